"""Join the choices of one request, which are written at the same time, into one answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from entropykv.server.models.loading import ServedLlama

_MOST_SEEDS = 2**32


def seeds(seed: int | None, n: int) -> list[int | None]:
    """Return the seeds of n choices of one prompt.

    The first choice has the request's seed, the others the following numbers, because equal seeds
    would give equal choices.
    """
    if seed is None:
        return [None] * n
    return [seed, *((seed + i) % _MOST_SEEDS for i in range(1, n))]


def with_usage(answer: Any, llama: ServedLlama) -> Any:
    """Return an answer of one choice with its numbers of tokens; its chunks, with another one that
    has them.
    """
    if isinstance(answer, Iterator):
        return _chunks_with_usage(answer, llama)
    return {**answer, "usage": {**answer["usage"], **_details_of(llama)}}


def _chunks_with_usage(
    chunks: Iterator[dict[str, Any]], llama: ServedLlama
) -> Iterator[dict[str, Any]]:
    head: dict[str, Any] = {}
    for chunk in chunks:
        head = head or _head(chunk)
        yield chunk
    usage = {**_usage(llama.prompt_size, llama.generated), **_details_of(llama)}
    yield {**head, "choices": [], "usage": usage}


def _details_of(llama: ServedLlama) -> dict[str, Any]:
    thought = None if llama.thought is None else llama.thought.counter.n_tokens
    return _details(llama.cached, thought)


def with_passages(answer: Any, llama: ServedLlama) -> Any:
    """Return an answer of one choice, or its chunks, with the passages that the answer looked at.

    They are beside the reason why the answer ended.
    """
    if isinstance(answer, Iterator):
        return (_with_passages(chunk, llama) for chunk in answer)
    return _with_passages(answer, llama)


def _with_passages(answer: dict[str, Any], llama: ServedLlama) -> dict[str, Any]:
    (choice,) = answer["choices"]
    if choice["finish_reason"] is None:
        return answer
    found = llama.passages
    passages = None if found is None else [asdict(passage) for passage in found]
    return {**answer, "choices": [{**choice, "passages": passages}]}


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
            return None
        self._shown = self._shown or _head(chunk)
        choice = {**chunk["choices"][0], "index": index}
        usage = {"usage": None} if self.usage else {}
        return {**chunk, **self._shown, "choices": [choice], **usage}

    def end(self) -> dict[str, Any] | None:
        """Return a last chunk after those of all choices; None if there is none."""
        return {**self._shown, "choices": [], "usage": self._cost()} if self.usage else None

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
    return {key: chunk[key] for key in ("id", "object", "created", "model")}


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
