"""Convert writes exact weights, types that fit, and metadata of the stock architecture."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from entropykv.convert import convert
from entropykv.convert.conversion import Estimate
from entropykv.convert.source import CHUNK_ELEMENTS
from tests.support.i2s_files import I2sModel
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
    for name, ternary in TINY.ternary.items():
        expected = ternary * np.float32(TINY.scales[name])
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
