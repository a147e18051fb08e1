"""End an answer at texts that the user names: -r of llama-cli."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def until_stop(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield pieces of an answer up to the first of the texts that end it, which is left out.

    Every piece gives one piece, maybe empty: what may be the beginning of such a text is held back
    until more is known.
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
    """Return the length of the longest end of `text` that is the beginning of one of `stops`."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
