"""Chat with a model that has no chat template: what is said, line by line."""

from __future__ import annotations

from collections.abc import Iterable

NO_TEMPLATE = (
    "the model has no chat template, so it continues what is said as plain text; give a template "
    "that it was trained with (--chat-template-file), or take a model that was trained to chat"
)


def plain_chat(texts: Iterable[str]) -> str:
    """Return the prompt of a chat: what was said, each text on a line of its own."""
    return "\n".join(texts)
