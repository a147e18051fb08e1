"""Decide how tokens are guessed ahead, and whether wrong guesses could be undone."""

from __future__ import annotations

from entropykv.errors import SettingsError
from entropykv.model.geometry import ModelGeometry
from entropykv.policy.policy import Policy
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.freezing import Freezing

_SLOWER = frozenset({"Q6_K", "F16"})
"""Types of weights for which llama.cpp's product of a single token is faster than ours: see
docs/background/products.md. With drafts, as in a pool, ours computes it, so that a token has the
same bits whatever is read with it.
"""


def spec_type_for(
    options: CacheOptions,
    geometry: ModelGeometry,
    policy: Policy,
    freezing: Freezing | None,
    store: str,
) -> str:
    """Return how tokens are guessed ahead: none, ngram or draft.

    `auto` without a draft model becomes none where wrong guesses could not be undone; on the flat
    and device stores, where attention to several tokens has other bits than that to one; and for
    one conversation with weights of _SLOWER. What is asked for by name raises SettingsError where
    it is not possible.
    """
    asked = options.spec_type
    if asked == "none":
        return asked
    obstacle = _obstacle(geometry, policy, freezing, store)
    kind = "ngram" if options.spec_draft_model is None else "draft"
    if asked == "auto" and kind == "ngram":
        types = {name for name, _ in geometry.weight_types}
        slower = not options.in_pool and not types.isdisjoint(_SLOWER)
        return "none" if obstacle is not None or store != "headwise" or slower else kind
    if obstacle is not None:
        raise SettingsError(
            f"{geometry.name}: wrong guesses could not be undone {obstacle}, so no tokens are "
            "guessed ahead; use --spec-type none (spec_type='none'), and no draft model"
        )
    return kind


def _obstacle(
    geometry: ModelGeometry, policy: Policy, freezing: Freezing | None, store: str
) -> str | None:
    """Return why wrong guesses could not be undone; None if they can."""
    if geometry.recurrent:
        return "in recurrent layers"
    if freezing is not None:
        return "where entries are frozen"
    if store == "flat":
        return None
    if policy.importance.repeats:
        return f"under policy {policy.name}, which reads texts twice"
    if policy.rule.by_layer:
        return f"under policy {policy.name}, which chooses per layer"
    return None
