"""The predictor that first texts teach is kept for later processes; if it cannot be kept, sessions
still work.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from entropykv import EntropyProfile, Pool, Session
from entropykv.errors import SettingsError
from entropykv.profile.find import profile_beside
from entropykv.profile.learnt import LearntFile, LearntPredictor
from entropykv.session import second_readings
from entropykv.session.document import read_document
from entropykv.session.second_readings import TOKENS_TO_LEARN
from entropykv.store.headwise import HeadwiseStore
from tests.support.learnt import fit_of, kept_in, need_texts
from tests.support.logits import tokens_for

N_CTX = 2048
TOKENS = tokens_for(N_CTX - 64)
OTHERS = tokens_for(N_CTX - 64, seed=4)
INSIDE: dict[str, Any] = {"n_ctx": N_CTX, "kv_budget": 0.2, "n_threads": 1}

pytestmark = pytest.mark.usefixtures("one_text")


def read(own_llama: Path, tokens: list[int], **options: Any) -> str | None:
    """Read a text in a session of its own; return its report of the learnt predictor, or None."""
    with Session(own_llama, **{**INSIDE, **options}) as session:
        session.decode(tokens)
        fit = session.cache.predictor_fit
        return None if fit is None else fit.report()


def weights_of(learnt: LearntPredictor) -> npt.NDArray[np.float32]:
    return np.concatenate([of_layer.ravel() for of_layer in learnt.predictor.weights])


def test_the_next_session_reads_once_from_its_first_token(
    own_llama: Path, learnt_folder: Path
) -> None:
    said = read(own_llama, TOKENS)
    learnt = kept_in(learnt_folder)
    assert learnt.complete
    assert learnt.predictor.n_tokens >= TOKENS_TO_LEARN
    assert said is not None
    assert f"kept in {learnt_folder}" in said
    with Session(own_llama, **INSIDE) as session:
        assert session.cache.predictor_fit is None
        assert session.config.policy.name == "adaptive:mass+values+predicted"
        session.decode(OTHERS)
        assert isinstance(session._slot.store, HeadwiseStore)
        assert session._slot.store.core.is_predicted
        assert session.reader.chunk == 512
    np.testing.assert_array_equal(weights_of(kept_in(learnt_folder)), weights_of(learnt))
    assert sorted(os.listdir(own_llama.parent)) == ["cache", "model.gguf"]


@pytest.mark.usefixtures("learnt_folder")
def test_answers_do_not_change_once_it_is_complete(own_llama: Path) -> None:
    read(own_llama, TOKENS)
    logits = []
    for text in (TOKENS, OTHERS):
        read(own_llama, text)
        with Session(own_llama, **INSIDE) as session:
            logits.append(session.decode(TOKENS[:900]))
    np.testing.assert_array_equal(*logits)


def test_a_text_of_few_tokens_is_not_said_to_have_taught(
    own_llama: Path, learnt_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short text has too few tokens for a round of lessons, so that nothing of it is kept."""
    need_texts(monkeypatch, 3)
    read(own_llama, TOKENS)
    said = read(own_llama, OTHERS[:100], kv_budget=40)
    assert said is not None
    assert "1 of 3 texts have taught something" in said
    assert kept_in(learnt_folder).n_texts == 1


def test_every_text_of_the_first_ones_teaches_a_round(
    own_llama: Path, learnt_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A predictor of three texts is the same whether one session or three read them."""
    need_texts(monkeypatch, 3)
    weights, counts = [], []
    for number in range(3):
        said = read(own_llama, tokens_for(N_CTX - 64, seed=number))
        learnt = kept_in(learnt_folder)
        assert learnt.complete is (number == 2)
        assert learnt.n_texts == number + 1
        assert said is not None
        if not learnt.complete:
            assert f"{number + 1} of 3 texts have taught something" in said
        weights.append(weights_of(learnt))
        counts.append(learnt.predictor.n_tokens)
    first, then = counts[0], np.diff(counts)
    assert first >= TOKENS_TO_LEARN
    assert all(second_readings.ROUND_TOKENS <= n < TOKENS_TO_LEARN for n in then)
    with Session(own_llama, learn=False, **INSIDE) as session:
        for number in range(3):
            session.reset()
            session.decode(tokens_for(N_CTX - 64, seed=number))
        alone = fit_of(session).predictor
        assert alone is not None
        assert alone.n_tokens == counts[2]
        found = np.concatenate([of_layer.ravel() for of_layer in alone.weights])
    np.testing.assert_allclose(found, weights[2], rtol=1e-2, atol=1e-3)
    assert not np.allclose(weights[1], weights[0], rtol=1e-2, atol=1e-3)


def test_short_texts_of_several_processes_add_up(
    own_llama: Path, learnt_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two texts in two sessions, each with half of the needed tokens, complete a predictor."""
    need_texts(monkeypatch, 2)
    short = second_readings.ROUND_TOKENS + 60
    said = read(own_llama, TOKENS[:short], kv_budget=60)
    first = kept_in(learnt_folder)
    assert not first.complete
    assert first.predictor.correlation is None
    assert said is not None
    assert f"and {TOKENS_TO_LEARN} are needed" in said
    with Session(own_llama, **{**INSIDE, "kv_budget": 60}) as session:
        store = session._slot.store
        assert isinstance(store, HeadwiseStore)
        assert store.core.is_predicted
        session.decode(OTHERS[:short])
    both = kept_in(learnt_folder)
    assert both.complete
    assert both.n_texts == 2
    assert both.predictor.n_tokens > first.predictor.n_tokens
    assert both.predictor.correlation is not None
    assert both.predictor.correlation > 0.3
    with Session(own_llama, **INSIDE) as session:
        assert session.cache.predictor_fit is None


@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_loaded_session_stays_the_same_text(
    in_a_file: bool,
    own_llama: Path,
    learnt_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However a text goes on after it was loaded, it is one of the texts that teach."""
    need_texts(monkeypatch, 2)
    with Pool(own_llama, n_ctx=N_CTX, kv_budget=400, n_sequences=1, n_threads=1) as pool:
        session = pool.session()
        session.decode(TOKENS[:900])
        assert kept_in(learnt_folder).n_texts == 1
        if in_a_file:
            session.files.save(tmp_path / "session")
            session.reset()
            session.files.load(tmp_path / "session")
        else:
            session.files.load_state(session.files.save_state())
        n_twice = fit_of(session).n_tokens
        session.decode(OTHERS[:900])
        assert fit_of(session).n_tokens == n_twice
        assert kept_in(learnt_folder).n_texts == 1


@pytest.mark.usefixtures("learnt_folder")
def test_the_same_text_again_teaches_nothing(own_llama: Path) -> None:
    with Pool(own_llama, n_ctx=N_CTX, kv_budget=256, n_sequences=2, n_threads=1) as pool:
        sessions = [pool.session() for _ in range(2)]
        fit = pool.runner.second_readings.fit
        assert fit is not None
        for session in sessions:
            session.decode(TOKENS[:300])
        assert fit.predictor is None
        sessions[0].decode(TOKENS[300:900])
        assert fit.predictor is not None


def test_it_is_off_where_somebody_says_so(
    own_llama: Path, learnt_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = read(own_llama, TOKENS, learn=False)
    assert said is not None
    assert "read twice" in said
    assert "later ones are read once" in said
    monkeypatch.setenv("ENTROPYKV_LEARN", "off")
    read(own_llama, TOKENS)
    assert not learnt_folder.exists()
    read(own_llama, TOKENS, learn=True)
    assert kept_in(learnt_folder).complete
    # Without learning, nothing that was learnt earlier is read, either.
    with Session(own_llama, **INSIDE) as session:
        assert session.cache.predictor_fit is not None
    monkeypatch.setenv("ENTROPYKV_LEARN", "perhaps")
    with pytest.raises(SettingsError, match="ENTROPYKV_LEARN cannot be 'perhaps'; set it to on or"):
        Session(own_llama, **INSIDE)


def test_a_profile_wins(own_llama: Path, learnt_folder: Path) -> None:
    read(own_llama, TOKENS)
    learnt = kept_in(learnt_folder).predictor
    profile = EntropyProfile(3, 6, 2, N_CTX, np.ones((3, 6)), predictor=learnt)
    for given in (profile, None):
        if given is None:
            profile.save(profile_beside(own_llama))
        with Session(own_llama, entropy_config=given, **INSIDE) as session:
            assert session.config.learnt is None
            assert session.config.predictor is not None
            assert session.cache.predictor_fit is None


def test_a_damaged_file_is_learnt_again(own_llama: Path, learnt_folder: Path) -> None:
    read(own_llama, TOKENS)
    (path,) = learnt_folder.glob("*.json")
    good = path.read_bytes()
    path.write_bytes(good[:-100])
    said = read(own_llama, TOKENS)
    assert said is not None
    assert said.startswith(f"{path}: is damaged, or of another version, and the model teaches anew")
    assert path.read_bytes() == good


def test_a_file_of_another_shape_is_not_used(own_llama: Path, learnt_folder: Path) -> None:
    read(own_llama, TOKENS)
    (path,) = learnt_folder.glob("*.json")
    learnt = kept_in(learnt_folder)
    smaller = tuple(of_layer[:, 1:] for of_layer in learnt.predictor.weights)
    path.unlink()
    wrong = second_readings.ScorePredictor(smaller, 500, 0.7)
    LearntFile(path).keep(LearntPredictor(wrong, "model", 1, complete=True))
    with Session(own_llama, **INSIDE) as session:
        assert session.config.learnt is None
        session.decode(TOKENS)
        assert fit_of(session).predictor is not None


@pytest.mark.parametrize("what", ["read-only", "full", "a file", "no home"])
def test_a_folder_that_cannot_be_written(
    what: str, own_llama: Path, learnt_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    if what == "full":
        monkeypatch.setattr("entropykv.files.os.replace", fail)
        expected = "No space left on device"
    elif what == "read-only":
        monkeypatch.setattr(Path, "mkdir", fail)
        expected = "No space left on device), and each learns again"
    elif what == "a file":
        learnt_folder.parent.parent.mkdir(parents=True)
        learnt_folder.parent.write_text("in the way")
        expected = f"it cannot be kept for other sessions ({learnt_folder}"
    else:
        monkeypatch.setattr("entropykv.system.cache_folder", no_home)
        expected = "nothing can be kept for other sessions: Could not determine home directory."
    said = read(own_llama, TOKENS)
    assert said is not None
    assert expected in said
    assert said.count(str(learnt_folder)) <= 1
    assert "\n" not in said
    assert not list(learnt_folder.glob("*")) or what == "full"
    assert not list(learnt_folder.glob("*.part")) + list(learnt_folder.glob("*.json"))


def test_two_at_once_leave_the_first_complete_one(own_llama: Path, learnt_folder: Path) -> None:
    with Session(own_llama, **INSIDE) as slow:
        slow.decode(TOKENS[:300])
        read(own_llama, OTHERS)
        before = weights_of(kept_in(learnt_folder))
        slow.decode(TOKENS[300:])
        assert fit_of(slow).predictor is not None
    np.testing.assert_array_equal(weights_of(kept_in(learnt_folder)), before)


def test_what_two_learn_at_once_counts_together(
    own_llama: Path, learnt_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sessions have predictors of their own; the one that is kept is their mean by tokens."""
    need_texts(monkeypatch, 3)
    with Session(own_llama, **INSIDE) as first, Session(own_llama, **INSIDE) as second:
        first.decode(TOKENS)
        second.decode(OTHERS)
        fits = [fit_of(session) for session in (first, second)]
        learnt = [fit.learnt for fit in fits]
    both = kept_in(learnt_folder)
    assert [each.n_texts for each in learnt if each is not None] == [1, 1]
    assert both.n_texts == 2
    counts = [each.predictor.n_tokens for each in learnt if each is not None]
    assert both.predictor.n_tokens == sum(counts)
    mean = np.average([weights_of(each) for each in learnt if each], axis=0, weights=counts)
    np.testing.assert_allclose(weights_of(both), mean, rtol=1e-5, atol=1e-6)
    read(own_llama, tokens_for(N_CTX - 64, seed=7))
    assert kept_in(learnt_folder).complete


@pytest.mark.parametrize(
    "text",
    [[100] * 1900, [100, 101] * 950, tokens_for(40) * 47],
    ids=["one token", "two in turn", "forty in turn"],
)
def test_texts_that_repeat_themselves_teach_nothing(
    text: list[int], own_llama: Path, learnt_folder: Path
) -> None:
    with Session(own_llama, **INSIDE) as session:
        session.decode(text)
        assert fit_of(session).candidate is None
        assert not learnt_folder.exists()
        session.reset()
        session.decode(TOKENS)
        assert fit_of(session).predictor is not None
    assert np.abs(weights_of(kept_in(learnt_folder))).max() < 100.0


def test_rounds_that_do_not_agree_are_not_kept(
    own_llama: Path, learnt_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After four rounds that do not agree, the process uses their predictions, but what is kept
    stays incomplete.

    Otherwise it would read every text twice.
    """
    monkeypatch.setattr(second_readings, "LEAST_CORRELATION", 1.1)
    with Session(own_llama, **INSIDE) as session:
        session.decode(TOKENS)
        fit = fit_of(session)
        assert fit.predictor is not None
        assert fit.n_tokens < 2000
        assert "texts differ too much" in str(fit.report())
    assert not kept_in(learnt_folder).complete


@pytest.mark.usefixtures("learnt_folder")
def test_a_sibling_whose_decode_failed_does_not_stop_the_others(
    own_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another session of a pool goes on, though no predictions are possible for one whose decode
    failed.

    Until reset(), the store of such a session has entries beyond its text.
    """
    with Pool(own_llama, n_ctx=N_CTX, kv_budget=900, n_sequences=2, n_threads=1) as pool:
        failing, reader = pool.session(), pool.session()
        failing.decode(TOKENS[:50])

        def fail(*_: object) -> None:
            raise RuntimeError("something went wrong")

        with monkeypatch.context() as patch:
            patch.setattr("entropykv.store.step.Part.settle", fail)
            with pytest.raises(Exception, match="something went wrong"):
                failing.decode(TOKENS[50:80])
        assert not failing.text.held().is_whole
        reader.decode(OTHERS)
        assert fit_of(reader).predictor is not None
        failing.reset()
        failing.decode(TOKENS[:100])


def document(own_llama: Path, path: Path, **options: Any) -> None:
    letters = list("abcdefghijklmnopqrstuvwxyz")
    text = "".join(str(each) for each in np.random.default_rng(1).choice(letters, 1400))
    with Session(own_llama, **{**INSIDE, **options}) as session:
        read_document(session, text, path)


def test_questions_about_a_document_are_answered_by_its_predictor(
    own_llama: Path, learnt_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "book.kv"
    document(own_llama, path, learn=False)
    for learn in (False, True):
        with Session(own_llama, learn=learn, **INSIDE) as session:
            session.files.open_document(path)
            store = session._slot.store
            assert isinstance(store, HeadwiseStore)
            assert store.core.is_predicted
            session.decode(OTHERS[:300])
            assert fit_of(session).n_tokens == 0
    assert not learnt_folder.exists()


@pytest.mark.usefixtures("learnt_folder")
def test_a_document_that_the_budget_held_is_not_read_again_for_a_question(
    own_llama: Path, tmp_path: Path
) -> None:
    path = tmp_path / "book.kv"
    document(own_llama, path, kv_budget=1.0)
    with Session(own_llama, **INSIDE) as session:
        session.files.open_document(path)
        session.decode(OTHERS[:300])
        assert fit_of(session).n_tokens == 0
        session.reset()
        session.decode(TOKENS)
        assert fit_of(session).predictor is not None


def test_a_document_replaces_no_predictor_of_a_pool(
    own_llama: Path, learnt_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "book.kv"
    document(own_llama, path, learn=False)
    read(own_llama, TOKENS)
    with Pool(own_llama, n_ctx=N_CTX, kv_budget=900, n_sequences=2, n_threads=1) as pool:
        session = pool.session()
        session.files.open_document(path)
        learnt = pool.runner.second_readings.learnt
        assert learnt is not None
        np.testing.assert_array_equal(weights_of(learnt), weights_of(kept_in(learnt_folder)))
