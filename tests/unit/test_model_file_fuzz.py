"""read_geometry over damaged files: each is read or refused by name, in time."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv.errors import EntropyKVError, ModelFileError, UnsupportedModelError
from entropykv.model.geometry import read_geometry
from tests.support.cpu_time import takes_less_than
from tests.support.headers import patched
from tests.support.tiny_models import write_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_llama(path, weight_type="Q8_0")
    return path


@pytest.fixture(scope="module")
def header_size(tiny: Path) -> int:
    return GGUFReader(tiny).data_offset


def type_offset(path: Path, tensor: str) -> int:
    """Return the offset of the type number of a tensor with two dimensions."""
    return path.read_bytes().index(tensor.encode()) + len(tensor) + 4 + 16


def test_truncated_tensors_say_how_many_bytes_are_missing(tiny: Path, tmp_path: Path) -> None:
    last = max(GGUFReader(tiny).tensors, key=lambda tensor: int(tensor.data_offset))
    end = int(last.data_offset) + last.n_bytes
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny.read_bytes()[: end - 100])
    with pytest.raises(ModelFileError, match=f"truncated, 100 of at least {end} bytes are missing"):
        read_geometry(path)


def test_i2_s_files_are_told_apart(tiny: Path, tmp_path: Path) -> None:
    offset = type_offset(tiny, "blk.0.attn_q.weight")
    path = patched(tiny, tmp_path / "ggml-model-i2_s.gguf", offset, struct.pack("<I", 36))
    with pytest.raises(UnsupportedModelError, match="I2_S file of Microsoft's BitNet fork"):
        read_geometry(path)
    path = patched(tiny, tmp_path / "unknown.gguf", offset, struct.pack("<I", 99))
    with pytest.raises(ModelFileError, match=r"blk.0.attn_q.weight has the unknown type 99"):
        read_geometry(path)


def test_tensor_data_is_not_read(tmp_path: Path) -> None:
    """8 GiB of weights that are a hole in the file cost neither time nor disk space."""
    source = tmp_path / "source.gguf"
    write_llama(source, weight_type="F32")
    offset = source.read_bytes().index(b"token_embd.weight") + len(b"token_embd.weight") + 4
    path = patched(source, tmp_path / "large.gguf", offset, struct.pack("<QQ", 1 << 16, 1 << 15))
    os.truncate(path, 9 << 30)
    assert takes_less_than(1.0, lambda: read_geometry(path))
    geometry = read_geometry(path)
    assert geometry.weights_bytes > 8 << 30
    assert path.stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize(("n_tensors", "n_keys"), [(1 << 16, 0), (0, 1 << 16), (1 << 16, 1 << 16)])
def test_large_counts_over_zeros_are_refused_at_once(
    tmp_path: Path, n_tensors: int, n_keys: int
) -> None:
    path = tmp_path / "zeros.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, n_tensors, n_keys))
    os.truncate(path, 4 << 30)

    def read() -> None:
        with pytest.raises(ModelFileError, match="is truncated or damaged"):
            read_geometry(path)

    assert takes_less_than(1.0, read)


@pytest.mark.parametrize("item_type", [8, 9, 0, 10])
@pytest.mark.parametrize("count", [1 << 63, 1 << 32, (1 << 22) - 1])
def test_large_arrays_are_refused_in_time(tmp_path: Path, item_type: int, count: int) -> None:
    path = tmp_path / "array.gguf"
    prefix = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
    key = struct.pack("<Q1sIIQ", 1, b"k", 9, item_type, count)
    path.write_bytes(prefix + key)
    os.truncate(path, 1 << 30)

    def read() -> None:
        with pytest.raises(
            ModelFileError, match=r"truncated or damaged|lacks general.architecture"
        ):
            read_geometry(path)

    assert takes_less_than(5.0, read)


def assert_read_or_refused(path: Path) -> None:
    def read() -> None:
        message = ""
        try:
            geometry = read_geometry(path)
            assert len(geometry.heads_per_layer) == geometry.n_layer <= 512
        except EntropyKVError as error:
            message = str(error)
        assert not message or path.name in message
        assert "\n" not in message

    assert takes_less_than(1.0, read)


fuzz = settings(max_examples=300)


@fuzz
@given(data=st.data())
def test_random_truncation_is_refused(
    tiny: Path, header_size: int, tmp_path: Path, data: st.DataObject
) -> None:
    length = data.draw(st.integers(0, header_size))
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny.read_bytes()[:length])
    expected = r"cut\.gguf: .*(is empty|after \d+ bytes|asks for byte \d+ of|bytes are missing)"
    with pytest.raises(ModelFileError, match=expected):
        read_geometry(path)


@fuzz
@given(data=st.data())
def test_random_bytes_in_the_header_are_read_or_refused(
    tiny: Path, header_size: int, tmp_path: Path, data: st.DataObject
) -> None:
    offsets = st.integers(0, header_size - 1)
    numbers = st.sampled_from([0, 1, 2, 36, 255, (1 << 31) - 1, (1 << 32) - 1, (1 << 64) - 1])
    values = st.one_of(
        st.binary(min_size=1, max_size=12),
        numbers.map(lambda number: struct.pack("<Q", number)),
        numbers.map(lambda number: struct.pack("<I", number & 0xFFFFFFFF)),
    )
    content = bytearray(tiny.read_bytes())
    for offset, value in data.draw(st.lists(st.tuples(offsets, values), min_size=1, max_size=4)):
        content[offset : offset + len(value)] = value
    path = tmp_path / "flipped.gguf"
    path.write_bytes(content)
    assert_read_or_refused(path)


def test_every_header_byte_set_to_255(tiny: Path, header_size: int, tmp_path: Path) -> None:
    path = tmp_path / "byte.gguf"
    content = bytearray(tiny.read_bytes())
    text = content.index(b"<0x00>"), content.index(b"tokenizer.ggml.scores")
    for offset in [*range(text[0]), *range(text[1], header_size, 3)]:
        kept, content[offset] = content[offset], 255
        path.write_bytes(content)
        assert_read_or_refused(path)
        content[offset] = kept
