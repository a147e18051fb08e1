"""EntropyLlama reads only the part of a prompt that it must read, also from saved states and in a
pool of conversations.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv import EntropyKVError, EntropyLlama, Session, SettingsError, detach
from tests.support.llamas import GREEDY, QUIET, STORES, content
from tests.support.logits import tokens_for
from tests.support.reads import Reads
from tests.support.saved_sessions import all_entries
from tests.support.threads import in_threads


@given(
    steps=st.lists(st.integers(1, 50), min_size=2, max_size=14),
    back=st.floats(0, 1),
    store=st.sampled_from(STORES),
    budget=st.sampled_from([48, 96, 1.0]),
)
@settings(max_examples=50)
def test_going_back_leaves_what_was_there(
    tiny_llama: Path, steps: list[int], back: float, store: str, budget: float
) -> None:
    """After a rollback, a session has the entries that the last eviction left, and all that were
    read since.
    """
    tokens = tokens_for(sum(steps))
    with Session(
        tiny_llama, n_ctx=600, kv_budget=budget, n_ubatch=16, store=store, n_threads=1
    ) as session:
        seen = {0: [[] for _ in all_entries(session)]}
        last = 0
        for step in steps:
            for _ in session.reader.read(
                tokens[session.position : session.position + step], all_logits=False
            ):
                seen[session.position] = all_entries(session)
                lost = any(
                    len(kept) < session.position - last + len(before)
                    for kept, before in zip(seen[session.position], seen[last], strict=True)
                )
                last = session.position if lost else last
                assert session.text.held().text.reusable_from == last
        position = last + round(back * (session.position - last))
        assert session.text.held().can_return_to(position)
        assert session.text.held().can_return_to(0)
        assert last <= 1 or not session.text.held().can_return_to(last - 1)
        assert not session.text.held().can_return_to(session.position + 1)
        session.text.truncate(position)
        expected = [[*kept, *range(last, position)] for kept in seen[last]]
        assert all_entries(session) == expected


def test_a_resize_that_evicts_is_the_new_limit(tiny_llama: Path, store: str) -> None:
    with Session(tiny_llama, n_ctx=256, store=store, n_threads=1) as session:
        session.decode(tokens_for(100))
        session.cache.resize(0.9)
        assert session.text.held().text.reusable_from == 0
        session.cache.resize(50)
        assert session.text.held().text.reusable_from == 100
        session.decode(tokens_for(3))
        assert session.text.held().text.reusable_from == 103
        # Going back to here is possible, but evicted entries do not return.
        session.text.truncate(95)
        # Evicted entries do not return by reading on either, even if that evicts others.
        for _ in range(3):
            position = session.position
            assert [session.text.held().can_return_to(p) for p in (0, 95, position)] == [
                True,
                False,
                False,
            ]
            assert session.text.held().text.reusable_from > session.config.n_ctx
            session.decode(tokens_for(40, seed=position))
        assert session.stats().evictions > 0
        session.reset()
        assert session.text.held().text.reusable_from == 0
        session.decode(tokens_for(20))
        assert session.text.held().can_return_to(10)


def test_what_extends_is_never_read_again(llm: EntropyLlama) -> None:
    reads = Reads(llm)
    prompt = tokens_for(150)
    llm(prompt, **GREEDY)
    assert reads.count() == 150
    assert llm.kv_stats().evictions > 0
    for turn in range(6):
        held = llm.n_tokens
        prompt = [*llm.input_ids[:held].tolist(), *tokens_for(21, seed=turn)]
        llm(prompt, **GREEDY)
        assert reads.count() == len(prompt) - held == 21
        stats = llm.kv_stats()
        assert stats.kv_bytes_peak <= stats.kv_bytes_budget


def test_what_extends_gives_what_a_session_that_reads_on_gives(
    llm: EntropyLlama, tiny_llama: Path, store: str
) -> None:
    first, more = tokens_for(150), tokens_for(40, seed=1)
    llm(first, **GREEDY)
    held = llm.input_ids[: llm.n_tokens].tolist()
    llm([*held, *more], **GREEDY)
    with Session(
        tiny_llama, n_ctx=512, kv_budget=64, n_ubatch=32, store=store, n_threads=1
    ) as session:
        written = list(session.generate(first, max_tokens=len(held) - 150 + 1))
        assert [*first, *written][: len(held)] == held
        list(session.generate(more, max_tokens=llm.n_tokens - len(held) - 40 + 1))
        session.text.truncate(min(session.position, llm.n_tokens))
        assert session.position == llm.n_tokens
        assert all_entries(session) == all_entries(llm._session)


def test_what_departs_after_an_eviction_is_read_from_the_start(
    llm: EntropyLlama, tiny_llama: Path, store: str
) -> None:
    reads = Reads(llm)
    prompt = tokens_for(150)
    llm(prompt, **GREEDY)
    limit = llm._session.text.held().text.reusable_from
    assert limit > 64
    other = [*prompt[: limit - 1], *tokens_for(20, seed=1)]
    reads.count()
    reply = content(llm(other, **GREEDY))
    assert reads.count() == len(other)
    fresh = EntropyLlama(
        str(tiny_llama), n_ctx=512, kv_budget=64, n_ubatch=32, store=store, **QUIET
    )
    assert content(fresh(other, **GREEDY)) == reply
    assert all_entries(fresh._session) == all_entries(llm._session)
    fresh.close()


def test_what_departs_after_the_last_eviction_is_read_from_there(
    tiny_llama: Path, store: str
) -> None:
    """With repeatable=False, what differs only after the last eviction is read from there."""
    llm = EntropyLlama(
        str(tiny_llama),
        n_ctx=512,
        kv_budget=64,
        n_ubatch=32,
        store=store,
        repeatable=False,
        **QUIET,
    )
    llm.eval(tokens_for(150))
    limit = 0
    while len(all_entries(llm._session)[0]) > 60 or limit != llm.n_tokens:
        llm.eval([7])  # An eviction makes room for a few more tokens.
        limit = llm._session.text.held().text.reusable_from
    llm.eval([8, 9, 10])
    assert llm._session.text.held().text.reusable_from == limit == llm.n_tokens - 3
    cached = llm.input_ids[: llm.n_tokens].tolist()
    reads = Reads(llm)
    llm([*cached[: limit + 1], 11, 12], **GREEDY)
    assert reads.count() == 2
    llm.close()


def test_without_evictions_any_prefix_is_used(tiny_llama: Path, store: str) -> None:
    """After going back to any common prefix, text and entries are those of a model that never read
    anything else.
    """

    def make() -> EntropyLlama:
        return EntropyLlama(
            str(tiny_llama), n_ctx=512, kv_type="f16", store=store, repeatable=False, **QUIET
        )

    used, fresh = make(), make()
    prompt = tokens_for(100)
    used(prompt, **GREEDY)
    other = [*prompt[:70], *tokens_for(40, seed=2)]
    reads = Reads(used)
    reply = content(used(other, **GREEDY))
    assert reads.count() == 40
    fresh.eval(prompt[:70])
    assert content(fresh(other, **GREEDY)) == reply
    assert all_entries(fresh._session) == all_entries(used._session)
    used.close()
    fresh.close()


def test_the_same_prompt_again_is_sampled_at_once(llm: EntropyLlama) -> None:
    prompt = tokens_for(150)
    llm.eval(prompt)
    reads = Reads(llm)
    llm(prompt, temperature=0.0, max_tokens=1)
    assert reads.count() == 0


def test_going_back_by_hand(llm: EntropyLlama) -> None:
    """A caller may set n_tokens; what cannot be rolled back is read again."""
    llm.eval(tokens_for(150))
    assert llm._session.text.held().text.reusable_from > 100
    reads = Reads(llm)
    llm.n_tokens = 100
    llm.eval([5])
    assert reads.count() == 101
    assert llm.input_ids[:101].tolist() == [*tokens_for(150)[:100], 5]
    llm._session.cache.resize(40)
    llm.n_tokens = 90
    llm.eval([6])
    assert reads.count() == 91


def decoded_by(llm: EntropyLlama) -> list[int]:
    """Return a list to which every token is appended that is read from now on."""
    tokens: list[int] = []
    session = llm._session
    decode = session.reader.read

    def spy(ids: Any, all_logits: bool, **how: Any) -> Iterator[Any]:
        tokens.extend(ids)
        return decode(ids, all_logits, **how)

    session.reader.read = spy  # type: ignore[method-assign]
    return tokens


def test_state_is_saved_and_loaded(tiny_llama: Path, store: str) -> None:
    def make() -> EntropyLlama:
        return EntropyLlama(
            str(tiny_llama), n_ctx=512, kv_budget=64, n_ubatch=32, store=store, **QUIET
        )

    llm, other = make(), make()
    llm(tokens_for(150), max_tokens=10, temperature=0.0)
    state = llm.save_state()
    assert state.llama_state_size == len(state.llama_state)
    prompt = [*llm.input_ids[: llm.n_tokens].tolist(), *tokens_for(12, seed=5)]
    expected = content(llm(prompt, max_tokens=10, temperature=0.0))
    for each in (llm, other):
        each.load_state(state)
        assert each.n_tokens == len(prompt) - 12
        decoded = decoded_by(each)
        assert content(each(prompt, max_tokens=10, temperature=0.0)) == expected
        assert decoded[:12] == prompt[-12:]
    foreign = llama_cpp.Llama(str(tiny_llama), n_ctx=64, **QUIET)
    foreign.eval([5])
    with pytest.raises(EntropyKVError):
        llm.load_state(foreign.save_state())
    assert llm([5, 6], max_tokens=2, temperature=0.0)["usage"]["prompt_tokens"] == 2
    foreign.close()
    llm.close()
    other.close()


def test_a_cache_of_prompts(tiny_llama: Path) -> None:
    llm = EntropyLlama(str(tiny_llama), n_ctx=512, kv_budget=96, n_ubatch=32, **QUIET)
    llm.set_cache(llama_cpp.LlamaRAMCache())
    first, second = tokens_for(140), tokens_for(140, seed=8)
    llm(first, max_tokens=5, temperature=0.0)
    longer = [*llm.input_ids[: llm.n_tokens].tolist(), *tokens_for(7, seed=5)]
    llm(second, max_tokens=5, temperature=0.0)
    decoded = decoded_by(llm)
    llm(longer, max_tokens=5, temperature=0.0)
    assert decoded[:7] == longer[-7:]
    llm.close()


PROMPTS = ["the king of the and", "on the other ", "where then are they", "an idea in the end"]


def llama_of(model: Path, **options: Any) -> EntropyLlama:
    defaults = {"n_ctx": 256, "n_ubatch": 16, "n_threads": 2, "kv_type": "f16", "verbose": False}
    return EntropyLlama(model, **{**defaults, **options})


def texts(llama: EntropyLlama, prompt: str) -> list[str]:
    """Return answers: greedy, with a seed, streamed to a longer prompt, and with the seed again."""
    sampled = {"max_tokens": 24, "seed": 5, "temperature": 1.5, "top_k": 0, "top_p": 1.0}
    return [
        llama(prompt, max_tokens=24, temperature=0)["choices"][0]["text"],
        llama(prompt, **sampled)["choices"][0]["text"],
        "".join(
            chunk["choices"][0]["text"]
            for chunk in llama(f"{prompt} and on", max_tokens=24, temperature=0, stream=True)
        ),
        llama(prompt, **sampled)["choices"][0]["text"],
    ]


def test_answers_in_threads_are_those_of_one_model_alone(pool_llama: Path) -> None:
    expected = []
    for prompt in PROMPTS:
        alone = llama_of(pool_llama)
        expected.append(texts(alone, prompt))
        alone.close()
    first = llama_of(pool_llama, n_sequences=4, kv_budget="1MiB")
    llamas = [first, *(first.another() for _ in PROMPTS[1:])]
    steps: list[int] = []
    assert first.pool is not None
    run = first.pool.runner.scheduler._run

    def noted(works: Any) -> None:
        steps.append(len(works))
        run(works)

    first.pool.runner.scheduler._run = noted
    found = in_threads([lambda m=m, p=p: texts(m, p) for m, p in zip(llamas, PROMPTS, strict=True)])
    assert found == expected
    assert max(steps) > 1
    for llama in reversed(llamas):
        llama.close()


def test_rows_of_all_tokens_are_each_their_own(pool_llama: Path) -> None:
    first = llama_of(pool_llama, n_sequences=2, logits_all=True)
    second = first.another()
    ask = {"max_tokens": 5, "temperature": 0, "logprobs": 2}
    both = in_threads([lambda m=m: m("the king", **ask)["choices"][0] for m in (first, second)])
    alone = llama_of(pool_llama, logits_all=True)
    expected = alone("the king", **ask)["choices"][0]["logprobs"]["token_logprobs"]
    for choice in both:
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    for llama in (second, first, alone):
        llama.close()


def test_what_has_no_pool_has_no_other(pool_llama: Path) -> None:
    alone = llama_of(pool_llama)
    with pytest.raises(SettingsError, match="n_sequences"):
        alone.another()
    alone.close()
    first = llama_of(pool_llama, n_sequences=2)
    with pytest.raises(SettingsError, match="cannot be detached"):
        detach(first)
    second = first.another()
    thread = threading.Thread(target=second.close)
    thread.start()
    thread.join()
    assert first("the king", max_tokens=3)["usage"]["completion_tokens"]
    first.close()
