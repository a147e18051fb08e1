"""Draft the tokens that a text is known to have next, with some mistakes."""

from __future__ import annotations

import random
from typing import Any

from entropykv import Session
from entropykv.session.drafter import Evidence, Tokens
from entropykv.session.drafting import Drafting, StepCosts


class Oracle:
    """Draft from a known text, with a mistake in about every second draft."""

    n_bytes = 0
    seconds_each = 0.0

    def __init__(self, text: list[int], seed: int) -> None:
        self.text = text
        self.chance = random.Random(seed)

    def draft(self, tokens: Tokens, most: int) -> tuple[list[int], Evidence]:
        drafts = self.text[len(tokens) : len(tokens) + self.chance.randrange(most + 1)]
        if drafts and self.chance.random() < 0.6:
            place = self.chance.randrange(len(drafts))
            drafts = [*drafts[:place], (drafts[place] + 1) % 50, *drafts[place + 1 :]]
        return drafts, Evidence(32)

    def close(self) -> None:
        return


class AllDrafts(Drafting):
    """Read all drafts, whether they save time or not."""

    def propose(self, tokens: Tokens, most: int, n_others: int = 0) -> list[int]:
        super().propose(tokens, most, n_others)
        return self._drafter.draft(tokens, min(most, self._most))[0]


def draft_with(session: Session, oracle: Oracle) -> Drafting:
    session.reader.drafting = AllDrafts(oracle, StepCosts(), session.config.n_drafts)
    return session.reader.drafting


def held(session: Session) -> list[Any]:
    """Return a headwise session's tokens, evictions, and everything that its KV heads hold."""
    heads = [
        (layer, head)
        for layer, row in enumerate(session.cache.budgets())
        for head in range(len(row))
    ]
    core = session._slot.store.core  # type: ignore[attr-defined]
    return [
        session.tokens,
        session.cache.evicted,
        *(session.cache.entries(*head).tolist() for head in heads),
        *(core.save_head(*head) for head in heads),
    ]
