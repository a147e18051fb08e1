"""States of an EntropyLlama can be saved, loaded, and kept in a cache of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from entropykv import EntropyKVError, EntropyLlama
from tests.support.llamas import QUIET, content
from tests.support.logits import tokens_for


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
