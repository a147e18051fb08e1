"""Convert writes exact weights, types that fit the rows, and metadata of the stock architecture; it
unpacks what independent packers pack.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv.convert import convert, ternary
from entropykv.convert.conversion import Estimate
from entropykv.convert.source import CHUNK_ELEMENTS
from tests.support.hf_files import pack_hf
from tests.support.i2s_files import I2sModel, pack_i2s
from tests.support.weights import assert_weights_are, read_weights

TINY = I2sModel(n_layer=1, n_embd=64, n_ff=96, n_head=2, n_head_kv=1, n_vocab=264)
# Rows of 544 values do not fill blocks of 256, so that they become Q4_0.
WIDE = I2sModel(n_layer=1, n_embd=256, n_ff=544)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY.write(tmp_path_factory.mktemp("models") / "i2s.gguf")


@pytest.mark.parametrize("weight_type", [None, "q4_0", "f16"])
@pytest.mark.parametrize("layout", ["x86", "arm64", "rows4"])
@pytest.mark.parametrize("model", [TINY, WIDE], ids=["tiny", "wide"])
def test_weights_are_exact(
    tmp_path: Path, model: I2sModel, layout: str, weight_type: str | None
) -> None:
    source, target = model.write(tmp_path / "i2s.gguf", layout), tmp_path / "out.gguf"
    convert(source, target, i2s_layout=layout, weight_type=weight_type)
    assert_weights_are(target, model)


def test_types_follow_the_rows(tmp_path: Path) -> None:
    source, target = WIDE.write(tmp_path / "i2s.gguf"), tmp_path / "out.gguf"
    summary = convert(source, target)
    kinds = {t.name: t.tensor_type.name for t in GGUFReader(target).tensors}
    assert kinds["blk.0.attn_q.weight"] == kinds["blk.0.ffn_up.weight"] == "TQ2_0"
    assert kinds["blk.0.ffn_down.weight"] == "Q4_0"
    assert kinds["token_embd.weight"] == "Q6_K"  # noqa: S105
    assert kinds["blk.0.ffn_sub_norm.weight"] == "F32"
    assert dict(summary.tensor_types) == {"Q6_K": 1, "TQ2_0": 6, "Q4_0": 1, "F32": 12}
    assert summary.target_bytes == target.stat().st_size
    assert summary.source_bytes == source.stat().st_size


def test_dense_weights_are_ternary_times_scale(tmp_path: Path, tiny: Path) -> None:
    convert(tiny, tmp_path / "out.gguf", weight_type="f32", embedding_type="keep")
    weights = read_weights(tmp_path / "out.gguf")
    for name, values in TINY.ternary.items():
        expected = values * np.float32(TINY.scales[name])
        assert np.array_equal(weights[f"{name}.weight"], expected)
        assert f"{name}.scale" not in weights
    assert np.array_equal(weights["token_embd.weight"], TINY.embedding)
    assert np.array_equal(weights["output_norm.weight"], TINY.norm(TINY.n_embd))


# The embedding is read in several chunks.
CHUNKED = dataclasses.replace(WIDE, n_vocab=9_000, ternary={}, scales={})


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert CHUNKED.embedding.size > 2 * CHUNK_ELEMENTS
    return CHUNKED.write(tmp_path_factory.mktemp("models") / "i2s.gguf")


@pytest.mark.parametrize(
    ("kind", "step"), [("q6_k", 1 / 32), ("q8_0", 1 / 127), ("f16", 0), ("f32", 0), ("keep", 0)]
)
def test_embeddings_are_quantised_row_by_row(
    tmp_path: Path, chunked: Path, kind: str, step: float
) -> None:
    convert(chunked, tmp_path / "out.gguf", embedding_type=kind)
    embedding = CHUNKED.embedding.astype(np.float32)
    error = np.abs(read_weights(tmp_path / "out.gguf")["token_embd.weight"] - embedding)
    assert (error <= step * np.abs(embedding).max(axis=1, keepdims=True)).all()


def test_metadata_moves_to_the_architecture_of_stock(tmp_path: Path, tiny: Path) -> None:
    target = tmp_path / "out.gguf"
    convert(tiny, target)
    values = {name: field.contents() for name, field in GGUFReader(target).fields.items()}
    assert values["general.architecture"] == "bitnet"
    assert values["bitnet.rope.freq_base"] == 500000.0
    assert values["bitnet.attention.head_count_kv"] == 1
    assert not [name for name in values if name.startswith("bitnet-")]
    assert values["tokenizer.ggml.pre"] == "llama-bpe"
    assert values["entropykv.activation"] == "relu2"
    assert values["general.file_type"] == 2  # The type is Q4_0, because rows have 64 and 96 values.
    assert values["tokenizer.ggml.tokens"][-1] == "<|end|>"
    assert len(values["tokenizer.ggml.tokens"]) == TINY.n_vocab
    assert values["tokenizer.ggml.merges"][0] == "a a"
    assert values["tokenizer.chat_template"].startswith("{% for m in messages %}")


def test_a_pre_tokenizer_in_the_file_stays(tmp_path: Path) -> None:
    source = TINY.write(tmp_path / "i2s.gguf", pre="gpt-2")
    convert(source, tmp_path / "out.gguf")
    field = GGUFReader(tmp_path / "out.gguf").fields["tokenizer.ggml.pre"]
    assert field.contents() == "gpt-2"


@pytest.mark.parametrize(
    ("arch", "key", "wanted", "result"),
    [
        ("bitnet", None, "auto", "silu"),
        ("bitnet-25", None, "auto", "relu2"),
        ("bitnet-b1.58", None, "auto", "relu2"),
        ("bitnet", "relu2", "auto", "relu2"),
        ("bitnet", "relu2", "silu", "silu"),
        ("bitnet-b1.58", None, "silu", "silu"),
    ],
)
def test_activation(tmp_path: Path, arch: str, key: str | None, wanted: str, result: str) -> None:
    source = dataclasses.replace(TINY, arch=arch).write(tmp_path / "a.gguf", activation=key)
    summary = convert(source, tmp_path / "out.gguf", activation=wanted)
    fields = GGUFReader(tmp_path / "out.gguf").fields
    assert summary.activation == fields["entropykv.activation"].contents() == result


def test_progress_ends_at_the_whole(tmp_path: Path, tiny: Path) -> None:
    calls: list[tuple[int, int]] = []
    convert(tiny, tmp_path / "out.gguf", progress=lambda *call: calls.append(call))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1]
    assert len({total for _, total in calls}) == 1


def test_what_it_takes_is_said_before_it_starts(tmp_path: Path, tiny: Path) -> None:
    calls: list[object] = []
    target = tmp_path / "out.gguf"
    convert(tiny, target, started=calls.append, progress=lambda *_: calls.append("progress"))
    expected, *rest = calls
    assert isinstance(expected, Estimate)
    assert set(rest) == {"progress"}
    assert 0 < target.stat().st_size - expected.target_bytes < 32768
    assert 0 < expected.seconds < 60
    assert expected.memory_bytes < 100 << 20


def test_the_estimate_grows_with_the_work(tmp_path: Path) -> None:
    expected: list[Estimate] = []
    for n_vocab in (300, 30_000):
        model = dataclasses.replace(WIDE, n_vocab=n_vocab, ternary={}, scales={})
        source = model.write(tmp_path / f"{n_vocab}.gguf")
        convert(source, tmp_path / "out.gguf", force=True, started=expected.append)
    assert expected[1].seconds > 3 * expected[0].seconds


Int8s = npt.NDArray[np.int8]


def random_ternary(rows: int, columns: int, seed: int = 0) -> Int8s:
    return np.random.default_rng(seed).integers(-1, 2, (rows, columns)).astype(np.int8)


# In 8 x 48 and 4 x 160, blocks of 128 and of 64 contain parts of several rows.
@pytest.mark.parametrize("shape", [(4, 32), (8, 48), (4, 160), (16, 256), (128, 33), (4, 3 * 128)])
@pytest.mark.parametrize("layout", ternary.I2S_LAYOUTS)
def test_i2s_unpacks_what_the_fork_packs(layout: str, shape: tuple[int, int]) -> None:
    values = random_ternary(*shape)
    codes = pack_i2s(values, 1.0, layout)[: values.size // 4]
    assert np.array_equal(ternary.unpack_i2s(codes, shape, layout), values)


def test_i2s_bytes_by_hand() -> None:
    """Element 0 is in the highest two bits of byte 0, and code 3 reads as 0."""
    codes = np.full(32, 0b01_01_01_01, dtype=np.uint8)
    codes[0] = 0b10_00_01_11
    values = ternary.unpack_i2s(codes, (1, 128), "x86")[0]
    assert values[[0, 32, 64, 96]].tolist() == [1, -1, 0, 0]
    assert np.count_nonzero(values) == 2
    values = ternary.unpack_i2s(codes, (1, 128), "arm64")[0]
    assert values[[0, 16, 32, 48]].tolist() == [1, -1, 0, 0]
    values = ternary.unpack_i2s(codes, (4, 32), "rows4")
    assert values[:, 0].tolist() == [1, -1, 0, 0]


def test_every_byte_of_i2s() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = ternary.unpack_i2s(codes, (4, 256), "rows4")
    meaning = {0: -1, 1: 0, 2: 1, 3: 0}
    for byte in range(256):
        assert values[:, byte].tolist() == [meaning[byte >> shift & 3] for shift in (6, 4, 2, 0)]


@pytest.mark.parametrize("layout", ternary.I2S_LAYOUTS)
def test_multiples(layout: str) -> None:
    assert ternary.i2s_multiple(layout) == {"x86": 128, "arm64": 64, "rows4": 4}[layout]


@settings(max_examples=50)
@given(rows=st.integers(1, 9), columns=st.integers(1, 40), seed=st.integers(0, 99))
def test_hf_unpacks_quarters_of_the_rows(rows: int, columns: int, seed: int) -> None:
    values = random_ternary(4 * rows, columns, seed)
    packed = pack_hf(values)
    for quarter in range(4):
        part = values[quarter * rows : (quarter + 1) * rows]
        assert np.array_equal(ternary.unpack_hf(packed, quarter), part)


def test_hf_threes_are_seen() -> None:
    packed = np.array([[0b10_11_00_01]], dtype=np.uint8)
    found = [ternary.is_ternary(ternary.unpack_hf(packed, quarter)) for quarter in range(4)]
    assert found == [True, True, False, True]


@settings(max_examples=50)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 3), seed=st.integers(0, 99))
def test_packed_weights_are_exact(rows: int, blocks: int, seed: int) -> None:
    values = random_ternary(rows, 256 * blocks, seed)
    packed = ternary.pack_tq2_0(values)
    assert np.array_equal(dequantize(packed, GGMLQuantizationType.TQ2_0), values)
    values = random_ternary(rows, 32 * blocks, seed)
    packed = ternary.pack_q4_0(values)
    assert np.array_equal(dequantize(packed, GGMLQuantizationType.Q4_0), values)


def test_absmean() -> None:
    weights = np.array([[0.1, -3.0, 0.9, 0.0], [-0.2, 1.2, -1.4, 1.2]], dtype=np.float32)
    values = ternary.quantize_absmean(weights, ternary.absmean_inverse(np.float32(1.0)))
    assert values.tolist() == [[0, -1, 1, 0], [0, 1, -1, 1]]
    inverse = ternary.absmean_inverse(np.float32(0.0))
    assert inverse == pytest.approx(1e5)
    assert not ternary.quantize_absmean(np.zeros((2, 2), dtype=np.float32), inverse).any()


@pytest.mark.parametrize("layout", ternary.I2S_LAYOUTS)
@pytest.mark.parametrize("columns", [32, 48, 96, 160, 256])
def test_rows_of_whole_blocks_unpack_alone(layout: str, columns: int) -> None:
    step = ternary.i2s_row_step(columns, layout)
    values = random_ternary(3 * step + (4 if layout == "rows4" else step), columns)
    codes = pack_i2s(values, 1.0, layout)
    for first in range(0, len(values), step):
        part = values[first : first + step]
        start = first * columns // 4
        unpacked = ternary.unpack_i2s(codes[start : start + part.size // 4], part.shape, layout)
        assert np.array_equal(unpacked, part)
