"""Count the words of RULER's prompts, and read their numbered lists."""

from __future__ import annotations

import re

from entropykv.evaluation.ruler.prompts import TaskPrompt


def numbered(text: str) -> list[tuple[str, str]]:
    return re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", text.strip())


def count(prompt: TaskPrompt) -> int:
    return len(re.findall(r"\w+|\S", prompt.text))
