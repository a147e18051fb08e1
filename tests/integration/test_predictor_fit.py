"""Models without a predictor read their first texts twice, and fit one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import EntropyProfile, Pool, Session
from entropykv.errors import SettingsError
from entropykv.profile.find import profile_beside
from entropykv.session.second_readings import TOKENS_TO_LEARN
from entropykv.store.headwise import HeadwiseStore
from entropykv.store.protocol import TokensToRead
from tests.architectures import ARCHITECTURES
from tests.support.command import entropykv
from tests.support.learnt import fit_of, store_of
from tests.support.logits import tokens_for
from tests.support.releases import write_known
from tests.support.tiny_models import write_gpt2

N_CTX = 2048
TOKENS = tokens_for(N_CTX - 64)
INSIDE: dict[str, Any] = {"n_ctx": N_CTX, "kv_budget": 0.2, "n_threads": 1}
LEAST_SHARE = 2.0**-20

pytestmark = pytest.mark.usefixtures("one_text")


def shares(session: Session) -> np.ndarray:
    """Return the predicted shares of all entries that are held, except the sinks."""
    core = store_of(session).core
    return np.concatenate(
        [
            core.predicted_shares(layer, head)[4:]
            for layer, shape in enumerate(store_of(session).layers)
            for head in range(shape.n_head_kv)
        ]
    )


def micro_batches_of(
    session: Session, tokens: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, int, int]]:
    """Read a text; returns position, tokens and tokens of the echo of each micro-batch."""
    found = []
    before = HeadwiseStore.before

    def note(self: HeadwiseStore, reading: TokensToRead) -> None:
        found.append((reading.position, reading.n_tokens, reading.n_echo))
        before(self, reading)

    with monkeypatch.context() as patch:
        patch.setattr(HeadwiseStore, "before", note)
        session.decode(tokens)
    return found


def echoes_in(session: Session, tokens: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> int:
    """Read a text; returns how many of its micro-batches had an echo."""
    return sum(n_echo > 0 for _, _, n_echo in micro_batches_of(session, tokens, monkeypatch))


def test_texts_are_read_once_after_the_first(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The predictor is fitted in the middle of a text, whose rest is read once."""
    with Session(tiny_llama, **INSIDE) as session:
        assert session.config.policy.name == "adaptive:mass+values+predicted"
        chunk = session.reader.chunk
        assert echoes_in(session, TOKENS, monkeypatch) == -(-TOKENS_TO_LEARN // chunk)
        fit = fit_of(session)
        assert TOKENS_TO_LEARN <= fit.n_tokens < TOKENS_TO_LEARN + chunk
        assert fit.predictor is not None
        assert session.reader.chunk == 512
        assert (shares(session) > 2 * LEAST_SHARE).mean() > 0.9
        assert store_of(session).core.is_predicted
        session.reset()
        assert echoes_in(session, TOKENS, monkeypatch) == 0
        assert fit.n_tokens < TOKENS_TO_LEARN + chunk
        assert session.stats().evictions > 0


def test_a_text_that_fits_teaches_nothing(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(tiny_llama, **{**INSIDE, "kv_budget": 1.0}) as session:
        assert echoes_in(session, TOKENS, monkeypatch) == 0
        assert fit_of(session).n_tokens == 0
        assert fit_of(session).report() is None


@pytest.mark.usefixtures("patient")
def test_what_was_held_before_is_predicted_then(tiny_llama: Path) -> None:
    """Entries that another session read before the predictor was fitted get predictions, too."""
    with Pool(tiny_llama, n_ctx=N_CTX, kv_budget=1200, n_sequences=3, n_threads=1) as pool:
        live, swapped, reader = (pool.session() for _ in range(3))
        for session in (live, swapped):
            session.decode(TOKENS[:100])
            assert shares(session).max() < 2 * LEAST_SHARE
        pool.runner.shared.swap_out(swapped._slot)  # type: ignore[union-attr]
        while fit_of(reader).predictor is None:
            reader.decode(TOKENS[:600])
            if reader.position > 1200:
                reader.reset()
        assert (shares(live) > 2 * LEAST_SHARE).mean() > 0.9
        swapped.decode(TOKENS[100:101])
        np.testing.assert_array_equal(shares(swapped)[:90], shares(live)[:90])


def test_written_text_teaches_too(tiny_llama: Path) -> None:
    with Session(tiny_llama, n_ctx=N_CTX, kv_budget=300, n_threads=1) as session:
        for token in TOKENS:
            session.decode([token])
            if fit_of(session).predictor is not None:
                break
        assert fit_of(session).predictor is not None
        assert session.position < 2 * TOKENS_TO_LEARN
        before = fit_of(session).n_tokens
        for token in TOKENS[:300]:
            session.decode([token])
        assert fit_of(session).n_tokens == before


def test_it_is_the_predictor_that_calibration_would_fit(smollm2: Path, prose: str) -> None:
    """Without its profile, SmolLM2 fits a predictor whose shares correlate with the profile's."""
    with Session(smollm2, n_ctx=2048, kv_budget=0.3, n_threads=2) as known:
        tokens = known.tokenize(prose)[:1400]
        assert known.cache.predictor_fit is None
        nothing = EntropyProfile(30, 9, 3, 2048, np.ones((30, 9)))
        shipped = known.config.profile
    assert shipped is not None
    assert shipped.predictor is not None
    with Session(
        smollm2, n_ctx=2048, kv_budget=0.3, n_threads=2, entropy_config=nothing
    ) as session:
        session.decode(tokens)
        fitted = shares(session)
        store_of(session).learning.adopt(shipped.predictor)
        session.reset()
        session.decode(tokens[:600])
        by_shipped = shares(session)
        fit = fit_of(session).predictor
        assert fit is not None
        store_of(session).learning.adopt(fit)
        session.reset()
        session.decode(tokens[:600])
        by_fitted = shares(session)
    assert len(fitted) > 0
    assert np.corrcoef(np.log(by_shipped), np.log(by_fitted))[0, 1] > 0.7


def test_keys_that_are_not_known_before_rope_are_read_twice_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "learned-positions.gguf"
    write_gpt2(model, n_ctx_train=N_CTX)
    with Session(model, **INSIDE) as session:
        assert session.config.policy.name == "adaptive:mass+values+echo"
        assert session.cache.predictor_fit is None
        assert echoes_in(session, TOKENS, monkeypatch) > TOKENS_TO_LEARN // session.reader.chunk + 1
    with pytest.raises(SettingsError, match="its position embeddings are learned"):
        Session(model, policy="uniform:predicted", **INSIDE)


def test_recurrent_layers_cannot_be_taught(tmp_path: Path) -> None:
    model = tmp_path / "hybrid.gguf"
    write_known(model, ARCHITECTURES["hybrid"][0])
    with pytest.raises(SettingsError, match="reads text twice"):
        Session(model, policy="uniform:predicted", kv_budget=0.5, n_threads=1)


def test_run_says_what_happened(tiny_llama: Path) -> None:
    options = ("-n", 2, "-t", 1, "-c", N_CTX, "--kv-budget", 0.2, "--no-chat", "-f", "-")
    words = "the and of to in that is was for it with as his on be at by had not are " * 38
    result = entropykv("run", "-m", tiny_llama, *options, stdin=words)
    assert result.returncode == 0, result.stderr
    assert "tokens were read twice, to learn what this model looks up" in result.stderr
    assert not profile_beside(tiny_llama).exists()


def test_micro_batches_end_where_the_bytes_are_full(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A micro-batch ends where the bytes are full, so that budgets that follow the text are known
    before it is evicted.
    """
    with Session(tiny_llama, policy="adaptive", **INSIDE) as session:
        whole = store_of(session).reach().whole
        sizes = micro_batches_of(session, TOKENS[:1500], monkeypatch)
    assert whole < 512
    assert sizes[0][:2] == (0, whole) or sizes[0][1] < 512
    assert sum(n for _, n, _ in sizes) == 1500
    assert sizes[1][0] == sizes[0][1]
    with Session(tiny_llama, policy="uniform", **INSIDE) as session:
        sizes = micro_batches_of(session, TOKENS[:1500], monkeypatch)
    assert [n for _, n, _ in sizes] == [512, 512, 476]
