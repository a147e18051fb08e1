"""Decide which part of a text that was read before a prompt can continue from.

EntropyLlama asks this for its own sequence, and --prompt-cache for its file. A pool asks it for the
checkpoints, and the server for the conversations, that the index of prefix_index.py finds. Each
caller describes a text as a HeldText, and applies the Reuse that reuse_of() returns. Nothing here
changes a sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from entropykv.session.prefix_index import common_prefix
from entropykv.session.sequence import ReadParts, TokenSequence

LEAST_SPARED = 32
"""The fewest tokens for which a checkpoint or a copy is used: fewer are read just as quickly."""


class ReuseSource(Enum):
    """Name what a prompt continues from."""

    NOTHING = "nothing"
    """Nothing is reused: the prompt is read from its start."""
    WHOLE = "whole"
    """The whole text: the prompt begins with it."""
    PROMPT = "prompt"
    """The end of the last prompt, which equals this one: its logits are known."""
    PART = "part"
    """A part of the text, which is truncated."""


@dataclass(frozen=True)
class Reuse:
    """Hold a decision: from which position a prompt is read, what it continues from, and why."""

    position: int
    """How many tokens of the prompt are not read again."""
    shared: int
    """How many tokens the prompt and the text have in common."""
    source: ReuseSource
    why: str


@dataclass(eq=False, slots=True)  # not frozen, since one is made with every token
class HeldText:
    """Describe a text that was read, and the positions that its store can go back to."""

    tokens: array[int]
    position: int
    parts: ReadParts
    """Where reading started micro-batches, and the logits of the last prompt."""
    has_logits: bool
    """True if the logits of the last token are known."""
    reusable_from: int
    """Where the text ended when an entry was last evicted; 0 if none ever was."""
    store_can_return_to: Callable[[int], bool]
    """A function that tells whether windows and recurrent layers can go back to a position."""
    is_whole: bool = True
    """False after a decode that failed half-way: then only position 0 can be reached."""
    n_sure: int = 0
    """The longest text of which every KV head keeps all entries for certain, in tokens."""
    n_ctx: int = 0

    @classmethod
    def of(
        cls,
        text: TokenSequence,
        store_can_return_to: Callable[[int], bool],
        *,
        is_whole: bool = True,
        n_sure: int = 0,
        n_ctx: int = 0,
    ) -> HeldText:
        """Describe a sequence or a checkpoint, without copying its tokens."""
        return cls(
            text.tokens,
            text.position,
            text.parts,
            text.logits is not None,
            text.reusable_from,
            store_can_return_to,
            is_whole,
            n_sure,
            n_ctx,
        )

    def until(self, position: int) -> HeldText:
        """Return the description that the text will have once it is truncated to a position."""
        if position == self.position:
            return self
        return replace(self, tokens=self.tokens[:position], position=position, has_logits=False)

    def can_return_to(self, position: int) -> bool:
        """Tell whether truncating to a position leaves the entries of that time."""
        if position == 0:
            return True
        if not self.is_whole or not self.reusable_from <= position <= self.position:
            return False
        return position == self.position or self.store_can_return_to(position)

    def keeps_all_until(self, end: int) -> bool:
        """Tell whether it is certain that nothing is evicted before the text has `end` tokens."""
        return min(end, self.n_ctx) <= self.n_sure

    def leads_back_to_prompt(self, position: int, end: int) -> bool:
        """Tell whether the last prompt ended at `position`, and all its entries are kept until
        `end`.
        """
        known = self.parts.logits_at(position) is not None
        return known and self.keeps_all_until(end) and self.can_return_to(position)


@dataclass(frozen=True)
class Demand:
    """Say what a prompt requires of the text that it continues from."""

    is_cut: bool = True
    """True if a part of the text must end where a reading from 0 would also start a micro-batch, so
    that asking again gives the same numbers.
    """
    end: int | None = None
    """The length that the text may reach without any eviction, for equal numbers; None: later
    evictions do not matter.
    """
    needs_logits: bool = True
    """True if logits must be known at the end of the prompt; False: its last token is read again if
    necessary.
    """
    knows_prompt: bool = False
    """True if the logits of the last prompt can be used when it is asked again."""
    reads_question: bool = False
    """True if a prompt that is asked again is read again as a whole, because something is measured
    while it is read.
    """


def reuse_of(
    held: HeldText, prompt: Sequence[int], demand: Demand, shared: int | None = None
) -> Reuse:
    """Decide from which position a prompt must be read if a text is already held.

    If the prompt begins with the text, all of the text is reused. Otherwise it is a part of the
    common beginning, without the last token of the prompt, whose logits are needed. `shared`: how
    many tokens both have in common, if that is known.
    """
    n_tokens = len(prompt)
    shared = common_prefix(held.tokens, prompt) if shared is None else shared
    if demand.reads_question and shared <= held.parts.end_of_prompt:
        shared = min(shared, held.parts.begin_of_prompt)

    def reuse(position: int, source: ReuseSource, why: str) -> Reuse:
        return Reuse(position, shared, source, why)

    has_end = shared < n_tokens or held.has_logits or not demand.needs_logits
    if 0 < shared == held.position and has_end:
        return reuse(shared, ReuseSource.WHOLE, "the prompt begins with all that was read")
    if demand.knows_prompt and shared == n_tokens:
        end = shared if demand.end is None else demand.end
        if held.leads_back_to_prompt(shared, end):
            return reuse(shared, ReuseSource.PROMPT, "the prompt is the last one again")
    if demand.end is not None and not held.keeps_all_until(demand.end):
        return reuse(0, ReuseSource.NOTHING, "entries may be evicted before the end")
    place = min(shared, n_tokens - 1)
    if demand.is_cut:
        place = held.parts.begin_before(place)
    if place <= 0:
        return reuse(0, ReuseSource.NOTHING, "the texts begin differently")
    if not held.can_return_to(place):
        return reuse(0, ReuseSource.NOTHING, "what was held there is gone")
    return reuse(place, ReuseSource.PART, "the texts part after this place")
