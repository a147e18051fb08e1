"""Measure damage: what a model's predictions lose if one layer keeps only sinks and newest tokens.

Loss curves tell how much the output of a KV head changes, but not what this changes in the model's
predictions: some layers attend to many entries that change no prediction. Therefore half of a text
is read; then, for one layer after the other, its KV heads drop everything that is not protected,
and the model predicts the rest of the text, and, after a request to repeat it, the text itself. The
damage is the divergence from its predictions with all entries kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from entropykv.calibration.observe import Observer
from entropykv.calibration.predictions import LEAST_TEXT, half_of, predictions_after_half
from entropykv.llamacpp.distributions import mean_divergence
from entropykv.profile.curves import MOST_DAMAGE, FloatArray
from entropykv.session.second_readings import REQUEST

RECENT_WINDOW = 32


def texts_of_damage(texts: Sequence[Sequence[int]]) -> int:
    """Return in how many of the texts, from the first on, every layer is measured.

    It is a quarter of those that are long enough, because damage_of_text() reads a text once for
    every layer, and texts differ little: the damage of the layers in two texts correlates with
    0.99.
    """
    return (sum(len(text) >= LEAST_TEXT for text in texts) + 3) // 4


def mean_damage(texts: Sequence[FloatArray]) -> FloatArray | None:
    """Return the mean damage of every layer, (n_layer,), in nats per token and at most MOST_DAMAGE.

    `texts`: what damage_of_text() returned. Returns None if there are none.
    """
    if not texts:
        return None
    damage = np.zeros(len(texts[0]))
    for of_text in texts:
        damage += of_text
    return np.minimum(damage / len(texts), MOST_DAMAGE)


def damage_of_text(
    observer: Observer, text: Sequence[int], on_progress: Callable[[int], None] = lambda _: None
) -> FloatArray:
    """Return the damage of every layer, (n_layer,), in nats per token, in a text of LEAST_TEXT
    tokens or more.
    """
    damage = np.zeros(observer.n_layer)
    request = observer.tokenize_plainly(REQUEST)
    with observer.reading(half_of(text)) as read:
        for prediction in predictions_after_half(text, request):
            read.rollback()
            whole = prediction.rows(read.predictions)
            weight = prediction.weight(whole)
            for layer in range(observer.n_layer):
                read.rollback()
                read.forget(layer, RECENT_WINDOW)
                damage[layer] += weight * mean_divergence(whole, prediction.rows(read.predictions))
                on_progress(len(prediction.tokens))
    return damage
