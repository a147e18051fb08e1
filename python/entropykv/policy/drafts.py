"""Decide how tokens are guessed ahead, and whether wrong guesses could be undone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from entropykv import _core
from entropykv.errors import SettingsError
from entropykv.model.geometry import ModelGeometry
from entropykv.policy.policy import Policy
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.freezing import Freezing

_MOST_HALVES = 0.075
"""The largest part of the weights that may be in F16 where drafts are read without being asked for,
and llama.cpp computes its products.
"""


def products_are_ours(weight_types: Iterable[tuple[str, int]], kernels: Sequence[str]) -> bool:
    """Tell whether llama.cpp computes hardly any products in F16, in which a token among drafts
    gets other bits than alone.

    `weight_types`: types and bytes of a model's weights; `kernels`: those of this CPU, the fastest
    last, as _core.product_kernels() returns them.
    """
    sizes = dict(weight_types)
    few = sizes.get("F16", 0) <= _MOST_HALVES * sum(sizes.values())
    return few or "avx512vnni" in kernels


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
    one conversation where the same is true of products, see products_are_ours(). What is asked for
    by name raises SettingsError where it is not possible.
    """
    asked = options.spec_type
    if asked == "none":
        return asked
    obstacle = _obstacle(geometry, policy, freezing, store)
    kind = "ngram" if options.spec_draft_model is None else "draft"
    if asked == "auto" and kind == "ngram":
        ours = products_are_ours(geometry.weight_types, _core.product_kernels())
        keeps = store == "headwise" and (options.in_pool or ours)
        return kind if obstacle is None and keeps else "none"
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
