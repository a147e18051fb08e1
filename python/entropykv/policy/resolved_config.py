"""Resolve what was asked of the cache into what it means for a model: the ResolvedConfig.

`entropykv plan` prints what a session follows: both have it of resolve().
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from entropykv import _core
from entropykv.errors import BudgetError, SettingsError, UnsupportedModelError
from entropykv.llamacpp.positions import check_sinks, largest_micro_batch
from entropykv.model.geometry import ModelGeometry
from entropykv.policy.names import (
    AUTO,
    learns_predictor,
    policy_named,
    schedules,
)
from entropykv.policy.plan import (
    FlatPlan,
    HeadwisePlan,
    attention_layers,
    kv_type_for,
    own_windows,
    plan_flat,
    plan_headwise,
)
from entropykv.policy.policy import Policy
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.freezing import RECALL_MICRO_BATCH, Freezing, check_freezing
from entropykv.settings.options import Budget
from entropykv.settings.recovery import Recovery

Q8_0_BLOCK = 32
"""Values that share a scale in llama.cpp's own cache, in blocks within one head."""
_Q8_0_BLOCK_BYTES = 34


@dataclass(frozen=True)
class ResolvedConfig:
    """Hold how a session runs a model: the options, and what follows from them before it reads.

    Nothing of it changes while the session lasts but the budget, which resize() changes.
    """

    options: CacheOptions
    """What was asked for."""
    geometry: ModelGeometry
    store: Literal["headwise", "flat"]
    fallback: str | None
    """Why the flat store serves the model where either might; None where it does not."""
    policy: Policy
    profile: EntropyProfile | None
    """The profile that the policy shares the budget by, if there is one."""
    freezing: Freezing | None
    """How entries freeze, with the type of frozen ones; None: nothing is frozen."""
    kv_type: str
    n_ctx: int
    n_ubatch: int
    """The most tokens of text in a micro-batch."""

    @property
    def own_windows(self) -> bool:
        """Tell whether the recent window of a KV head follows its own budget: see own_windows()."""
        return own_windows(self.policy, self.options.recent_window)

    @property
    def variation(self) -> float:
        """Return the variation of the profile's entropies, for position scores; 0 without one."""
        return self.profile.coefficient_of_variation if self.profile else 0.0

    @property
    def learns_predictor(self) -> bool:
        """Tell whether the first texts are read twice, to fit a predictor that nobody has yet."""
        return learns_predictor(self.policy, self.profile)

    @property
    def reads_twice(self) -> bool:
        """Tell whether the text that the budget does not hold is read twice, or its beginning."""
        return self.policy.importance.repeats or self.learns_predictor

    def headwise_plan(
        self,
        budget: Budget | None = None,
        layers: Sequence[_core.LayerShape] | None = None,
        longest: int | None = None,
    ) -> HeadwisePlan:
        """Return what a budget means for every KV head; raises BudgetError if it is too small.

        `budget` None: the one that was asked for. `layers`: the attention layers that were found in
        the model's graph; None: by the file's header, which says nothing of windows. `longest`: how
        long the text may get; None: as long as the context.
        """
        return plan_headwise(
            self.options.budget if budget is None else budget,
            attention_layers(self.geometry) if layers is None else layers,
            self.n_ctx if longest is None else min(longest, self.n_ctx),
            self.kv_type,
            self.policy,
            self.profile,
            self.options.n_sinks,
            self.options.recent_window,
        )

    def pool_pages(
        self, budget: Budget | None = None, layers: Sequence[_core.LayerShape] | None = None
    ) -> int:
        """Return the pages of a pool for `n_sequences` conversations, at most what they can use.

        A fraction is that of what all of them would take, each with a whole context; tokens and
        bytes are those of all together. Raises BudgetError as headwise_plan().
        """
        budget = self.options.budget if budget is None else budget
        n_sequences = self.options.n_sequences or 1
        plan = self.headwise_plan(budget, layers)
        if budget.kind == "fraction":
            return n_sequences * plan.pool_pages
        most = n_sequences * self.headwise_plan(Budget("fraction", 1.0), layers).pool_pages
        if budget.kind == "bytes":
            return min(most, int(budget.value) // plan.page_bytes)
        if budget.value <= self.n_ctx:
            return plan.pool_pages
        tokens = min(int(budget.value), n_sequences * self.n_ctx)
        return min(most, sum(_core.pages_for(tokens, n) for n in plan.entries_per_page))

    def equal_share(
        self, budget: Budget | None = None, layers: Sequence[_core.LayerShape] | None = None
    ) -> HeadwisePlan:
        """Return what each conversation of a pool gets while all of them hold entries.

        Raises BudgetError where an equal part does not hold sinks and recent window: then fewer
        conversations hold entries at a time.
        """
        n_sequences = self.options.n_sequences or 1
        pages = self.pool_pages(budget, layers) // n_sequences
        page_bytes = self.headwise_plan(Budget("fraction", 1.0), layers).page_bytes
        try:
            return self.headwise_plan(Budget("bytes", max(1, pages * page_bytes)), layers)
        except BudgetError as error:
            raise BudgetError(
                f"of a KV budget of {budget or self.options.budget}, {n_sequences} conversations "
                f"at a time would get too little: {error} for each"
            ) from None

    @property
    def cell_bytes(self) -> int:
        """Return the bytes of a token in llama.cpp's own cache, all layers together."""
        values = self.geometry.cached_values
        return values * _Q8_0_BLOCK_BYTES // Q8_0_BLOCK if self.kv_type == "q8_0" else 2 * values

    def flat_plan(self, budget: Budget | None = None) -> FlatPlan:
        """Return what a budget means for llama.cpp's cache; raises as headwise_plan()."""
        return plan_flat(
            self.options.budget if budget is None else budget,
            self.cell_bytes,
            self.n_ctx,
            self.n_ubatch,
            self.options.n_sinks,
            self.options.recent_window,
        )

    def on_flat_store(self, why: str) -> ResolvedConfig:
        """Return the config for the flat store, where the headwise one cannot serve the model.

        UnsupportedModelError, which begins with `why`, where entries are to be frozen.
        """
        if self.freezing:
            raise UnsupportedModelError(
                f"{why}; the flat store cannot freeze: use it without --freeze (freeze=) and "
                "without policy rolling-freeze"
            )
        return resolve(self.options, self.geometry, self.profile, flat_because=why)

    def without_prediction(self) -> ResolvedConfig:
        """Return the config for a model whose keys before RoPE are not known.

        Another one for policy `auto` alone: a measure that was asked for by name stays.
        """
        if self.options.policy != AUTO or not self.policy.importance.predicts:
            return self
        return resolve(self.options, self.geometry, self.profile, predictable=False)

    def check_recovery(self, recovery: Recovery | None) -> None:
        """Raise SettingsError for a ladder that has nothing to restore, or goes back too far."""
        if recovery is None:
            return
        if not self.freezing:
            raise SettingsError(
                "recovery restores what is frozen, and nothing is; use --freeze ram or --policy "
                "freeze (freeze=), or leave recovery out"
            )
        if recovery.held_back and self.geometry.recurrent:
            raise SettingsError(
                f"{self.geometry.name}: recovery that generates tokens again goes back, which "
                "recurrent layers cannot; use recovery without its last rung, or none"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return what follows from the options, as names and numbers."""
        return {
            "n_ctx": self.n_ctx,
            "n_ubatch": self.n_ubatch,
            "store": self.store,
            "kv_type": self.kv_type,
            "kv_budget": str(self.options.budget),
            "policy": self.policy.name,
            "entropy_profile": self.profile is not None,
            "freeze": None if self.freezing is None else self.freezing.where,
            "freeze_type": None if self.freezing is None else self.freezing.kv_type,
        }


def resolve(
    options: CacheOptions,
    geometry: ModelGeometry,
    profile: EntropyProfile | None,
    *,
    flat_because: str | None = None,
    predictable: bool = True,
) -> ResolvedConfig:
    """Say what options mean for a model, before anything of it is loaded but the file's header.

    It reads nothing: session/asked.py finds the profile, which is None if the policy takes none or
    there is none. `flat_because`: why the flat store must serve the model, although headwise or
    auto was asked for. `predictable`: the model's keys before RoPE are known, which only its graph
    can tell. Raises SettingsError for options that do not go together or that the model or its
    store cannot follow, and ContextError for too many sinks.
    """
    flat = options.store == "flat" or flat_because is not None
    if flat and options.in_pool:
        raise UnsupportedModelError(
            f"{geometry.name}: the flat store holds one conversation, and no pool; use "
            "--store headwise (store='headwise'), or a Session"
        )
    freezing = options.freezing or (Freezing() if schedules(options.policy) else None)
    policy = policy_named(
        options.policy,
        profile,
        "flat" if flat else "headwise",
        freezes=freezing is not None,
        recurrent=geometry.recurrent,
        predictable=predictable,
    )
    check_freezing(freezing, options.store, options.kv_type)
    n_ctx = options.n_ctx or geometry.n_ctx_train
    check_sinks(options.n_sinks, n_ctx, geometry.n_ctx_train)
    kv_type = kv_type_for(
        options.kv_type, options.budget, geometry, n_ctx * (options.n_sequences or 1)
    )
    if flat:
        kv_type = _flat_kv_type(options.kv_type, kv_type, geometry)
    if freezing is not None:
        freezing = replace(freezing, kv_type=freezing.type_for(kv_type))
    config = ResolvedConfig(
        options=options,
        geometry=geometry,
        store="flat" if flat else "headwise",
        fallback=flat_because,
        policy=policy,
        profile=profile,
        freezing=freezing,
        kv_type=kv_type,
        n_ctx=n_ctx,
        n_ubatch=_largest_micro_batch(options, geometry, n_ctx, policy, freezing),
    )
    config.check_recovery(options.recovery)
    return config


def _largest_micro_batch(
    options: CacheOptions,
    geometry: ModelGeometry,
    n_ctx: int,
    policy: Policy,
    freezing: Freezing | None,
) -> int:
    """Return the most tokens of a micro-batch; few where recall looks for frozen entries.

    Not with echoes: they find what is needed before anything is frozen.
    """
    n_ubatch = options.micro_batch
    recalls = freezing is not None and freezing.recall_interval > 0
    if recalls and not policy.importance.repeats:
        n_ubatch = min(n_ubatch, RECALL_MICRO_BATCH)
    return largest_micro_batch(n_ubatch, n_ctx, geometry.n_ctx_train)


def _flat_kv_type(asked: str, chosen: str, geometry: ModelGeometry) -> str:
    """Return the type of llama.cpp's cache: f16 where heads do not fill the blocks of `auto`'s.

    SettingsError where such a type was asked for.
    """
    sizes = (geometry.head_dim_k, geometry.head_dim_v, *geometry.window_head_dims)
    odd = [size for size in sizes if size % Q8_0_BLOCK]
    if chosen == "f16" or not odd:
        return chosen
    if asked == "auto":
        return "f16"
    raise SettingsError(
        f"{geometry.name}: the flat store cannot hold {chosen}, whose blocks have {Q8_0_BLOCK} "
        f"values, with heads of {odd[0]}; use --kv-type f16 (kv_type='f16')"
    )
