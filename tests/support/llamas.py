"""Ask models with the interface of llama-cpp-python."""

from __future__ import annotations

from typing import Any

QUIET: dict[str, Any] = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}
STORES = ("headwise", "flat")


def content(response: Any) -> Any:
    """A response without what differs between two calls: id and time."""
    return {name: value for name, value in response.items() if name not in ("id", "created")}


def answer(response: Any) -> str:
    return str(response["choices"][0]["message"]["content"])


PROMPT = "the winding road to the land of "
GRAMMAR = 'root ::= [a-z]{3} " " [0-9]{2}'


GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 10}
