"""Hold one text that a session has read, without the entries, which are in the store.

Floating-point sums depend on how a text is cut into micro-batches: a kernel for one token adds in
another order than one for many, and so do matrix products of different sizes. If a text is read
again from the beginning of one of its micro-batches, it is cut in the same way, and gives the same
bits. ReadParts records these beginnings, and ImageSpans where the text has images, which are runs
of placeholders among its tokens.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from entropykv.llamacpp.distributions import Logits

FIRST_PLACEHOLDER = -2
"""The largest token that is a placeholder for a part of an image; -1 is llama.cpp's "no token"."""


@dataclass(frozen=True)
class ImageSpan:
    """Hold the place of an image in a text, as far as it was read."""

    start: int
    """The position of the first token of the image in the text."""
    n_tokens: int
    """How many tokens of the image were read."""
    behind: int
    """By how much RoPE's position is less than the text position after the whole image; 0 without
    M-RoPE, RoPE with positions of several dimensions.
    """

    @property
    def end(self) -> int:
        """Return the text position after the last token of the image that was read."""
        return self.start + self.n_tokens

    @property
    def lag(self) -> int:
        """Return by how much RoPE's position is less than the text position after those tokens of
        the image that were read.
        """
        return min(self.behind, self.n_tokens - 1)


class ImageSpans:
    """Hold the places of all images of a text, in their order."""

    def __init__(self, spans: Sequence[ImageSpan] = ()) -> None:
        """Store the spans of a text's images, which must be in the order of the text and must not
        overlap.
        """
        self._spans = list(spans)

    def __iter__(self) -> Iterator[ImageSpan]:
        """Iterate over the spans, in the order of the text."""
        return iter(self._spans)

    def __len__(self) -> int:
        """Return how many images the text has."""
        return len(self._spans)

    @property
    def lag(self) -> int:
        """Return by how much RoPE's position of the next token is less than its text position."""
        return sum(span.lag for span in self._spans)

    def lag_before(self, start: int) -> int:
        """Return by how much RoPE's position is less than the text position at `start`, where an
        image begins.
        """
        return sum(span.lag for span in self._spans if span.start < start)

    def ends_within(self, position: int, first: int) -> bool:
        """Tell whether the text read so far ends at `position`, after exactly the first `first`
        rows of an image.
        """
        last = self._spans[-1] if self._spans else None
        return last is not None and (last.end, last.n_tokens) == (position, first)

    def note(self, position: int, first: int, n_tokens: int, behind: int) -> None:
        """Record that rows of an image, from row `first` on, were read at a position of the text;
        `behind`: that of the ImageSpan.
        """
        start = position - first
        if first > 0 and self._spans and self._spans[-1].start == start:
            self._spans.pop()
        self._spans.append(ImageSpan(start, first + n_tokens, behind))

    def truncate(self, position: int) -> None:
        """Remove the images at and beyond a position, and the end of an image that crosses it."""
        self._spans = [
            span if span.end <= position else replace(span, n_tokens=position - span.start)
            for span in self._spans
            if span.start < position
        ]

    def copy(self) -> ImageSpans:
        """Return a copy for another text with the same beginning."""
        return ImageSpans(self._spans)


def is_placeholder(token: int) -> bool:
    """Tell whether a token is a placeholder for a part of an image."""
    return token <= FIRST_PLACEHOLDER


def text_before_image(tokens: Sequence[int], most: int) -> int:
    """Return how many of the first `most` tokens come before the first image among them."""
    first = next((i for i, token in enumerate(tokens[:most]) if is_placeholder(token)), most)
    return min(first, len(tokens))


class TokenSequence:
    """Hold the tokens, position and logits of a text, and from which positions on it can be read
    again.

    This object does not change the store: code that changes the store must also update the
    sequence.
    """

    def __init__(self, n_ubatch: int, tokens: Iterable[int] = ()) -> None:
        """Start with tokens that were read; a micro-batch has at most `n_ubatch` tokens."""
        self.tokens = array("i", tokens)
        """Every token read or generated so far, evicted or not."""
        self.position = len(self.tokens)
        """How many tokens were read."""
        self.logits: Logits | None = None
        """The logits of the last token, (n_vocab,); None if unknown, as after truncate()."""
        self.echoed = 0
        """For how many of the first tokens echoes have scored the entries: see second_readings."""
        self.is_teacher = False
        """True if the text has given lessons to a predictor: see second_readings.py."""
        self.n_taught = 0
        """How many of the text's tokens have given lessons, or gave none because they repeat text
        that has.
        """
        self._taught_to = 0
        """The position after the last token that `n_taught` counts."""
        self.images = ImageSpans()
        """The positions of images in the text, whose tokens there are placeholders."""
        self.parts = ReadParts(n_ubatch)
        self.reusable_from = 0
        """The first position, apart from 0, that a rollback can return to without missing entries:
        where the text ended at the last eviction, or 0 if nothing was evicted. A number beyond the
        context says that there is none.
        """
        self.evicted_before = 0
        """How many entries had been evicted when note_evictions() was called last."""
        self.is_document = False
        """True if the text begins with a document that was loaded; then the predictor learns
        nothing from questions about it.
        """

    def add(
        self,
        tokens: Sequence[int],
        logits: Logits | None,
        *,
        is_prompt: bool,
        continues: bool = False,
    ) -> None:
        """Add a micro-batch that was read; `logits`: those of its last token, (n_vocab,), if any.

        `is_prompt`, `continues`: as in ReadParts.note().
        """
        self.logits = logits
        self.parts.note(
            self.position, len(tokens), logits, is_prompt=is_prompt, continues=continues
        )
        self.position += len(tokens)
        self.tokens.extend(tokens)

    def add_image(self, first: int, n_tokens: int, behind: int) -> None:
        """Record that rows of an image, from row `first` on, are added next: see ImageSpans.

        Images are never echoed, so their tokens count as echoed if all text before them was.
        """
        self.images.note(self.position, first, n_tokens, behind)
        if self.echoed == self.position:
            self.echoed += n_tokens

    def note_evictions(self, evicted: int) -> None:
        """Record where the text ends now if entries were evicted since the last call; `evicted`:
        how many were evicted in all.
        """
        if evicted != self.evicted_before:
            self.reusable_from = max(self.reusable_from, self.position)
        self.evicted_before = evicted

    def note_lessons(self, begin: int, n_tokens: int) -> None:
        """Count tokens, from position `begin` on, in `n_taught`."""
        self.n_taught += n_tokens
        self._taught_to = max(self._taught_to, begin + n_tokens)

    def forget_lessons(self) -> None:
        """Let what is read next count as another text for the predictor."""
        self.is_teacher = False
        self.n_taught = self._taught_to = 0

    def truncate(self, position: int, n_ctx: int) -> None:
        """Roll back to a position in a context of n_ctx tokens. Logits stay only if the text
        already ends there.

        What is read next counts as another text for the predictor if it replaces tokens that have
        given lessons.
        """
        del self.tokens[position:]
        if position < self.position:
            self.position, self.logits = position, None
        self.parts.truncate(position)
        self.images.truncate(position)
        self.echoed = min(self.echoed, position)
        if position < self._taught_to:
            self.forget_lessons()
        if position == 0:
            self.reusable_from = 0
            self.is_document = False
        elif position < self.reusable_from:
            # Entries that were evicted are missing, however the text continues.
            self.reusable_from = n_ctx + 1

    def begin_after_load(self, evicted: int) -> None:
        """Record a text that was loaded from a file after `evicted` evictions: the position of the
        last eviction is unknown, so only the end of the text can be returned to.
        """
        self.reusable_from = self.position if evicted else 0
        self.evicted_before = evicted

    def copy(self) -> TokenSequence:
        """Return an independent copy."""
        other = TokenSequence(0)
        other.tokens, other.position, other.logits = self.tokens[:], self.position, self.logits
        other.echoed, other.parts = self.echoed, self.parts.copy()
        other.is_teacher, other.n_taught = self.is_teacher, self.n_taught
        other._taught_to = self._taught_to
        other.images = self.images.copy()
        other.reusable_from = self.reusable_from
        other.evicted_before = self.evicted_before
        other.is_document = self.is_document
        return other

    def to_come_back_to(self) -> TokenSequence:
        """Return a copy for a checkpoint, with logits only at the end of a prompt.

        From the end of a prompt, an answer may be generated again by its logits. After an answer,
        more text is read, so that its logits, the largest part of a copy, are not needed.
        """
        other = self.copy()
        if other.parts.logits_at(other.position) is None:
            other.logits = None
            other.parts.forget_logits()
        return other

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the tokens, of the records of micro-batches, and of the logits."""
        known = [each for each in (self.logits, self.parts.logits) if each is not None]
        # Logits are often one array that several records refer to, which is counted once.
        logits = sum({id(each): each.nbytes for each in known}.values())
        return self.tokens.itemsize * len(self.tokens) + self.parts.n_bytes + logits


@dataclass(frozen=True)
class _Part:
    """Hold the positions of one micro-batch: `begin` is the first, `end` follows the last.

    It is full if reading a longer text would end a micro-batch there, too.
    """

    begin: int
    end: int
    full: bool = False


class ReadParts:
    """Record where the micro-batches of several tokens began and ended, and the logits of the last
    prompt.

    Tokens that were read one by one, such as generated ones, are not recorded: a text can be cut
    between any two of them.
    """

    def __init__(self, n_ubatch: int) -> None:
        """Start empty; a micro-batch has up to `n_ubatch` tokens."""
        self._n_ubatch = n_ubatch
        self._parts: list[_Part] = []
        self._begin_of_prompt = self._end_of_prompt = 0
        self._logits: npt.NDArray[np.float32] | None = None

    def note(
        self,
        position: int,
        n_tokens: int,
        logits: npt.NDArray[np.float32] | None,
        *,
        is_prompt: bool = False,
        continues: bool = False,
    ) -> None:
        """Record a micro-batch read at `position`, and the logits of its last token, (n_vocab,).

        `is_prompt`: the tokens belong to a prompt, and were not written; the last micro-batch of a
        prompt may have only one token. `continues`: the micro-batch is joined to the one before,
        because a longer text would have been read through `position` in one.
        """
        if continues and self._parts and self._parts[-1].end == position:
            self._parts[-1] = _Part(self._parts[-1].begin, position + n_tokens)
        elif n_tokens > 1:
            full = n_tokens == self._n_ubatch
            self._parts.append(_Part(position, position + n_tokens, full))
        if n_tokens > 1 or is_prompt:
            if position != self._end_of_prompt:
                self._begin_of_prompt = position
            self._end_of_prompt, self._logits = position + n_tokens, logits

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the records, without those of the logits."""
        return sys.getsizeof(self._parts)

    @property
    def logits(self) -> npt.NDArray[np.float32] | None:
        """Return the logits after the last prompt, (n_vocab,); None if they are not known."""
        return self._logits

    def forget_logits(self) -> None:
        """Forget the logits of the last prompt, which take 4 bytes per token of the vocabulary."""
        self._logits = None

    def copy(self) -> ReadParts:
        """Return a copy for another text with the same beginning."""
        other = ReadParts(self._n_ubatch)
        other._parts = self._parts[:]
        other._begin_of_prompt, other._end_of_prompt = self._begin_of_prompt, self._end_of_prompt
        other._logits = self._logits
        return other

    def truncate(self, position: int) -> None:
        """Forget what was read from `position` on, and logits of a prompt that ended beyond it."""
        while self._parts and self._parts[-1].begin >= position:
            self._parts.pop()
        if self._parts and self._parts[-1].end > position:
            self._parts[-1] = _Part(self._parts[-1].begin, position)
        if self._end_of_prompt > position:
            self._logits = None

    @property
    def begin_of_prompt(self) -> int:
        """Return where reading the last prompt began: after the text that had been read or written
        before.
        """
        return self._begin_of_prompt

    @property
    def end_of_prompt(self) -> int:
        """Return the end of the last micro-batch of a prompt, or of several written tokens; 0 if
        there was none.
        """
        return self._end_of_prompt

    def begin_before(self, position: int) -> int:
        """Return the last position up to `position` where reading the same text starts a
        micro-batch.

        A micro-batch that is not full ends where its text ended: reading a longer text would not
        begin a micro-batch there.
        """
        for part in reversed(self._parts):
            if part.begin < position <= part.end:
                return position if part.full and position == part.end else part.begin
            if part.end < position:
                break
        return position

    def logits_at(self, position: int) -> npt.NDArray[np.float32] | None:
        """Return the logits after a prompt that ended at `position`, (n_vocab,); None if they are
        not known.
        """
        return self._logits if position == self._end_of_prompt else None
