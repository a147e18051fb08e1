"""Plan how many entries every KV head may keep, for sessions and `entropykv plan`. Nothing here has
side effects.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from entropykv import _core
from entropykv.errors import BudgetError, ProfileError
from entropykv.llamacpp.context import CELL_PADDING
from entropykv.model.geometry import ModelGeometry
from entropykv.policy.policy import WINDOW_EIGHTHS, BudgetRule, Policy
from entropykv.policy.sources.readme_entropy_kv import weights_of
from entropykv.profile.curves import LossCurves
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.options import Budget
from entropykv.settings.own_policy import BudgetToShare, OwnPolicy, checked_weights

_BytesOf = Callable[[int], int]


@dataclass(frozen=True)
class ProtectedEntries:
    """Hold which entries of each KV head are protected from eviction: the first `n_sinks` of the
    text, and the newest `recent_window`.
    """

    n_sinks: int
    recent_window: int

    @classmethod
    def for_budget(
        cls, mean_entries: int, n_sinks: int, recent_window: int | None, window_eighths: int
    ) -> ProtectedEntries:
        """Return what is protected under a mean budget of `mean_entries`. `recent_window` None:
        `window_eighths` eighths of the mean budget.
        """
        if recent_window is None:
            recent_window = max(1, mean_entries * window_eighths // 8)
        return cls(n_sinks, recent_window)

    @property
    def entries(self) -> int:
        """Return how many entries of every KV head are protected."""
        return self.n_sinks + self.recent_window


@dataclass(frozen=True)
class WholeTexts:
    """Tell which texts a number of pages keeps whole, so that none of their entries are evicted.

    For longer texts, the policy decides which entries stay.
    """

    pages: int
    most: int
    """The length of the longest possible text in tokens."""
    pages_of: Callable[[int], int]
    """A function that returns how many pages all entries of a text take, by its length in
    tokens.
    """

    @functools.cached_property
    def longest(self) -> int:
        """Return the length of the longest text that is kept whole, in tokens."""
        return bisect.bisect_right(range(self.most + 1), self.pages, key=self.pages_of) - 1

    def hold(self, n_tokens: int) -> bool:
        """Tell whether a text of n_tokens is kept whole; False for 0, because the policy plans for
        an empty text.
        """
        return 0 < n_tokens <= self.longest

    def length_for(self, n_tokens: int, wanted: int) -> int | None:
        """Return how long, up to `wanted`, a text of `n_tokens` may become and still be kept whole.

        Returns None if neither is kept whole, where hold() counts an empty text as not kept.
        """
        if self.pages_of(wanted) <= self.pages:
            return wanted
        return self.longest if self.hold(n_tokens) else None


@dataclass(frozen=True)
class HeadwisePlan:
    """Hold a plan of the headwise or device store: the budget of every KV head in entries, and the
    pages for all of them.
    """

    budgets: tuple[tuple[int, ...], ...]
    """The entries of each KV head, as [layer][KV head]."""
    mean_entries: int
    """The mean budget of a KV head, in entries."""
    floor_entries: int
    """The fewest entries that a KV head may get, unless its limit is lower."""
    entries_per_page: tuple[int, ...]
    """How many entries fill a page, for each KV head of each layer, layer by layer."""
    limits: tuple[int, ...]
    """How many entries each KV head can use: the whole context, or a window."""
    protection: ProtectedEntries
    """The entries that are protected in every KV head."""
    pool_pages: int
    """How many pages the pool has."""
    page_bytes: int
    """The bytes of a page."""
    longest: int
    """The length in tokens of the longest text that the plan is made for."""

    @property
    def holds_all(self) -> bool:
        """Tell whether no text up to `longest` ever evicts an entry."""
        return self.mean_entries >= self.longest

    def pages_of(self, entries: int) -> int:
        """Return how many pages `entries` entries of every KV head take, as far as each can use
        them.
        """
        pairs = zip(self.limits, self.entries_per_page, strict=True)
        return sum(_core.pages_for(min(entries, most), per_page) for most, per_page in pairs)

    @functools.cached_property
    def whole_texts(self) -> WholeTexts:
        """Return the object that tells which texts the pages of the plan keep whole."""
        return WholeTexts(self.pool_pages, self.longest, self.pages_of)

    @property
    def entries_of_whole_texts(self) -> list[int]:
        """Return the entries of each KV head, as far as it can use them, for the longest text that
        the pool keeps whole.
        """
        return [min(limit, self.whole_texts.longest) for limit in self.limits]

    @property
    def pool_bytes(self) -> int:
        """Return the bytes that the pool never exceeds."""
        return self.pool_pages * self.page_bytes


@dataclass(frozen=True)
class FlatPlan:
    """Hold the entries that the flat store keeps, and the cells that they need."""

    entries: int
    cells: int
    protection: ProtectedEntries


def plan_headwise(
    budget: Budget,
    layers: Sequence[_core.LayerShape],
    n_ctx: int,
    kv_type: str,
    policy: Policy,
    profile: EntropyProfile | None,
    n_sinks: int,
    recent_window: int | None,
) -> HeadwisePlan:
    """Return the plan that shares a budget among the KV heads.

    `layers`: the model's attention layers; KV heads of a layer with a window get no more than the
    window holds, and the other heads get what is left. `recent_window` None: as the policy sets it.
    Raises BudgetError if the budget cannot hold sinks and recent window in every KV head,
    ProfileError if the policy needs loss curves that `profile` does not have, and SettingsError for
    invalid results of a user's own policy.
    """
    page_bytes, per_head = _page_geometry(layers, kv_type)

    limits = [_core.most_entries(s, n_ctx) for s in layers for _ in range(s.n_head_kv)]
    most_pages = sum(_core.pages_for(n, p) for n, p in zip(limits, per_head, strict=True))

    def pages(entries: int) -> int:
        return min(_pages(entries, per_head), most_pages)

    def bytes_of(entries: int) -> int:
        return pages(entries) * page_bytes

    def protected_of(n: int) -> ProtectedEntries:
        return ProtectedEntries.for_budget(n, n_sinks, recent_window, policy.window_eighths)

    mean = _mean_entries(budget, n_ctx, bytes_of)
    protection = _protection(budget, mean, n_ctx, protected_of, bytes_of)
    floor = min(protection.entries, n_ctx)
    if policy.rule.by_layer and recent_window is None:
        # Half of the head's own budget is the only limit of its window.
        floor = min(2 * (n_sinks + 1), floor)
        protection = ProtectedEntries(n_sinks, n_ctx)
    if policy.own is not None:
        heads = tuple(shape.n_head_kv for shape in layers)
        ask = BudgetToShare(n_ctx, mean, floor, heads, tuple(limits), profile)
        shares = own_shares(policy.own, ask, per_head)
    else:
        shares = _share(policy, profile, mean, n_ctx, floor, per_head, limits)
    return HeadwisePlan(
        tuple(by_layer(shares, layers)),
        mean,
        floor,
        tuple(per_head),
        tuple(limits),
        protection,
        pages(mean),
        page_bytes,
        n_ctx,
    )


def own_shares(own: OwnPolicy, ask: BudgetToShare, per_page: Sequence[int]) -> list[int]:
    """Return the budget of every KV head in entries, layer by layer, as a user's own policy shares
    it.

    `per_page`: how many entries of every KV head fill a page. Raises SettingsError for invalid
    results of share().
    """
    weights = checked_weights(own, ask)
    shares = _core.share_budget(
        ask.mean_entries, ask.n_ctx, ask.floor_entries, per_page, weights, ask.limits
    )
    if own.choice == "head":
        return shares
    heads = iter(shares)
    layers = [list(itertools.islice(heads, n)) for n in ask.heads_per_layer]
    return [min(layer) for layer in layers for _ in layer]


def own_windows(policy: Policy, recent_window: int | None) -> bool:
    """Tell whether sinks and recent window take at most half of each KV head's own budget: where
    budgets are shared per layer, or follow what heads lose in this text and predictions are added,
    unless the user gives a window.
    """
    return recent_window is None and (policy.rule.by_layer or policy.adds_lookups)


def by_layer(
    of_heads: Sequence[int], layers: Sequence[_core.LayerShape]
) -> Iterator[tuple[int, ...]]:
    """Yield one tuple per layer of a list that has a value for each KV head, layer by layer."""
    heads = iter(of_heads)
    for shape in layers:
        yield tuple(itertools.islice(heads, shape.n_head_kv))


def attention_layers(geometry: ModelGeometry) -> list[_core.LayerShape]:
    """Return the shapes of the layers that have KV heads, by the file's header; may be empty."""
    if geometry.head_dim_k < 1 or geometry.head_dim_v < 1:
        return []
    return [
        _core.LayerShape(
            n_head, n_head_kv, geometry.head_dim_k, geometry.head_dim_v, latent=geometry.latent
        )
        for n_head, n_head_kv in zip(
            geometry.heads_per_layer, geometry.kv_heads_per_layer, strict=True
        )
        if n_head_kv > 0
    ]


def kv_type_for(kv_type: str, budget: Budget, geometry: ModelGeometry, n_ctx: int) -> str:
    """Return the KV type that `auto` stands for; any other type is returned unchanged.

    For `auto`, it is f16 if a budget in bytes holds the whole context, else q8_0, which keeps 1.8
    times as many entries in the same bytes. These entries are worth more than the rounding costs.
    """
    if kv_type != "auto":
        return kv_type
    layers = attention_layers(geometry)
    if budget.kind != "bytes" or not layers:
        return "q8_0"
    page_bytes, per_head = _page_geometry(layers, "f16")
    return "f16" if _pages(n_ctx, per_head) * page_bytes <= budget.value else "q8_0"


def _page_geometry(layers: Sequence[_core.LayerShape], kv_type: str) -> tuple[int, list[int]]:
    """Return the bytes of a page, and how many entries of every KV head fill one, in the order of
    layers.
    """
    page_bytes, per_page = _core.page_geometry(layers, kv_type)
    return page_bytes, [
        entries for entries, s in zip(per_page, layers, strict=True) for _ in range(s.n_head_kv)
    ]


def _pages(entries: int, per_head: Sequence[int]) -> int:
    """Return how many pages hold `entries` entries of every KV head."""
    return sum(_core.pages_for(entries, per_page) for per_page in per_head)


def plan_flat(
    budget: Budget,
    cell_bytes: int,
    n_ctx: int,
    n_ubatch: int,
    n_sinks: int,
    recent_window: int | None,
) -> FlatPlan:
    """Convert a budget to entries and cells; a byte budget includes the cells of one micro-batch.

    `cell_bytes`: the bytes of K and V of one token in all layers. `recent_window` None: half of the
    budget. Raises BudgetError as plan_headwise() does.
    """

    def cells(entries: int) -> int:
        wanted = entries + (n_ubatch if entries < n_ctx else 0)
        return -(-wanted // CELL_PADDING) * CELL_PADDING

    def bytes_of(entries: int) -> int:
        return cells(entries) * cell_bytes

    def protected_of(n: int) -> ProtectedEntries:
        return ProtectedEntries.for_budget(n, n_sinks, recent_window, WINDOW_EIGHTHS)

    entries = _mean_entries(budget, n_ctx, bytes_of)
    protection = _protection(budget, entries, n_ctx, protected_of, bytes_of)
    return FlatPlan(entries, cells(entries), protection)


def _mean_entries(budget: Budget, n_ctx: int, bytes_of: _BytesOf) -> int:
    if budget.kind == "fraction":
        return int(round(budget.value * n_ctx, 9))  # 0.29 * 100 is less than 29 in floating point.
    if budget.kind == "tokens":
        return min(int(budget.value), n_ctx)
    if bytes_of(n_ctx) <= budget.value:  # The whole context needs no micro-batch besides.
        return n_ctx
    return bisect.bisect_right(range(n_ctx), budget.value, key=bytes_of) - 1


def _protection(
    budget: Budget,
    mean: int,
    n_ctx: int,
    protected_of: Callable[[int], ProtectedEntries],
    bytes_of: _BytesOf,
) -> ProtectedEntries:
    """Return protected_of(mean), the entries that are protected under the mean budget `mean`.

    Raises BudgetError if the mean budget does not hold them.
    """
    protection = protected_of(mean)
    if mean >= min(protection.entries, n_ctx) and mean > 0:
        return protection

    def holds_them(n: int) -> bool:
        return n >= min(protected_of(n).entries, n_ctx)

    # A budget of n_ctx entries holds all protected ones, so the search always finds a budget.
    least = 2 + bisect.bisect_left(range(2, n_ctx), True, key=holds_them)
    needed = protected_of(least)
    raise BudgetError(
        f"a KV budget of {budget} leaves {mean} entries per KV head, fewer than {needed.n_sinks} "
        f"sinks and a recent window of {needed.recent_window}; the smallest budget that holds them "
        f"is {least} tokens ({bytes_of(least)} bytes)"
    )


def _share(
    policy: Policy,
    profile: EntropyProfile | None,
    mean: int,
    n_ctx: int,
    floor: int,
    per_page: list[int],
    limits: list[int],
) -> list[int]:
    """Return the budget of every KV head in entries, layer by layer; raises ProfileError if the
    policy needs loss curves and there are none.
    """
    if not policy.rule.by_curves:
        by_entropy = policy.rule is BudgetRule.PROFILE_ENTROPY
        weights = weights_of(profile) if by_entropy and profile else []
        return _core.share_budget(mean, n_ctx, floor, per_page, weights, limits)
    if profile is None or profile.curves is None:
        missing = "a profile" if profile is None else "loss curves, which the profile does not have"
        raise ProfileError(
            f"policy {policy.name} needs {missing}; make a profile with them by `entropykv "
            "calibrate` and give it with --entropy-config (entropy_config)"
        )
    if mean >= n_ctx:
        return limits
    return shares_by_curves(profile.curves, mean, n_ctx, floor, per_page, limits)


def shares_by_curves(
    curves: LossCurves,
    mean: int,
    n_ctx: int,
    floor: int,
    per_page: Sequence[int],
    limits: Sequence[int],
) -> list[int]:
    """Return the budgets in entries of every KV head, layer by layer, with which a text of n_ctx
    tokens loses least by the loss curves of a profile.

    No KV head gets more than its limit; what one cannot use goes to the others.
    """
    knots, losses = curves.knots(n_ctx, n_ctx - floor)
    return _core.share_by_curves(mean, n_ctx, floor, per_page, knots, losses, limits)
