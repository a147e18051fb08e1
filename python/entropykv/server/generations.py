"""Answer one request with several generations: of several prompts, or several choices of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from entropykv.server.loading import ServedLlama

_MOST_SEEDS = 2**32


@dataclass(frozen=True)
class Generations:
    """Write `n` choices of every prompt, one after the other.

    `generate(prompt, seed)` makes one: a response of llama-cpp-python, or an iterator of chunks.
    """

    generate: Callable[[Any, int | None], Any]
    prompts: Sequence[Any]
    n: int = 1
    seed: int | None = None

    def _parts(self) -> Iterator[tuple[int, Any]]:
        """Yield the index of every choice, and what generate() returns for it.

        The first choice has the request's seed, those after it the numbers after that: otherwise
        all of them would be the same.
        """
        for index in range(len(self.prompts) * self.n):
            choice = index % self.n
            seed = None if self.seed is None else (self.seed + choice) % _MOST_SEEDS
            first = self.seed if choice == 0 else seed
            yield index, self.generate(self.prompts[index // self.n], first)

    def whole(self) -> dict[str, Any]:
        """Return one response; a prompt counts once, however many choices it has."""
        answer: dict[str, Any] = {}
        for index, response in self._parts():
            choice = {**response["choices"][0], "index": index}
            if not answer:
                answer = {**response, "choices": [choice]}
                continue
            answer["choices"].append(choice)
            usage = response["usage"]
            again = index % self.n != 0
            answer["usage"] = _usage(
                answer["usage"]["prompt_tokens"] + (0 if again else usage["prompt_tokens"]),
                answer["usage"]["completion_tokens"] + usage["completion_tokens"],
            )
        return answer

    def stream(self, llama: ServedLlama, *, usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the chunks of all choices under one id, then, with `usage`, what they cost."""
        head: dict[str, Any] = {}
        n_prompt = n_generated = 0
        for index, chunks in self._parts():
            for chunk in chunks:
                head = head or {key: chunk[key] for key in ("id", "object", "created", "model")}
                choice = {**chunk["choices"][0], "index": index}
                yield {**chunk, **head, "choices": [choice], **({"usage": None} if usage else {})}
            n_prompt += llama.prompt_size if index % self.n == 0 else 0
            n_generated += llama.generated
        if usage:
            yield {**head, "choices": [], "usage": _usage(n_prompt, n_generated)}


def _usage(n_prompt: int, n_generated: int) -> dict[str, int]:
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
    }
