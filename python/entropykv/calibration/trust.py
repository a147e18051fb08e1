"""Decide in which KV heads predicted scores are added to what the text's own queries gave.

For some heads, no linear function of key and value predicts well enough what they look for; there,
predictions make a head keep the wrong entries, whatever is asked about the text. So a text is read
with everything kept, as for the loss curves; then each KV head is ranked with and without
predictions, and what its outputs would have lost is added up twice: over the queries of how the
text goes on, and over those of its repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from entropykv.calibration.observe import Observer, ReadText
from entropykv.calibration.predictions import LEAST_TEXT
from entropykv.calibration.spread import Arrays, Spread, StepSettings, TextWork
from entropykv.errors import SettingsError
from entropykv.policy.policy import EXPECTED_LOOKUPS
from entropykv.profile.curves import (
    KEEP_FRACTIONS,
    N_SINKS,
    RECENT_FRACTION,
    CurveRules,
    Entries,
    FloatArray,
    Rows,
    head_loss,
)
from entropykv.session.second_readings import OVERLAP, REQUEST

COMPARED = KEEP_FRACTIONS[2:5]
"""The kept fractions of the text that are compared: 1/32 to 1/8, as with small budgets."""
MOST_TEXTS = 3
"""The most texts that trust is measured in."""
MARGIN = 0.02
"""A head loses its trust if predictions increase its loss by more than this fraction; less is
noise.
"""
REPETITIONS = 3
"""How many pieces of a text are repeated, at equal distances."""
REPEATED = 1 / 16
"""The length of each repeated piece, as a fraction of the text."""


def trust_tokens(lengths: Sequence[int]) -> int:
    """Return how many tokens head_trust() reads of texts of these lengths, without the request for
    a repetition.
    """
    long_enough = [n for n in lengths if n >= LEAST_TEXT][:MOST_TEXTS]
    rules = [CurveRules.for_length(n) for n in long_enough]
    return sum(2 * of.n_read + of.queries + REPETITIONS * int(REPEATED * of.length) for of in rules)


def head_trust(
    spread: Spread,
    settings: StepSettings,
    texts: Sequence[tuple[int, ...]],
    on_progress: Callable[[int], None] = lambda _: None,
) -> FloatArray | None:
    """Return the values of ScorePredictor.trust, (n_layer, n_head_kv): 0 or 1.

    The value is 0 if a KV head loses more (by MARGIN) with the predictor of settings.profile than
    without it, in the continuation as well as in the repetitions. Returns None if the texts are too
    short; raises the errors of lose().
    """
    long_enough = [text for text in texts if len(text) >= LEAST_TEXT][:MOST_TEXTS]
    if not long_enough:
        return None
    work = [TextWork("trust", (text,)) for text in long_enough]
    found = spread.run(lose, settings, work, on_progress)
    losses = np.zeros((2, *found[0][0].shape[1:]))
    for (of_text,) in found:
        losses[0] += of_text[0]
        for of_piece in of_text[1:]:
            losses[1] += of_piece
    without, with_predictions = losses[:, 0], losses[:, 1]
    worse = np.all(with_predictions > (1.0 + MARGIN) * without, axis=0)
    return np.where(worse, 0.0, 1.0)


def lose(
    settings: StepSettings, work: Sequence[TextWork], on_progress: Callable[[int], None]
) -> Iterator[Arrays]:
    """Yield for each text one array (1 + REPETITIONS, 2, n_layer, n_head_kv): the losses over its
    continuation and over each repetition of a piece, without and with predictions. This function is
    a Step. Raises SettingsError without a profile that has a predictor.
    """
    if settings.profile is None or settings.profile.predictor is None:
        raise SettingsError("trust is of a predictor; give a profile that has one")
    texts = [each.texts[0] for each in work]
    engine: dict[str, Any] = {"kv_type": settings.kv_type, "n_threads": settings.n_threads}
    n_ctx = max(map(len, texts))
    predictor = settings.profile.predictor
    shares = []
    with Observer(settings.path, n_ctx=n_ctx, predictor=predictor, **engine) as observer:
        for text in texts:
            n_read = CurveRules.for_length(len(text)).n_read
            shares.append(observer.importance_of(text[:n_read]))
            on_progress(n_read)
    # len(REQUEST) counts characters, of which there are more than tokens.
    longest = n_ctx + OVERLAP + len(REQUEST)
    with Observer(settings.path, n_ctx=longest, **engine) as observer:
        request = observer.tokenize_plainly(REQUEST)
        for text, of_text in zip(texts, shares, strict=True):
            rules = CurveRules.for_length(len(text))
            with observer.reading(text[: rules.n_read]) as read:
                asked: list[Sequence[int]] = [text[rules.n_read :][: observer.n_ubatch]]
                asked += [[*request, *piece][: observer.n_ubatch] for piece in _pieces(text, rules)]
                losses = np.array([_losses(read, tokens, of_text) for tokens in asked])
            on_progress(trust_tokens([len(text)]) - rules.n_read)
            yield (losses,)


def _pieces(text: Sequence[int], rules: CurveRules) -> list[Sequence[int]]:
    """Return the pieces of the text that are repeated, each with the OVERLAP tokens before it."""
    starts = [OVERLAP + i * rules.n_read // (REPETITIONS + 1) for i in range(REPETITIONS)]
    return [text[start - OVERLAP : start + int(REPEATED * len(text))] for start in starts]


def _losses(read: ReadText, tokens: Sequence[int], shares: Sequence[Sequence[Rows]]) -> FloatArray:
    """Return the loss of the KV heads over the queries of `tokens`, without and with predictions:
    (2, n_layer, n_head_kv).
    """
    read.rollback()
    n_read = len(shares[0][0])
    rules = CurveRules(
        length=n_read + len(tokens),
        queries=len(tokens),
        n_sinks=N_SINKS,
        recent_window=max(1, int(RECENT_FRACTION * n_read)),
        keep=tuple(sorted({int(fraction * n_read) for fraction in COMPARED})),
    )
    losses = np.zeros((2, len(shares), len(shares[0])))
    for layer, head, queries, entries in read.attended(tokens):
        predicted = np.float32(EXPECTED_LOOKUPS) * np.square(shares[layer][head])
        for i, importance in enumerate((entries.importance, entries.importance + predicted)):
            ranked = Entries(entries.k, entries.v, importance)
            losses[i, layer, head] = head_loss(queries, ranked, rules).dropped.sum()
    return losses
