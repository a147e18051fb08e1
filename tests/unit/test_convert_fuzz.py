"""A randomly damaged I2_S file is converted or refused, and never leaves a partial file."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv.convert import convert
from entropykv.errors import EntropyKVError
from tests.support.i2s_files import I2sModel

TINY = I2sModel(n_layer=1, n_embd=64, n_ff=96, n_head=2, n_head_kv=1, n_vocab=264)

fuzz = settings(max_examples=200)


def assert_converted_or_refused(directory: Path, damage: Callable[[bytearray], bytearray]) -> None:
    source, target = directory / "fuzz.gguf", directory / "out.gguf"
    source.write_bytes(damage(bytearray((directory / "i2s.gguf").read_bytes())))
    message = ""
    try:
        convert(source, target, force=True)
    except EntropyKVError as error:
        message = str(error)
    assert "\n" not in message
    assert target.exists() == (not message)
    if not message:
        assert GGUFReader(target).tensors
        target.unlink()
    assert {path.name for path in directory.iterdir()} == {"i2s.gguf", "fuzz.gguf"}


@fuzz
@given(data=st.data())
def test_random_truncation(tmp_path: Path, data: st.DataObject) -> None:
    if not (tmp_path / "i2s.gguf").exists():
        TINY.write(tmp_path / "i2s.gguf")
    size = (tmp_path / "i2s.gguf").stat().st_size
    length = data.draw(st.integers(0, size - 1))
    assert_converted_or_refused(tmp_path, lambda content: content[:length])


@fuzz
@given(data=st.data())
def test_random_bytes(tmp_path: Path, data: st.DataObject) -> None:
    if not (tmp_path / "i2s.gguf").exists():
        TINY.write(tmp_path / "i2s.gguf")
    header = (tmp_path / "i2s.gguf").read_bytes().index(TINY.embedding[:1].tobytes())
    numbers = st.sampled_from([0, 1, 2, 36, 255, (1 << 31) - 1, (1 << 32) - 1, (1 << 64) - 1])
    values = st.one_of(
        st.binary(min_size=1, max_size=8), numbers.map(lambda number: struct.pack("<Q", number))
    )
    offsets = st.one_of(
        st.integers(0, 1300), st.integers(header - 1500, header - 1), st.integers(0, header + 900)
    )
    flips = data.draw(st.lists(st.tuples(offsets, values), min_size=1, max_size=3))

    def damage(content: bytearray) -> bytearray:
        for offset, value in flips:
            content[offset : offset + len(value)] = value
        return content

    assert_converted_or_refused(tmp_path, damage)
