"""Compare logits, and make texts whose logits are compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from entropykv.evaluation.stock import StockSession

Logits = npt.NDArray[np.float32]


def relative_error(ours: Logits, stock: Logits) -> float:
    """Return the root mean square of the difference, divided by the standard deviation of stock's
    logits; both arrays have the same shape.
    """
    return float(np.sqrt(((ours - stock) ** 2).mean()) / stock.std())


def tokens_for(n: int, n_vocab: int = 250, seed: int = 3) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, n_vocab, n)]


def stock_logits(path: Path, tokens: list[int], *, flash: bool = False) -> Logits:
    stock = StockSession(str(path), n_ctx=1024, n_threads=2, flash=flash)
    try:
        return stock.decode(tokens, all_logits=True)
    finally:
        stock.close()
