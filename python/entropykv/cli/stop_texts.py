"""End an answer at texts that the user gives (llama-cli's -r)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def until_stop(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield the pieces of an answer up to the first stop text, which is left out.

    Every input piece yields one output piece, which may be empty: text that may be the beginning of
    a stop text is held back until the next pieces decide.
    """
    held = ""
    for piece in pieces:
        held += piece
        ends = [at for at in (held.find(stop) for stop in stops) if at >= 0]
        if ends:
            yield held[: min(ends)]
            return
        sure = len(held) - _unfinished(held, stops)
        yield held[:sure]
        held = held[sure:]
    yield held


def _unfinished(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of one of `stops`."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
