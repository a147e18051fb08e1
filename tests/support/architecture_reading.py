"""Read tiny models of every architecture with stock llama.cpp and with sessions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from entropykv import Session
from entropykv.evaluation.stock import StockSession

Logits = npt.NDArray[np.float32]


def stock(path: Path, *, flash: bool = False) -> StockSession:
    return StockSession(path, n_ctx=256, n_threads=1, flash=flash)


def read(session: StockSession | Session, tokens: list[int], step: int) -> Logits:
    """Return the logits of all tokens, which are read `step` at a time: (n_tokens, n_vocab)."""
    parts = [tokens[first : first + step] for first in range(0, len(tokens), step)]
    return np.concatenate([session.decode(part, all_logits=True) for part in parts])


def next_logits(session: StockSession | Session, tokens: list[int]) -> Logits:
    """Read tokens, and return the logits after the last one.

    All rows are requested, because cogvlm's graph returns the first row if only the last one is
    requested.
    """
    logits: Logits = session.decode(tokens, all_logits=True)[-1]
    return logits


def greedy(session: StockSession, prompt: list[int], n_tokens: int) -> tuple[list[int], Logits]:
    """Return a greedily written text, and the logits from which each of its tokens was chosen,
    (n_tokens, n_vocab).
    """
    rows = [next_logits(session, prompt)]
    text = [int(rows[0].argmax())]
    while len(text) < n_tokens:
        rows.append(next_logits(session, text[-1:]))
        text.append(int(rows[-1].argmax()))
    return text, np.stack(rows)


def decided(logits: Logits, rounding: float) -> npt.NDArray[np.bool_]:
    """Tell for each row of `logits`, (rows, n_vocab), whether rounding cannot change which value is
    the largest.
    """
    best = np.sort(logits, axis=1)[:, -2:]
    choices: npt.NDArray[np.bool_] = best[:, 1] - best[:, 0] > 4 * rounding * logits.std()
    return choices
