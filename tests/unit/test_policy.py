"""Policies, measures and modifiers are found by name, and unknown names are refused."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from entropykv.errors import SettingsError
from entropykv.policy.policy import (
    AUTO,
    FAST,
    MODIFIERS,
    POLICIES,
    Policy,
    learns_predictor,
    policy_named,
    schedules,
    takes_profile,
)
from entropykv.profile.curves import IMPORTANCES, LossCurves
from entropykv.profile.learnt import LearntPredictor
from entropykv.profile.predictor import ScorePredictor
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.options import declared


def named(text: str) -> Policy:
    return policy_named(text, None, "headwise")


@given(
    st.sampled_from([p.name for p in POLICIES.values() if not p.importance.by_position]),
    st.sampled_from(["mass", "attention", "products"]),
    st.permutations(list(MODIFIERS)),
    st.integers(0, len(MODIFIERS)),
)
def test_a_policy_has_one_name(name: str, measure: str, order: list[str], n: int) -> None:
    """Modifiers in any order give the same policy, and its own name gives it again."""
    names = set(order[:n])
    of_heads = {"values", "predicted"}
    assume(not {"echo", "predicted"} <= names)
    assume("predicted" not in names or measure != "products")
    assume(not POLICIES[name].rule.by_layer or not of_heads & names)
    assume(not POLICIES[name].schedule or not {*of_heads, "echo"} & names)
    policy = named(f"{name}:{'+'.join([measure, *order[:n]])}")
    assert named(policy.name) == policy
    assert policy.importance.measure == measure
    assert set(policy.importance.modifiers) == set(order[:n])
    assert policy.rule is POLICIES[name].rule
    default = policy.importance == POLICIES[name].importance
    assert (policy == POLICIES[name]) == (policy.name == name) == default


@pytest.mark.parametrize("name", ["layer", "layer-range"])
def test_the_layer_document_adds_up_whatever_is_measured(name: str) -> None:
    """In the policies of Kim and Jung (2025), importance adds up over the prompt without decay, by
    any measure.
    """
    assert named(f"{name}:attention") == POLICIES[name]
    for measure in ("attention", "mass", "products"):
        assert named(f"{name}:{measure}").importance.settings().decay == 1.0
    assert named("uniform:attention").importance.settings().decay == pytest.approx(0.998)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("best", "'best'; use one of auto, fast, streaming, recency, uniform"),
        ("uniform:", "no measure ''.*use one of mass, attention, products"),
        ("uniform:masses", "no measure 'masses'.*use one of mass, attention, products"),
        ("uniform:values", "no measure 'values'"),
        ("uniform:mass+norms", "no modifier 'norms'.*any of values, echo, predicted"),
        ("uniform:mass+window", "no modifier 'window'.*any of values, echo"),
        ("uniform:predicted+echo", "predicted adds up no queries and takes no modifier echo"),
        ("adaptive:reconstruct+echo", "takes no modifier echo"),
        ("uniform:mass+", "no modifier ''"),
        ("uniform:mass:values", "no measure 'mass:values'"),
        ("entropy:mass+values+values", "names a modifier twice"),
        ("streaming:mass", "streaming ranks by position and accepts no measure; use --policy stre"),
        ("recency:", "recency ranks by position"),
        ("layer:mass+values", "same tokens for all heads.*use --policy layer, or measure mass"),
        ("layer-range:attention+values", "ranks them by what each head has stored"),
        ("layer:predicted", "same tokens for all heads.*but predicted ranks"),
    ],
)
def test_what_is_not_a_policy_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        named(text)


def test_policy_freeze_goes_by_what_each_step_finds() -> None:
    policy = named("rolling-freeze")
    assert str(policy.importance) == "attention"
    assert named("rolling-freeze:attention") == policy
    # Metinov et al. rank entries by |q.k|.
    assert named("rolling-freeze:products").importance.measure == "products"
    assert named("rolling-freeze:products").schedule
    assert schedules("rolling-freeze")
    assert schedules("rolling-freeze:mass")
    assert [name for name in ("auto", "uniform:products", "x") if schedules(name)] == []
    for measure in ("predicted", "attention+values", "mass+echo", "reconstruct"):
        with pytest.raises(SettingsError, match=r"step's queries find.*--policy rolling-freeze, "):
            named(f"rolling-freeze:{measure}")


@pytest.mark.parametrize("name", [AUTO, FAST])
def test_a_policy_that_chooses_its_measure_takes_none(name: str) -> None:
    with pytest.raises(SettingsError, match=f"policy {name} chooses its measure itself"):
        named(f"{name}:mass")


def test_the_flat_store_takes_no_measure_of_attention() -> None:
    with pytest.raises(SettingsError, match="cannot follow policy uniform:attention"):
        policy_named("uniform:attention", None, "flat")


def with_curves(profile: EntropyProfile, importance: str | None = None) -> EntropyProfile:
    shape = (profile.n_layer, profile.n_head_kv, 1)
    nothing = np.zeros(shape)
    return replace(
        profile, curves=LossCurves(64, 8, 4, 6, 1, (0,), nothing, nothing, None, importance)
    )


def test_auto_follows_what_earlier_processes_have_learnt() -> None:
    predictor = ScorePredictor((np.zeros((1, 5), np.float32),), n_tokens=100)
    auto = policy_named("auto", None, "headwise")
    for complete in (True, False):
        learnt = LearntPredictor(predictor, "model", 1, complete)
        assert policy_named("auto", None, "headwise", learnt=learnt) == auto
        assert learns_predictor(auto, None, learnt) is not complete
        on_device = policy_named("auto", None, "device", learnt=learnt)
        assert on_device == named(f"uniform:{IMPORTANCES[0]}")
        assert policy_named("uniform:predicted", None, "device", learnt=learnt).importance.predicts
        assert policy_named("fast", None, "device", learnt=learnt) == POLICIES["uniform"]
    assert policy_named("auto", None, "device") == POLICIES["uniform"]
    with pytest.raises(SettingsError, match="no profile with a predictor"):
        policy_named("uniform:predicted", None, "device")


def test_auto_follows_what_is_known_of_the_model() -> None:
    entropies = EntropyProfile(1, 2, 1, 64, np.ones((1, 2)))
    for known, name in (
        (None, "adaptive"),
        (entropies, "adaptive"),
        (with_curves(entropies), "profile"),
    ):
        taught = policy_named("auto", known, "headwise")
        assert taught == named(f"{name}:{IMPORTANCES[0]}")
        assert learns_predictor(taught, known)
        unpredictable = policy_named("auto", known, "headwise", predictable=False)
        assert unpredictable == named(f"{name}:mass+values+echo")
        assert policy_named("auto", known, "headwise", recurrent=True) == POLICIES[name]
        assert policy_named("fast", known, "headwise") == POLICIES[name]
    predictor = ScorePredictor((np.zeros((1, 5), np.float32),), n_tokens=100)
    for importance, read_twice in zip(
        IMPORTANCES, ("mass+values+echo", "reconstruct"), strict=True
    ):
        best = with_curves(entropies, importance)
        known = replace(best, predictor=predictor)
        for each in (best, known):
            taught = policy_named("auto", each, "headwise")
            assert taught == named(f"profile:{importance}")
            assert learns_predictor(taught, each) is (each is best)
            unpredictable = policy_named("auto", each, "headwise", predictable=False)
            assert unpredictable == named(f"profile:{read_twice}")
            assert policy_named("auto", each, "headwise", recurrent=True) == POLICIES["profile"]
            assert policy_named("fast", each, "headwise") == POLICIES["profile"]
    without_curves = replace(entropies, predictor=predictor)
    assert policy_named("auto", without_curves, "headwise") == named(f"adaptive:{IMPORTANCES[0]}")
    taught = policy_named("auto", without_curves, "device")
    assert taught == named(f"uniform:{IMPORTANCES[0]}")
    assert policy_named("auto", known, "device") == named(f"profile:{IMPORTANCES[1]}")
    assert policy_named("auto", known, "device", predictable=False) == POLICIES["profile"]
    assert policy_named("auto", with_curves(entropies), "device") == POLICIES["profile"]
    for name in ("auto", "fast"):
        assert policy_named(name, with_curves(entropies), "flat") == POLICIES["recency"]
        frozen = policy_named(name, with_curves(entropies), "headwise", freezes=True)
        assert frozen == POLICIES["uniform"]


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("auto", True),
        ("fast", True),
        ("profile", True),
        ("entropy:mass", True),
        ("adaptive", False),
        ("adaptive:mass+values+predicted", True),
        ("uniform:predicted", True),
        ("x:predicted", False),
        ("x", False),
    ],
)
def test_profiles_are_looked_for_where_a_policy_takes_one(name: str, *, takes: bool) -> None:
    assert takes_profile(name) == takes


def test_help_names_every_policy_in_five_lines() -> None:
    text = declared(CacheOptions)["policy"].help
    names = re.findall("[a-z-]+", text)
    assert {AUTO, FAST, *POLICIES} <= set(names)
    newest = text.partition("the newest: ")[2].partition(";")[0].split(", ")
    assert newest == [p.name for p in POLICIES.values() if p.importance.by_position]
    shown = textwrap.wrap(f"{text} (default: auto)", 80 - 24 - 2)
    assert len(shown) == 5
