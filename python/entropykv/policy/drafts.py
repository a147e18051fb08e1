"""Decide how tokens are guessed ahead, and whether wrong guesses could be undone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from entropykv import _core
from entropykv.errors import SettingsError
from entropykv.model.geometry import ModelGeometry
from entropykv.policy.policy import Policy
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.freezing import Freezing

_LOSSES = {"Q6_K": 0.4, "F16": 0.4}
"""By type of weights, by how much ours take longer than llama.cpp's product of a single token, or
of a few for F16: see docs/background/products.md. With drafts, as in a pool, ours computes it, so
that a token has the same bits whatever is read with it.
"""
_LOSSES_AVX512 = {"Q6_K": 0.08, "F16": 0.1}
_MOST_LOSS = 0.03
"""So much longer may a step of one token take where drafts are read without being asked for."""


def drafts_pay(weight_types: Iterable[tuple[str, int]], kernels: Sequence[str]) -> bool:
    """Tell whether the products that drafts need are about as fast as those without drafts.

    `weight_types`: types and bytes of a model's weights; `kernels`: those of this CPU, the fastest
    last, as _core.product_kernels() returns them.
    """
    losses = _LOSSES_AVX512 if "avx512vnni" in kernels else _LOSSES
    sizes = dict(weight_types)
    lost = sum(n_bytes * losses.get(name, 0.0) for name, n_bytes in sizes.items())
    return lost <= _MOST_LOSS * sum(sizes.values())


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
    one conversation whose products would become slower, see drafts_pay(). What is asked for by name
    raises SettingsError where it is not possible.
    """
    asked = options.spec_type
    if asked == "none":
        return asked
    obstacle = _obstacle(geometry, policy, freezing, store)
    kind = "ngram" if options.spec_draft_model is None else "draft"
    if asked == "auto" and kind == "ngram":
        pays = options.in_pool or drafts_pay(geometry.weight_types, _core.product_kernels())
        return "none" if obstacle is not None or store != "headwise" or not pays else kind
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
