"""Divergences of logits equal what their definition gives by hand."""

from __future__ import annotations

import numpy as np
import pytest

from entropykv.llamacpp.distributions import log_softmax, mean_divergence


def test_log_softmax_of_large_logits() -> None:
    logits = np.array([[1000.0, 1000.0 + np.log(3.0)], [-np.inf, 5.0]], np.float32)
    assert np.exp(log_softmax(logits)) == pytest.approx(
        np.array([[0.25, 0.75], [0.0, 1.0]]), abs=1e-4
    )


def test_divergence_is_that_of_the_definition() -> None:
    whole = np.log(np.array([[0.5, 0.25, 0.25], [0.9, 0.1, 1e-30]], np.float32))
    rows = np.log(np.array([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]], np.float32))
    whole[1, 2] = -np.inf
    expected = (0.25 * np.log(2.0) + 0.9 * np.log(0.9 / 0.8)) / 2
    assert mean_divergence(whole, rows) == pytest.approx(expected, rel=1e-5)
    assert mean_divergence(whole, whole) == 0.0


def test_more_rows_than_are_compared_at_a_time() -> None:
    logits = np.random.default_rng(1).normal(size=(2, 101, 7)).astype(np.float32)
    p, q = (log_softmax(each) for each in logits)
    assert mean_divergence(*logits) == pytest.approx((np.exp(p) * (p - q)).sum() / 101)
