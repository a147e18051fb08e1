"""Write the events of an answer as llama_cpp.Llama's completions, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from entropykv.generation.events import AnswerPiece, Ended, Event, PromptRead
from entropykv.session.logprobs import CompletionLogprobs, HeldValues, TokenLogprob


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
        self._echo, self._logprobs = echo, logprobs
        self.tokens: list[int] = []
        """The tokens that were written."""

    def whole(self, events: Iterator[Event]) -> dict[str, Any]:
        """Return the completion."""
        text, reason, n_prompt, n_written, held = self._echo, "stop", 0, 0, HeldValues()
        for event in events:
            if isinstance(event, PromptRead):
                n_prompt = event.n_tokens
            elif isinstance(event, Ended):
                reason, n_written = event.reason, event.n_tokens
            else:
                text += event.text
            held.add(self._values(event))
        return {
            **self._part(text, held.values, reason),
            "usage": {
                "prompt_tokens": n_prompt,
                "completion_tokens": n_written,
                "total_tokens": n_prompt + n_written,
            },
        }

    def chunks(self, events: Iterator[Event]) -> Iterator[dict[str, Any]]:
        """Yield a chunk for every piece of text, and one that says why the completion ended."""
        text, values = self._echo, list[TokenLogprob]()
        for event in events:
            values += self._values(event)
            if isinstance(event, AnswerPiece):
                text += event.text
            if isinstance(event, Ended):
                if text or values:
                    yield self._part(text, values, None)
                yield self._part("", (), event.reason)
            elif text and not isinstance(event, PromptRead):
                yield self._part(text, values, None)
                text, values = "", []

    def _values(self, event: Event) -> Sequence[TokenLogprob]:
        """Return the values that an event tells, and note its token."""
        if isinstance(event, AnswerPiece):
            if event.token is not None:
                self.tokens.append(event.token)
            return event.logprobs
        if isinstance(event, PromptRead) and self._logprobs is not None:
            return self._logprobs.of_prompt(event.logprobs)
        return ()

    def _part(
        self, text: str, values: Sequence[TokenLogprob], reason: str | None
    ) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._logprobs.shown(values)
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice]}
