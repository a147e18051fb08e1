"""Define a policy: how a budget is shared among the KV heads, and by what entries are ranked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from entropykv import _core
from entropykv.errors import SettingsError
from entropykv.settings.own_policy import OwnPolicy

_ALL = {measure.name: measure for measure in _core.measures()}
"""The measures in the table of the extension, by their names: cpp/decide/importance.cpp."""

MEASURES = {name: measure.summary for name, measure in _ALL.items() if not measure.by_position}
"""The measures that can be chosen for a policy, each with a summary of what it gives to entries."""

MODIFIERS = {
    "values": "times the norm of the entry's value",
    "echo": "a text is read twice, and queries that repeat it count, too",
    "predicted": "what a repetition would give counts, too, predicted from key and value",
}

_OF_SHARES = ("mass", "attention")
"""The measures that are sums of shares of attention."""

_ECHO_DECAY = 0.9995
"""Where texts are read twice, at least this fraction of importance is left after one more token, so
that text that was repeated long ago is not forgotten.
"""


OBSERVED_ON_DEVICES = 64
"""How many of the last queries of a micro-batch the device store observes.

Measuring what all 512 queries give takes a device longer than attention itself. With fewer than 64,
and with 32 that are evenly spaced, continuations are further from those with a full cache.
"""

EXPECTED_LOOKUPS = 0.2
"""The weight of the attention predicted for later queries, relative to what the queries of the text
gave.

With a larger weight, more old facts are kept, but continuations are less close to those with a full
cache; the value was chosen on tuning texts.
"""

WINDOW_EIGHTHS = 4
"""How many eighths of the mean budget the recent window takes."""
WINDOW_EIGHTHS_WITH_LOOKUPS = 3
"""How many eighths of the mean budget the recent window takes where budgets follow what heads lose
in this text, and predictions are added to what its queries gave.

A window smaller than WINDOW_EIGHTHS leaves room for the heads that look things up. Without
predictions, entries that have just left it would rank too low, because few queries have seen them.
Loss curves of a profile were measured with WINDOW_EIGHTHS.
"""


@dataclass(frozen=True)
class Importance:
    """Hold how entries are ranked; entries with higher scores stay longer."""

    measure: str = "mass"
    """One of MEASURES, or `streaming` or `recency`, which rank only by position."""
    modifiers: tuple[str, ...] = ("values",)
    """Names in MODIFIERS, in the order of that table."""
    decay: float = 0.998
    """The fraction of an entry's importance that is left after one more token."""
    observation_window: int = 512
    """How many of the last tokens of a micro-batch are observed: only their queries count."""

    @staticmethod
    def parse(text: str) -> Importance:
        """Read MEASURE[+MODIFIER...]; raises SettingsError for unknown or repeated names, and for
        modifiers that do not fit the measure or each other.
        """
        measure, *modifiers = text.split("+")
        if measure not in MEASURES:
            raise SettingsError(
                f"there is no measure {measure!r} of importance; use one of {', '.join(MEASURES)}"
            )
        for modifier in modifiers:
            if modifier not in MODIFIERS:
                raise SettingsError(
                    f"there is no modifier {modifier!r} of importance; use {_any_of(MODIFIERS)}"
                )
            if modifier == "predicted" and measure not in _OF_SHARES:
                raise SettingsError(
                    f"measure {measure} adds up no shares of attention and takes no modifier "
                    f"predicted; use it with {' or '.join(_OF_SHARES)}, or measure predicted alone"
                )
            if modifier == "echo" and not _ALL[measure].adds_up:
                raise SettingsError(
                    f"measure {measure} adds up no queries and takes no modifier {modifier}; use "
                    f"{measure} with values, or another measure"
                )
        if {"echo", "predicted"} <= set(modifiers):
            raise SettingsError(
                f"{text!r} predicts what a repetition would give, and repeats the text, too; use "
                "echo or predicted alone"
            )
        if len(set(modifiers)) < len(modifiers):
            raise SettingsError(f"{text!r} names a modifier twice; name it once")
        return Importance(measure, tuple(name for name in MODIFIERS if name in modifiers))

    def __str__(self) -> str:
        """Return the text that parse() reads."""
        return "+".join((self.measure, *self.modifiers))

    @property
    def by_position(self) -> bool:
        """Tell whether entries are ranked by position alone, so that every head would choose the
        same ones.
        """
        return self._row.by_position

    @property
    def of_observed(self) -> bool:
        """Tell whether entries are ranked only by sums of what queries gave, and not by keys or
        values that a KV head has stored.
        """
        return self.adds_up and set(self.modifiers) <= {"echo"}

    @property
    def adds_up(self) -> bool:
        """Tell whether importance is a sum of what queries gave to an entry: shares of attention,
        or for measure products, |q.k|.
        """
        return self._row.adds_up

    @property
    def repeats(self) -> bool:
        """Tell whether every text must be read twice to rank its entries: see SecondReadings."""
        return self._row.of_echoes or "echo" in self.modifiers

    @property
    def predicts(self) -> bool:
        """Tell whether scores are predicted from keys and values, completely or in part, which
        needs a predictor.
        """
        return self._row.predicts or "predicted" in self.modifiers

    @property
    def adds_predictions(self) -> bool:
        """Tell whether predicted attention is added to the attention that queries gave."""
        return "predicted" in self.modifiers

    @property
    def threshold(self) -> float:
        """Return the default threshold of the freeze schedule: a mean of |q.k| for measure
        products, a multiple of the mean share of attention for the other measures.
        """
        return self._row.threshold

    @property
    def kind(self) -> _core.ScoreKind:
        """Return the measure's member of the extension's enumeration."""
        return self._row.kind

    def on_devices(self) -> Importance:
        """Return how the device store ranks entries: it observes at most OBSERVED_ON_DEVICES
        queries.
        """
        return replace(self, observation_window=min(self.observation_window, OBSERVED_ON_DEVICES))

    @property
    def _row(self) -> _core.Measure:
        return _ALL[self.measure]

    @property
    def _decay(self) -> float:
        if self._row.of_echoes:
            # Nothing decays, because every entry gets its score once, from the echo of its own
            # chunk.
            return 1.0
        if self.repeats:
            return max(self.decay, _ECHO_DECAY)
        return self.decay

    def settings(self) -> _core.ImportanceSettings:
        """Return how a store of the extension must compute importance."""
        return _core.ImportanceSettings(
            kind=self.kind,
            decay=self._decay,
            observation_window=self.observation_window,
            by_values="values" in self.modifiers,
            expected_lookups=EXPECTED_LOOKUPS if self.adds_predictions else 0.0,
        )


def _any_of(names: dict[str, str]) -> str:
    return "any of " + ", ".join(names)


class BudgetRule(Enum):
    """Name the rules by which a budget is shared among the KV heads."""

    EQUAL = auto()
    PROFILE_ENTROPY = auto()
    """Share by the entropies of a profile."""
    PROFILE_CURVES = auto()
    """Share by the loss curves of a profile."""
    LAYER_ENTROPY = auto()
    """Share per layer, in proportion to the mean entropy of the layer in this text."""
    LAYER_RANGE = auto()
    """Share per layer, by budgets from 8 for the lowest entropy to 128 for the highest, scaled to
    the total budget.
    """
    LOSSES = auto()
    """Share by what heads lose in this text."""
    GUIDED = auto()
    """Share by what heads lose in this text and by the loss curves of a profile, which count
    equally.
    """
    OWN = auto()
    """Share by the weights of a user's object: see settings/own_policy.py."""
    OWN_BY_LAYER = auto()
    """Share by the weights of a user's object, with one choice for all heads of a layer."""

    @property
    def by_profile(self) -> bool:
        """Tell whether the rule needs an entropy profile."""
        return self is BudgetRule.PROFILE_ENTROPY or self.by_curves

    @property
    def by_curves(self) -> bool:
        """Tell whether the rule needs the loss curves of a profile from the start."""
        return self in (BudgetRule.PROFILE_CURVES, BudgetRule.GUIDED)

    @property
    def by_layer(self) -> bool:
        """Tell whether all heads of a layer keep the same positions."""
        ours = (BudgetRule.LAYER_ENTROPY, BudgetRule.LAYER_RANGE, BudgetRule.OWN_BY_LAYER)
        return self in ours

    @property
    def by_text(self) -> bool:
        """Tell whether budgets follow what the text shows. Those of OWN may follow it, too, and
        those of OWN_BY_LAYER need not: they do if the user's class overrides observe().
        """
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
    """True if the flat store supports the policy, because heads need no choices of their own."""
    rule: BudgetRule = BudgetRule.EQUAL
    schedule: bool = False
    """True if entries below a threshold are frozen for some steps, whatever the budget."""
    own: OwnPolicy | None = None
    """The user's object that shares the budget; None for a policy of entropykv."""

    @property
    def window_eighths(self) -> int:
        """Return how many eighths of the mean budget the recent window takes, unless the user gives
        a window.
        """
        if self.rule.by_losses and self.importance.adds_predictions:
            return WINDOW_EIGHTHS_WITH_LOOKUPS
        return WINDOW_EIGHTHS
