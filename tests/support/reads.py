"""Count the prompt tokens that calls of a model read."""

from __future__ import annotations

from entropykv import EntropyLlama


class Reads:
    """Count the prompt tokens that a model has read since the last count."""

    def __init__(self, llm: EntropyLlama) -> None:
        self.llm = llm
        self._before = llm.kv_stats().prompt_tokens

    def count(self) -> int:
        now = self.llm.kv_stats().prompt_tokens
        count, self._before = now - self._before, now
        return count
