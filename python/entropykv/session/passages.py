"""Find the passages of a document that an answer looked at.

Queries add the attention that they give to an entry to its importance, which otherwise decays. How
much the importance of a passage has risen while an answer was written, summed over all KV heads,
says how much the answer looked at the passage, beyond what the document itself did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from entropykv.session.session import Session

MOST_PASSAGES = 16
"""The most passages that are returned for one answer."""
MOST_TOKENS = 1 << 18
"""The longest document that is cut into passages, in tokens."""
_SHORTEST, _LONGEST = 24, 64
"""A passage ends where a sentence or line ends after at least `_SHORTEST` tokens, and at the latest
after `_LONGEST` tokens.
"""
_ENDS = (b".", b"!", b"?", b"\n", "\N{IDEOGRAPHIC FULL STOP}".encode())


@dataclass(frozen=True)
class Passage:
    """Hold a passage of a document, and how much an answer looked at it."""

    start: int
    """The first character of the passage in the document's text."""
    end: int
    """The end of the passage's characters, exclusive."""
    text: str
    share: float
    """The passage's part of all importance that the document's entries have gained, from 0 to 1."""


def cut_into_passages(tokens: Sequence[bytes]) -> list[int]:
    """Return the numbers of the tokens at which passages begin, and the number of all tokens.

    `tokens`: the bytes of every token. A passage has 24 to 64 tokens, and ends with a line or a
    sentence if there is an end among them; the last one may be shorter.
    """
    cuts = [0]
    for number, token in enumerate(tokens, 1):
        length = number - cuts[-1]
        is_end = token.rstrip(b" ").endswith(_ENDS)
        if length >= _LONGEST or (is_end and length >= _SHORTEST):
            cuts.append(number)
    return cuts if cuts[-1] == len(tokens) else [*cuts, len(tokens)]


class AttentionSince:
    """Measure how much importance the entries of a session have gained since this object
    was made.
    """

    def __init__(self, session: Session) -> None:
        """Remember the positions and the importance of all entries, until close().

        This takes 8 bytes for each entry, which kv_bytes_scratch counts; passages() takes 8 bytes
        more for each entry while it runs. Raises PoolError if the pool has no room for the session.
        """
        self._session = session
        self._before = session.cache.importance()
        session.snapshot_bytes = sum(
            positions.nbytes + importance.nbytes for positions, importance in self._before or ()
        )

    def close(self) -> None:
        """Forget the positions and the importance that were remembered."""
        self._before = None
        self._session.snapshot_bytes = 0

    def by_position(self, n_tokens: int) -> npt.NDArray[np.float64] | None:
        """Return how much importance each of the first `n_tokens` positions has gained since this
        object was made, summed over all KV heads: (n_tokens,).

        Entries that lost importance, were evicted or are new count as 0, and so do attention sinks,
        which get attention whatever they say. Returns None if the store or the policy does not
        measure attention, and after close(). Raises PoolError if the pool has no room for the
        session.
        """
        now = self._session.cache.importance()
        if self._before is None or now is None:
            return None
        added = np.zeros(n_tokens)
        for (old, before), (positions, importance) in zip(self._before, now, strict=True):
            kept = np.isin(positions, old, assume_unique=True) & (positions < n_tokens)
            places = np.searchsorted(old, positions[kept])
            added[positions[kept]] += np.maximum(importance[kept] - before[places], 0.0)
        added[: self._session.config.options.n_sinks] = 0.0
        return added

    def passages(self, text: str, n_tokens: int, most: int) -> list[Passage] | None:
        """Return at most `most` passages of a document, in falling order of the attention they have
        gained since this object was made.

        `text` is the document's text, and the session has begun with its `n_tokens` tokens. Returns
        None if the attention is not measured, or for more than MOST_TOKENS tokens. Raises PoolError
        if the pool has no room for the session.
        """
        added = self.by_position(n_tokens) if n_tokens <= MOST_TOKENS else None
        if added is None:
            return None
        session = self._session
        tokens = [session.token_bytes(token, special=True) for token in session.tokens[:n_tokens]]
        first, ends = _places_in(text, tokens)
        cuts = [first + cut for cut in cut_into_passages(tokens[first:])]
        found = []
        total = added[first:].sum()
        for begin, end in pairwise(cuts):
            start, stop = ends[begin], ends[end]
            share = float(added[begin:end].sum() / total) if total > 0 else 0.0
            if share > 0 and stop > start:
                found.append(Passage(start, stop, text[start:stop], share))
        return sorted(found, key=lambda passage: -passage.share)[:most]


def _places_in(text: str, tokens: Sequence[bytes]) -> tuple[int, list[int]]:
    """Return the number of the token at which a text begins within tokens that contain it, and for
    every boundary between tokens the number of characters of the text before it.

    Before and behind the text, the tokens hold what the chat template adds.
    """
    data, wanted = b"".join(tokens), text.encode("utf-8", "replace")
    offset = data.find(wanted)
    if offset < 0:  # The vocabulary has changed the text, which still ends before a line break.
        offset = max(0, len(data) - len(wanted) - 1)
    boundaries = [0, *accumulate(map(len, tokens))]
    # All bytes of a character but its first one are 0b10xxxxxx.
    begins = (np.frombuffer(data, np.uint8)[offset:] & 0xC0) != 0x80
    characters = np.concatenate([[0], np.cumsum(begins)])
    ends = [min(int(characters[max(0, end - offset)]), len(text)) for end in boundaries]
    first = max(0, int(np.searchsorted(boundaries, offset, side="right")) - 1)
    return first, ends
