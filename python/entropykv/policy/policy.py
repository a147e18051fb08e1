"""Define policies: how a budget is shared among the KV heads, by what entries are ranked, and what
the names that `--policy` accepts stand for.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from entropykv import _core
from entropykv.errors import SettingsError
from entropykv.profile.curves import EARLIER_IMPORTANCES, IMPORTANCES
from entropykv.profile.learnt import LearntPredictor
from entropykv.profile.predictor import ScorePredictor
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.own_policy import OwnPolicy, check_own_policy

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
            # Nothing decays, because a score is the largest attention that any query of an echo
            # gave.
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
    def adds_lookups(self) -> bool:
        """Tell whether budgets follow what heads lose in this text, and predictions are added to
        what its queries gave.
        """
        return self.rule.by_losses and self.importance.adds_predictions

    @property
    def window_eighths(self) -> int:
        """Return how many eighths of the mean budget the recent window takes, unless the user gives
        a window.
        """
        return WINDOW_EIGHTHS_WITH_LOOKUPS if self.adds_lookups else WINDOW_EIGHTHS


AUTO = "auto"
"""The default policy. It stands for the policy that a comparison in the model's profile has chosen:
`adaptive`; `guided`, which also follows the loss curves of the profile; or `profile`, which follows
these curves alone. Without a comparison it is `profile` if there are curves, and without a profile
`adaptive`. Entries are ranked by a predictor, with the measure that the profile names: the
profile's predictor, or one that was learnt from the model's first texts, which are read twice for
it. If a model's keys before RoPE are not known, nothing can be predicted, and all texts are read
twice. With recurrent layers, only the queries of the text rank entries, as on the device store
without a predictor: no text is read twice there. The device store has `profile` or `uniform`. With
frozen entries it is `uniform`, because needed entries return and every head needs room for them; on
the flat store it is `recency`.
"""
FAST = "fast"
"""The policy that shares budgets as `auto` does, but without predictions and echoes: only the
queries of the text rank entries.
"""
_OF_DEVICE = ("mass", "attention", "predicted")
"""The measures that the device store computes, besides those by position."""
_READ_TWICE = {predicted: twice for twice, predicted in EARLIER_IMPORTANCES.items()}
"""The measure that replaces each of IMPORTANCES if nothing can be predicted."""


POLICIES = {
    policy.name: policy
    for policy in (
        Policy(
            "streaming", "sinks and the most recent tokens", Importance("streaming", ()), flat=True
        ),
        Policy(
            "recency",
            "README_ENTROPY_KV's position score: exponential decay, a bonus for the newest tenth",
            Importance("recency", ()),
            flat=True,
        ),
        Policy(
            "uniform",
            "the same budget for every KV head, each keeping what gets most attention",
        ),
        Policy(
            "entropy",
            "budgets per KV head from an entropy profile, each keeping what gets most attention",
            rule=BudgetRule.PROFILE_ENTROPY,
        ),
        Policy(
            "profile",
            "budgets per KV head that lose least by the profile's loss curves, each keeping what "
            "gets most attention",
            rule=BudgetRule.PROFILE_CURVES,
        ),
        Policy(
            "adaptive",
            "budgets per KV head that lose least in this text, each keeping what gets most "
            "attention",
            rule=BudgetRule.LOSSES,
        ),
        Policy(
            "guided",
            "budgets per KV head that lose least in this text and by the profile's loss curves, "
            "each keeping what gets most attention",
            rule=BudgetRule.GUIDED,
        ),
        Policy(
            "layer",
            "Kim and Jung (2025): budgets per layer by entropy in this text, half of them for what "
            "gets most attention in the layer",
            Importance("attention", (), decay=1.0),
            rule=BudgetRule.LAYER_ENTROPY,
        ),
        Policy(
            "layer-range",
            "the same with budgets from 8 to 128 by entropy, scaled to the budget",
            Importance("attention", (), decay=1.0),
            rule=BudgetRule.LAYER_RANGE,
        ),
        Policy(
            "rolling-freeze",
            "ASR-KF-EGR's schedule: what gets less attention than a share of the mean is "
            "frozen, each time for longer, and comes back by itself "
            "(rolling-freeze:products: less |q.k| than a threshold, as in its paper)",
            Importance("attention", ()),
            schedule=True,
        ),
    )
}


def policy_named(
    name: str | OwnPolicy,
    profile: EntropyProfile | None,
    store: str,
    *,
    freezes: bool = False,
    recurrent: bool = False,
    predictable: bool = True,
    learnt: LearntPredictor | None = None,
) -> Policy:
    """Return the policy with this name, which may be `auto` or `fast`, or the policy of a user's
    object. `profile`: that of the model, or None.

    `freezes`: evicted entries are frozen. `recurrent`: the model has recurrent layers, which cannot
    read a text twice. `predictable`: the model's keys before RoPE are known, which predictors need.
    `learnt`: the predictor that earlier processes have learnt. `name`:
    NAME[:MEASURE[+MODIFIER...]]; the `name` of the returned policy has modifiers in the order of
    MODIFIERS, and leaves out a measure that is the policy's default. Raises SettingsError for an
    invalid name or object, and for a policy that the store or the model does not support.
    """
    if not isinstance(name, str):
        policy = _own(name)
    elif name in (AUTO, FAST):
        foresees = name == AUTO and not recurrent
        policy = _parsed(
            _chosen(
                profile,
                store,
                freezes=freezes,
                foresees=foresees,
                predictable=predictable,
                knows=predictor_of(profile, learnt) is not None,
            )
        )
    else:
        policy = _parsed(name)
    if recurrent and (policy.importance.repeats or learns_predictor(policy, profile, learnt)):
        raise SettingsError(
            f"policy {policy.name} reads text twice, which would change the state of the model's "
            "recurrent layers; use measure mass"
        )
    if store == "device":
        _check_device(policy, predictor_of(profile, learnt))
    if store == "flat" and not policy.flat:
        possible = " or ".join(p.name for p in POLICIES.values() if p.flat)
        raise SettingsError(
            "the flat store keeps the same tokens for every head and cannot follow policy "
            f"{policy.name}; use --policy {possible}, or --store headwise"
        )
    return policy


def predictor_of(
    profile: EntropyProfile | None, learnt: LearntPredictor | None
) -> ScorePredictor | None:
    """Return the predictor of a model's profile, or else the one that was learnt; None if there is
    neither.
    """
    if profile is not None and profile.predictor is not None:
        return profile.predictor
    return None if learnt is None else learnt.predictor


def learns_predictor(
    policy: Policy, profile: EntropyProfile | None, learnt: LearntPredictor | None = None
) -> bool:
    """Tell whether a policy needs a predictor that is still to be learnt: none is known, or only a
    learnt one that more texts may improve.
    """
    known = profile is not None and profile.predictor is not None
    return policy.importance.predicts and not known and (learnt is None or not learnt.complete)


def may_predict(name: str | OwnPolicy) -> bool:
    """Tell whether a policy ranks entries by a predictor if the model and its store allow it."""
    if not isinstance(name, str):
        return "predicted" in str(getattr(name, "importance", ""))
    base, _, measure = name.partition(":")
    return base == AUTO or "predicted" in measure.split("+")


def takes_profile(name: str | OwnPolicy) -> bool:
    """Tell whether a policy uses the model's profile, if the model has one.

    A policy may use the profile to share the budget, or the predictor in the profile to rank
    entries. Returns False for a user's own policy, which gets a profile only if one is given with
    the options.
    """
    if not isinstance(name, str):
        return False
    base, _, measure = name.partition(":")
    predicts = "predicted" in measure.split("+")
    return base in (AUTO, FAST) or (
        base in POLICIES and (POLICIES[base].rule.by_profile or predicts)
    )


def schedules(name: str | OwnPolicy) -> bool:
    """Tell whether a policy freezes and restores entries by the schedule of policy
    `rolling-freeze`.
    """
    if not isinstance(name, str):
        return False
    base = name.partition(":")[0]
    return base in POLICIES and POLICIES[base].schedule


def _check_device(policy: Policy, predictor: ScorePredictor | None) -> None:
    """Raise SettingsError for a policy that the device store cannot follow.

    The budgets of the policy must not change while a text is read, since every KV head has its rows
    from the start, and its measure must not need keys, which are not on the host. Without a known
    predictor it must not need one, since the device store reads no text twice to learn it.
    """
    importance = policy.importance
    of_device = importance.by_position or (
        importance.measure in _OF_DEVICE and set(importance.modifiers) <= {"values", "predicted"}
    )
    if policy.rule.by_text or policy.schedule or policy.own is not None or not of_device:
        raise SettingsError(
            f"the device store cannot follow policy {policy.name}; use --policy uniform, profile, "
            "entropy, recency or streaming, with measure mass, attention or predicted, also with "
            "+values or +predicted, or --store headwise with all layers on the CPU (-ngl 0)"
        )
    if importance.predicts and predictor is None:
        raise SettingsError(
            f"policy {policy.name} predicts scores, and the model has no profile with a predictor, "
            "which the device store cannot learn from texts; make one with `entropykv calibrate`, "
            "read a text on the CPU once (-ngl 0), or use --policy fast"
        )


def _own(policy: object) -> Policy:
    own = check_own_policy(policy, [AUTO, FAST, *POLICIES])
    importance = Importance.parse(own.importance)
    if own.choice == "layer":
        _check_choice_of_layers(own.name, importance)
    rule = BudgetRule.OWN_BY_LAYER if own.choice == "layer" else BudgetRule.OWN
    return Policy(own.name, "a policy of your own", importance, rule=rule, own=own)


def _check_choice_of_layers(name: str, importance: Importance) -> None:
    """Raise SettingsError for a measure by which the heads of a layer could not choose together,
    because it depends on what each head has stored.
    """
    if not (importance.of_observed or importance.repeats):
        raise SettingsError(
            f"policy {name} keeps the same tokens for all heads of a layer, but {importance} ranks "
            f"them by what each head has stored; use --policy {name}, or measure mass, attention "
            "or products"
        )


def _chosen(
    profile: EntropyProfile | None,
    store: str,
    *,
    freezes: bool,
    foresees: bool,
    predictable: bool,
    knows: bool,
) -> str:
    """Return NAME or NAME:MEASURE of the policy that `auto` or `fast` chooses.

    `foresees`: entries are also ranked by what a repetition of the text would attend to.
    `predictable`: the model's keys before RoPE are known. `knows`: a predictor is known.
    """
    if store == "flat":
        return "recency"
    if freezes:
        return "uniform"
    curves = None if profile is None else profile.curves
    compared = None if profile is None else profile.comparison
    if store == "device":
        name = "uniform" if curves is None else "profile"
        foresees = foresees and predictable and knows
    else:
        name = "adaptive" if curves is None else "profile"
        if compared is not None:
            name = compared.policy
    if not foresees:
        return name
    importance = IMPORTANCES[0]  # The measure of all policies that a profile compares.
    if compared is None and curves is not None:
        importance = curves.importance or importance
    if not predictable:
        importance = _READ_TWICE[importance]
    return f"{name}:{importance}"


def _parsed(text: str) -> Policy:
    name, colon, measure = text.partition(":")
    if name in (AUTO, FAST):
        raise SettingsError(
            f"policy {name} chooses its measure itself; use --policy {name}, or name a policy that "
            "takes one, as in adaptive:mass"
        )
    if name not in POLICIES:
        known = ", ".join([AUTO, FAST, *POLICIES])
        raise SettingsError(f"policy cannot be {name!r}; use one of {known}")
    policy = POLICIES[name]
    if not colon:
        return policy
    if policy.importance.by_position:
        raise SettingsError(
            f"policy {name} ranks by position and accepts no measure; use --policy {name}"
        )
    importance = Importance.parse(measure)
    if policy.rule.by_layer:
        _check_choice_of_layers(name, importance)
    if policy.schedule and (importance.repeats or not importance.of_observed):
        raise SettingsError(
            f"policy {name} depends on what each step's queries find, and {importance} does not; "
            f"use --policy {name}, or measure mass, attention or products"
        )
    # The decay stays that of the policy, whatever the measure: some policies need the sum over all
    # queries.
    importance = replace(importance, decay=policy.importance.decay)
    if importance == policy.importance:
        return policy
    return replace(policy, name=f"{name}:{importance}", importance=importance)
