"""Define the names that `--policy` accepts."""

from __future__ import annotations

from dataclasses import replace

from entropykv.errors import SettingsError
from entropykv.policy.policy import BudgetRule, Importance, Policy
from entropykv.policy.sources.kim_jung import LAYER, LAYER_IN_RANGE
from entropykv.policy.sources.metinov import ROLLING_FREEZE
from entropykv.policy.sources.readme_entropy_kv import ENTROPY, RECENCY
from entropykv.profile.curves import EARLIER_IMPORTANCES, IMPORTANCES
from entropykv.profile.learnt import LearntPredictor
from entropykv.profile.predictor import ScorePredictor
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.own_policy import OwnPolicy, check_own_policy

AUTO = "auto"
"""The default policy. It stands for the policy that a comparison in the model's profile has chosen:
`adaptive`; `guided`, which also follows the loss curves of the profile; or `profile`, which follows
these curves alone. Without a comparison it is `profile` if there are curves, and without a profile
`adaptive`. Entries are ranked by a predictor, with the measure that the profile names: the
profile's predictor, or one that was learnt from the model's first texts, which are read twice for
it. If a model's keys before RoPE are not known, nothing can be predicted, and all texts are read
twice. With frozen entries it is `uniform`, because needed entries return and every head needs room
for them; on the flat store it is `recency`. On the device store it is `profile` or `uniform`, and
only the queries of the text rank entries if no predictor is known, since no text is read twice
there.
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
        RECENCY,
        Policy(
            "uniform",
            "the same budget for every KV head, each keeping what gets most attention",
        ),
        ENTROPY,
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
        LAYER,
        LAYER_IN_RANGE,
        ROLLING_FREEZE,
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
