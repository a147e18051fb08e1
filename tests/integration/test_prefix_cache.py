"""The prefix cache keeps conversations between requests, and decides which a request continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import Pool

pytest.importorskip("fastapi", reason="needs the extra server")

from entropykv.server.engine.prefix_cache import PrefixCache
from entropykv.server.http.access import Caller
from entropykv.session.reuse import Demand, common_prefix, reuse_of
from entropykv.session.session import Session
from entropykv.session.session_text import SessionText
from tests.architectures import MODELS
from tests.support.pools import N_CTX, PIECE, PROMPTS, pool_of
from tests.support.releases import write_known

SYSTEM, OWN = PROMPTS[2], PROMPTS[4]
"""The common beginning of several prompts (4 pieces), and the rest of a long one."""
ANNA, BEN = Caller("anna"), Caller("ben")

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture(params=["llama", "evicting", "freezing", "jamba"])
def pool(request: pytest.FixtureRequest, pool_llama: Path, tmp_path: Path) -> Any:
    """Open a pool: of a model whose texts can be cut anywhere, or with evictions, freezing or
    recurrent layers, where they cannot.
    """
    kinds: dict[str, dict[str, Any]] = {
        "llama": {"kv_budget": 4 * N_CTX},
        "evicting": {"kv_budget": 128},
        "freezing": {"kv_budget": 128, "freeze": "ram"},
        "jamba": {"kv_budget": 4 * N_CTX, "kv_type": "f16"},
    }
    model = pool_llama
    if request.param == "jamba":
        model = tmp_path / "jamba.gguf"
        write_known(model, MODELS["jamba"])
    with pool_of(model, n_sequences=4, **kinds[request.param]) as made:
        yield made


def read(
    prefix_cache: PrefixCache, session: Session, tokens: list[int], until: int | None = None
) -> None:
    """Read a prompt in pieces, as the server does, up to its end or to `until`."""
    last = len(tokens) if until is None else until
    for first in range(session.position, last, PIECE):
        piece = tokens[first : min(first + PIECE, last)]
        prefix_cache.reads(session, len(piece))
        session.decode(piece)
    if until is None:
        session.text.checkpoint_at_turn(writes=True)
        prefix_cache.has_read(session)


def turn(
    prefix_cache: PrefixCache, tokens: list[int], caller: Caller = ANNA, n: int = 6
) -> tuple[list[int], int]:
    """Answer a prompt; return prompt and answer, and how many tokens of the prompt were read."""
    session = prefix_cache.take(tokens, caller)
    shared = common_prefix(session.tokens, tokens)
    if shared < session.position and not session.text.return_to_checkpoint(tokens, repeatable=True):
        demand = Demand(end=len(tokens) + n)
        session.text.truncate(reuse_of(session.text.held(), tokens, demand).position)
    before = session.position
    if before < len(tokens):
        read(prefix_cache, session, tokens)
    prefix_cache.has_read(session)
    for _ in range(n):
        assert session.logits is not None
        session.decode([int(session.logits.argmax())])
    text = session.tokens
    prefix_cache.put(session, caller)
    return text, len(tokens) - before


class Coming:
    """Take a session for a prompt in a thread of its own, while another prompt is read."""

    def __init__(self, prefix_cache: PrefixCache, tokens: list[int], caller: Caller = ANNA) -> None:
        self.asked = 0
        self.session: Session | None = None

        def look() -> None:
            self.asked += 1

        def come() -> None:
            self.session = prefix_cache.take(tokens, caller, look)

        self.thread = threading.Thread(target=come)
        self.thread.start()

    def wait(self) -> None:
        """Return once the prompt waits for another one, or has its session."""
        while not self.asked and self.thread.is_alive():
            time.sleep(0.001)

    def end(self) -> Session:
        self.thread.join(20)
        assert self.session is not None, "it still waits"
        return self.session


def test_a_newcomer_gets_what_it_shares_before_the_rest_is_read(pool: Pool) -> None:
    """A new prompt gets the text that it shares with a longer one, up to its last cut, before the
    longer one ends.
    """
    prefix_cache = PrefixCache(pool, 4)
    long, short = [*SYSTEM, 5, *OWN], [*SYSTEM, 6, 7, 8]
    first = prefix_cache.take(long, ANNA)
    coming = Coming(prefix_cache, short)
    coming.wait()
    read(prefix_cache, first, long, until=5 * PIECE)
    session = coming.end()
    assert session.tokens == SYSTEM
    assert first.position < len(long)
    assert prefix_cache.forked == 1
    found = session.decode(short[len(SYSTEM) :])
    read(prefix_cache, first, long)
    if not session.cache.evicted and session.config.freezing is None:
        alone = pool.session()
        for part in range(0, len(SYSTEM), PIECE):
            alone.decode(SYSTEM[part : part + PIECE])
        np.testing.assert_array_equal(found, alone.decode(short[len(SYSTEM) :]))


def test_who_comes_late_gets_it_where_it_can_be_cut_or_reads_by_itself(pool: Pool) -> None:
    prefix_cache = PrefixCache(pool, 4)
    long, short = [*SYSTEM, 5, *OWN], [*SYSTEM, 6, 7, 8]
    first = prefix_cache.take(long, ANNA)
    read(prefix_cache, first, long, until=7 * PIECE)
    can_be_cut = not (
        first.cache.evicted or pool.runner.factory.context.recurrent or first.config.freezing
    )
    coming = Coming(prefix_cache, short)
    coming.wait()
    read(prefix_cache, first, long, until=8 * PIECE)  # Of the long prompt, the end is still unread.
    assert coming.end().position == (len(SYSTEM) if can_be_cut else 0)


def test_nobody_waits_for_another_tenant(pool: Pool) -> None:
    prefix_cache = PrefixCache(pool, 4)
    prefix_cache.take([*SYSTEM, 5, *OWN], ANNA)
    coming = Coming(prefix_cache, [*SYSTEM, 6], BEN)
    assert coming.end().position == 0
    assert not coming.asked


def test_who_reads_may_give_up(pool: Pool) -> None:
    prefix_cache = PrefixCache(pool, 4)
    first = prefix_cache.take([*SYSTEM, 5], ANNA)
    coming = Coming(prefix_cache, [*SYSTEM, 6])
    coming.wait()
    prefix_cache.gives_up(first)
    assert coming.end().position == 0


def test_who_waits_is_let_go_if_another_session_takes_over_and_fails(
    pool_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool_of(pool_llama, n_sequences=4, kv_budget=4 * N_CTX, checkpoints="0") as pool:
        prefix_cache = PrefixCache(pool, 4)
        turn(prefix_cache, SYSTEM)
        long = [*SYSTEM, *OWN]
        coming: list[Coming] = []
        fork, close, own_thread = Session.fork, Session.close, threading.current_thread()

        def look(*_: object, **__: object) -> bool:
            """Report that there is no checkpoint, once another prompt has begun to wait."""
            if not coming:
                coming.append(Coming(prefix_cache, long))
                coming[0].wait()
            return False

        def fail(session: Session) -> None:
            close(session)
            if forked and session is not forked[0] and threading.current_thread() is own_thread:
                raise InterruptedError

        def note(session: Session) -> Session:
            forked.append(fork(session))
            return forked[-1]

        forked: list[Session] = []
        with monkeypatch.context() as patch:
            patch.setattr(SessionText, "return_to_checkpoint", look)
            patch.setattr(Session, "fork", note)
            patch.setattr(Session, "close", fail)
            with pytest.raises(InterruptedError):
                prefix_cache.take(long, ANNA)
        assert coming[0].asked, "it did not wait"
        coming[0].end()


def test_a_newcomer_that_leaves_costs_nothing(pool: Pool) -> None:
    prefix_cache = PrefixCache(pool, 4)
    long = [*SYSTEM, 5, *OWN]
    first = prefix_cache.take(long, ANNA)

    def leave() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        prefix_cache.take([*SYSTEM, 6], ANNA, leave)
    sessions = len(pool.sessions())
    read(prefix_cache, first, long)
    assert len(pool.sessions()) == sessions
    assert prefix_cache.forked == 0


def test_all_choices_of_a_prompt_go_on_from_its_end(pool: Pool) -> None:
    prefix_cache = PrefixCache(pool, 4)
    first = prefix_cache.take(SYSTEM, ANNA)
    others = [Coming(prefix_cache, SYSTEM) for _ in range(2)]
    for each in others:
        each.wait()
    read(prefix_cache, first, SYSTEM)
    assert first.logits is not None
    for each in others:
        session = each.end()
        assert session.tokens == SYSTEM
        np.testing.assert_array_equal(session.logits, first.logits)


def test_of_prompts_that_come_at_once_one_is_read(pool_llama: Path) -> None:
    with pool_of(pool_llama, n_sequences=8, kv_budget=8 * N_CTX) as pool:
        prefix_cache = PrefixCache(pool, 8)
        coming = [Coming(prefix_cache, SYSTEM) for _ in range(8)]
        for each in coming:
            each.wait()
        reads = [each.session for each in coming if each.session is not None]
        assert len(reads) == 1
        read(prefix_cache, reads[0], SYSTEM)
        assert all(each.end().tokens == SYSTEM for each in coming)


def test_conversations_that_share_half_of_their_texts_stay_apart(pool: Pool) -> None:
    prefix_cache = PrefixCache(pool, 4)
    texts = {"anna": [*SYSTEM, 5, *PROMPTS[1]], "bob": [*SYSTEM, 6, *PROMPTS[1]]}
    for number in range(3):
        for name, text in texts.items():
            new = [number + 7, 8, 9]
            texts[name], n_read = turn(prefix_cache, [*text, *new])
            assert number == 0 or n_read <= len(new) + 1, f"turn {number} of {name}"
    assert prefix_cache.resumed == 4


def test_an_answer_that_is_asked_for_again_takes_no_second_place(pool_llama: Path) -> None:
    with pool_of(pool_llama, n_sequences=2, kv_budget=2 * N_CTX) as pool:
        prefix_cache = PrefixCache(pool, 4)
        turn(prefix_cache, SYSTEM)
        _, n_read = turn(prefix_cache, SYSTEM)
        assert n_read == 0
        assert (
            len([caller for caller, *_ in prefix_cache.conversations() if caller.user == "anna"])
            == 1
        )


def test_tokens_that_spell_the_same_text_go_on_with_it(pool_llama: Path) -> None:
    with pool_of(pool_llama, n_sequences=2, kv_budget=2 * N_CTX, freeze="ram") as pool:
        prefix_cache = PrefixCache(pool, 4)
        text, _ = turn(prefix_cache, SYSTEM)
        spelled = [*SYSTEM[:40], 5, 6, *text[41:], 7, 8]
        asked: list[list[int]] = []

        def continues(held: Sequence[int]) -> bool:
            asked.append(list(held))
            return True

        session = prefix_cache.take(spelled, ANNA, None, continues)
        assert session.tokens == text
        assert asked == [text]


def test_tenants_share_nothing(pool: Pool) -> None:
    prefix_cache = PrefixCache(pool, 4)
    prompt = [*SYSTEM, 5, 6]
    assert turn(prefix_cache, prompt)[1] == len(prompt)
    assert turn(prefix_cache, prompt, BEN)[1] == len(prompt)
    assert pool.session_for(prompt, tenant=Caller("cleo")).position == 0
    names = Caller("anna", "work"), Caller("anna", "home")
    for shared, shelf_of in (
        (True, prefix_cache),
        (False, PrefixCache(pool, 4, shared_prefixes=False)),
    ):
        text = [*PROMPTS[1], *SYSTEM, 9 if shared else 10]
        counts = [turn(shelf_of, text, name)[1] for name in names]
        assert counts[0] == len(text)
        if pool.runner.config.freezing is None:
            assert (counts[1] < len(text)) == shared
        elif not shared:
            assert counts[1] == len(text)


def test_a_fork_is_of_the_same_tenant(pool_llama: Path) -> None:
    with pool_of(pool_llama, n_sequences=2, kv_budget=2 * N_CTX) as pool:
        session = pool.session(tenant="anna")
        session.decode(SYSTEM)
        assert session.fork().tenant == "anna"
        session.text.checkpoint_at_turn(writes=True)
        assert pool.session_for([*SYSTEM, 5], "anna").position == len(SYSTEM)
        assert pool.session_for([*SYSTEM, 5]).position == 0


def test_how_one_stands_is_told_between_steps(pool_llama: Path) -> None:
    """The status of a session is read between steps; the caller waits while one may change it."""
    with pool_of(pool_llama, n_sequences=1, kv_budget=2 * N_CTX) as pool:
        session = pool.session()
        session.decode(SYSTEM)
        states: list[str] = []
        thread = threading.Thread(target=lambda: states.append(session.cache.pool_status().state))
        with pool.runner.scheduler.between_steps():
            thread.start()
            thread.join(0.2)
            assert not states
            session.cache.swap_out()
        thread.join(10)
        assert states == ["swapped_out"]
