"""Let an object of the user's own, given as `policy=`, decide who keeps what: OwnPolicy."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from entropykv.errors import SettingsError
from entropykv.profile.profile import EntropyProfile

Floats = npt.NDArray[np.float64]
_NAME = re.compile(r"[a-z][a-z0-9-]{0,40}")


@dataclass(frozen=True)
class BudgetToShare:
    """Tell OwnPolicy.share() how much there is to share among the KV heads of a model."""

    n_ctx: int
    """The length of the longest text, in tokens."""
    mean_entries: int
    """Entries per KV head that the budget holds, on average."""
    floor_entries: int
    """Entries that every KV head gets at least: sinks, and the recent window."""
    heads_per_layer: tuple[int, ...]
    """How many KV heads each attention layer has."""
    limits: tuple[int, ...]
    """Entries that each KV head can use, all layers in order: all of the context, or a window."""
    profile: EntropyProfile | None
    """The profile that was given as `entropy_config`."""

    @property
    def n_kv_heads(self) -> int:
        """Return the number of KV heads of all layers."""
        return sum(self.heads_per_layer)


@dataclass(frozen=True)
class MicroBatchSeen:
    """Show OwnPolicy.observe() what a micro-batch of text has brought."""

    n_tokens: int
    """How many tokens it has."""
    heads_per_layer: tuple[int, ...]
    """How many KV heads each attention layer has."""
    entropies: Callable[[int], npt.NDArray[np.float32]]
    """entropies(layer) returns those of the attention rows in bits, (n_tokens, query heads)."""
    positions: Callable[[int, int], npt.NDArray[np.int32]]
    """positions(layer, kv_head) returns the entries that are kept now, ascending, (n,)."""
    importance: Callable[[int, int], npt.NDArray[np.float32]]
    """importance(layer, kv_head) returns what those entries are ranked by, (n,)."""


class OwnPolicy:
    """Derive from it, and give an object of your class as `policy=`.

    `name`: small letters, digits and hyphens; not one of entropykv's. `importance`: what entries of
    a KV head are ranked by, MEASURE[+MODIFIER...] as in `--policy`. `choice`: "head": each KV head
    keeps entries of its own; "layer": all KV heads of a layer keep the same, and have the same
    budget; then `importance` is one of the measures that policy layer takes.

    Every sequence has a copy of the object (copy.deepcopy), made before its text begins: what
    observe() notes in it is of that text alone. The headwise store follows it.
    """

    name: ClassVar[str]
    importance: ClassVar[str] = "mass+values"
    choice: ClassVar[Literal["head", "layer"]] = "head"

    def share(self, budget: BudgetToShare) -> Sequence[float] | Floats:
        """Return how much each KV head gets, relative to the others: 0 or more, (n_kv_heads,).

        All layers in order. Every head gets the floor; what is beyond it is shared in proportion,
        up to the heads' limits, in whole pages, so that the budget is never exceeded. It is called
        before a text begins, after observe(), and whenever the budget changes.
        """
        return np.ones(budget.n_kv_heads)

    def observe(self, seen: MicroBatchSeen) -> None:
        """Take in what a micro-batch has shown; share() is called after it. By default: nothing.

        Single tokens of an answer are not shown, unless micro-batches are that small.
        """

    def state(self) -> Floats:
        """Return what observe() has noted, as numbers that a saved session keeps: (n,)."""
        return np.empty(0)

    def load(self, state: Floats) -> None:
        """Go on from what state() of this class returned. Raise ValueError if it cannot be."""


def check_own_policy(policy: object, taken: Sequence[str]) -> OwnPolicy:
    """Return the policy; raises SettingsError where it is none, or has no name of its own."""
    if not isinstance(policy, OwnPolicy):
        raise SettingsError(
            f"policy cannot be {policy!r}; use the name of one, or an object of a class that is "
            "derived from entropykv.OwnPolicy"
        )
    name = getattr(policy, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in taken:
        raise SettingsError(
            f"the name of an own policy cannot be {name!r}; use small letters, digits and hyphens, "
            f"and none of {', '.join(taken)}"
        )
    if policy.choice not in ("head", "layer"):
        raise SettingsError(
            f"the choice of policy {name} cannot be {policy.choice!r}; use head or layer"
        )
    return policy


def checked_weights(policy: OwnPolicy, budget: BudgetToShare) -> list[float]:
    """Return what share() returns; raises SettingsError where that is no share for each KV head."""
    weights = np.asarray(policy.share(budget), np.float64)
    possible = weights.shape == (budget.n_kv_heads,) and np.isfinite(weights).all()
    if not possible or weights.min() < 0.0 or weights.max() == 0.0:
        raise SettingsError(
            f"policy {policy.name}: share() must return {budget.n_kv_heads} numbers of 0 or more, "
            "one for every KV head, and not all 0"
        )
    return list(weights / weights.max())
