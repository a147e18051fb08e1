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

from entropykv.calibration.observe import Observer
from entropykv.calibration.predictions import (
    LEAST_TEXT,
    half_of,
    predictions_after_half,
)
from entropykv.llamacpp.distributions import mean_divergence
from entropykv.profile.curves import MOST_DAMAGE, FloatArray
from entropykv.session.echo import REQUEST

RECENT_WINDOW = 32
MOST_TEXTS = 3
"""Every layer reads on in each of them."""


def layer_damage(
    observer: Observer,
    texts: Sequence[Sequence[int]],
    on_progress: Callable[[int], None] = lambda _: None,
) -> FloatArray | None:
    """Return the mean damage of every layer, (n_layer,), in nats a token.

    None for texts that are too short.
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
    damage = np.zeros(observer.n_layer)
    request = observer.tokenize_plainly(REQUEST)
    with observer.reading(half_of(text)) as read:
        for prediction in predictions_after_half(text, request):
            read.go_back()
            whole = prediction.rows(read.predictions)
            weight = prediction.weight(whole)
            for layer in range(observer.n_layer):
                read.go_back()
                read.forget(layer, RECENT_WINDOW)
                damage[layer] += weight * mean_divergence(whole, prediction.rows(read.predictions))
                on_progress(len(prediction.tokens))
    return damage
