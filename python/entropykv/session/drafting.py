"""Guess the next tokens of a text, so that one step can read several of them.

A step reads the weights once, whether it has one token or eight. So a run of guessed tokens
(drafts) is read behind the token that was chosen last; those that the samplers choose, too, are
accepted, and the others are undone. A drafter makes them (drafter.py). How many of them are read
follows from how often they were right, and from what steps cost (draft_lengths.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entropykv.session.draft_lengths import DraftLengths
from entropykv.session.drafter import LONGEST_MATCH, Drafter, Evidence, Tokens
from entropykv.session.step_costs import StepCosts

Logits = npt.NDArray[np.float32]


@dataclass
class DraftCounts:
    """Count what drafts were read, and how many of them were right."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    """Steps of written tokens, with drafts or without."""


class Drafting:
    """Guess the next tokens of one text with its drafter, as many as save time."""

    _RETRY = 16
    """After so many tokens without drafts, one is made to see whether they are right again; twice
    as many after each time that they still do not pay.
    """
    _MOST_RETRY = 1024

    def __init__(self, drafter: Drafter, costs: StepCosts, most: int) -> None:
        """Read up to `most` drafts at a time; `costs` are those of the steps of all sequences."""
        self._drafter = drafter
        self._costs = costs
        self._lengths = DraftLengths(costs, most)
        self._most = most
        self._evidence = Evidence(LONGEST_MATCH)
        """What spoke for the last drafts; at first, the drafter is tried."""
        self._skipped = 0
        """For how many tokens no drafts were made, because they would not have paid."""
        self._patience = self._RETRY
        self.counts = DraftCounts()

    @property
    def n_bytes(self) -> int:
        """Return the bytes that the drafter holds."""
        return self._drafter.n_bytes + self._lengths.n_bytes

    def propose(self, tokens: Tokens, most: int, n_others: int = 0) -> list[int]:
        """Return drafts of what follows the tokens, `most` at most.

        `n_others`: tokens that other sequences write in the same step; drafts delay them, too.
        """
        most = min(most, self._most)
        self._lengths.compare(tokens)
        seconds, single = self._drafter.seconds_each, self._costs.single_seconds
        if seconds > 0.0 and single > 0.0:
            # The last evidence counts: that of new drafts is not known yet.
            most = self._lengths.choose(most, self._evidence, n_others, seconds / single)
            if most == 0:
                self._skipped += 1
                if self._skipped < self._patience:
                    return []
                most, self._patience = 1, min(2 * self._patience, self._MOST_RETRY)
            else:
                self._patience = self._RETRY
            self._skipped = 0
        drafts, evidence = self._drafter.draft(tokens, most)
        if not drafts:
            return []
        self._evidence = evidence
        self._lengths.expect(tokens, drafts, evidence)
        return drafts[: self._lengths.choose(len(drafts), evidence, n_others)]

    def close(self) -> None:
        """Free the drafter."""
        self._drafter.close()

    def note(self, n_drafts: int, n_right: int) -> None:
        """Record how many drafts were read after propose(), and how many were right."""
        self.counts.steps += 1
        if n_drafts:
            self.counts.drafted += n_drafts
            self.counts.accepted += n_right


class Verification:
    """Choose tokens by the logits of a run with drafts, as long as they are the drafts."""

    def __init__(
        self,
        drafts: Sequence[int],
        choose: Callable[[Logits], int | None],
        is_end: Callable[[int], bool],
    ) -> None:
        """Verify `drafts`: `choose` samples a token by logits; None: a constraint allows none."""
        self._drafts = drafts
        self._choose = choose
        self._is_end = is_end
        self.is_asked = False
        """Whether drafts were read, and tokens chosen."""
        self.accepted: list[int] = []
        """The drafts that are right."""
        self.next: int | None = None
        """The token that was chosen after them."""
        self.error: Exception | None = None
        """The error that choosing it raised, if any."""

    def verify(self, rows: Logits) -> int:
        """Return how many drafts are right; an error is kept until the step has ended."""
        self.is_asked = True
        for i, logits in enumerate(rows):
            try:
                self.next = self._choose(logits)
            except Exception as error:
                self.error = error
                break
            if self.next is None or self._is_end(self.next):
                break
            if i == len(rows) - 1 or self.next != self._drafts[i]:
                break
            self.accepted.append(self.next)
        return len(self.accepted)
