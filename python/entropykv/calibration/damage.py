"""Damage: what a model's predictions lose when a layer forgets all but sinks and newest tokens.

Loss curves tell how far a KV head's output is off, and nothing of what that does to the model: some
layers look back at much that changes no prediction. So half of a text is read; then, for one layer
after the other, its KV heads drop what is not protected, and the model predicts how the text goes
on, and the text itself once more behind a request to repeat it. The damage is the divergence from
what it predicts with everything at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from entropykv.calibration.observe import Observer
from entropykv.profile.curves import MOST_DAMAGE, FloatArray
from entropykv.session.echo import OVERLAP, REQUEST

LEAST_TEXT = 256
"""Shorter texts show no damage: half of them is not much more than what is protected."""
RECENT_WINDOW = 32
CONTINUATION_FRACTION = 1 / 8
REPETITION_FRACTION = 1 / 16
"""Of the text: what is predicted."""
MOST_TEXTS = 3
"""Every layer reads on in each of them."""

Logits = npt.NDArray[np.float32]


def predicted_tokens(length: int) -> int:
    """Return how many tokens layer_damage() reads for each layer of a text of `length` tokens."""
    return int(length * CONTINUATION_FRACTION) + int(length * REPETITION_FRACTION)


def layer_damage(
    observer: Observer,
    texts: Sequence[Sequence[int]],
    on_progress: Callable[[int], None] = lambda _: None,
) -> FloatArray | None:
    """Return the mean damage of every layer, (n_layer,), in nats a token.

    What is repeated counts by the share of it that the model repeats right with everything at hand:
    not every model follows a request. None for texts that are too short.
    """
    long_enough = [text for text in texts if len(text) >= LEAST_TEXT][:MOST_TEXTS]
    if not long_enough:
        return None
    damage = np.zeros(observer.n_layer)
    for text in long_enough:
        damage += _of_text(observer, text, on_progress)
    return np.minimum(damage / len(long_enough), MOST_DAMAGE)


def _of_text(
    observer: Observer, text: Sequence[int], on_progress: Callable[[int], None]
) -> FloatArray:
    half = len(text) // 2
    continuation = text[half : half + int(len(text) * CONTINUATION_FRACTION)]
    request = observer.tokenize_plainly(REQUEST)
    repeated = text[OVERLAP : OVERLAP + int(len(text) * REPETITION_FRACTION)]
    damage = np.zeros(observer.n_layer)
    with observer.reading(text[:half]) as read:
        for before, following in (([], continuation), (request, repeated)):
            tokens = [*before, *following]
            read.go_back()
            whole = _log_probabilities(read.predictions(tokens)[len(before) :])
            weight = _share_right(whole, following) if before else 1.0
            for layer in range(observer.n_layer):
                read.go_back()
                read.forget(layer, RECENT_WINDOW)
                rows = _log_probabilities(read.predictions(tokens)[len(before) :])
                damage[layer] += weight * divergence(whole, rows)
                on_progress(len(following))
    return damage


def _share_right(rows: Logits, tokens: Sequence[int]) -> float:
    """Return how many tokens are the first choice of the row before them, as a share."""
    return float(np.mean(rows[:-1].argmax(axis=1) == np.asarray(tokens[1:])))


def divergence(whole: Logits, rows: Logits) -> float:
    """Return the mean KL of predictions from those with everything, both as log probabilities.

    A token that is impossible with everything at hand adds nothing.
    """
    of_rows = []
    for a, b in zip(whole, rows, strict=True):
        possible = np.isfinite(a)
        log = a[possible].astype(np.float64)
        of_rows.append(float(np.exp(log) @ (log - b[possible])))
    return max(0.0, sum(of_rows) / len(of_rows))


def _log_probabilities(logits: Logits) -> Logits:
    """Turn logits into log probabilities, in place: there may be many."""
    for i, row in enumerate(logits):
        shifted = row - row.max()
        logits[i] = shifted - np.log(np.exp(shifted, dtype=np.float64).sum())
    return logits
