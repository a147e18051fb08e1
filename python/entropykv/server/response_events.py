"""Make what a response of the Responses API consists of, and the events of a streamed one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any


def message_item(item_id: str, text: str | None) -> dict[str, Any]:
    """Return a message; without text, one that has only begun."""
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": "in_progress" if text is None else "completed",
        "content": [] if text is None else [_text_part(text)],
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(call: dict[str, Any]) -> dict[str, Any]:
    """Return a function call, from one of a chat completion."""
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
        "status": "completed",
    }


def with_end(
    head: dict[str, Any], output: list[dict[str, Any]], reason: str, usage: dict[str, int]
) -> dict[str, Any]:
    """Return a response with its output, and why it ended."""
    whole = reason != "length"
    return {
        **head,
        "status": "completed" if whole else "incomplete",
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "output": output,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def events(head: dict[str, Any], chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the events of a response, numbered, from the chunks of a chat completion with usage."""
    for number, event in enumerate(_Events(head).of(chunks)):
        yield {**event, "sequence_number": number}


class _Events:
    """Make the events of one response: those of its text as it is written, then its calls."""

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = head
        self._id = f"msg_{uuid.uuid4().hex}"
        self._text = ""
        self._calls: list[dict[str, Any]] = []
        self._reason = "stop"

    def of(self, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        yield {"type": "response.created", "response": self._head}
        yield {"type": "response.in_progress", "response": self._head}
        usage: dict[str, int] = {}
        for chunk in chunks:
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                self._reason = choice["finish_reason"] or self._reason
                self._calls += choice["delta"].get("tool_calls") or []
                yield from self._more_text(choice["delta"].get("content") or "")
        output = []
        if self._text:
            output.append(message_item(self._id, self._text))
            yield from self._end_of_text(output[0])
        for call in self._calls:
            output.append(call_item(call))
            yield from _call_events(output[-1], len(output) - 1)
        ended = with_end(self._head, output, self._reason, usage)
        yield {"type": f"response.{ended['status']}", "response": ended}

    def _more_text(self, text: str) -> Iterator[dict[str, Any]]:
        if not text:
            return
        if not self._text:
            item = message_item(self._id, None)
            yield {"type": "response.output_item.added", "output_index": 0, "item": item}
            part = _text_part("")
            yield {"type": "response.content_part.added", **self._place(), "part": part}
        self._text += text
        delta = {"delta": text, "logprobs": []}
        yield {"type": "response.output_text.delta", **self._place(), **delta}

    def _end_of_text(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        done = {"text": self._text, "logprobs": []}
        yield {"type": "response.output_text.done", **self._place(), **done}
        part = item["content"][0]
        yield {"type": "response.content_part.done", **self._place(), "part": part}
        yield {"type": "response.output_item.done", "output_index": 0, "item": item}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": 0, "content_index": 0}


def _call_events(item: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    begun = {**item, "arguments": "", "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    place = {"item_id": item["id"], "output_index": index}
    arguments = item["arguments"]
    kind = "response.function_call_arguments"
    yield {"type": f"{kind}.delta", **place, "delta": arguments}
    yield {"type": f"{kind}.done", **place, "name": item["name"], "arguments": arguments}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}
