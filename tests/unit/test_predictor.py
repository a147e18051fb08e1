"""Predictors are fitted by ridge regression as defined, and read back from files or refused."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from entropykv.errors import ProfileError
from entropykv.profile.predictor import (
    LOOKUP_SHARE,
    ScorePredictor,
    lookups_of,
)

Floats = npt.NDArray[np.float64]


def test_lookups_are_shares_among_the_highest_of_all_heads() -> None:
    """The lookups of a head are its share of the highest scores of all heads, however many entries
    it holds.
    """
    low, high = np.linspace(0.0, 0.1, 80), np.linspace(0.5, 1.0, 60)
    scores = [[low, high], [low[:40], low[:20]]]
    shares = lookups_of([[s.astype(np.float32) for s in layer] for layer in scores])
    assert shares.shape == (2, 2)
    np.testing.assert_allclose(shares, [[0.0, LOOKUP_SHARE * 200 / 60], [0.0, 0.0]])


def example() -> ScorePredictor:
    random = np.random.default_rng(3)
    weights = tuple(random.standard_normal((2, n), np.float32) for n in (5, 3))
    tables = (np.array([[0.0, 0.25], [1.0, 0.125]]), np.array([[1.0, 0.5], [0.0, 1.0]]))
    return ScorePredictor(weights, 1976, 0.75, *tables)


def test_it_survives_json_to_the_bit() -> None:
    predictor = example()
    data = predictor.to_json()
    assert data["n_features"] == [5, 3]
    loaded = ScorePredictor.from_json(data, "here", (2, 2))
    for ours, theirs in zip(predictor.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert not theirs.flags.writeable
    assert (loaded.n_tokens, loaded.correlation) == (1976, 0.75)
    assert loaded.lookups is not None
    np.testing.assert_array_equal(loaded.lookups, predictor.lookups)
    assert loaded.trust is not None
    np.testing.assert_array_equal(loaded.trust, predictor.trust)
    unknown = ScorePredictor(predictor.weights, 1).to_json()
    loaded = ScorePredictor.from_json(unknown, "here", (2, 2))
    assert (loaded.correlation, loaded.lookups) == (None, None)


def encoded(*values: float) -> str:
    return base64.b64encode(np.array(values, "<f4").tobytes()).decode()


WRONG = [
    ("n_features", 5, "predictor.n_features must be a list of 2"),
    ("n_features", [5], "predictor.n_features must be a list of 2"),
    ("n_features", [5, 0], "predictor.n_features[1]"),
    ("n_features", [5, 1 << 20], "predictor.n_features[1]"),
    ("n_features", [5, 4], "predictor.weights has 16 values; 2 KV heads of 2 layers need 18"),
    ("n_tokens", 0, "predictor.n_tokens"),
    ("n_tokens", 1.5, "predictor.n_tokens"),
    ("correlation", 1.5, "predictor.correlation"),
    ("correlation", float("nan"), "predictor.correlation"),
    ("correlation", "high", "predictor.correlation"),
    ("lookups", 0.5, "predictor.lookups must be a list of 2"),
    ("lookups", [[0.5, 0.5]], "predictor.lookups must be a list of 2"),
    ("lookups", [[0.5, 0.5], [0.5]], "predictor.lookups[1] must be a list of 2"),
    ("lookups", [[0.5, 0.5], [0.5, 2]], "predictor.lookups[1][1]"),
    ("lookups", [[0.5, 0.5], [0.5, float("nan")]], "predictor.lookups[1][1]"),
    ("weights", [1.0], "predictor.weights must be a text"),
    ("weights", "AAAA!", "predictor.weights must be base64 of float32 values"),
    ("weights", "äöü", "predictor.weights must be base64 of float32 values"),
    ("weights", "AAAA", "predictor.weights must be base64 of float32 values"),
    ("weights", "", "predictor.weights"),
    ("weights", encoded(1.0, 2.0), "predictor.weights has 2 values"),
    ("weights", encoded(*[1.0] * 15, np.nan), "predictor.weights has values that are not finite"),
    ("weights", encoded(*[1.0] * 15, np.inf), "predictor.weights has values that are not finite"),
    ("more", 1, "predictor has the unknown key 'more'"),
    ("n_tokens", ..., "predictor lacks n_tokens"),
    ("weights", ..., "predictor lacks weights"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_what_is_wrong_in_a_file_is_named(name: str, value: Any, message: str) -> None:
    data = example().to_json()
    if value is ...:
        del data[name]
    else:
        data[name] = value
    with pytest.raises(ProfileError) as caught:
        ScorePredictor.from_json(data, "here", (2, 2))
    assert str(caught.value).startswith("here: ")
    assert message in str(caught.value)
    assert "calibrate again" in str(caught.value)


@pytest.mark.parametrize(
    ("weights", "lookups"),
    [
        (np.full((2, 3), np.nan), None),
        (np.zeros(3), None),
        (np.zeros((2, 3)), np.zeros((1, 3))),
        (np.zeros((2, 3)), np.zeros((2, 2))),
        (np.zeros((2, 3)), np.array([[0.0, -0.5]])),
        (np.zeros((2, 3)), np.array([[0.0, np.nan]])),
    ],
)
def test_impossible_arrays_are_refused(weights: Floats, lookups: Floats | None) -> None:
    with pytest.raises(ProfileError, match=r"predictor\.(weights|lookups)"):
        ScorePredictor((weights.astype(np.float32),), 1, None, lookups)
    if lookups is not None:
        with pytest.raises(ProfileError, match=r"predictor\.trust"):
            ScorePredictor((weights.astype(np.float32),), 1, None, None, lookups)


def test_files_of_earlier_versions_trust_all_heads() -> None:
    data = example().to_json()
    del data["trust"]
    loaded = ScorePredictor.from_json(data, "here", (2, 2))
    assert loaded.trust is None
    assert loaded.beside_queries() is loaded


def test_trust_multiplies_the_predicted_shares() -> None:
    """Trust multiplies predicted shares; these are logarithms in a predictor, so only the last
    weight changes.
    """
    predictor = example()
    beside = predictor.beside_queries()
    for layer, (ours, theirs) in enumerate(zip(predictor.weights, beside.weights, strict=True)):
        np.testing.assert_array_equal(ours[:, :-1], theirs[:, :-1])
        factors = np.exp((theirs - ours)[:, -1])
        np.testing.assert_allclose(factors, [[1.0, 0.5], [0.0, 1.0]][layer], atol=1e-6)
