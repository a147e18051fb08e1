"""A policy of the user's own can be given as an object to `policy=`."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import (
    BudgetToShare,
    EntropyLlama,
    MicroBatchSeen,
    OwnPolicy,
    Pool,
    Session,
    SessionFileError,
    SettingsError,
)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_policy.py"
N_CTX = 512
TOKENS = [(7 * i) % 200 + 3 for i in range(420)]


class Alternating(OwnPolicy):
    """Give three quarters of the budget beyond the floor to every second KV head."""

    name = "alternating"

    def share(self, budget: BudgetToShare) -> np.ndarray:
        """Return weights of 3, 1, 3, 1 and so on, one per KV head."""
        return np.resize([3.0, 1.0], budget.n_kv_heads)


class Counting(Alternating):
    """Count the observed tokens, and swap the weights once there are enough."""

    name = "counting"
    seen = 0
    entropies: tuple[int, ...] = ()

    def observe(self, seen: MicroBatchSeen) -> None:
        """Count tokens, and assert that each entry of KV head 0 in layer 0 has an importance."""
        self.seen += seen.n_tokens
        self.entropies = seen.entropies(0).shape
        kept = seen.positions(0, 0)
        assert seen.importance(0, 0).shape == kept.shape
        assert np.all(np.diff(kept) > 0)

    def share(self, budget: BudgetToShare) -> np.ndarray:
        """Return the weights 3, 1, 3, 1 and so on; after 200 tokens, 1, 3, 1, 3."""
        return np.resize([1.0, 3.0] if self.seen >= 200 else [3.0, 1.0], budget.n_kv_heads)

    def state(self) -> np.ndarray:
        """Return the number of observed tokens."""
        return np.array([float(self.seen)])

    def load(self, state: np.ndarray) -> None:
        """Take the number of observed tokens; raise ValueError if the state is not one."""
        if state.shape != (1,) or not state[0] >= 0:
            raise ValueError("no count")
        self.seen = int(state[0])


class ByLayer(Alternating):
    """Choose once for all KV heads of a layer."""

    name = "by-layer"
    choice = "layer"
    importance = "attention"


def session_of(path: Path, policy: Any, **options: Any) -> Session:
    return Session(path, n_ctx=N_CTX, kv_budget=0.3, policy=policy, n_threads=1, **options)


def budgets_of(session: Session) -> np.ndarray:
    return np.array([entries for layer in session.cache.budgets() for entries in layer])


def test_shares_follow_the_object(tiny_llama: Path) -> None:
    with session_of(tiny_llama, Alternating()) as session:
        budgets = budgets_of(session)
        assert session.config.policy.name == session.stats().policy == "alternating"
        assert np.all(budgets[::2] > budgets[1::2])
        session.decode(TOKENS)
        stats = session.stats()
        assert stats.kv_bytes_peak <= stats.kv_bytes_budget
        assert stats.evictions > 0


def test_what_it_observes_changes_shares(tiny_llama: Path) -> None:
    """What the policy observes changes the shares; each text has a copy of the given object, which
    never changes.
    """
    given = Counting()
    with session_of(tiny_llama, given, n_ubatch=64) as session:
        before = budgets_of(session)
        session.decode(TOKENS[:192])
        assert np.array_equal(budgets_of(session), before)
        session.decode(TOKENS[192:])
        after = budgets_of(session)
        assert np.all(after[::2] < after[1::2])
        session.reset()
        assert np.array_equal(budgets_of(session), before)
    assert (given.seen, given.entropies) == (0, ())


def test_a_saved_session_knows_what_was_observed(tiny_llama: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"n_ubatch": 64}
    with session_of(tiny_llama, Counting(), **options) as session:
        session.decode(TOKENS[:300])
        session.files.save(tmp_path / "own.session")
        expected = session.decode(TOKENS[300:])
        budgets = budgets_of(session)
    with session_of(tiny_llama, Counting(), **options) as session:
        session.files.load(tmp_path / "own.session")
        assert np.array_equal(session.decode(TOKENS[300:]), expected)
        assert np.array_equal(budgets_of(session), budgets)
    with (
        session_of(tiny_llama, Alternating()) as session,
        pytest.raises(SessionFileError, match="policy"),
    ):
        session.files.load(tmp_path / "own.session")


def test_all_heads_of_a_layer_keep_the_same(tiny_llama: Path) -> None:
    with session_of(tiny_llama, ByLayer()) as session:
        session.decode(TOKENS)
        for layer, budgets in enumerate(session.cache.budgets()):
            assert len(set(budgets)) == 1
            first = session.cache.entries(layer, 0)
            for head in range(len(budgets)):
                assert np.array_equal(session.cache.entries(layer, head), first)


def test_every_door_takes_it(tiny_llama: Path) -> None:
    llm = EntropyLlama(
        str(tiny_llama), n_ctx=N_CTX, kv_budget=0.3, policy=Counting(), verbose=False
    )
    assert llm.kv_stats().policy == "counting"
    llm.close()
    with Pool(tiny_llama, n_ctx=N_CTX, kv_budget=320, policy=Counting(), n_sequences=2) as pool:
        first, second = pool.session(), pool.session()
        first.decode(TOKENS)
        second.decode(TOKENS[:190])  # The text is longer than what half of the pool holds.
        turned, still = budgets_of(first), budgets_of(second)
        assert turned[0] < turned[1]  # Each session's shares follow its own text.
        assert still[0] > still[1]


class Nameless(OwnPolicy):
    """Define a policy without a name."""


class Uniform(OwnPolicy):
    """Define a policy with a name that is taken."""

    name = "uniform"


class Short(OwnPolicy):
    """Define a policy with too few shares."""

    name = "short"

    def share(self, budget: BudgetToShare) -> list[float]:  # noqa: ARG002
        """Return one weight, although there are more KV heads."""
        return [1.0]


class Negative(OwnPolicy):
    """Define a policy with negative weights."""

    name = "negative"

    def share(self, budget: BudgetToShare) -> np.ndarray:
        """Return the weight -1 for every KV head."""
        return -np.ones(budget.n_kv_heads)


class LayerByValues(OwnPolicy):
    """Rank by norms of values, which differ between KV heads, although all heads of a layer must
    choose together.
    """

    name = "layer-by-values"
    choice = "layer"


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (object(), "derived from entropykv.OwnPolicy"),
        (Alternating, "derived from entropykv.OwnPolicy"),
        (Nameless(), "the name of an own policy cannot be None"),
        (Uniform(), "the name of an own policy cannot be 'uniform'"),
        (Short(), r"policy short: share\(\) must return \d+ numbers"),
        (Negative(), r"policy negative: share\(\) must return"),
        (LayerByValues(), "keeps the same tokens for all heads of a layer"),
    ],
)
def test_one_sentence_for_what_is_no_policy(tiny_llama: Path, policy: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        session_of(tiny_llama, policy)


def test_the_flat_store_refuses_it(tiny_llama: Path) -> None:
    with pytest.raises(SettingsError, match="cannot follow policy alternating"):
        session_of(tiny_llama, Alternating(), store="flat")


def test_the_example(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = runpy.run_path(str(EXAMPLE))
    module["main"](str(tiny_llama))
    out = capsys.readouterr().out
    assert "layer  0: may keep" in out
    assert "bytes at most" in out
