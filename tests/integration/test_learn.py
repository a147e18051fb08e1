"""--learn writes a profile for a model without one, from texts that its sessions read twice."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from entropykv import EntropyLlama, EntropyProfile, Pool, Session
from entropykv.calibration.observe import Observer
from entropykv.errors import SettingsError
from entropykv.model.geometry import read_geometry
from entropykv.model.header import HeaderReader
from entropykv.profile.find import find_profile, profile_beside
from entropykv.session import learning, predictor_fit
from entropykv.session.learning import LEAST_TOKENS
from tests.architectures import ARCHITECTURES
from tests.support.calibration_texts import WORDS
from tests.support.logits import tokens_for
from tests.support.releases import write_known
from tests.support.unwritable import make_folders_unwritable

N_CTX = 2048
PROMPT = WORDS * 120
TOKENS = tokens_for(N_CTX - 64)
INSIDE = {"n_ctx": N_CTX, "kv_budget": 0.2, "n_threads": 1}


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_llama, tmp_path / "model.gguf"))


def learnt(model: Path) -> EntropyProfile:
    return EntropyProfile.load(profile_beside(model))


def read(model: Path, tokens: list[int], **options: object) -> str | None:
    """Read a text inside a budget; returns the final note about learning."""
    with Session(model, **{**INSIDE, "learn": True, **options}) as session:  # type: ignore[arg-type]
        session.decode(tokens)
        assert session.learner is not None
        return session.learner.report()


# --- what is learnt -------------------------------------------------------------------------------


def test_later_sessions_use_it(model: Path) -> None:
    with Session(model, **INSIDE) as session:  # type: ignore[arg-type]
        assert session.policy.name == "adaptive:mass+values+predicted"
        assert session.learner is None
    assert read(model, TOKENS) == (
        f"{profile_beside(model)}: learnt; sessions with this model use it from now on"
    )
    for policy, name in (("auto", "profile:mass+values+predicted"), ("fast", "profile")):
        with Session(model, policy=policy, **INSIDE) as session:  # type: ignore[arg-type]
            assert session.policy.name == name
            session.decode(TOKENS)
            assert session.predictor_fit is None
    profile = learnt(model)
    assert profile.is_learnt
    assert profile.predictor is not None
    assert profile.source.startswith("entropykv --learn, ")


def test_numbers_are_those_of_a_session_that_learns_nothing(model: Path) -> None:
    logits = []
    for learn in (False, True):
        with Session(model, learn=learn, **INSIDE) as session:  # type: ignore[arg-type]
            logits.append(session.decode(TOKENS))
    np.testing.assert_array_equal(logits[0], logits[1])


def test_heads_that_need_more_room_get_it(uneven_llama: Path, tmp_path: Path) -> None:
    """The first layer attends to all entries equally, so it loses most with any number of
    entries.
    """
    model = Path(shutil.copy(uneven_llama, tmp_path / "model.gguf"))
    read(model, TOKENS)
    profile = learnt(model)
    assert profile.curves is not None
    errors = profile.curves.output_error
    assert errors.max() == pytest.approx(1.0)
    assert np.all(np.diff(errors, axis=2) <= 0.0)
    entropies = profile.head_entropies
    assert entropies[0].min() > entropies[1:, 3:].max()
    with Session(model, policy="fast", **INSIDE) as session:  # type: ignore[arg-type]
        budgets = session.budgets()
    assert len({heads for layer in budgets for heads in layer}) > 1


def test_entropies_are_those_of_the_text_s_own_rows(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one micro-batch, nothing is dropped before a row, and rows of the echo do not count."""
    monkeypatch.setattr(learning, "LEAST_TOKENS", 900)
    monkeypatch.setattr(predictor_fit, "LEAST_TOKENS", 900)
    tokens = TOKENS[:900]
    read(model, tokens, n_ubatch=N_CTX, kv_type="f16")
    with Observer(model, n_ctx=N_CTX, n_threads=1) as observer:
        expected = observer.entropies(tokens).mean(axis=1)
    np.testing.assert_allclose(learnt(model).head_entropies, expected, atol=0.01)


def test_it_tells_nothing_of_the_text(model: Path) -> None:
    """Another text of the same length gives the same strings: no words, no tokens."""
    found = []
    for tokens in (TOKENS, TOKENS[::-1]):
        read(model, tokens)
        found.append(json.loads(profile_beside(model).read_text(encoding="utf-8")))
        profile_beside(model).unlink()
        # The weights depend on the text's queries, keys and values together.
        assert found[-1]["predictor"].pop("weights")
    assert strings_of(found[0]) == strings_of(found[1])
    assert found[0]["curves"]["output_error"] != found[1]["curves"]["output_error"]
    assert "measurement" not in found[0]


def strings_of(value: object) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(text for each in value.values() for text in strings_of(each))]
    if isinstance(value, list):
        return [text for each in value for text in strings_of(each)]
    return [value] if isinstance(value, str) else []


def test_it_agrees_with_calibration_on_which_layers_lose_most(
    smollm2: Path, prose: str, tmp_path: Path
) -> None:
    """SmolLM2 with one bit of a norm changed counts as another model, without a profile."""
    model = tmp_path / "other.gguf"
    content = bytearray(smollm2.read_bytes())
    content[HeaderReader(smollm2).norms["output_norm.weight"][0]] ^= 1
    model.write_bytes(content)
    with Session(model, learn=True, **INSIDE) as session:  # type: ignore[arg-type]
        session.decode(session.tokenize(prose)[:1500])
    calibrated = find_profile(read_geometry(smollm2))
    assert calibrated is not None
    losses = [losses_of_layers(profile) for profile in (learnt(model), calibrated)]
    assert np.corrcoef(losses)[0, 1] > 0.8


def losses_of_layers(profile: EntropyProfile) -> npt.NDArray[np.float64]:
    """Sum up the losses of KV heads that keep only protected entries."""
    assert profile.curves is not None
    _, losses = profile.curves.knots(N_CTX, N_CTX)
    return np.array(losses).reshape(profile.n_layer, profile.n_head_kv, -1)[..., 0].sum(axis=1)


def test_several_texts_and_sessions_add_up(model: Path) -> None:
    """Sessions of a pool learn together, and reset() forgets only the text."""
    part = TOKENS[: LEAST_TOKENS // 2]
    with Pool(model, n_ctx=N_CTX, kv_budget=256, n_sequences=2, learn=True, n_threads=1) as pool:
        sessions = [pool.session(), pool.session()]
        learner = pool.runner.learner
        assert learner is not None
        for session in sessions:
            session.decode(part)
        assert 0 < learner.n_tokens < LEAST_TOKENS
        assert not profile_beside(model).exists()
        sessions[0].reset()
        for _ in range(2):
            sessions[0].decode(part)
        assert learner.path == profile_beside(model)


def test_llama_learns(model: Path) -> None:
    llama = EntropyLlama(model, n_ctx=N_CTX, kv_budget=0.2, n_threads=1, learn=True, verbose=False)
    llama.eval(TOKENS)
    llama.close()
    assert learnt(model).is_learnt


# --- what is in the way, and what is left alone ---------------------------------------------------


def test_what_shows_too_little_says_so(model: Path) -> None:
    short = read(model, TOKENS[: LEAST_TOKENS // 2])
    assert short is not None
    assert re.search(r"no profile is learnt yet: [1-9]\d* tokens", short)
    whole = read(model, TOKENS, kv_budget=1.0)
    assert whole is not None
    assert "no profile is learnt yet: 0 tokens" in whole
    assert os.listdir(model.parent) == ["model.gguf"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"store": "flat"}, "the flat store follows no entropy profile"),
        ({"policy": "fast"}, "policy adaptive reads them once: use --policy auto"),
        ({"policy": "uniform"}, "policy uniform reads them once"),
        ({"freeze": "ram"}, "policy uniform reads them once: use --policy auto, without --freeze"),
    ],
)
def test_who_cannot_learn_says_why_and_goes_on(
    model: Path, options: dict[str, object], why: str
) -> None:
    report = read(model, TOKENS[:600], **options)
    assert report is not None
    assert why in report
    assert os.listdir(model.parent) == ["model.gguf"]


def test_recurrent_layers_are_referred_to_calibration(tmp_path: Path) -> None:
    path = tmp_path / "hybrid.gguf"
    write_known(path, ARCHITECTURES["hybrid"][0])
    report = read(path, tokens_for(100), n_ctx=read_geometry(path).n_ctx_train)
    assert report is not None
    assert "recurrent layers cannot" in report
    assert "entropykv calibrate" in report


def test_a_named_profile_and_learning_exclude_each_other(model: Path) -> None:
    with pytest.raises(SettingsError, match="leave one of them out"):
        Session(model, learn=True, entropy_config=model.with_name("a.json"))


def test_a_profile_that_is_there_stays(model: Path) -> None:
    read(model, TOKENS)
    before = profile_beside(model).read_bytes()
    assert read(model, TOKENS[::-1]) is None
    assert read(model, TOKENS[::-1], policy="adaptive:mass+values+echo") is None
    assert profile_beside(model).read_bytes() == before
    profile_beside(model).write_text("{", encoding="utf-8")
    report = read(model, TOKENS, policy="adaptive:mass+values+echo")
    assert report is not None
    assert "model.entropy.json" in report
    assert profile_beside(model).read_text(encoding="utf-8") == "{"


def test_what_another_process_has_left_meanwhile_stays(model: Path) -> None:
    """If two processes learn at once, one complete profile is left."""
    read(model, TOKENS)
    theirs = profile_beside(model).read_bytes()
    profile_beside(model).unlink()
    with Session(model, learn=True, **INSIDE) as session:  # type: ignore[arg-type]
        session.decode(TOKENS[:500])
        profile_beside(model).write_bytes(theirs)
        session.decode(TOKENS[500:])
        assert session.learner is not None
        assert "is there by now" in str(session.learner.report())
    assert profile_beside(model).read_bytes() == theirs
    assert sorted(os.listdir(model.parent)) == ["model.entropy.json", "model.gguf"]


def test_a_folder_that_is_not_writable(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is detected before anything is read; root may write everywhere."""
    make_folders_unwritable(monkeypatch)
    report = read(model, TOKENS)
    assert report is not None
    assert "folder is not writable" in report
    assert os.listdir(model.parent) == ["model.gguf"]


def test_a_disk_that_fails_ends_learning_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("entropykv.files.os.replace", fail)
    report = read(model, TOKENS)
    assert report is not None
    assert "No space left on device" in report
    assert os.listdir(model.parent) == ["model.gguf"]
