"""Read tiny models of every architecture, by stock llama.cpp and by sessions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from entropykv import Session
from entropykv.llamacpp.stock import StockSession

Logits = npt.NDArray[np.float32]


def stock(path: Path, *, flash: bool = False) -> StockSession:
    return StockSession(path, n_ctx=256, n_threads=1, flash=flash)


def read(session: StockSession | Session, tokens: list[int], step: int) -> Logits:
    """Logits of tokens that are read a few at a time."""
    parts = [tokens[first : first + step] for first in range(0, len(tokens), step)]
    return np.concatenate([session.decode(part, all_logits=True) for part in parts])


def next_logits(session: StockSession | Session, tokens: list[int]) -> Logits:
    """After all tokens: cogvlm's graph gives the first row where only the last is asked for."""
    logits: Logits = session.decode(tokens, all_logits=True)[-1]
    return logits


def greedy(session: StockSession, prompt: list[int], n_tokens: int) -> tuple[list[int], Logits]:
    """A text, and the logits that each of its tokens was chosen by."""
    rows = [next_logits(session, prompt)]
    text = [int(rows[0].argmax())]
    while len(text) < n_tokens:
        rows.append(next_logits(session, text[-1:]))
        text.append(int(rows[-1].argmax()))
    return text, np.stack(rows)


def decided(logits: Logits, rounding: float) -> npt.NDArray[np.bool_]:
    """Rows whose largest value is so by more than rounding."""
    best = np.sort(logits, axis=1)[:, -2:]
    choices: npt.NDArray[np.bool_] = best[:, 1] - best[:, 0] > 4 * rounding * logits.std()
    return choices
