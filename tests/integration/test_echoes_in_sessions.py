"""Sessions read a text twice, inside the budget, if it would be evicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import BudgetToShare, OwnPolicy, Pool, Session, SettingsError
from entropykv.evaluation.passkeys import make_cases
from entropykv.store.step import BatchPart, MicroBatch
from tests.architectures import MODELS
from tests.support.logits import tokens_for
from tests.support.releases import write_known
from tests.support.saved_sessions import all_entries, future, session_of
from tests.support.tiny_models import write_gpt2

POLICIES = (
    "adaptive:mass+values+echo",
    "adaptive:reconstruct",
    "uniform:reconstruct",
    "layer:attention+echo",
)


class FirstHeads(OwnPolicy):
    """Give the first KV head of every layer three times the weight of the second; entries are
    ranked by `reconstruct`.
    """

    name = "first-heads"
    importance = "reconstruct"

    def share(self, budget: BudgetToShare) -> np.ndarray:
        """Return the weights of the KV heads: 3, 1, 3, 1 and so on."""
        return np.resize([3.0, 1.0], budget.n_kv_heads)


each_policy = pytest.mark.parametrize("policy", POLICIES)


@pytest.fixture
def echoes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that records tokens of text and of the echo for each part of a micro-batch."""
    sizes: list[tuple[int, int]] = []
    decode = MicroBatch.decode_together

    def counted(self: MicroBatch, context: Any, parts: Sequence[BatchPart]) -> Any:
        sizes.extend((len(part.tokens), len(part.echo)) for part in parts)
        return decode(self, context, parts)

    monkeypatch.setattr(MicroBatch, "decode_together", counted)
    return sizes


@each_policy
def test_a_text_that_fits_is_read_once(
    uneven_llama: Path, policy: str, echoes: list[tuple[int, int]]
) -> None:
    with session_of(uneven_llama, policy=policy) as session:
        session.decode(tokens_for(60))
        session.decode(tokens_for(30))
        assert all(n_echo == 0 for _, n_echo in echoes)
        assert session.cache.evicted == 0


def test_what_was_read_once_is_scored_before_it_is_evicted(
    uneven_llama: Path, echoes: list[tuple[int, int]]
) -> None:
    with session_of(uneven_llama, policy="adaptive:reconstruct") as session:
        session.decode(tokens_for(90))
        echoes.clear()
        session.decode(tokens_for(40, seed=1))
        n_alone = sum(1 for n_text, n_echo in echoes if n_text == 0 and n_echo > 0)
        assert n_alone == -(-90 // session.reader.chunk)
        assert all(n_echo > n_text for n_text, n_echo in echoes if n_text >= 16)
        assert session.cache.evicted > 0


def test_in_a_pool_too_it_is_scored_while_all_of_it_is_there(
    uneven_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    decode = MicroBatch.decode_together
    settings: dict[str, Any] = {"n_ctx": 512, "n_ubatch": 64, "n_threads": 1, "kv_budget": 192}
    with Pool(uneven_llama, n_sequences=2, policy=FirstHeads(), **settings) as pool:

        def looked(self: MicroBatch, context: Any, parts: Sequence[BatchPart]) -> Any:
            if all(not part.tokens for part in parts):
                store = session._slot.store  # The session itself must not be called within a step.
                heads = [(i, j) for i, of in enumerate(store.budgets()) for j in range(len(of))]
                found.append(sum(len(store.entries(*head)) for head in heads))
            return decode(self, context, parts)

        other, session = pool.session(), pool.session()
        other.decode(tokens_for(90, seed=5))
        session.decode(tokens_for(90))
        n_heads = len(all_entries(session))
        monkeypatch.setattr(MicroBatch, "decode_together", looked)
        session.decode(tokens_for(60, seed=1))
        assert set(found) == {90 * n_heads}
        assert session.cache.evicted > 0


def test_what_is_written_is_scored_once_per_recent_window(
    uneven_llama: Path, echoes: list[tuple[int, int]]
) -> None:
    with session_of(uneven_llama, policy="uniform:reconstruct", recent_window=20) as session:
        session.decode(tokens_for(200))
        echoes.clear()
        for token in tokens_for(81, seed=6):
            session.decode([token])
        alone = [n_echo for n_text, n_echo in echoes if n_text == 0]
        assert len(alone) == 81 // min(20, session.reader.chunk)


@each_policy
def test_budgets_hold_and_texts_repeat(uneven_llama: Path, policy: str) -> None:
    outcomes = []
    for _ in range(2):
        with session_of(uneven_llama, policy=policy) as session:
            for n_tokens in (200, 1, 1, 17, 50):
                session.decode(tokens_for(n_tokens, seed=n_tokens))
                stats = session.stats()
                assert stats.kv_bytes_now <= stats.kv_bytes_peak <= stats.kv_bytes_budget
                budgets = [n for layer in session.cache.budgets() for n in layer]
                entries = all_entries(session)
                assert all(len(e) <= n for e, n in zip(entries, budgets, strict=True))
                assert max(map(max, entries)) < session.position
            assert session.cache.evicted > 0
            outcomes.append(future(session))
    assert outcomes[0] == outcomes[1]


@each_policy
@pytest.mark.parametrize("n_read", [60, 90, 200])
def test_the_same_numbers_as_without_a_break(
    uneven_llama: Path, policy: str, n_read: int, tmp_path: Path
) -> None:
    with session_of(uneven_llama, policy=policy, recent_window=24) as session:
        session.decode(tokens_for(n_read))
        list(session.generate([7], 11))
        session.files.save(tmp_path / "x.ekv")
        expected = future(session)
    with session_of(uneven_llama, policy=policy, recent_window=24) as session:
        session.files.load(tmp_path / "x.ekv")
        assert future(session) == expected


def test_going_back_forgets_what_was_scored(uneven_llama: Path) -> None:
    with session_of(uneven_llama, policy="adaptive:reconstruct") as session:
        session.decode(tokens_for(200))
        session.reset()
        session.decode(tokens_for(80, seed=2))
        session.decode(tokens_for(80, seed=3))
        again = future(session)
    with session_of(uneven_llama, policy="adaptive:reconstruct") as session:
        session.decode(tokens_for(80, seed=2))
        session.decode(tokens_for(80, seed=3))
        assert future(session) == again


@each_policy
@pytest.mark.parametrize("n_ubatch", [1, 30, 512])
def test_micro_batches_of_any_size(uneven_llama: Path, policy: str, n_ubatch: int) -> None:
    with session_of(uneven_llama, policy=policy, n_ubatch=n_ubatch) as session:
        session.decode(tokens_for(300))
        assert session.cache.evicted > 0
        assert session.position == 300


def test_echoes_stay_within_learned_positions(
    tmp_path: Path, echoes: list[tuple[int, int]]
) -> None:
    write_gpt2(tmp_path / "gpt2.gguf", n_ctx_train=256)
    with session_of(tmp_path / "gpt2.gguf", policy="adaptive:reconstruct", n_ctx=256) as session:
        session.decode(tokens_for(256, n_vocab=200))
        assert session.position == 256
    position = 0
    for n_text, n_echo in echoes:
        assert position + n_text + n_echo <= 256
        position += n_text
    assert any(n_echo for _, n_echo in echoes)


def test_facts_of_a_document_survive_without_a_profile(smollm2: Path) -> None:
    """A document that is read twice keeps more of its facts than one that is read once.

    It has four facts in 900 tokens, and the budget holds a sixth of its entries.
    """
    sentences = " ".join(
        f"On day {day} the keeper of the lighthouse wrote about wind, rain and the {what} he had "
        "seen from the gallery, and went to bed early."
        for day, what in enumerate(["gulls", "ships", "clouds", "seals", "stars", "lamps"] * 8)
    )
    right = {}
    for policy in ("adaptive", "adaptive:mass+values+echo"):
        with Session(smollm2, n_ctx=1024, kv_budget=150, policy=policy, kv_type="f16") as session:
            (case,) = make_cases(
                [sentences],
                lambda text, session=session: len(session.tokenize(text, add_bos=False)),  # type: ignore[misc]
                n_cases=1,
                n_tokens=900,
                facts_per_text=4,
                seed=0,
            )
            session.decode(session.tokenize(case.text))
            state = session.files.save_state()
            right[policy] = 0
            for fact in case.facts:
                session.files.load_state(state)
                question = session.tokenize(fact.prompt, add_bos=False)
                answer = list(session.generate(question, 12, temperature=0.0))
                right[policy] += fact.is_answered_by(session.detokenize(answer))
    once, twice = right.values()
    assert twice >= 3
    assert twice > once


def test_recurrent_layers_cannot_read_twice(tmp_path: Path) -> None:
    path = tmp_path / "jamba.gguf"
    write_known(path, MODELS["jamba"])
    with pytest.raises(SettingsError, match="recurrent layers; use measure mass"):
        session_of(path, policy="adaptive:reconstruct")
    with session_of(path) as session:
        assert session.config.policy.name == "adaptive"
