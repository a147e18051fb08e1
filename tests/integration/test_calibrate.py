"""Calibration of real GGUF files: entropies and curves against numpy and transformers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader

from entropykv import EntropyProfile, ProfileError, Session
from entropykv.calibration.measure import (
    CalibrationSettings,
    calibrate,
    correlation,
    excerpts_of,
    measure,
)
from entropykv.calibration.observe import Observer
from entropykv.calibration.texts import Text, read_texts
from entropykv.profile.curves import CurveRules, average_curves
from tests.support import reference
from tests.support.command import assert_refused, entropykv
from tests.support.logits import tokens_for
from tests.support.model_reference import ModelReference
from tests.support.tiny_models import write_llama

SCRIPT = Path(__file__).resolve().parents[2] / "calibration" / "calibrate_entropy.py"
WORDS = "the and of to in ion an he on at "
QUICK = CalibrationSettings(n_sequences=4, max_length=64, curve_length=96, n_threads=2)


HAS_TRANSFORMERS = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def attention_of(path: Path, tokens: list[int]) -> list[tuple[npt.NDArray[Any], ...]]:
    """q, k, v and weights of every layer, [head][token]; k and v of query heads."""
    model = ModelReference(path, "silu")
    model.stored = reference.round_f16
    model.logits(tokens)
    return model.attended


def entropies_of(path: Path, tokens: list[int]) -> npt.NDArray[np.float64]:
    """(n_layer, n_tokens, n_head), in bits."""
    rows = []
    for *_, p in attention_of(path, tokens):
        rows.append(-(p * np.log2(np.maximum(p, 1e-300))).sum(axis=2).T)
    return np.array(rows)


def some_texts(n: int = 6) -> list[Text]:
    rng = np.random.default_rng(4)
    words = WORDS.split()
    return [
        Text(f"{i}.txt", " ".join(words[int(w)] for w in rng.integers(0, len(words), 120)))
        for i in range(n)
    ]


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_bitnet"])
def test_rows_are_those_of_the_definition(model: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(model)
    tokens = tokens_for(150)
    expected = entropies_of(path, tokens)
    for n_ubatch in (512, 40):
        with Observer(path, n_ctx=256, n_threads=2, n_ubatch=n_ubatch) as observer:
            observer.entropies(tokens_for(200, seed=9))  # leaves nothing behind
            rows = observer.entropies(tokens)
        # A key that lies between two values of f16 may be rounded to the other one.
        np.testing.assert_allclose(rows, expected, atol=3e-3)
    assert expected.std() > 0.1


def test_a_profile_is_the_mean_over_quarters(tiny_llama: Path) -> None:
    texts = some_texts()
    profile = calibrate(tiny_llama, texts, QUICK)
    with Observer(tiny_llama, n_ctx=64) as observer:
        excerpts = excerpts_of(texts, observer.tokenize, QUICK)
    rows = [entropies_of(tiny_llama, list(excerpt.tokens)) for excerpt in excerpts]
    quarters = np.array([of_text[:, [15, 31, 47, 63]].mean(axis=1) for of_text in rows])
    np.testing.assert_allclose(profile.head_entropies, quarters.mean(axis=0), atol=1e-3)
    measured = profile.measurement
    assert measured is not None
    np.testing.assert_allclose(measured.spread, quarters.std(axis=0), atol=1e-3)
    all_rows = np.array([of_text.mean(axis=1) for of_text in rows])
    np.testing.assert_allclose(measured.all_rows, all_rows.mean(axis=0), atol=1e-3)
    halves = quarters[::2].mean(axis=0), quarters[1::2].mean(axis=0)
    assert measured.stability == pytest.approx(correlation(*halves), abs=2e-3)
    assert [tokens for _, tokens in measured.texts] == [64] * 4
    assert (profile.n_layer, profile.n_head, profile.n_head_kv, profile.n_ctx) == (3, 6, 2, 2048)
    assert profile.fingerprint is not None
    assert profile.curves is not None


def test_threads_do_not_matter(tiny_llama: Path) -> None:
    texts = some_texts()
    profiles = [
        calibrate(tiny_llama, texts, CalibrationSettings(4, 64, n_threads=n, curve_length=96))
        for n in (1, 2, 3)
    ]
    assert profiles[0].to_dict() == profiles[1].to_dict() == profiles[2].to_dict()


def test_another_seed_reads_other_texts(tiny_llama: Path) -> None:
    names = set()
    for seed in range(3):
        settings = CalibrationSettings(2, 32, seed, curve_texts=0, n_threads=2)
        measured = calibrate(tiny_llama, some_texts(), settings).measurement
        assert measured is not None
        names.add(tuple(name for name, _ in measured.texts))
    assert len(names) >= 2


@pytest.mark.parametrize("n_ubatch", [512, 300])
def test_curves_are_those_of_brute_force(tiny_llama: Path, n_ubatch: int) -> None:
    """Importance, choice, mass and outputs: everything from the definition, in float64."""
    rules = CurveRules.for_length(320)
    tokens = tokens_for(rules.length)
    with Observer(tiny_llama, n_ctx=320, n_threads=2, n_ubatch=n_ubatch) as observer:
        curves = average_curves(rules, [observer.losses(tokens, rules)])
    for layer, (q, k, v, p) in enumerate(attention_of(tiny_llama, tokens)):
        for head in range(2):
            group = slice(3 * head, 3 * head + 3)
            distance = np.arange(rules.n_read)[:, None] - np.arange(rules.n_read)[None, :]
            scoring = np.where(
                distance >= reference.NEIGHBOURHOOD,
                p[group, : rules.n_read, : rules.n_read] ** 2,
                0,
            )
            importance = scoring.sum(axis=(0, 1))
            mass, dropped, whole = reference.curve_losses(
                q[group, rules.n_read :].transpose(1, 0, 2),
                k[3 * head],
                v[3 * head],
                importance,
                rules,
                reference.Options(32**-0.5),
            )
            np.testing.assert_allclose(curves.mass_lost[layer, head], mass, atol=2e-3)
            error = np.sqrt(dropped / whole)
            np.testing.assert_allclose(curves.output_error[layer, head], error, atol=4e-3)
            assert mass[0] > 0.1


def test_policy_profile_runs_and_stays_inside_the_budget(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile = calibrate(tiny_llama, some_texts(), QUICK)
    profile.save(path)
    with Session(
        tiny_llama,
        n_ctx=512,
        kv_budget=0.25,
        policy="profile",
        n_ubatch=64,
        n_threads=2,
        entropy_config=path,
    ) as session:
        assert session.other_file() is None
        session.decode(tokens_for(400))
        stats = session.stats()
        budgets = np.array(session.budgets())
        assert stats.policy == "profile"
        assert stats.kv_bytes_peak <= stats.kv_bytes_budget
        assert budgets.min() >= 68
        assert budgets.sum() <= 128 * budgets.size
        assert len(set(budgets.ravel().tolist())) > 1
    arguments = ("-m", tiny_llama, "-c", 512, "--kv-budget", 0.25, "--entropy-config", path)
    plan = entropykv("plan", *arguments, "--policy", "profile", "--json")
    assert json.loads(plan.stdout)["budgets"] == budgets.tolist()
    run = entropykv("run", *arguments, "--policy", "profile", "-p", "the", "-n", 5, "--no-chat")
    assert run.returncode == 0, run.stderr
    EntropyProfile(3, 6, 2, 512, profile.head_entropies).save(path)
    refused = entropykv("run", *arguments, "--policy", "profile", "-p", "the", "-n", 5)
    assert_refused(refused, "loss curves", "entropykv calibrate")


def test_the_same_model_in_another_file_is_noted(tiny_llama: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    write_llama(other, n_layer=3, n_head=6, n_head_kv=2, head_dim=32, weight_type="F16")
    profile = calibrate(other, some_texts(), CalibrationSettings(2, 32, curve_texts=0))
    with Session(tiny_llama, n_ctx=64, entropy_config=profile) as session:
        note = session.other_file()
        assert note is not None
        assert "another file" in note


def test_the_profile_of_another_model_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    other = tmp_path / "other.gguf"
    write_llama(other, n_layer=3, n_head=6, n_head_kv=2, head_dim=16, weight_type="F16")
    profile = calibrate(other, some_texts(), CalibrationSettings(2, 32, curve_texts=0))
    for store in ("headwise", "flat"):
        with pytest.raises(ProfileError, match="head_dim_k 16"):
            Session(tiny_llama, n_ctx=64, entropy_config=profile, store=store)


# the command line


def test_calibrate_writes_a_profile(tiny_llama: Path, tmp_path: Path) -> None:
    output, text = tmp_path / "out.json", tmp_path / "text.txt"
    text.write_text(WORDS * 60, encoding="utf-8")
    arguments = ("-m", tiny_llama, "-o", output, "--text", text, "--n-sequences", 3)
    result = entropykv("calibrate", *arguments, "--curve-length", 128, "-t", 2)
    assert result.returncode == 0, result.stderr
    assert "mean entropy" in result.stdout
    profile = EntropyProfile.load(output)
    assert profile.measurement is not None
    assert [name for name, _ in profile.measurement.texts] == [
        "text.txt",
        "text.txt from token 128",
        "text.txt from token 256",
    ]
    assert sorted(os.listdir(tmp_path)) == ["out.json", "text.txt"]
    shown = entropykv("profile", output)
    assert shown.returncode == 0, shown.stderr
    assert "policy profile" in shown.stdout
    compared = entropykv("profile", output, output)
    assert "correlation 1.0000" in compared.stdout


def test_an_old_profile_is_converted(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    content = {"n_layer": 1, "n_head": 2, "n_head_kv": 1, "n_ctx": 64}
    content["head_entropies"] = {"L0_H0": 1, "L0_H1": 2.5}  # type: ignore[assignment]
    old.write_text(json.dumps(content), encoding="utf-8")
    result = entropykv("profile", old, "--convert", new)
    assert result.returncode == 0, result.stderr
    assert json.loads(new.read_text(encoding="utf-8"))["format_version"] == 2
    assert EntropyProfile.load(new).to_dict() == EntropyProfile.load(old).to_dict()


def test_bad_arguments_of_calibrate(tiny_llama: Path, tmp_path: Path) -> None:
    model, out = ("-m", tiny_llama), ("-o", tmp_path / "a.json")
    calls: list[tuple[tuple[object, ...], str]] = [
        ((*model, "-o", tmp_path / "none" / "a.json"), "cannot be written"),
        ((*model, "-o", tmp_path), "cannot be written"),
        ((*model, *out, "--text", tmp_path / "none.txt"), "none.txt"),
        (("-m", tmp_path / "none.gguf", *out), "none.gguf"),
        ((*model, *out, "--max-length", 4096), "--max-length"),
        ((*model, *out, "--plot", tmp_path / "a.pdf"), "a.pdf"),
        (("--from-results", tmp_path / "none.json", *out), "none.json"),
        (("--hf", tmp_path / "nowhere", *out), "nowhere" if HAS_TRANSFORMERS else "entropykv[hf]"),
    ]
    for arguments, word in calls:
        assert_refused(entropykv("calibrate", *arguments), word)
    assert os.listdir(tmp_path) == []


def test_an_interrupt_leaves_nothing(smollm2: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "entropykv.cli", "calibrate", "-m", str(smollm2), "-t", "1"]
    process = subprocess.Popen(
        [*command, "-o", str(tmp_path / "out.json")],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen = ""
    deadline = time.monotonic() + 60
    while not re.search(r"[1-9]\d*/", seen) and time.monotonic() < deadline:
        seen += process.stderr.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert os.listdir(tmp_path) == []


def test_the_documents_command_line(tiny_llama: Path, tmp_path: Path) -> None:
    def script(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(SCRIPT), *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    output, results = tmp_path / "a.json", tmp_path / "results.json"
    length = ("--n-sequences", 2, "--max-length", 32)
    result = script("--model", tiny_llama, "--output", output, *length, "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert EntropyProfile.load(output).n_layer == 3
    results.write_text('{"head_entropies": {"L0_H0": 1.5}}', encoding="utf-8")
    result = script("--from-results", results, f"--output={output}")
    assert result.returncode == 0, result.stderr
    assert EntropyProfile.load(output).mean == 1.5
    word = "no_model" if HAS_TRANSFORMERS else "entropykv[hf]"
    assert_refused(script("--model", tmp_path / "no_model", "--output", output), word)


# transformers


def hf_llama(path: Path, directory: Path) -> Path:
    """The tiny llama of a GGUF file as a checkpoint, with a tokenizer of words."""
    torch = pytest.importorskip("torch", reason="the reference is transformers")
    transformers = pytest.importorskip("transformers", reason="the reference is transformers")
    tokenizers = pytest.importorskip("tokenizers", reason="the reference is transformers")
    reader = GGUFReader(path)
    weights = {t.name.removesuffix(".weight"): torch.tensor(t.data) for t in reader.tensors}
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=192,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        max_position_embeddings=2048,
    )
    model = transformers.LlamaForCausalLM(config).float()

    def halves(weight: Any, n_head: int) -> Any:
        """Pairs of neighbours, as GGUF has them, become first and second half."""
        return weight.reshape(n_head, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

    state = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for i in range(3):
        names = {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        }
        state |= {f"model.layers.{i}.{hf}": f"blk.{i}.{ours}" for hf, ours in names.items()}
        weights[f"blk.{i}.attn_q"] = halves(weights[f"blk.{i}.attn_q"], 6)
        weights[f"blk.{i}.attn_k"] = halves(weights[f"blk.{i}.attn_k"], 2)
    model.load_state_dict({f"{hf}.weight": weights[ours] for hf, ours in state.items()})
    model.save_pretrained(directory)
    words = {word: 3 + i for i, word in enumerate(sorted(set(WORDS.split())))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="the"))  # noqa: S106
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_transformers_agrees(tiny_llama: Path, tmp_path: Path) -> None:
    directory = hf_llama(tiny_llama, tmp_path / "hf")
    from entropykv.calibration.hf import (  # noqa: PLC0415
        calibrate_hf,
        eager_entropies,
        load_eager,
    )

    model, tokenizer = load_eager(str(directory), "cpu")
    tokens = tokens_for(120)
    with Observer(tiny_llama, n_ctx=128, n_threads=2) as observer:
        ours = observer.entropies(tokens)
        theirs = eager_entropies(model, tokens)  # K and V in f32
        np.testing.assert_allclose(ours.mean(axis=1), theirs.mean(axis=1), atol=1e-3)
        np.testing.assert_allclose(ours, theirs, atol=1e-2)
        texts = some_texts()
        profile = calibrate_hf(str(directory), texts, QUICK)
        excerpts = excerpts_of(texts, lambda text: tokenizer(text)["input_ids"], QUICK)
        expected = measure(observer.entropies, excerpts, lambda _: None)
    np.testing.assert_allclose(profile.head_entropies, expected.quarters.mean(axis=0), atol=1e-3)
    assert (profile.n_head_kv, profile.n_ctx, profile.curves) == (2, 2048, None)


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_smollm2_is_near_its_dequantised_weights(smollm2: Path) -> None:
    """On 4 texts; benchmarks/calibration.py does the same on all 20."""
    for package in ("torch", "transformers", "accelerate"):
        pytest.importorskip(package, reason="the reference is transformers")
    from entropykv.calibration.hf import eager_entropies, load_eager  # noqa: PLC0415

    pytest.importorskip("torch").set_num_threads(1)
    settings = CalibrationSettings(n_sequences=4, n_threads=2)
    model, _ = load_eager(str(smollm2.parent), "cpu", gguf_file=smollm2.name)
    with Observer(smollm2, n_ctx=128, n_threads=2) as observer:
        excerpts = excerpts_of(read_texts(None), observer.tokenize, settings)
        ours = measure(observer.entropies, excerpts, lambda _: None).quarters.mean(axis=0)
    theirs = measure(lambda ids: eager_entropies(model, ids), excerpts, lambda _: None)
    expected = theirs.quarters.mean(axis=0)
    r = correlation(ours, expected)
    assert r is not None
    assert r >= 0.995
    assert np.abs(ours - expected).mean() <= 0.02
