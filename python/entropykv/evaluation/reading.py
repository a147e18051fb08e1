"""Read and write greedily, a session under a budget and stock llama.cpp in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from entropykv.llamacpp.distributions import Logits
from entropykv.session.recovery import Watch
from entropykv.session.session import Session

Tick = Callable[[int], None]
"""Called between two steps with how many more tokens are done; may raise to end the work there."""


class Reader(Protocol):
    """Define what a Session and a StockSession have in common."""

    @property
    def position(self) -> int:
        """Return the number of tokens read so far."""

    def decode_micro_batches(
        self, tokens: Sequence[int], all_logits: bool
    ) -> Iterator[Logits | None]:
        """Decode each micro-batch as the result is iterated."""

    def save_state(self) -> Any:
        """Return what was read, for load_state()."""

    def load_state(self, state: Any, /) -> object:
        """Go back to what save_state() returned."""

    def tokenize(self, text: str, add_bos: bool | None) -> list[int]:
        """Return the tokens of a text; `add_bos` None does as the model wants."""

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""

    def is_end(self, token: int) -> bool:
        """Tell whether a token ends the generation."""


@dataclass(frozen=True)
class Written:
    """Hold what was written, and how fast: neither the first nor the last token costs a decode."""

    tokens: list[int]
    n_decoded: int
    seconds: float


def rows_of(
    reader: Reader, tokens: Sequence[int], tick: Tick, *, all_logits: bool = True
) -> Iterator[Logits]:
    """Read tokens; yields the logits of each micro-batch, (tokens, n_vocab), that has some."""
    before = reader.position
    for logits in reader.decode_micro_batches(tokens, all_logits):
        if logits is not None:
            yield logits
        tick(reader.position - before)
        before = reader.position


def read(reader: Reader, tokens: Sequence[int], tick: Tick) -> tuple[Logits, float]:
    """Read tokens; returns logits of the last one, (n_vocab,), and the seconds that it took."""
    start = time.perf_counter()
    last = [rows[-1] for rows in rows_of(reader, tokens, tick, all_logits=False)]
    return last[0], time.perf_counter() - start


def write(
    reader: Reader, logits: Logits, n_tokens: int, tick: Tick, *, stops: bool = False
) -> Written:
    """Write n_tokens greedily after what `logits` are of; fewer where `stops` and the text ends.

    A session with a recovery ladder climbs it meanwhile, up to where it writes nothing again.
    """
    watch = _watch_of(reader, len(logits))
    tokens: list[int] = []
    start = time.perf_counter()
    while not (stops and reader.is_end(int(logits.argmax()))):
        tokens.append(int(logits.argmax()))
        if len(tokens) == n_tokens:
            break
        logits, _ = read(reader, tokens[-1:], tick)
        if watch is not None:
            watch.wants_rewalk(logits, reader.position)
    n_decoded = min(len(tokens), n_tokens - 1)
    return Written(tokens, n_decoded, time.perf_counter() - start)


def _watch_of(reader: Reader, n_vocab: int) -> Watch | None:
    """Return the recovery ladder for one text that a session writes; None where it has none."""
    if isinstance(reader, Session) and reader.recovery is not None:
        return Watch(reader, reader.recovery, n_vocab)
    return None
