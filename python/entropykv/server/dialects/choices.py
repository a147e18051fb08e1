"""Join the choices of one request, which are written at the same time, into one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_MOST_SEEDS = 2**32


def seed_of(seed: int | None, number: int) -> int | None:
    """Return the seed of one of the choices of a prompt.

    The first choice has the request's seed, the others the following numbers, because equal seeds
    would give equal choices.
    """
    return None if seed is None else (seed + number) % _MOST_SEEDS if number else seed


@dataclass
class Choices:
    """Join `n` choices of every prompt; each is an answer of one choice, or its chunks.

    The tokens of a prompt count once for all its choices. `usage`: whether the end of a stream has
    the numbers of tokens.
    """

    n: int
    usage: bool = False
    _shown: dict[str, Any] = field(default_factory=dict)
    """Id and time of the first chunk, which all chunks get."""
    _costs: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The numbers of tokens of every choice that has ended."""
    _times: dict[str, Any] = field(default_factory=dict)
    """How long the choice took that has ended first."""

    def whole(self, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the joined answer."""
        choices = [{**each["choices"][0], "index": i} for i, each in enumerate(answers)]
        self._costs = {i: each["usage"] for i, each in enumerate(answers)}
        return {**answers[0], "choices": choices, "usage": self._cost()}

    def chunk(self, index: int, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Return a chunk of a choice as a chunk of the joined answer; None if it belongs to the
        end.
        """
        if not chunk["choices"]:
            self._costs[index] = chunk["usage"]
            if not self._times and "timings" in chunk:
                self._times = {"timings": chunk["timings"]}
            return None
        self._shown = self._shown or _head(chunk)
        choice = {**chunk["choices"][0], "index": index}
        usage = {"usage": None} if self.usage else {}
        return {**chunk, **self._shown, "choices": [choice], **usage}

    def end(self) -> dict[str, Any] | None:
        """Return a last chunk after those of all choices; None if there is none."""
        if not self.usage:
            return None
        return {**self._shown, "choices": [], "usage": self._cost(), **self._times}

    def _cost(self) -> dict[str, Any]:
        prompts = [cost for index, cost in self._costs.items() if index % self.n == 0]
        details = [cost.get("completion_tokens_details") for cost in self._costs.values()]
        thoughts = [each["reasoning_tokens"] for each in details if each is not None]
        usage = _usage(
            sum(cost["prompt_tokens"] for cost in prompts),
            sum(cost["completion_tokens"] for cost in self._costs.values()),
        )
        cached = sum(cost["prompt_tokens_details"]["cached_tokens"] for cost in prompts)
        return {**usage, **_details(cached, sum(thoughts) if thoughts else None)}


def _head(chunk: dict[str, Any]) -> dict[str, Any]:
    keys = ("id", "object", "created", "model", "system_fingerprint")
    return {key: chunk[key] for key in keys if key in chunk}


def _usage(n_prompt: int, n_generated: int) -> dict[str, Any]:
    """Return OpenAI's numbers of tokens."""
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
    }


def _details(n_cached: int, n_thought: int | None) -> dict[str, Any]:
    """Return how many tokens of a prompt had been read before, and how many tokens of an answer
    were thoughts; None if the model has none.
    """
    details = {"prompt_tokens_details": {"cached_tokens": n_cached}}
    if n_thought is not None:
        details["completion_tokens_details"] = {"reasoning_tokens": n_thought}
    return details
