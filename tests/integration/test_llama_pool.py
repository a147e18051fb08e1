"""llama-cpp-python's interface holds several conversations at a time, in one pool."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from entropykv import EntropyLlama, SettingsError, detach
from tests.support.threads import in_threads

PROMPTS = ["the king of the and", "on the other ", "where then are they", "an idea in the end"]


def llama_of(model: Path, **options: Any) -> EntropyLlama:
    defaults = {"n_ctx": 256, "n_ubatch": 16, "n_threads": 2, "kv_type": "f16", "verbose": False}
    return EntropyLlama(model, **{**defaults, **options})


def texts(llama: EntropyLlama, prompt: str) -> list[str]:
    """Return answers to a prompt: greedy, with a seed, with a grammar, and one that is repeated."""
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
