"""Define a policy: how it shares a budget among the KV heads, and what ranks entries."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from entropykv.policy.importance import Importance
from entropykv.settings.own_policy import OwnPolicy


class BudgetRule(Enum):
    """Name the ways to share a budget among the KV heads."""

    EQUAL = auto()
    PROFILE_ENTROPY = auto()
    """Share by the entropies of a profile."""
    PROFILE_CURVES = auto()
    """Share by the loss curves of a profile."""
    LAYER_ENTROPY = auto()
    """Share per layer, in proportion to its mean entropy in this text."""
    LAYER_RANGE = auto()
    """Share per layer, between 8 for the lowest entropy and 128 for the highest, scaled."""
    LOSSES = auto()
    """Share by what heads lose in this text."""
    GUIDED = auto()
    """Share by what heads lose in this text and by the loss curves of a profile, equally."""
    OWN = auto()
    """Share by the weights of a user's object: see settings/own_policy.py."""
    OWN_BY_LAYER = auto()
    """Share by the weights of a user's object, with one choice for all heads of a layer."""

    @property
    def by_profile(self) -> bool:
        """Tell whether it needs an entropy profile."""
        return self is BudgetRule.PROFILE_ENTROPY or self.by_curves

    @property
    def by_curves(self) -> bool:
        """Tell whether it needs the loss curves of a profile."""
        return self in (BudgetRule.PROFILE_CURVES, BudgetRule.GUIDED)

    @property
    def by_layer(self) -> bool:
        """Tell whether all heads of a layer keep the same positions."""
        ours = (BudgetRule.LAYER_ENTROPY, BudgetRule.LAYER_RANGE, BudgetRule.OWN_BY_LAYER)
        return self in ours

    @property
    def by_text(self) -> bool:
        """Tell whether budgets change as a text is read."""
        return self.by_layer or self.by_losses

    @property
    def by_losses(self) -> bool:
        """Tell whether budgets follow what heads lose in this text."""
        return self in (BudgetRule.LOSSES, BudgetRule.GUIDED)


@dataclass(frozen=True)
class Policy:
    """Hold how a budget is shared, and which entries are kept."""

    name: str
    summary: str
    importance: Importance = field(default_factory=Importance)
    flat: bool = False
    """True if the flat store supports it, because heads need no choices of their own."""
    rule: BudgetRule = BudgetRule.EQUAL
    schedule: bool = False
    """True if entries below a threshold are frozen for some steps, whatever the budget."""
    own: OwnPolicy | None = None
    """The user's object that shares the budget; None for one of entropykv's policies."""
