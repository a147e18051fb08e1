"""read_geometry() reads intact files, and refuses damaged ones by name and in time."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv.errors import EntropyKVError, ModelFileError, UnsupportedModelError
from entropykv.model.geometry import ModelGeometry, read_geometry
from tests.support.cpu_time import takes_less_than
from tests.support.tiny_models import write_bitnet, write_llama


def patched(source: Path, target: Path, offset: int, value: bytes) -> Path:
    content = bytearray(source.read_bytes())
    content[offset : offset + len(value)] = value
    target.write_bytes(content)
    return target


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_llama(path, weight_type="Q8_0")
    return path


def write_metadata(path: Path, fill: Callable[[GGUFWriter], None]) -> Path:
    """Write a file with a complete llama header, changed by `fill`, and no tensors."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_geometry_of_a_llama_file(tiny: Path) -> None:
    geometry = read_geometry(str(tiny))
    tensors = GGUFReader(tiny).tensors
    assert geometry == ModelGeometry(
        path=tiny,
        architecture="llama",
        name="tiny llama",
        n_layer=2,
        n_head=4,
        heads_per_layer=(4, 4),
        kv_heads_per_layer=(2, 2),
        head_dim_k=16,
        head_dim_v=16,
        n_ctx_train=2048,
        n_vocab=320,
        weights_bytes=sum(tensor.n_bytes for tensor in tensors),
        n_embd=64,
        n_ff=64,
        file_bytes=tiny.stat().st_size,
        weight_types=geometry.weight_types,
        activation=None,
        learned_positions=False,
        latent=False,
    )
    assert geometry.cached_values == 2 * 2 * (16 + 16)
    assert [kind for kind, _ in geometry.weight_types] == ["Q8_0", "F32"]
    assert sum(size for _, size in geometry.weight_types) == geometry.weights_bytes


@pytest.mark.parametrize("weight_type", ["F32", "F16", "BF16", "Q4_0"])
def test_geometry_of_bitnet_files(tmp_path: Path, weight_type: str) -> None:
    path = tmp_path / "bitnet.gguf"
    write_bitnet(path, weight_type=weight_type, n_head=3, n_head_kv=1, head_dim=32)
    geometry = read_geometry(path)
    assert (geometry.architecture, geometry.n_head, geometry.head_dim_v) == ("bitnet", 3, 32)
    assert geometry.kv_heads_per_layer == (1, 1)
    assert geometry.weight_types[0][0] == weight_type
    assert geometry.weights_bytes == sum(tensor.n_bytes for tensor in GGUFReader(path).tensors)


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_activation_of_the_file(tmp_path: Path, activation: str) -> None:
    write_bitnet(tmp_path / "bitnet.gguf", activation=activation)
    assert read_geometry(tmp_path / "bitnet.gguf").activation == activation


@pytest.mark.parametrize("activation", ["ReLU2", "x" * 1000])
def test_an_unknown_activation_is_refused(tmp_path: Path, activation: str) -> None:
    write_bitnet(tmp_path / "bitnet.gguf", activation=activation)
    with pytest.raises(UnsupportedModelError, match=r"bitnet\.gguf: .* none of silu, relu2; "):
        read_geometry(tmp_path / "bitnet.gguf")


def test_heads_per_layer_and_explicit_head_sizes(tmp_path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_head_count([4, 8, 0])
        writer.add_head_count_kv([2, 1, 0])
        writer.add_key_length(80)
        writer.add_value_length(48)
        writer.add_vocab_size(77)

    geometry = read_geometry(write_metadata(tmp_path / "layers.gguf", fill))
    assert geometry.n_head == 8
    assert geometry.heads_per_layer == (4, 8, 0)
    assert geometry.kv_heads_per_layer == (2, 1, 0)
    assert (geometry.head_dim_k, geometry.head_dim_v) == (80, 48)
    assert (geometry.n_vocab, geometry.weights_bytes, geometry.weight_types) == (77, 0, ())
    assert geometry.name == "layers"


def test_v_that_is_a_part_of_k_is_not_cached(tmp_path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_head_count(8)
        writer.add_head_count_kv(1)
        writer.add_key_length(576)
        writer.add_value_length(512)
        writer.add_key_length_mla(192)
        writer.add_value_length_mla(128)

    geometry = read_geometry(write_metadata(tmp_path / "latent.gguf", fill))
    assert geometry.latent
    assert geometry.cached_values == 3 * 576


@pytest.mark.parametrize("n_sharing", [1, 3])
def test_layers_that_attend_to_the_keys_of_others_have_none(tmp_path: Path, n_sharing: int) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_shared_kv_layers(n_sharing)

    path = write_metadata(tmp_path / "shared.gguf", fill)
    if n_sharing == 3:
        with pytest.raises(ModelFileError, match="shared_kv_layers is 3"):
            read_geometry(path)
    else:
        assert read_geometry(path).kv_heads_per_layer == (2, 2, 0)


def test_kv_heads_default_to_query_heads(tmp_path: Path) -> None:
    geometry = read_geometry(write_metadata(tmp_path / "a.gguf", lambda w: w.add_head_count(4)))
    assert geometry.kv_heads_per_layer == (4, 4, 4)
    assert geometry.head_dim_k == 16


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (lambda _: None, "lacks llama.attention.head_count;"),
        (lambda w: w.add_head_count([4, 4]), "head_count has 2 values for 3 layers"),
        (lambda w: w.add_float32("llama.attention.head_count", 4.0), "is not an integer"),
        (lambda w: w.add_int32("llama.attention.head_count", -4), "impossible values"),
        (lambda w: w.add_array("llama.attention.head_count", ["4"]), "is not an integer"),
        (lambda w: (w.add_head_count(4), w.add_head_count_kv(3)), "not a multiple"),
        (lambda w: (w.add_head_count(4), w.add_string("llama.vocab_size", "x")), "not an integer"),
        (lambda w: (w.add_head_count(4), w.add_uint32("general.name", 1)), "is not a text"),
        (lambda w: (w.add_head_count(4), w.add_bool("entropykv.activation", True)), "not a text"),
    ],
)
def test_impossible_metadata_is_named(
    tmp_path: Path, fill: Callable[[GGUFWriter], None], message: str
) -> None:
    path = write_metadata(tmp_path / "odd.gguf", fill)
    with pytest.raises(ModelFileError, match=r"odd\.gguf: ") as caught:
        read_geometry(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "key", ["general.architecture", "llama.block_count", "llama.context_length"]
)
def test_a_missing_key_is_named(tiny: Path, tmp_path: Path, key: str) -> None:
    offset = tiny.read_bytes().index(key.encode())
    path = patched(tiny, tmp_path / "lacking.gguf", offset, b"x")
    with pytest.raises(ModelFileError, match=f"lacks {key}; download or convert"):
        read_geometry(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GG", "is truncated after 2 bytes"),
        (b"GGUF\x03\0\0\0", "is truncated after 8 bytes"),
        (b"PK\x03\x04" + bytes(100), "is not a GGUF file"),
        (b"ggml" + bytes(100), "is not a GGUF file"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "has GGUF version 1"),
        (struct.pack("<4sIQQ", b"GGUF", 4, 0, 0), "has GGUF version 4"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "little-endian"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 62, 1), "is damaged"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 0), "lacks general.architecture"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 5), "is truncated or damaged"),
    ],
)
def test_files_that_are_no_model(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"odd\.gguf: ") as caught:
        read_geometry(path)
    assert message in str(caught.value)


def test_missing_file_directory_and_device_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"none.gguf: no such file"):
        read_geometry(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match=r"SmolLM: no such file.*`entropykv models` lists"):
        read_geometry("SmolLM")
    others = [(str(tmp_path), "directory"), (os.devnull, "regular"), ("a\0b", "cannot be read")]
    for path, message in others:
        with pytest.raises(ModelFileError, match=message):
            read_geometry(path)


@pytest.fixture(scope="module")
def header_size(tiny: Path) -> int:
    return GGUFReader(tiny).data_offset


def type_offset(path: Path, tensor: str) -> int:
    """Return the offset in a file of the type number of a two-dimensional tensor."""
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
    """Weights are not read: 8 GiB of them in a sparse file cost neither time nor disk space."""
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
