"""The shipped BitNet model works, from its tokenizer to its answers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from entropykv import EntropyProfile, Session
from entropykv.calibration import CalibrationSettings, calibrate, read_texts
from entropykv.calibration.measure import excerpts_of, measure
from entropykv.model.geometry import read_geometry
from entropykv.model.shipped import DEMOS
from entropykv.profile.find import profile_beside
from tests.support.command import assert_refused, entropykv
from tests.support.model_reference import ModelReference
from training.facts import STOP, STOP_LINE, Writer
from training.tokenizer import WordTokenizer

DEMO = DEMOS["bitnet"]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(DEMO.path, n_ctx=1664, kv_type="f16", n_threads=2) as session:
        yield session


def answers(session: Session, n_tokens: int, seed: str) -> list[bool]:
    """Return whether each of 8 questions about one document is answered word for word."""
    words, facts = Writer(seed).test_document(n_tokens, 8)
    document = session.tokenize("".join([*words[1:-1], STOP_LINE]))
    right = []
    for fact in facts:
        session.reset()
        session.decode(document)
        question = session.tokenize("".join(fact.question()), add_bos=False)
        answer = session.detokenize(list(session.generate(question, max_tokens=12)))
        right.append(answer == "".join([*fact.statement(), STOP]))
    return right


def test_it_is_small_ternary_and_has_squared_relu() -> None:
    geometry = read_geometry(DEMO.path)
    assert geometry.file_bytes <= 8 * 2**20
    assert geometry.activation == "relu2"
    assert "TQ2_0" in dict(geometry.weight_types)


def test_the_tokenizer_of_the_file_is_that_of_training(session: Session) -> None:
    words = Writer(11).training_document(800, 0.2, 0.4).words
    assert session.tokenize("".join(words[1:]), add_bos=True) == WordTokenizer().encode(words)


def test_a_word_it_does_not_know_survives_as_bytes(session: Session) -> None:
    text = "Wilhelmina keeps a glühwürmchen."
    assert session.detokenize(session.tokenize(text, add_bos=False)) == text


def test_full_cache_answers_held_out_questions(session: Session) -> None:
    right = [r for i in range(4) for r in answers(session, 512, f"test {i}")]
    assert sum(right) / len(right) >= 0.85
    right = [r for i in range(2) for r in answers(session, 1536, f"test {i}")]
    assert sum(right) / len(right) >= 0.7


def test_a_budget_forgets_facts(session: Session) -> None:
    full = answers(session, 512, "test 0")
    with Session(DEMO.path, n_ctx=544, kv_budget=0.1, policy="streaming") as small:
        assert sum(answers(small, 512, "test 0")) < sum(full)


def test_the_profile_fits_the_model() -> None:
    profile = EntropyProfile.load(profile_beside(DEMO.path))
    geometry = read_geometry(DEMO.path)
    profile.check_geometry(
        geometry.n_layer, geometry.n_head, max(geometry.kv_heads_per_layer), geometry.name
    )
    assert profile.coefficient_of_variation > 0.05


def test_calibration_is_near_the_dequantised_weights_in_float64() -> None:
    settings = CalibrationSettings(curve_texts=0)
    profile = calibrate(DEMO.path, read_texts(), settings)
    reference = ModelReference(DEMO.path, "relu2")

    def entropies(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        reference.attended.clear()
        reference.logits(tokens)
        # The axes are layer, head, row and key.
        weights = np.stack([layer[3] for layer in reference.attended])
        bits = -(weights * np.log2(np.maximum(weights, 1e-300))).sum(axis=-1)
        return bits.transpose(0, 2, 1).astype(np.float32)

    with Session(DEMO.path, n_ctx=64) as session:
        excerpts = excerpts_of(read_texts(), session.tokenize, settings)
    expected = measure(entropies, excerpts, lambda _: None).chosen("quarters").mean(axis=0)
    assert np.corrcoef(profile.head_entropies.ravel(), expected.ravel())[0, 1] >= 0.995
    assert np.abs(profile.head_entropies - expected).mean() <= 0.02


def test_run_answers_the_question_of_the_demo() -> None:
    result = entropykv("run", "--demo", "bitnet", "--temp", "0", "--kv-budget", "1.0")
    assert result.returncode == 0, result.stderr
    assert DEMO.question in result.stderr
    fact = result.stdout.strip()
    assert fact.startswith("Ines lives in ")
    assert fact in DEMO.document.read_text(encoding="utf-8")


def test_run_answers_another_question_about_another_document(tmp_path: Path) -> None:
    text = tmp_path / "facts.txt"
    sentences = ["Tom lives in Oslo.", "Ada plays the harp.", "Noah works as a baker."]
    random.Random(1).shuffle(sentences)
    text.write_text("The old mill slept behind the barn. " + " ".join(sentences) + "\n")
    result = entropykv(
        "run", "--demo", "bitnet", "--temp", "0", "-f", text, "-p", "Where does Tom live?"
    )
    assert result.stdout.strip() == "Tom lives in Oslo."


def test_plan_knows_the_demo_and_its_profile() -> None:
    result = entropykv("plan", "--demo", "bitnet", "--kv-budget", "0.3", "--policy", "entropy")
    assert result.returncode == 0, result.stderr
    assert "entropy" in result.stdout


def test_models_lists_what_is_there() -> None:
    rows = json.loads(entropykv("models", "--json").stdout)
    assert rows[0]["name"] == "bitnet"
    assert rows[0]["path"] == str(DEMO.path)
    assert rows[0]["file_bytes"] == DEMO.path.stat().st_size
    assert "bitnet" in entropykv("models").stdout


def test_a_model_and_a_demo_exclude_each_other() -> None:
    result = entropykv("run", "--demo", "bitnet", "-m", "x.gguf", "-p", "x")
    assert result.returncode == 2
    assert "not allowed with" in result.stderr
    assert_refused(entropykv("run", "--demo", "bitnet", "-f", "no-such-file"), "no-such-file")
