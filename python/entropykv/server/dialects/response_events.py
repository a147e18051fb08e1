"""Make the items of a response (Responses API), and the events of a streamed one."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any


def message_item(item_id: str, text: str | None) -> dict[str, Any]:
    """Return a message item; without text, one that has just begun."""
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": "in_progress" if text is None else "completed",
        "content": [] if text is None else [_text_part(text)],
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def thought_item(item_id: str, text: str | None) -> dict[str, Any]:
    """Return a reasoning item; without text, one that has just begun."""
    part = {"type": "reasoning_text", "text": text}
    return {
        "id": item_id,
        "type": "reasoning",
        "status": "in_progress" if text is None else "completed",
        "summary": [],
        "content": [] if text is None else [part],
        "encrypted_content": None,
    }


def call_item(call: dict[str, Any]) -> dict[str, Any]:
    """Return a function call item, from a call of a chat completion."""
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
        "status": "completed",
    }


def with_end(
    head: dict[str, Any], output: list[dict[str, Any]], reason: str, usage: dict[str, Any]
) -> dict[str, Any]:
    """Return a response with its output, and the reason why it ended."""
    details = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
    whole = reason != "length"
    return {
        **head,
        "status": "completed" if whole else "incomplete",
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "output": output,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": details,
            "total_tokens": usage["total_tokens"],
        },
    }


def events(head: dict[str, Any], chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the numbered events of a response, from the chunks of a chat completion with usage."""
    for number, event in enumerate(_Events(head).of(chunks)):
        yield {**event, "sequence_number": number}


class _Events:
    """Make the events of one response: first those of its texts while they are written, then its
    calls.
    """

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = head
        self._output: list[dict[str, Any]] = []
        """The completed items."""
        self._open: _TextItem | None = None
        self._calls: list[dict[str, Any]] = []
        self._reason = "stop"

    def of(self, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        yield {"type": "response.created", "response": self._head}
        yield {"type": "response.in_progress", "response": self._head}
        usage: dict[str, Any] = {}
        timings: dict[str, Any] = {}
        for chunk in chunks:
            usage = chunk.get("usage") or usage
            timings = {"timings": chunk["timings"]} if "timings" in chunk else {}
            for choice in chunk["choices"]:
                self._reason = choice["finish_reason"] or self._reason
                delta = choice["delta"]
                self._calls += delta.get("tool_calls") or []
                for kind, text in ((_Thought, "reasoning_content"), (_Said, "content")):
                    for event in self._more(kind, delta.get(text) or ""):
                        yield {**event, **timings}
        yield from self._end_of_text()
        for call in self._calls:
            self._output.append(call_item(call))
            yield from _call_events(self._output[-1], len(self._output) - 1)
        ended = with_end(self._head, self._output, self._reason, usage)
        yield {"type": f"response.{ended['status']}", "response": ended, **timings}

    def _more(self, kind: type[_TextItem], text: str) -> Iterator[dict[str, Any]]:
        if not text:
            return
        if not isinstance(self._open, kind):
            yield from self._end_of_text()
            self._open = kind(len(self._output))
            yield from self._open.begin()
        yield self._open.more(text)

    def _end_of_text(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            yield from self._open.end()
            self._output.append(self._open.item)
        self._open = None


class _TextItem(ABC):
    """Make the events of one item whose text is streamed."""

    kind: str
    """The name of the item's events in OpenAI's API."""

    def __init__(self, index: int) -> None:
        """Start the item with this index in the output."""
        self._index = index
        self._id = f"{self.prefix}_{uuid.uuid4().hex}"
        self._text = ""

    prefix: str
    """The beginning of the item's id."""

    @abstractmethod
    def make(self, text: str | None) -> dict[str, Any]:
        """Return the item; without text, one that has just begun."""

    @abstractmethod
    def part(self, text: str) -> dict[str, Any]:
        """Return the only part of the item."""

    @property
    def item(self) -> dict[str, Any]:
        """Return the item in its current state."""
        return self.make(self._text)

    def begin(self) -> Iterator[dict[str, Any]]:
        item = self.make(None)
        yield {"type": "response.output_item.added", "output_index": self._index, "item": item}
        yield {"type": "response.content_part.added", **self._place(), "part": self.part("")}

    def more(self, text: str) -> dict[str, Any]:
        self._text += text
        return {"type": f"{self.kind}.delta", **self._place(), "delta": text, **self.extra}

    extra: Mapping[str, Any] = MappingProxyType({})
    """Additional fields of the item's events."""

    def end(self) -> Iterator[dict[str, Any]]:
        yield {"type": f"{self.kind}.done", **self._place(), "text": self._text, **self.extra}
        part = self.part(self._text)
        yield {"type": "response.content_part.done", **self._place(), "part": part}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self.item}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._index, "content_index": 0}


class _Said(_TextItem):
    kind = "response.output_text"
    prefix = "msg"
    extra = MappingProxyType({"logprobs": []})

    def make(self, text: str | None) -> dict[str, Any]:
        return message_item(self._id, text)

    def part(self, text: str) -> dict[str, Any]:
        return _text_part(text)


class _Thought(_TextItem):
    kind = "response.reasoning_text"
    prefix = "rs"

    def make(self, text: str | None) -> dict[str, Any]:
        return thought_item(self._id, text)

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}


def _call_events(item: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    begun = {**item, "arguments": "", "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    place = {"item_id": item["id"], "output_index": index}
    arguments = item["arguments"]
    kind = "response.function_call_arguments"
    yield {"type": f"{kind}.delta", **place, "delta": arguments}
    yield {"type": f"{kind}.done", **place, "name": item["name"], "arguments": arguments}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}
