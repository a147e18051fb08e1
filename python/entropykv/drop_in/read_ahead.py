"""Hold tokens that were sampled and read ahead of those that a llama_cpp.Llama knows of."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from entropykv.session.drafting import Logits, Verification
from entropykv.session.session import Session


class ReadAhead:
    """Hold the drafts that turned out right: Llama asks for one token after the other.

    All sampled tokens but the last were read. Their logits are kept until Llama goes on to them.
    """

    def __init__(self) -> None:
        """Begin with nothing ahead."""
        self._sampled: deque[int] = deque()
        self._rows: deque[Logits] = deque()
        self._read: deque[int] = deque()
        self._error: Exception | None = None

    def forget(self) -> None:
        """Forget what is ahead: the text goes on in another way."""
        self._sampled.clear()
        self._rows.clear()
        self._read.clear()
        self._error = None

    def verify(self, rows: Logits, verification: Verification) -> int:
        """Sample by the logits of a run with drafts; returns how many of the drafts are right.

        An error of sampling is raised when Llama asks for the token: see take().
        """
        n_right = verification.verify(rows)
        self._rows.extend(row.copy() for row in rows[: n_right + 1])
        self._read.extend(verification.accepted)
        self._sampled.extend(verification.accepted)
        self._error = verification.error
        if self._error is None and verification.next is not None:
            self._sampled.append(verification.next)
        return n_right

    def first_row(self, logits: Logits | None) -> Logits | None:
        """Return the logits behind the token before the drafts; `logits` where none were read."""
        return self._rows.popleft() if self._rows else logits

    def take(self) -> int | None:
        """Return the next token that was sampled; None: none was. Raises what sampling raised."""
        if self._sampled:
            return self._sampled.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return None

    def goes_on_with(self, session: Session, n_tokens: int, ids: Sequence[int]) -> bool:
        """Tell whether the next tokens that Llama reads are one that was read ahead."""
        ahead = len(self._read)
        there = ahead > 0 and session.position == n_tokens + ahead
        return there and list(ids) == [self._read[0]]

    def next_row(self) -> Logits | None:
        """Go on to the next token that was read; returns the logits behind it."""
        self._read.popleft()
        return self._rows.popleft() if self._rows else None
