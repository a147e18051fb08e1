"""Hold one text that a session has read, besides what the store keeps of it: TokenSequence."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from entropykv.llamacpp.distributions import Logits
from entropykv.session.image_spans import ImageSpans
from entropykv.session.read_parts import ReadParts


class TokenSequence:
    """Hold tokens, position and logits of a text, and from where on it can be read again.

    These are plain values: who changes the store tells the sequence.
    """

    def __init__(self, n_ubatch: int, tokens: Iterable[int] = ()) -> None:
        """Begin with tokens that were read; a micro-batch has `n_ubatch` tokens at most."""
        self.tokens = array("i", tokens)
        """Every token read or generated so far, evicted or not."""
        self.position = len(self.tokens)
        """How many tokens were read."""
        self.logits: Logits | None = None
        """The logits of the last token, (n_vocab,); None before one and after truncate()."""
        self.echoed = 0
        """How many tokens from the first on have entries that echoes have scored: see echo.py."""
        self.images = ImageSpans()
        """Where images are, whose tokens are placeholders."""
        self.parts = ReadParts(n_ubatch)
        self.reusable_from = 0
        """The position at the end of what last evicted an entry; 0 if nothing ever did."""
        self.evicted_before = 0
        """How many entries were evicted when it was last looked."""

    def add(self, tokens: list[int], logits: Logits | None, *, is_prompt: bool) -> None:
        """Add a micro-batch that was read; `logits` are those of its last token.

        `is_prompt`: it is no token that was written.
        """
        self.logits = logits
        self.parts.note(self.position, len(tokens), logits, is_prompt=is_prompt)
        self.position += len(tokens)
        self.tokens.extend(tokens)

    def add_image(self, first: int, n_tokens: int, behind: int) -> None:
        """Note that an image's rows, from number `first` on, are added next: see ImageSpans.

        They get no echo, so that an echo of the text before it is as good as one of all.
        """
        self.images.note(self.position, first, n_tokens, behind)
        if self.echoed == self.position:
            self.echoed += n_tokens

    def note_evictions(self, evicted: int) -> None:
        """Note where the text ended when entries were evicted; `evicted`: how many so far."""
        if evicted != self.evicted_before:
            self.reusable_from = max(self.reusable_from, self.position)
        self.evicted_before = evicted

    def truncate(self, position: int, n_ctx: int) -> None:
        """Go back to an earlier position, or to 0."""
        del self.tokens[position - self.position :]
        self.position, self.logits = position, None
        self.parts.truncate(position)
        self.images.truncate(position)
        self.echoed = min(self.echoed, position)
        if position == 0:
            self.reusable_from = 0
        elif position < self.reusable_from:
            self.reusable_from = n_ctx + 1  # what is missing now stays so, wherever the text goes

    def begin_after_load(self, evicted: int) -> None:
        """Take over what a file tells of evictions: nobody knows when the last one was."""
        self.reusable_from = self.position if evicted else 0
        self.evicted_before = evicted

    def copy(self) -> TokenSequence:
        """Return a sequence that goes on from here by itself."""
        other = TokenSequence(0)
        other.tokens, other.position, other.logits = self.tokens[:], self.position, self.logits
        other.echoed, other.parts = self.echoed, self.parts.copy()
        other.images = self.images.copy()
        other.reusable_from = self.reusable_from
        other.evicted_before = self.evicted_before
        return other

    def to_come_back_to(self) -> TokenSequence:
        """Return a copy for a checkpoint, with logits only where a prompt ends.

        An answer is asked for again from there. At the end of an answer a longer text goes on, so
        that nobody needs the logits, which are most of what a copy takes.
        """
        other = self.copy()
        if other.parts.logits_at(other.position) is None:
            other.logits = None
            other.parts.forget_logits()
        return other

    @property
    def n_bytes(self) -> int:
        """Return the bytes that it takes: tokens, where they were cut, and logits."""
        known = [each for each in (self.logits, self.parts.logits) if each is not None]
        logits = sum({id(each): each.nbytes for each in known}.values())  # often the same
        return self.tokens.itemsize * len(self.tokens) + self.parts.n_bytes + logits
