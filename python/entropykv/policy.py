"""Policies: what the names given to `--policy` mean."""

from __future__ import annotations

from dataclasses import dataclass

from entropykv._core import ScoreKind
from entropykv.errors import SettingsError

ENTROPY_CLAMP = (0.3, 2.5)
"""Limits of entropy / mean entropy in a head's budget, as in the BitNet document."""


@dataclass(frozen=True)
class Policy:
    """How budgets are shared and which entries are kept."""

    name: str
    summary: str
    score: ScoreKind
    flat: bool = False
    """The flat store can follow it: it needs no choice of its own per head."""
    by_entropy: bool = False
    """Budgets per KV head follow an entropy profile."""
    by_curves: bool = False
    """Budgets per KV head follow the loss curves of an entropy profile."""
    observation_window: int = 512
    """Queries at the end of a micro-batch that score, in tokens."""
    mass_decay: float = 0.998
    """What is left of an entry's importance after one more token; 0: only the last batch counts."""


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("streaming", "sinks and the most recent tokens", ScoreKind.streaming, flat=True),
        Policy(
            "recency",
            "the BitNet document's position score: exponential decay, a bonus for the newest tenth",
            ScoreKind.recency,
            flat=True,
        ),
        Policy(
            "uniform",
            "the same budget for every KV head, each keeping what gets most attention",
            ScoreKind.mass,
        ),
        Policy(
            "entropy",
            "budgets per KV head from an entropy profile, each keeping what gets most attention",
            ScoreKind.mass,
            by_entropy=True,
        ),
        Policy(
            "profile",
            "budgets per KV head that lose least by the profile's loss curves, each keeping what "
            "gets most attention",
            ScoreKind.mass,
            by_curves=True,
        ),
    )
}


def policy_named(name: str | None, *, has_profile: bool, store: str) -> Policy:
    """Return the policy of that name, or the default: recency for the flat store, else by mass.

    Without a name, a profile selects `entropy`. Raises SettingsError for a name that does not
    exist or that the store cannot follow.
    """
    if name is None:
        name = "recency" if store == "flat" else "entropy" if has_profile else "uniform"
    if name not in POLICIES:
        raise SettingsError(f"policy cannot be {name!r}; use one of {', '.join(POLICIES)}")
    policy = POLICIES[name]
    if store == "flat" and not policy.flat:
        possible = " or ".join(p.name for p in POLICIES.values() if p.flat)
        raise SettingsError(
            f"the flat store keeps the same tokens for every head and cannot follow policy {name}; "
            f"use --policy {possible}, or --store headwise"
        )
    return policy
