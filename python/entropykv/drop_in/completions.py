"""Write the events of an answer as llama_cpp.Llama's completions, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from entropykv.generation.events import CompletionReader, Event
from entropykv.session.logprobs import CompletionLogprobs, TokenLogprob


class LlamaCppWriter:
    """Write one completion as the dictionaries of llama_cpp.llama_types."""

    def __init__(self, model: str, echo: str, logprobs: CompletionLogprobs | None) -> None:
        """Write an answer of a model; `echo` is the text of the prompt if it is repeated.

        `logprobs` shows the values of tokens; None: they were not asked for.
        """
        self._head = {
            "id": f"cmpl-{uuid.uuid4()}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._logprobs = logprobs
        self._read = CompletionReader(echo, logprobs)
        self.tokens: list[int] = []
        """The tokens that were written."""

    def whole(self, events: Iterator[Event]) -> dict[str, Any]:
        """Return the completion."""
        said = self._read.whole(events)
        self.tokens += said.tokens
        n_prompt, n_written = self._read.n_prompt, 0 if said.ended is None else said.ended.n_tokens
        return {
            **self._part(said.text, said.values, said.reason or "stop"),
            "usage": {
                "prompt_tokens": n_prompt,
                "completion_tokens": n_written,
                "total_tokens": n_prompt + n_written,
            },
        }

    def chunks(self, events: Iterator[Event]) -> Iterator[dict[str, Any]]:
        """Yield a chunk for every piece of text, and one that says why the completion ended."""
        for part in self._read.parts(events):
            self.tokens += part.tokens
            if part.text or part.values:
                yield self._part(part.text, part.values, None)
            if part.ended is not None:
                yield self._part("", (), part.reason)

    def _part(
        self, text: str, values: Sequence[TokenLogprob], reason: str | None
    ) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._logprobs.shown(values)
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice]}
