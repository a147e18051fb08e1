"""`entropykv plan`: what a budget means for a model, from the header of its file alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from entropykv.errors import ModelFileError
from entropykv.model.geometry import ModelGeometry, read_geometry
from entropykv.policy.names import Policy, policy_named
from entropykv.policy.plan import HeadwisePlan, attention_layers, kv_type_for, plan_headwise
from entropykv.profile.belongs import check_model
from entropykv.session.profile import given_profile, profile_for
from entropykv.settings.options import Budget, Settings

_Q8_0_BITS = 8.5  # 32 values and their f16 scale


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of weights and KV cache, in full and inside a budget."""

    geometry: ModelGeometry
    n_ctx: int
    kv_type: str
    budget: Budget
    policy: Policy
    headwise: HeadwisePlan
    kv_bytes_f16: int
    kv_bytes_q8_0: int

    @property
    def saved_bytes(self) -> int:
        """What the budget saves against the full f16 cache."""
        return self.kv_bytes_f16 - self.headwise.pool_bytes

    def to_dict(self) -> dict[str, Any]:
        """For --json: bytes, and budgets in entries as [layer][KV head]."""
        return {
            "model": self.geometry.name or self.geometry.path.name,
            "architecture": self.geometry.architecture,
            "n_ctx": self.n_ctx,
            "kv_type": self.kv_type,
            "kv_budget": str(self.budget),
            "policy": self.policy.name,
            "weights_bytes": self.geometry.weights_bytes,
            "weight_types": dict(self.geometry.weight_types),
            "kv_bytes_f16": self.kv_bytes_f16,
            "kv_bytes_q8_0": self.kv_bytes_q8_0,
            "kv_bytes_budget": self.headwise.pool_bytes,
            "saved_bytes": self.saved_bytes,
            "mean_entries": self.headwise.mean_entries,
            "sinks": self.headwise.protection.n_sinks,
            "recent_window": self.headwise.protection.recent_window,
            "budgets": [list(layer) for layer in self.headwise.budgets],
        }


def make_plan(
    path: str | os.PathLike[str],
    *,
    n_ctx: int,
    kv_budget: Budget | str | float,
    policy: str,
    kv_type: str,
    entropy_config: str | os.PathLike[str] | None,
    n_sinks: int = 4,
    recent_window: int | None = None,
) -> MemoryPlan:
    """Plan a budget as a session would; nothing but the file's header is read.

    Raises ModelFileError, ProfileError, BudgetError, SettingsError.
    """
    settings = Settings(kv_type=kv_type, n_ctx=n_ctx, n_sinks=n_sinks, recent_window=recent_window)
    budget = Budget.parse(kv_budget)
    geometry = read_geometry(path)
    profile = profile_for(policy, geometry, given_profile(entropy_config))
    chosen = policy_named(policy, profile, "headwise")
    if profile is not None:
        check_model(profile, geometry)
    layers = attention_layers(geometry)
    if not layers:
        raise ModelFileError(
            f"{geometry.path}: the model has no attention layers, so there is no KV cache to plan; "
            "use a model with attention"
        )
    context = settings.n_ctx or geometry.n_ctx_train
    kv_type = kv_type_for(kv_type, budget, geometry, context)
    values = context * sum(s.n_head_kv * s.entry_values for s in layers)
    return MemoryPlan(
        geometry=geometry,
        n_ctx=context,
        kv_type=kv_type,
        budget=budget,
        policy=chosen,
        headwise=plan_headwise(
            budget, layers, context, kv_type, chosen, profile, n_sinks, recent_window
        ),
        kv_bytes_f16=2 * values,
        kv_bytes_q8_0=int(values * _Q8_0_BITS / 8),
    )


def format_plan(plan: MemoryPlan) -> str:
    """The plan as text for a terminal."""
    geometry, headwise = plan.geometry, plan.headwise
    types = ", ".join(f"{name} {_mib(size)}" for name, size in geometry.weight_types[:3])
    share = plan.kv_bytes_f16 / (plan.kv_bytes_f16 + geometry.weights_bytes)
    lines = [
        f"{geometry.name or geometry.path.name} ({geometry.architecture}), context {plan.n_ctx}",
        f"  weights           {_mib(geometry.weights_bytes):>12}   {types}",
        f"  KV cache, f16     {_mib(plan.kv_bytes_f16):>12}   {share:.1%} of weights + KV cache",
        f"  KV cache, q8_0    {_mib(plan.kv_bytes_q8_0):>12}",
        f"  KV budget {plan.budget!s:<8}{_mib(headwise.pool_bytes):>12}   {plan.kv_type}, "
        f"{headwise.mean_entries} of {plan.n_ctx} entries per KV head on average",
        f"  saved             {_mib(plan.saved_bytes):>12}   "
        f"{plan.saved_bytes / plan.kv_bytes_f16:.1%} of the full f16 KV cache",
        "",
        f"Entries per KV head, policy {plan.policy.name} (each keeps {headwise.protection.n_sinks} "
        f"sinks and the {headwise.protection.recent_window} most recent)"
        + (", before any text is read:" if plan.policy.rule.by_text else ":"),
        "  layer   mean    min    max",
    ]
    lines += [
        f"  {number:>5} {sum(layer) / len(layer):>6.0f} {min(layer):>6} {max(layer):>6}"
        for number, layer in enumerate(headwise.budgets)
    ]
    return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
