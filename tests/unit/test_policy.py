"""Names of policies, measures and modifiers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv import _core
from entropykv.errors import SettingsError
from entropykv.importance import MEASURES, MODIFIERS, Importance
from entropykv.policy import POLICIES, Policy, policy_help, policy_named
from tests import reference


def named(text: str) -> Policy:
    return policy_named(text, has_profile=True, store="headwise")


@given(
    st.sampled_from([p.name for p in POLICIES.values() if not p.importance.by_position]),
    st.sampled_from([name for name in MEASURES if name != "expected"]),
    st.permutations(list(MODIFIERS)),
    st.integers(0, len(MODIFIERS)),
)
def test_a_policy_has_one_name(name: str, measure: str, order: list[str], n: int) -> None:
    """Modifiers in any order are the same policy, which its own name gives again."""
    policy = named(f"{name}:{'+'.join([measure, *order[:n]])}")
    assert named(policy.name) == policy
    assert policy.importance.measure == measure
    assert set(policy.importance.modifiers) == set(order[:n])
    assert (policy.by_entropy, policy.by_curves) == (name == "entropy", name == "profile")
    default = measure == "mass" and n == 0
    assert (policy == POLICIES[name]) == (policy.name == name) == default


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("best", "'best'; use one of streaming, recency, uniform"),
        ("uniform:", "no measure ''.*use one of mass, attention, products"),
        ("uniform:masses", "no measure 'masses'.*use one of mass, attention, products"),
        ("uniform:values", "no measure 'values'"),
        ("uniform:mass+norms", "no modifier 'norms'.*any of window, exposure, values, distinct"),
        ("uniform:expected+values+window", "expected counts no queries and takes no modifier win"),
        ("uniform:expected+exposure", "expected counts no queries and takes no modifier expos"),
        ("uniform:mass+", "no modifier ''"),
        ("uniform:mass:values", "no measure 'mass:values'"),
        ("entropy:mass+values+values", "names a modifier twice"),
        ("streaming:mass", "streaming goes by positions and takes no measure; use --policy stre"),
        ("recency:", "recency goes by positions"),
    ],
)
def test_what_is_not_a_policy_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        named(text)


def test_the_flat_store_takes_no_measure_of_attention() -> None:
    with pytest.raises(SettingsError, match="cannot follow policy uniform:attention"):
        policy_named("uniform:attention", has_profile=False, store="flat")


def test_help_names_everything() -> None:
    for name in itertools.chain(POLICIES, MEASURES, MODIFIERS):
        assert f"{name} (" in policy_help() or f"{name}: " in policy_help()


@settings(deadline=None)
@given(
    st.integers(0, 5000),
    st.sampled_from([0.0, 0.9, 0.998, 0.99999, 1.0]),
    st.integers(1, 512),
)
def test_exposure_is_that_of_the_oracle(age: int, decay: float, window: int) -> None:
    importance = _core.ImportanceSettings(
        _core.ScoreKind.mass, decay=decay, observation_window=window, by_exposure=True
    )
    expected = reference.exposure(age, float(np.float32(decay)), window)
    assert _core.exposure(age, importance) == pytest.approx(expected, rel=1e-4)


def test_exposure_by_hand() -> None:
    decayed = Importance("attention", ("exposure",)).settings(0.0)
    assert [_core.exposure(age, decayed) for age in (0, 32, 33)] == [1, 1, pytest.approx(1.998)]
    assert _core.exposure(10**6, decayed) == pytest.approx(500.0, rel=1e-3)
    last = Importance("attention", ("window", "exposure")).settings(0.0)
    assert [_core.exposure(age, last) for age in (32, 131, 10**6)] == [1.0, 100.0, 512.0]
    assert math.isfinite(_core.exposure(2**31 - 1, decayed))
