"""Gather what a user asks for in CacheOptions, and resolve it for a model: into a ResolvedConfig.

Both a session and `entropykv plan` call resolve(), so that the plan shows what a session does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from entropykv import _core
from entropykv.errors import BudgetError, SettingsError, UnsupportedModelError
from entropykv.llamacpp.positions import check_sinks, largest_micro_batch
from entropykv.model.geometry import ModelGeometry
from entropykv.policy.plan import (
    FlatPlan,
    HeadwisePlan,
    attention_layers,
    kv_type_for,
    own_windows,
    plan_flat,
    plan_headwise,
)
from entropykv.policy.policy import (
    AUTO,
    Policy,
    learns_predictor,
    may_predict,
    policy_named,
    predictor_of,
    schedules,
    takes_profile,
)
from entropykv.profile.find import find_profile, given_profile, other_file
from entropykv.profile.learnt import LearntPredictor, find_learnt
from entropykv.profile.predictor import ScorePredictor
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.freezing import (
    RAM,
    RECALL_END,
    RECALL_MICRO_BATCHES,
    RUNGS,
    Freezing,
    Recovery,
    check_freezing,
)
from entropykv.settings.options import KV_PARTS, Budget, declared, of_group


def cache_options_of(
    options: Any, *, rungs: Sequence[str] = tuple(RUNGS), **others: Any
) -> CacheOptions:
    """Return the cache options that options of the command line or of the server ask for.

    Fields of CacheOptions that have the same name in `options` are read from there; `others` are
    the fields with other names, and those of a pool. `rungs`: the rungs of the recovery ladder that
    may be asked for. Raises SettingsError for invalid values and combinations.
    """
    alike = {
        field: getattr(options, each.name)
        for field, each in declared(CacheOptions).items()
        if each.name == each.server_name and each.group != "pool"
        if getattr(options, each.name, None) is not None
    }
    ladder = {"freeze": freezing_of(options), "recovery": recovery_of(options, rungs)}
    return CacheOptions(**{**alike, **ladder, **others})


def freezing_of(options: Any) -> Freezing | None:
    """Return the settings of freezing that options of the command line or of the server ask for;
    None if nothing is to be frozen.

    `options.policy` may be a list. Raises SettingsError for invalid options, and for options that
    would have no effect.
    """
    policies = [options.policy] if isinstance(options.policy, str) else options.policy
    given = _given(Freezing, options)
    always = all(map(schedules, policies))
    if options.freeze is None and given and not always:
        raise SettingsError(
            f"{_flag(given)} is of no use where nothing is frozen; give --freeze ram or --freeze "
            "disk:DIR, too"
        )
    useless = [name for name in given if name in of_group(Freezing, "schedule")]
    if useless and not any(map(schedules, policies)):
        raise SettingsError(
            f"{_flag(useless)} belongs to --policy rolling-freeze; use that policy, or leave it out"
        )
    if "recall_prompt" in given and (always or given.get("recall_interval") == 0):
        raise SettingsError(
            "--recall-prompt is of no use with --policy rolling-freeze, which brings entries back "
            "by its schedule, and with --recall-interval 0, which brings none back; leave it out"
        )
    if options.freeze is None and not always:
        return None
    where = RAM if options.freeze is None else options.freeze
    return Freezing(where, **given)


def recovery_of(options: Any, rungs: Sequence[str] = tuple(RUNGS)) -> Recovery | None:
    """Return the recovery ladder that the options ask for, or None; raises SettingsError for
    invalid options, and for options of a ladder without one.

    `rungs` are those that may be asked for; without the last one, options of a rewalk do not exist.
    """
    given = _given(Recovery, options)
    if options.recovery is None:
        if given:
            choices = f"{', '.join(rungs[:-1])} or {rungs[-1]}"
            raise SettingsError(f"nothing is watched; give --recovery {choices}")
        return None
    return Recovery(highest=RUNGS[options.recovery], **given)


def _given(kind: type[Freezing | Recovery], options: Any) -> dict[str, Any]:
    """Return the values that `options` have for fields of a dataclass, by the names of the fields,
    without None.
    """
    values = {
        field: getattr(options, each.name, None)
        for field, each in declared(kind).items()
        if each.flags
    }
    return {field: value for field, value in values.items() if value is not None}


def _flag(fields: Iterable[str]) -> str:
    """Return the command line option that comes first in the alphabet among those of these fields
    of Freezing.
    """
    return min(declared(Freezing)[field].flags[0] for field in fields)


_MOST_HALVES = 0.075
"""The largest fraction of the bytes of weights that may be F16 where drafts are read without being
asked for, if llama.cpp computes their products: a token read with drafts gets other bits there than
alone.
"""


def products_are_ours(weight_types: Iterable[tuple[str, int]], kernels: Sequence[str]) -> bool:
    """Tell whether llama.cpp computes hardly any products of F16 weights, where a token that is
    read with drafts gets other bits than a token alone.

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
    and device stores, where attention to several tokens has other bits than that to one; and, for a
    session without a pool, where products have other bits, too: see products_are_ours(). Raises
    SettingsError if guessing by name or with a draft model is asked for where it is not possible.
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


Q8_0_BLOCK = 32
"""The number of values that share a scale in llama.cpp's own cache; a block never spans
two heads.
"""
_Q8_0_BLOCK_BYTES = 34


@dataclass(frozen=True)
class ResolvedConfig:
    """Hold how a session runs a model: the options, and everything that follows from them before
    any token is read.

    It does not change during a session, also not when resize() gives the session another budget.
    """

    options: CacheOptions
    """The options that were given."""
    geometry: ModelGeometry
    store: Literal["headwise", "device", "flat"]
    fallback: str | None
    """Why `auto` has chosen the device or the flat store instead of the headwise one; None
    otherwise.
    """
    policy: Policy
    profile: EntropyProfile | None
    """The profile that the policy uses to share the budget or to rank entries; None if it uses
    none.
    """
    learnt: LearntPredictor | None
    """The predictor that earlier processes have learnt of the model, if it is used."""
    freezing: Freezing | None
    """How evicted entries are frozen; None: they are dropped."""
    kv_type: str
    n_ctx: int
    n_ubatch: int
    """The most tokens of text in a micro-batch."""
    recall_micro_batch: int
    """The most tokens of text in a micro-batch at the end of a prompt, or if all logits are wanted:
    fewer if frozen entries are searched.
    """
    recall_end: int
    """How many of the last tokens of a prompt count as its end, which is read in micro-batches of
    at most recall_micro_batch tokens.
    """
    spec_type: str
    """How tokens are guessed ahead: none, ngram or draft."""
    n_drafts: int
    """How many drafts a sequence may have in a micro-batch."""

    @property
    def own_windows(self) -> bool:
        """Tell whether sinks and recent window take at most half of each KV head's own budget: see
        own_windows() in policy/plan.py. Where entries are frozen, all windows are equal.
        """
        return self.freezing is None and own_windows(self.policy, self.options.recent_window)

    @property
    def centres_keys(self) -> bool:
        """Tell whether the headwise store keeps keys without what the model's biases contribute to
        nearly all of them, because large biases would make q8_0 coarse.

        It does not with measure `products`, which needs the products of queries with unchanged
        keys.
        """
        return (
            self.store == "headwise"
            and KV_PARTS[self.kv_type][0] == "q8_0"
            and self.geometry.key_biases
            and self.policy.importance.measure != "products"
        )

    @property
    def recalls_before_end(self) -> bool:
        """Tell whether frozen entries, if there are any, are also searched before the end of a
        prompt.
        """
        return self.freezing is None or self.freezing.recall_prompt is None

    @property
    def predictor(self) -> ScorePredictor | None:
        """Return the predictor of new entries' scores: the profile's, or else the learnt one; None
        if none is known, or if the policy predicts nothing.
        """
        return predictor_of(self.profile, self.learnt) if self.policy.importance.predicts else None

    @property
    def learns_predictor(self) -> bool:
        """Tell whether the first texts are read twice to learn a predictor, because none is known
        yet, or not from enough text.
        """
        return learns_predictor(self.policy, self.profile, self.learnt)

    @property
    def untaught(self) -> str | None:
        """Return how policy `auto` could rank entries better on a device, where no predictor is
        learnt; None if it has one, with freezing, and for other policies and stores.
        """
        by_itself = self.store == "device" and self.options.policy == AUTO and self.freezing is None
        if not by_itself or predictor_of(self.profile, self.learnt) is not None:
            return None
        teacher = "One long text read on the CPU (-ngl 0), or " if self.options.learns else ""
        return (
            "nothing is known of what this model looks up, and no text teaches it on a device: "
            f"entries are ranked by the last queries alone. {teacher}`entropykv calibrate` "
            "teaches it for all later runs"
        )

    @property
    def reads_twice(self) -> bool:
        """Tell whether texts that the budget cannot hold are read twice, in full or until a
        predictor is learnt.
        """
        return self.policy.importance.repeats or self.learns_predictor

    def headwise_plan(
        self,
        budget: Budget | None = None,
        layers: Sequence[_core.LayerShape] | None = None,
        longest: int | None = None,
    ) -> HeadwisePlan:
        """Return what a budget means for every KV head; raises as plan_headwise() does.

        `budget` None: the one of the options. `layers`: the attention layers found in the model's
        graph; None: those of the file's header, which does not contain windows. `longest`: the
        longest possible text in tokens; None: the context.
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
        """Return how many pages a pool of `options.n_sequences` conversations has, at most as many
        as the conversations can use.

        A budget that is a fraction refers to all conversations with full contexts; a budget in
        tokens or bytes is for all conversations together. Arguments and errors are those of
        headwise_plan().
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
        """Return what each conversation of a pool gets while all of them hold entries; arguments
        and errors are those of headwise_plan().

        BudgetError also says that an equal share cannot hold sinks and recent window; then only
        fewer conversations can hold entries at a time.
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
        """Return the bytes of one token in llama.cpp's own cache, for all layers together."""
        values = self.geometry.cached_values
        return values * _Q8_0_BLOCK_BYTES // Q8_0_BLOCK if self.kv_type == "q8_0" else 2 * values

    def flat_plan(self, budget: Budget | None = None) -> FlatPlan:
        """Return what a budget means for llama.cpp's own cache; raises as plan_flat() does."""
        return plan_flat(
            self.options.budget if budget is None else budget,
            self.cell_bytes,
            self.n_ctx,
            self.n_ubatch,
            self.options.n_sinks,
            self.options.recent_window,
        )

    def on_flat_store(self, why: str) -> ResolvedConfig:
        """Return the config for the flat store, after the headwise one could not serve the model.
        `why`: the reason.

        Raises UnsupportedModelError, with a message that begins with `why`, if entries are to be
        frozen, and the errors of resolve().
        """
        if self.freezing:
            raise UnsupportedModelError(
                f"{why}; the flat store cannot freeze: use it without --freeze (freeze=) and "
                "without policy rolling-freeze"
            )
        return self._resolved_again(instead=("flat", why))

    def on_device_store(self, why: str) -> ResolvedConfig:
        """Return the config for the device store. `why`: why that store is tried instead of the
        headwise one.

        Raises SettingsError and UnsupportedModelError for options that it does not support.
        """
        return self._resolved_again(instead=("device", why))

    def without_prediction(self) -> ResolvedConfig:
        """Return the config for a model whose keys before RoPE are not known.

        Only policy `auto` gets another measure; one that was requested by name is kept.
        """
        if self.options.policy != AUTO or not self.policy.importance.predicts:
            return self
        instead: tuple[Literal["device", "flat"], str] | None = None
        if self.store == "device" and self.fallback is not None:
            instead = ("device", self.fallback)
        return self._resolved_again(instead=instead, predictable=False)

    def without_learnt(self) -> ResolvedConfig:
        """Return the config without the learnt predictor, because it does not fit the model."""
        instead: tuple[Literal["device", "flat"], str] | None = None
        if self.store != "headwise" and self.fallback is not None:
            instead = (self.store, self.fallback)
        return resolve(self.options, self.geometry, self.profile, instead=instead)

    def _resolved_again(
        self,
        *,
        instead: tuple[Literal["device", "flat"], str] | None,
        predictable: bool = True,
    ) -> ResolvedConfig:
        return resolve(
            self.options,
            self.geometry,
            self.profile,
            self.learnt,
            instead=instead,
            predictable=predictable,
        )

    def other_file(self) -> str | None:
        """Return a note if the profile was made with another file of the model's shape; else
        None.
        """
        return None if self.profile is None else other_file(self.profile, self.geometry)

    def check_recovery(self, recovery: Recovery | None) -> None:
        """Raise SettingsError for a recovery ladder if nothing is frozen, and for one that writes
        tokens again if the model has recurrent layers.
        """
        if recovery is None:
            return
        if not self.freezing:
            raise SettingsError(
                "recovery restores what is frozen, and nothing is; use --freeze ram or --policy "
                "rolling-freeze (freeze=), or leave recovery out"
            )
        if recovery.held_back and self.geometry.recurrent:
            raise SettingsError(
                f"{self.geometry.name}: recovery that generates tokens again goes back, which "
                "recurrent layers cannot; use recovery without its last rung, or none"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved values by name, for JSON."""
        return {
            "n_ctx": self.n_ctx,
            "n_ubatch": self.n_ubatch,
            "store": self.store,
            "kv_type": self.kv_type,
            "centres_keys": self.centres_keys,
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
    learnt: LearntPredictor | None = None,
    *,
    instead: tuple[Literal["device", "flat"], str] | None = None,
    predictable: bool = True,
) -> ResolvedConfig:
    """Resolve options for a model of which only the file's header is read.

    Opens no files: the caller finds the profile and the learnt predictor, which are None if the
    policy uses none or there is none. `instead`: the store that serves the model although headwise
    or auto was requested, and why. `predictable`: whether the model's keys before RoPE are known,
    which only its graph can tell. Raises SettingsError for options that contradict each other or
    that the model or its store does not support, UnsupportedModelError for the flat store in a
    pool, and ContextError for too many sinks.
    """
    asked = options.store if instead is None else instead[0]
    store: Literal["headwise", "device", "flat"] = (
        "device" if asked == "device" else "flat" if asked == "flat" else "headwise"
    )
    if store == "flat" and options.in_pool:
        raise UnsupportedModelError(
            f"{geometry.name}: the flat store holds one conversation, and no pool; use "
            "--store headwise (store='headwise'), or a Session"
        )
    freezing = options.freezing or (Freezing() if schedules(options.policy) else None)
    policy = policy_named(
        options.policy,
        profile,
        store,
        freezes=freezing is not None,
        recurrent=geometry.recurrent,
        predictable=predictable,
        learnt=learnt,
    )
    check_freezing(freezing, options.store if store == "headwise" else store, options.kv_type)
    n_ctx = options.n_ctx or geometry.n_ctx_train
    check_sinks(options.n_sinks, n_ctx, geometry.n_ctx_train)
    kv_type = kv_type_for(
        options.kv_type, options.budget, geometry, n_ctx * (options.n_sequences or 1)
    )
    if store != "headwise":
        kv_type = _type_of_llama(options.kv_type, kv_type, geometry, store)
    if freezing is not None:
        freezing = replace(freezing, kv_type=freezing.type_for(kv_type))
    spec_type = spec_type_for(options, geometry, policy, freezing, store)
    n_ubatch, recall_micro_batch, recall_end = _micro_batches(
        largest_micro_batch(options.micro_batch, n_ctx, geometry.n_ctx_train),
        n_ctx,
        geometry,
        policy,
        freezing,
    )
    config = ResolvedConfig(
        options=options,
        geometry=geometry,
        store=store,
        fallback=None if instead is None else instead[1],
        policy=policy,
        profile=profile,
        learnt=learnt,
        freezing=freezing,
        kv_type=kv_type,
        n_ctx=n_ctx,
        n_ubatch=n_ubatch,
        recall_micro_batch=recall_micro_batch,
        recall_end=recall_end,
        spec_type=spec_type,
        n_drafts=0 if spec_type == "none" else options.draft_max,
    )
    config.check_recovery(options.recovery)
    return config


def config_for(options: CacheOptions, geometry: ModelGeometry) -> ResolvedConfig:
    """Read the profile that the policy takes, and resolve the options with it.

    It reads the profile that the options name, or else the profile of the model. If that has no
    predictor, the one that earlier processes have learnt is read. Raises the errors of resolve(),
    given_profile() and find_profile().
    """
    profile = given_profile(options.entropy_config)
    if profile is None and takes_profile(options.policy):
        profile = find_profile(geometry)
    learnt: LearntPredictor | None = None
    needs_predictor = profile is None or profile.predictor is None
    if needs_predictor and may_predict(options.policy) and options.learns:
        learnt = find_learnt(geometry)
    return resolve(options, geometry, profile, learnt)


def _micro_batches(
    n_ubatch: int, n_ctx: int, geometry: ModelGeometry, policy: Policy, freezing: Freezing | None
) -> tuple[int, int, int]:
    """Return n_ubatch, recall_micro_batch and recall_end of the config; `n_ubatch`: the most tokens
    that may be read at a time.

    A search considers the last RECALL_QUERIES queries of a KV head. If they are fewer than two
    thirds of a micro-batch, facts are lost (docs/background/freezing.md). A freeze schedule has one
    step for each micro-batch, so its micro-batches are small. With echoes, micro-batches stay
    large, because an echo finds the needed entries before anything is frozen.
    """
    if freezing is None or freezing.recall_interval == 0 or policy.importance.repeats:
        return n_ubatch, n_ubatch, n_ctx
    at_end, most = RECALL_MICRO_BATCHES
    small = min(n_ubatch, at_end)
    if policy.schedule:
        return small, small, n_ctx
    if freezing.recall_prompt is not None:
        return n_ubatch, small, freezing.recall_prompt
    groups = [layer.n_head // layer.n_head_kv for layer in attention_layers(geometry)]
    fitting = _core.RECALL_QUERIES * 3 // (2 * max(groups, default=1))
    return max(small, min(n_ubatch, most, fitting)), small, RECALL_END


def _type_of_llama(asked: str, chosen: str, geometry: ModelGeometry, store: str) -> str:
    """Return the KV type for a store whose K and V are tensors of ggml. `asked`: the type in the
    options; `chosen`: what that stands for.

    It is f16 if `auto` chose a type whose blocks heads do not fill. Raises SettingsError if the
    user asked for such a type, or for different types of K and V.
    """
    of_keys, of_values = KV_PARTS[chosen]
    if of_keys != of_values:
        raise SettingsError(
            f"{geometry.name}: the {store} store holds K and V in one type, not in {chosen}; use "
            f"--kv-type {of_keys} (kv_type={of_keys!r}), or --store headwise"
        )
    sizes = (geometry.head_dim_k, geometry.head_dim_v, *geometry.window_head_dims)
    odd = [size for size in sizes if size % Q8_0_BLOCK]
    if chosen == "f16" or not odd:
        return chosen
    if asked == "auto":
        return "f16"
    raise SettingsError(
        f"{geometry.name}: the {store} store cannot hold {chosen}, whose blocks have {Q8_0_BLOCK} "
        f"values, with heads of {odd[0]}; use --kv-type f16 (kv_type='f16')"
    )
