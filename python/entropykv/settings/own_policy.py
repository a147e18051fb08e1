"""Let a user's own object, given as `policy=`, decide which entries are kept: OwnPolicy."""

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
    """Hold what OwnPolicy.share() can divide among the KV heads of a model."""

    n_ctx: int
    """The length of the longest possible text, in tokens."""
    mean_entries: int
    """How many entries per KV head the budget holds on average."""
    floor_entries: int
    """How many entries every KV head gets at least, unless its limit is lower."""
    heads_per_layer: tuple[int, ...]
    """How many KV heads each attention layer has."""
    limits: tuple[int, ...]
    """How many entries each KV head can use, in the order of layers: the whole context, or a
    window.
    """
    profile: EntropyProfile | None
    """The profile that was given as `entropy_config`, or None."""

    @property
    def n_kv_heads(self) -> int:
        """Return the number of KV heads of all layers."""
        return sum(self.heads_per_layer)


@dataclass(frozen=True)
class MicroBatchSeen:
    """Hold what OwnPolicy.observe() can see of a micro-batch."""

    n_tokens: int
    """How many tokens the micro-batch has."""
    heads_per_layer: tuple[int, ...]
    """How many KV heads each attention layer has."""
    entropies: Callable[[int], npt.NDArray[np.float32]]
    """entropies(layer) returns the entropies of attention rows in bits, (n_tokens, query heads)."""
    positions: Callable[[int, int], npt.NDArray[np.int32]]
    """positions(layer, kv_head) returns the positions of kept entries, ascending, (n,)."""
    importance: Callable[[int, int], npt.NDArray[np.float32]]
    """importance(layer, kv_head) returns the importance of the kept entries, in the order of their
    positions, (n,).
    """


class OwnPolicy:
    """Decide which entries are kept: derive a class, and give an object of it as `policy=`.

    `name`: small letters, digits and hyphens; not a name of entropykv's own. `importance`: the
    measure that ranks the entries of a KV head, MEASURE[+MODIFIER...] as in `--policy`. `choice`:
    "head": each KV head keeps entries of its own; "layer": all KV heads of a layer keep the same
    entries, and have the same budget; then `importance` must be a measure that policy layer
    supports.

    Every sequence has a copy of the object (copy.deepcopy), which is made before its text begins.
    Therefore whatever observe() records belongs to that text alone. Only the headwise store uses
    it.
    """

    name: ClassVar[str]
    importance: ClassVar[str] = "mass+values"
    choice: ClassVar[Literal["head", "layer"]] = "head"

    def share(self, budget: BudgetToShare) -> Sequence[float] | Floats:
        """Return the weight of each KV head, 0 or more, (n_kv_heads,).

        The order is by layer. Every head gets the floor; the entries beyond it are shared in
        proportion to the weights, up to the heads' limits, in whole pages, so that the budget is
        never exceeded. It is called before a text begins, after observe(), and whenever the budget
        changes.
        """
        return np.ones(budget.n_kv_heads)

    def observe(self, seen: MicroBatchSeen) -> None:
        """Record what a micro-batch shows, before share() is called again. By default, nothing is
        recorded.

        Single tokens of an answer are not passed, unless micro-batches are that small.
        """

    def state(self) -> Floats:
        """Return what observe() has recorded, as numbers for a saved session: (n,)."""
        return np.empty(0)

    def load(self, state: Floats) -> None:
        """Restore what state() of this class returned. Raise ValueError if it is invalid."""


def check_own_policy(policy: object, taken: Sequence[str]) -> OwnPolicy:
    """Return the policy; raises SettingsError if it is not an OwnPolicy, or has an impossible
    choice or name, such as one of those that are `taken`.
    """
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
    """Return the result of share(), divided by the largest weight; raises SettingsError if it is
    not one weight of 0 or more per KV head, or if all are 0.
    """
    weights = np.asarray(policy.share(budget), np.float64)
    possible = weights.shape == (budget.n_kv_heads,) and np.isfinite(weights).all()
    if not possible or weights.min() < 0.0 or weights.max() == 0.0:
        raise SettingsError(
            f"policy {policy.name}: share() must return {budget.n_kv_heads} numbers of 0 or more, "
            "one for every KV head, and not all 0"
        )
    return list(weights / weights.max())
