"""Plan the memory of a model under a budget from the header of its file alone: `entropykv plan`."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from entropykv import _core
from entropykv.errors import BudgetError, ModelFileError
from entropykv.llamacpp.model import offloaded_layers
from entropykv.model.geometry import read_geometry
from entropykv.policy.plan import FlatPlan, HeadwisePlan, attention_layers, by_layer
from entropykv.policy.policy import BudgetRule
from entropykv.policy.resolved_config import ResolvedConfig, config_for
from entropykv.profile.find import check_model
from entropykv.session.stats import mib
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.options import KV_PARTS
from entropykv.system import available_memory

_Q8_0_BITS = 8.5  # 32 values of 8 bits, and their f16 scale.


@dataclass(frozen=True)
class MemoryPlan:
    """Hold bytes of weights and KV cache, for the full cache and for the budget."""

    config: ResolvedConfig
    """The resolved settings, equal to those of a session that is opened with the same options."""
    plan: HeadwisePlan | FlatPlan
    """The plan of each conversation; in a shared pool, of an equal part."""

    @property
    def n_sequences(self) -> int:
        """Return how many conversations share the budget."""
        return self.config.options.n_sequences or 1

    @property
    def budgets_may_change(self) -> bool:
        """Tell whether a text, or its length alone, may change the budgets of KV heads."""
        plan, config = self.plan, self.config
        follows = config.store == "headwise" and config.policy.rule is not BudgetRule.EQUAL
        return follows and isinstance(plan, HeadwisePlan) and not plan.holds_all

    @property
    def budgets(self) -> list[list[int]]:
        """Return the entries that every KV head may keep before a text is read, as [layer][KV head]
        of the layers with attention.
        """
        config = self.config
        if isinstance(self.plan, HeadwisePlan):
            of_heads = self.plan.budgets
            # These budgets begin to follow a text when the bytes can no longer hold all of it.
            if config.policy.rule.by_losses and not (config.freezing or self.plan.holds_all):
                layers = attention_layers(config.geometry)
                of_heads = tuple(by_layer(self.plan.entries_of_whole_texts, layers))
            return [list(layer) for layer in of_heads]
        return [[self.plan.entries] * n for n in self.config.geometry.kv_heads_per_layer if n]

    @property
    def mean_entries(self) -> int:
        """Return the entries of a KV head that the budget asks for, on average. What KV heads may
        keep, in whole pages, is in `budgets`.
        """
        plan = self.plan
        return plan.mean_entries if isinstance(plan, HeadwisePlan) else plan.entries

    @property
    def budget_bytes(self) -> int:
        """Return the bytes that the KV cache never exceeds, of all conversations together."""
        plan = self.plan
        if isinstance(plan, HeadwisePlan) and self.config.options.in_pool:
            return self.config.pool_pages() * plan.page_bytes
        return self.share_bytes

    @property
    def share_bytes(self) -> int:
        """Return the bytes that each conversation gets while all of them hold entries."""
        plan = self.plan
        if isinstance(plan, HeadwisePlan):
            return plan.pool_bytes
        return plan.cells * self.config.cell_bytes

    @property
    def kv_bytes_f16(self) -> int:
        """Return the bytes of the full cache in f16, of all conversations together."""
        return 2 * self._values

    @property
    def kv_bytes_q8_0(self) -> int:
        """Return the bytes of the full cache in q8_0, of all conversations together."""
        return int(self._values * _Q8_0_BITS / 8)

    @property
    def _values(self) -> int:
        layers = attention_layers(self.config.geometry)
        n_tokens = self.config.n_ctx * self.n_sequences
        return n_tokens * sum(s.n_head_kv * s.entry_values for s in layers)

    @property
    def bytes_by_place(self) -> dict[str, int]:
        """Return the bytes of the device store's rows, by "devices" and "main memory".

        The rows are for the entries of the budget and for one micro-batch in every layer, for each
        conversation of a pool. The result is empty for other stores. How llama.cpp splits layers
        among several devices is not known before the model is loaded.
        """
        if self.config.store != "device" or not isinstance(self.plan, HeadwisePlan):
            return {}
        config, geometry = self.config, self.config.geometry
        offloaded = offloaded_layers(config.options.n_gpu_layers)
        # llama.cpp counts the output as one more layer, the first one that goes to a device.
        first = 0 if offloaded < 0 else max(0, geometry.n_layer + 1 - offloaded)
        numbers = [i for i, n in enumerate(geometry.kv_heads_per_layer) if n > 0]
        places = {"devices": 0, "main memory": 0}
        layers = zip(numbers, attention_layers(geometry), self.plan.budgets, strict=True)
        # Rows of neighbouring layers of one shape lie one after another.
        for (on_device, _, _), run in itertools.groupby(
            layers, lambda layer: (layer[0] >= first, layer[1].k_dim, layer[1].v_dim)
        ):
            _, shapes, budgets = zip(*run, strict=True)
            rows = _core.device_rows(
                shapes[0], config.kv_type, budgets, config.n_ubatch, config.n_ctx, self.n_sequences
            )
            row_bytes = shapes[0].entry_values * (_Q8_0_BITS / 8 if config.kv_type == "q8_0" else 2)
            places["devices" if on_device else "main memory"] += int(rows * row_bytes)
        return places

    @property
    def saved_bytes(self) -> int:
        """Return the bytes that the budget saves, compared with the full f16 cache."""
        return self.kv_bytes_f16 - self.budget_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the object that --json prints: bytes, and budgets in entries as
        [layer][KV head].
        """
        geometry, protection = self.config.geometry, self.plan.protection
        return {
            "model": geometry.name or geometry.path.name,
            "architecture": geometry.architecture,
            **self.config.to_dict(),
            "weights_bytes": geometry.weights_bytes,
            "weight_types": dict(geometry.weight_types),
            "kv_bytes_f16": self.kv_bytes_f16,
            "kv_bytes_q8_0": self.kv_bytes_q8_0,
            "kv_bytes_budget": self.budget_bytes,
            "n_sequences": self.n_sequences,
            "kv_bytes_each": self.share_bytes,
            "saved_bytes": self.saved_bytes,
            "kv_bytes_by_place": self.bytes_by_place,
            "mean_entries": self.mean_entries,
            "sinks": protection.n_sinks,
            "recent_window": protection.recent_window,
            "budgets": self.budgets,
        }


def mean_of(budgets: Sequence[Sequence[int]]) -> int:
    """Return the entries that a KV head may keep on average, of budgets as [layer][KV head]."""
    entries = [each for layer in budgets for each in layer]
    return round(sum(entries) / max(len(entries), 1))


def make_plan(path: str | os.PathLike[str], options: CacheOptions) -> MemoryPlan:
    """Plan a budget as a session would; only the file's header, its profile and its learnt
    predictor are read.

    If `store` is auto, the plan is for the headwise store; only the model's graph tells whether it
    can serve the model. Raises ModelFileError for a file that cannot be read or a model without
    attention, ProfileError for a profile that cannot be read or is of another model, and the errors
    of resolve() and plan_headwise().
    """
    geometry = read_geometry(path)
    config = config_for(options, geometry)
    if config.profile is not None:
        check_model(config.profile, geometry)
    if not attention_layers(geometry):
        raise ModelFileError(
            f"{geometry.path}: the model has no attention layers, so there is no KV cache to plan; "
            "use a model with attention"
        )
    return _plan_of(config)


def _plan_of(config: ResolvedConfig) -> MemoryPlan:
    if config.store == "flat":
        return MemoryPlan(config, config.flat_plan())
    in_pool = config.options.in_pool
    return MemoryPlan(config, config.equal_share() if in_pool else config.headwise_plan())


def describe_budget(config: ResolvedConfig, budget_bytes: int, *, documents: bool = False) -> str:
    """Return in a few words what a budget means for a loaded model.

    `budget_bytes`: the bytes that the KV cache never exceeds, of all conversations together.
    `documents`: whether one of the sequences is no conversation, but reads documents.
    """
    n_sequences = config.options.n_sequences or 1
    n_conversations = n_sequences - documents
    size = mib(budget_bytes)
    if n_sequences > 1:
        size += f" for {n_conversations} conversation{'s' * (n_conversations > 1)}"
        size += " and the document that is read" * documents
    try:
        tokens = min(mean_of(_plan_of(config).budgets), config.n_ctx)
        size = f"{tokens:,} tokens per KV head{' for each' * (n_sequences > 1)} ({size})"
    except BudgetError:
        size += ", fewer at a time: it does not hold the sinks and recent windows of all"
    return f"context {config.n_ctx:,} tokens, budget {size}, policy {config.policy.name}"


def budget_warnings(config: ResolvedConfig, budget_bytes: int) -> Iterator[str]:
    """Yield a warning if the context exceeds the trained length and KV heads may keep more than 3/4
    of that on average, and one if main memory cannot hold a budget now. The latter is left out for
    the device store, and where the system does not say what is free.

    `budget_bytes`: the bytes that the KV cache never exceeds, of all conversations together.
    """
    trained = config.geometry.n_ctx_train
    if config.n_ctx > trained:
        with contextlib.suppress(BudgetError):
            mean = mean_of(_plan_of(config).budgets)
            if 4 * mean > 3 * trained:
                yield (
                    f"a KV head may keep {mean} entries, more than 3/4 of the {trained} tokens "
                    "that the model was trained for: beyond them, distances are no longer told "
                    f"apart; give --kv-budget {3 * trained // 4} or less"
                )
    free = available_memory()
    if config.store != "device" and free is not None and budget_bytes > free:
        yield (
            f"the KV budget may take {mib(budget_bytes)}, and {mib(free)} of memory are free; give "
            "a smaller --kv-budget"
        )


def format_plan(plan: MemoryPlan) -> str:
    """Return the plan as text for a terminal."""
    config, protection = plan.config, plan.plan.protection
    geometry, budget = config.geometry, config.options.budget
    types = ", ".join(f"{name} {mib(size)}" for name, size in geometry.weight_types[:3])
    share = plan.kv_bytes_f16 / (plan.kv_bytes_f16 + geometry.weights_bytes)
    lines = [
        f"{geometry.name or geometry.path.name} ({geometry.architecture}), context {config.n_ctx}"
        + _of_several(plan),
        f"  weights           {mib(geometry.weights_bytes):>12}   {types}",
        f"  KV cache, f16     {mib(plan.kv_bytes_f16):>12}   {share:.1%} of weights + KV cache",
        f"  KV cache, q8_0    {mib(plan.kv_bytes_q8_0):>12}",
        f"  KV budget {budget!s:<8}{mib(plan.budget_bytes):>12}   {config.kv_type}, "
        + ("for all conversations" if config.options.in_pool else _entries(plan)),
        *_line_of_each(plan),
        *_lines_of_places(plan),
        *_line_of_keys(config),
        f"  saved             {mib(plan.saved_bytes):>12}   "
        f"{plan.saved_bytes / plan.kv_bytes_f16:.1%} of the full f16 KV cache",
        f"  read at a time    {config.n_ubatch:>12} tokens of a prompt, by the {config.store} store"
        + _frozen(config),
        "",
        f"Entries per KV head, policy {config.policy.name} (each keeps {protection.n_sinks} "
        f"sinks and the {protection.recent_window} most recent"
        + (", at most half of its own budget)" if config.own_windows else ")")
        + (", before any text is read:" if plan.budgets_may_change else ":"),
        *_lines_of_layers(plan.budgets),
    ]
    return "\n".join(lines)


def _lines_of_layers(budgets: Sequence[Sequence[int]]) -> list[str]:
    """Return a table of the budgets of each layer's KV heads, or a line if all are equal."""
    each = {entries for layer in budgets for entries in layer}
    if len(each) == 1:
        return [f"  {each.pop()} in each of {len(budgets)} layers"]
    return [
        "  layer   mean    min    max",
        *(
            f"  {number:>5} {sum(layer) / len(layer):>6.0f} {min(layer):>6} {max(layer):>6}"
            for number, layer in enumerate(budgets)
        ),
    ]


def _of_several(plan: MemoryPlan) -> str:
    return f" for each of {plan.n_sequences} conversations" if plan.n_sequences > 1 else ""


def _entries(plan: MemoryPlan) -> str:
    return f"{mean_of(plan.budgets)} of {plan.config.n_ctx} entries per KV head on average"


def _line_of_each(plan: MemoryPlan) -> list[str]:
    """Return the line about each conversation's part of a shared pool; empty without a pool."""
    if not plan.config.options.in_pool:
        return []
    return [f"  for each          {mib(plan.share_bytes):>12}   {_entries(plan)}"]


def _lines_of_places(plan: MemoryPlan) -> list[str]:
    """Return a line for each place in which the device store has rows; empty for other stores."""
    return [
        f"  in {place:<15}{mib(size):>12}   with rows for one micro-batch in every layer"
        for place, size in plan.bytes_by_place.items()
        if size
    ]


def _line_of_keys(config: ResolvedConfig) -> list[str]:
    """Return the line that says how q8_0 holds keys with biases; empty for other keys."""
    if config.centres_keys:
        return [f"  keys {'':<26}without their biases, which would make q8_0 coarse"]
    if KV_PARTS[config.kv_type][0] == "q8_0" and config.geometry.key_biases:
        return [f"  keys {'':<26}with their biases, which make q8_0 coarse; f16 does not care"]
    return []


def _frozen(config: ResolvedConfig) -> str:
    freezing = config.freezing
    if freezing is None:
        return ""
    return f"; evicted entries are frozen ({freezing.where}, {freezing.kv_type})"
