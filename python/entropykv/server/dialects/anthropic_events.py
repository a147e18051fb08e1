"""Write answers in the form of Anthropic's Messages API, whole or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from entropykv.server.engine.answering import Answering

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


def message_of(head: dict[str, Any], answer: dict[str, Any], job: Answering) -> dict[str, Any]:
    """Return a message with the answer of a chat completion."""
    choice = answer["choices"][0]
    said = choice["message"]
    blocks: list[dict[str, Any]] = []
    if thought := said.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if said["content"]:
        blocks.append({"type": "text", "text": said["content"]})
    blocks += [_call_block(call, _input_of(call)) for call in said.get("tool_calls", [])]
    usage = _usage(answer["usage"])
    return {**head, "content": blocks, **_end(choice["finish_reason"], job.stop), "usage": usage}


def events(
    head: dict[str, Any], chunks: Iterator[dict[str, Any]], job: Answering
) -> Iterator[dict[str, Any]]:
    """Yield the events of a message, from the chunks of a chat completion with usage."""
    return _Events(head, job).of(chunks)


class _Events:
    """Make the events of one message: its blocks follow each other, and each has a number."""

    def __init__(self, head: dict[str, Any], job: Answering) -> None:
        self._head = head
        self._job = job
        self._index = -1
        self._open: str | None = None
        """The type of the block that is being written."""

    def of(self, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        usage: dict[str, Any] = {}
        reason: str | None = None
        for number, chunk in enumerate(chunks):
            if number == 0:  # The prompt has been read.
                yield self._start()
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                reason = choice["finish_reason"] or reason
                delta = choice["delta"]
                yield from self._more("thinking", delta.get("reasoning_content"))
                yield from self._more("text", delta.get("content"))
                for call in delta.get("tool_calls") or ():
                    yield from self._call(call)
        yield from self._close()
        yield {
            "type": "message_delta",
            "delta": _end(reason, self._job.stop),
            "usage": _usage(usage),
        }
        yield {"type": "message_stop"}

    def _start(self) -> dict[str, Any]:
        n_prompt, n_cached = self._job.n_prompt, self._job.n_cached
        usage = _tokens(n_prompt, n_cached, 0)
        message = {**self._head, "content": [], **_end(None), "usage": usage}
        return {"type": "message_start", "message": message}

    def _more(self, kind: str, text: str | None) -> Iterator[dict[str, Any]]:
        if not text:
            return
        if self._open != kind:
            empty = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            yield from self._begin(kind, empty)
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._begin("tool_use", _call_block(call, {}))
        given = json.dumps(_input_of(call), ensure_ascii=False)
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


def _input_of(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call; models may write anything else than an object."""
    try:
        given = json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return OpenAI's numbers of tokens as Anthropic counts them."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return _tokens(usage["prompt_tokens"], cached, usage["completion_tokens"])


def _tokens(n_prompt: int, n_cached: int, n_written: int) -> dict[str, int]:
    """Return numbers of tokens; those read before count apart."""
    return {
        "input_tokens": n_prompt - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_written,
    }
