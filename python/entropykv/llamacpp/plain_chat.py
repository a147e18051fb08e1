"""Chat with a model that has no chat template: what is said, line by line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

NO_TEMPLATE = (
    "the model has no chat template, so it continues what is said as plain text; give a template "
    "that it was trained with (--chat-template-file), or take a model that was trained to chat"
)


def plain_chat(texts: Iterable[str]) -> str:
    """Return the prompt of a chat: what was said, each text on a line of its own."""
    return "\n".join(texts)


def plain_messages(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return the prompt of a chat that is given as messages of `role` and `content`.

    An answer stands directly behind the text that it continues, as the model has written it.
    Otherwise the next turn would not begin with what was read and written in this one.
    """
    lines: list[str] = []
    for message in messages:
        text = str(message["content"] or "")
        if lines and message.get("role") == "assistant":
            lines[-1] += text
        else:
            lines.append(text)
    return plain_chat(lines)
