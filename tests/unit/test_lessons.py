"""Lessons from texts that are read twice add up to loss curves."""

from __future__ import annotations

import numpy as np
import pytest

from entropykv.policy.lessons import LENGTH, Lessons, uniform_heads

ENTROPIES = np.array([[1.0, 2.0], [3.0, 4.0]])


def lessons_of(*seen: tuple[int, int, list[float], list[list[float]]]) -> Lessons:
    """Return lessons of two layers with two query heads and one KV head each."""
    lessons = Lessons(2, 2, 1)
    for n_tokens, end, knots, losses in seen:
        lessons.add(n_tokens, end, np.array(knots), np.array(losses), ENTROPIES)
    return lessons


def test_curves_go_by_shares_of_a_text() -> None:
    """A text of half the length, with half as many entries, gives the same curves."""
    knots = [0.0, 256.0, 1024.0]
    losses = [[4.0, 1.0, 0.0], [1.0, 0.25, 0.0]]
    whole = lessons_of((100, LENGTH, knots, losses)).curves()
    half = lessons_of((100, LENGTH // 2, [k / 2 for k in knots], losses)).curves()
    np.testing.assert_allclose(half.output_error, whole.output_error)
    assert whole.keep == (0, 32, 64, 128, 256, 512, 1024)
    first, second = np.square(whole.output_error[:, 0])
    np.testing.assert_allclose(first, np.array([4.0, 3.625, 3.25, 2.5, 1.0, 2 / 3, 0.0]) / 4)
    np.testing.assert_allclose(second, first / 4)
    assert not whole.mass_lost.any()


def test_who_keeps_the_whole_text_loses_nothing() -> None:
    """After the last knot, losses fall to zero at the text's end; knots beyond the end do not
    count.
    """
    curves = lessons_of((10, LENGTH, [0.0, 512.0, 4096.0], [[1.0, 0.5, 0.9], [0.0, 0.0, 0.0]]))
    kept = np.square(curves.curves().output_error[0, 0])
    assert kept[5] == pytest.approx(0.5)
    assert kept[6] == pytest.approx(0.5 * (LENGTH - 1024) / (LENGTH - 512))
    assert not curves.curves().output_error[1].any()


def test_every_token_counts_alike() -> None:
    knots = [0.0]
    lessons = lessons_of((30, LENGTH, knots, [[1.0], [0.0]]), (90, LENGTH, knots, [[0.0], [1.0]]))
    assert lessons.n_tokens == 120
    errors = lessons.curves().output_error[:, 0, 0]
    assert errors[1] == 1.0
    assert errors[0] ** 2 == pytest.approx(1 / 3)
    np.testing.assert_allclose(lessons.entropies(), ENTROPIES)


def test_without_losses_heads_are_alike() -> None:
    assert not lessons_of((30, LENGTH, [0.0], [[0.0], [0.0]])).curves().output_error.any()
    assert not Lessons(2, 2, 1).entropies().any()


def test_layers_that_differ_have_no_profile() -> None:
    assert uniform_heads([(6, 2), (6, 2), (6, 2)]) == (3, 6, 2)
    assert uniform_heads([(6, 2), (6, 3)]) is None
