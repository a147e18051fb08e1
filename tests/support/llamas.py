"""Call models through the interface of llama-cpp-python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llama_cpp import Llama

from entropykv import EntropyLlama

QUIET: dict[str, Any] = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}
STORES = ("headwise", "flat")


def content(response: Any) -> Any:
    """Return a response without its id and time, which differ between two calls."""
    return {name: value for name, value in response.items() if name not in ("id", "created")}


def answer(response: Any) -> str:
    return str(response["choices"][0]["message"]["content"])


def as_long(options: dict[str, Any], whole: Any) -> dict[str, Any]:
    """Return options that ask for as many tokens as stock has written, if max_tokens ended its
    text.

    Stock may exceed max_tokens to complete a character.
    """
    cut = whole["choices"][0]["finish_reason"] == "length"
    return {**options, "max_tokens": whole["usage"]["completion_tokens"]} if cut else options


PROMPT = "the winding road to the land of "
GRAMMAR = 'root ::= [a-z]{3} " " [0-9]{2}'


GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 10}


def both(model: Path, store: str) -> Iterator[tuple[EntropyLlama, Llama]]:
    """Open an EntropyLlama with a full budget and a stock Llama; close both at the end."""
    ours = EntropyLlama(str(model), n_ctx=256, kv_type="f16", store=store, **QUIET)
    stock = Llama(str(model), n_ctx=256, **QUIET)
    yield ours, stock
    ours.close()
    stock.close()


def small(model: Path, store: str) -> Iterator[EntropyLlama]:
    """Open an EntropyLlama that keeps 64 of 512 tokens, in micro-batches of 32; close it."""
    made = EntropyLlama(str(model), n_ctx=512, kv_budget=64, n_ubatch=32, store=store, **QUIET)
    yield made
    made.close()
