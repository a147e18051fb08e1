"""Write answers in the form of Anthropic's Messages API, whole or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from entropykv.generation.events import Event
from entropykv.server.chat.tool_calls import call_arguments
from entropykv.server.dialects.answers import AnswerForm

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "function_call": "tool_use"}
"""Anthropic's names for the reasons why an answer ended; the others are end_turn."""

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors by their status; the others are api_error."""


def anthropic_error(error: dict[str, Any], status: int) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {**error, "type": kind}}


class MessageWriter:
    """Write an answer as a message, whole or as events: its blocks follow each other, and each has
    a number.
    """

    def __init__(self, head: dict[str, Any], form: AnswerForm) -> None:
        """Write the answer of a form; `head`: the fields that the message begins with."""
        self._head, self._form, self._job = head, form, form.job
        self._index = -1
        self._open: str | None = None
        """The type of the block that is being written."""

    def whole(self, events: Iterator[Event]) -> dict[str, Any]:
        """Return the message."""
        said = self._form.whole(events)
        blocks: list[dict[str, Any]] = []
        if said.thought:
            blocks.append({"type": "thinking", "thinking": said.thought, "signature": ""})
        if said.text:
            blocks.append({"type": "text", "text": said.text})
        blocks += [_call_block(call, call_arguments(call)) for call in said.calls]
        ended = {**self._head, "content": blocks, **_end(said.reason, self._job.stop)}
        return {**ended, "usage": self._usage()}

    def chunks(self, events: Iterator[Event]) -> Iterator[dict[str, Any]]:
        """Yield the events of the message; the first one once the prompt was read."""
        reason, has_begun = None, False
        for part in self._form.parts(events):
            if not has_begun:
                yield self._start()
                has_begun = True
            reason = part.reason or reason
            yield from self._more("thinking", part.thought)
            yield from self._more("text", part.text)
            for call in part.calls:
                yield from self._call(call)
        yield from self._close()
        end = _end(reason, self._job.stop)
        yield {"type": "message_delta", "delta": end, "usage": self._usage()}
        yield {"type": "message_stop"}

    def _start(self) -> dict[str, Any]:
        message = {**self._head, "content": [], **_end(None), "usage": self._usage()}
        return {"type": "message_start", "message": message}

    def _usage(self) -> dict[str, int]:
        """Return the numbers of tokens so far; those that were read before count apart."""
        job = self._job
        return {
            "input_tokens": job.n_prompt - job.n_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": job.n_cached,
            "output_tokens": job.n_written,
        }

    def _more(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if not text:
            return
        if self._open != kind:
            empty = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            yield from self._begin(kind, empty)
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._begin("tool_use", _call_block(call, {}))
        given = json.dumps(call_arguments(call), ensure_ascii=False)
        yield self._delta({"type": "input_json_delta", "partial_json": given})

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None


def _end(reason: str | None, stop: str | None = None) -> dict[str, Any]:
    """Return why a message ended; None: it has not. `stop`: the text that has ended it."""
    shown = None if reason is None else _REASONS.get(reason, "end_turn")
    if reason == "stop" and stop is not None:
        shown = "stop_sequence"
    return {"stop_reason": shown, "stop_sequence": stop if shown == "stop_sequence" else None}


def _call_block(call: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": call["function"]["name"],
        "input": given,
    }
