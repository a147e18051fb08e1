"""Count the tokens of a thought while they are written, and end it when its budget is used up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from entropykv.thinking.tags import ThoughtTags

_REMEMBERED = 128
"""Bytes at the end of the text that are searched for tags: more than the longest tag has."""


class ThoughtCounter:
    """Follow one text token by token, as llama.cpp's reasoning budget does.

    The budget counts the tokens after the opening tag. Once it is used up, and no character is
    incomplete, `forced` is the next token of `ending`, which closes the thought. A further thought
    in the same text has the whole budget again.
    """

    def __init__(
        self,
        tags: ThoughtTags,
        piece: Callable[[int], bytes],
        *,
        opened: bool,
        budget: int = -1,
        ending: Sequence[int] = (),
    ) -> None:
        """Start a text; `piece` returns the bytes of a token, including tags.

        `opened`: the prompt ends within a thought. `budget`: the most tokens of a thought; -1: no
        limit.
        """
        self._begin, self._end = tags.begin.encode(), tags.end.encode()
        self._piece = piece
        self._budget = budget
        self._ending = list(ending)
        self._tail = b""
        self._thinks = opened
        self._left = budget
        self._n_forced: int | None = 0 if opened and budget == 0 else None
        self.n_tokens = 0
        """How many tokens of thoughts were written so far, including their closing tags."""

    @property
    def is_bounded(self) -> bool:
        """Tell whether thoughts have a budget."""
        return self._budget >= 0

    @property
    def thinks(self) -> bool:
        """Tell whether the text is within a thought."""
        return self._thinks

    @property
    def forced(self) -> int | None:
        """Return the token that must follow; None if any token may."""
        if self._n_forced is None or self._n_forced >= len(self._ending):
            return None
        return self._ending[self._n_forced]

    def accept(self, token: int) -> None:
        """Record the next token of the text."""
        self._tail = (self._tail + self._piece(token))[-_REMEMBERED:]
        if not self._thinks:
            if self._begin in self._tail:
                self._start()
            return
        self.n_tokens += 1
        if self._n_forced is not None:
            self._n_forced += 1
            if self._n_forced >= len(self._ending):
                self._stop()
        elif self._end in self._tail:
            self._stop()
        elif self._budget >= 0:
            self._left -= 1
            if self._left <= 0 and _is_complete(self._tail):
                self._n_forced = 0

    def _start(self) -> None:
        self._thinks, self._tail, self._left = True, b"", self._budget
        self._n_forced = 0 if self._budget == 0 else None

    def _stop(self) -> None:
        self._thinks, self._tail, self._n_forced = False, b"", None


def _is_complete(text: bytes) -> bool:
    """Tell whether a text ends with a whole character."""
    for size in range(1, min(4, len(text)) + 1):
        byte = text[-size]
        if byte < 0x80:
            return True
        if byte >= 0xC0:
            return size >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return True
