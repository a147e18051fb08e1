"""Budgets that follow the text are computed from what the store measures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv import _core
from entropykv.policy.online import LEAST_TOKENS, CurveBudgets, MeasuredLosses, changes_budgets
from entropykv.policy.plan import HeadwisePlan
from entropykv.policy.policy import POLICIES
from entropykv.profile.curves import LossCurves
from entropykv.store.headwise_budgets import online_budgets
from tests.support import reference
from tests.support.online_layers import Layers, plan_for
from tests.support.profiles import example
from tests.support.reference import Rules
from tests.support.stores import HEADS, LAYERS, MAX_ENTRIES, SHAPES

ONLINE = ("adaptive", "guided", "layer", "layer-range")


def read(store: _core.HeadwiseStore, lengths: list[int], loud: tuple[int, int] | None) -> Any:
    """Read micro-batches; the queries of KV head `loud` attend to all entries nearly equally.

    Returns the mean entropies of all rows, [layer][row], if `loud` is None.
    """
    random = np.random.default_rng(1)
    entropies: list[list[float]] = [[] for _ in SHAPES]
    position = 0
    for n in lengths:
        store.begin(n, position, position)
        for layer, (n_head, n_head_kv, k_dim, v_dim) in enumerate(SHAPES):
            group = n_head // n_head_kv
            q = random.standard_normal((n, n_head, k_dim), np.float32) * 0.3
            k = random.standard_normal((n, n_head_kv, k_dim), np.float32)
            # All queries attend to these four entries.
            k[:4, :, 0] += 40.0 if position == 0 else 0.0
            q[:, :, 0] = 3.0
            if loud is not None and loud[0] == layer:
                q[:, loud[1] * group : (loud[1] + 1) * group, 0] = 0.0
            v = random.standard_normal((n, n_head_kv, v_dim), np.float32)
            store.attend_alone(layer, q, k, v, k_dim**-0.5, position=position)
            if loud is None:
                entropies[layer] += store.row_entropies(layer).mean(axis=1).tolist()
        position += n
    return entropies


def adaptive(plan: HeadwisePlan) -> tuple[Layers, MeasuredLosses]:
    layers = Layers(Rules("mass", by_values=True, decay=0.998), [MAX_ENTRIES] * 3)
    online = MeasuredLosses(layers.store, LAYERS, MAX_ENTRIES)
    online.expect(plan)
    layers.store.measure_losses(online.knots(1.0))
    return layers, online


@pytest.mark.parametrize("loud", HEADS)
def test_a_head_that_loses_more_gets_more(loud: tuple[int, int]) -> None:
    plan = plan_for("adaptive", 100)
    layers, online = adaptive(plan)
    assert online.budgets(plan) is None
    read(layers.store, [96, 96], loud)
    online.observe(96, budgets_change=True)
    shares = online.budgets(plan)
    assert shares is not None
    budgets = dict(zip(HEADS, shares, strict=True))
    reference.check_shares(shares, 100, MAX_ENTRIES, plan.floor_entries, [*plan.entries_per_page])
    assert budgets[loud] > max(b for key, b in budgets.items() if key != loud)
    assert budgets[loud] > 100
    online.forget()
    assert online.budgets(plan) is None


def test_losses_of_any_size_share_in_the_same_way() -> None:
    """Losses of any size give the same budgets; only their ratios count, because sums of |q.k| have
    no limit.
    """
    plan = plan_for("adaptive", 100)
    _, online = adaptive(plan)
    losses = np.sort(np.random.default_rng(0).uniform(size=(len(HEADS), 3)))[:, ::-1]
    shares = []
    for factor in (1.0, 2.0**40, 2.0**-40):
        state = np.concatenate([[0.0, 20.0, 90.0], (factor * losses).ravel()])
        assert online.problem(state) is None
        online.load(state)
        np.testing.assert_array_equal(online.state()[: state.size], state)
        shares.append(online.budgets(plan))
    assert shares[0] == shares[1] == shares[2]
    assert len(set(shares[0] or [])) > 1


def curves_of(errors: dict[int, float]) -> LossCurves:
    """Return loss curves of all KV heads: with the given error for some heads, and a small one for
    the others.
    """
    table = np.full((len(HEADS), 1, 3), 1e-3)
    for head, error in errors.items():
        table[head, 0] = [error, error / 2, error / 8]
    sizes = (MAX_ENTRIES, 64, 4, 50, 1, (0, 100, 300))
    return LossCurves(*sizes, np.zeros_like(table), table)


def guided(curves: LossCurves, losses: np.ndarray) -> dict[int, int]:
    """Return budgets by number of the head; `losses` of the text are at 0, 100 and 300 entries."""
    plan = plan_for("adaptive", 100)
    layers = Layers(Rules("mass", by_values=True, decay=0.998), [MAX_ENTRIES] * 3)
    online = MeasuredLosses(layers.store, LAYERS, MAX_ENTRIES, curves)
    online.expect(plan)
    online.load(np.concatenate([[0.0, 100.0, 300.0], losses.ravel()]))
    shares = online.budgets(plan)
    assert shares is not None
    reference.check_shares(shares, 100, MAX_ENTRIES, plan.floor_entries, [*plan.entries_per_page])
    return dict(enumerate(shares))


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_text_and_profile_count_equally(factor: float) -> None:
    """A head that is important by the text or by the profile gets room, whatever the scale of the
    losses of the text.
    """
    of_text = np.full((len(HEADS), 3), 1e-3)
    of_text[1] = [1.0, 0.5, 0.1]
    budgets = guided(curves_of({2: 1.0}), factor * of_text)
    others = [n for head, n in budgets.items() if head not in (1, 2)]
    assert min(budgets[1], budgets[2]) > max(others)
    assert budgets == guided(curves_of({2: 1.0}), of_text)
    alone = guided(curves_of({1: 1.0}), factor * of_text)
    assert alone[1] > budgets[1]
    assert alone[2] < budgets[2]


def test_curves_are_read_again_only_at_other_knots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss curves are read again only when a budget changes their knots, not at every share of the
    budget.
    """
    read: list[int] = []
    knots = LossCurves.knots

    def counted(self: LossCurves, n_ctx: int, most: int) -> Any:
        read.append(most)
        return knots(self, n_ctx, most)

    monkeypatch.setattr(LossCurves, "knots", counted)
    of_text = np.full((len(HEADS), 3), 1e-3)
    of_text[1] = [1.0, 0.5, 0.1]
    layers = Layers(Rules("mass", by_values=True, decay=0.998), [MAX_ENTRIES] * 3)
    online = MeasuredLosses(layers.store, LAYERS, MAX_ENTRIES, curves_of({2: 1.0}))
    for budget, n_read in ((100, 1), (100, 1), (160, 2), (160, 2), (100, 3)):
        plan = plan_for("adaptive", budget)
        for state in (of_text, 3.0 * of_text):
            online.load(np.concatenate([[0.0, 1.0 * budget, 3.0 * budget], state.ravel()]))
            shares = online.budgets(plan)
            fresh = MeasuredLosses(layers.store, LAYERS, MAX_ENTRIES, curves_of({2: 1.0}))
            fresh.load(online.state())
            before = len(read)
            assert shares == fresh.budgets(plan)
            del read[before:]
        assert len(read) == n_read


def test_policy_guided_reads_the_curves_of_the_profile() -> None:
    layers = Layers(Rules("mass", by_values=True, decay=0.998), [MAX_ENTRIES] * 3)
    profile = example()
    for name, curves in (("guided", profile.curves), ("adaptive", None)):
        online = online_budgets(POLICIES[name], layers.store, LAYERS, MAX_ENTRIES, profile)
        assert isinstance(online, MeasuredLosses)
        assert online.curves is curves


@pytest.mark.parametrize("growth", [1.0, 2.5, 7.0, 1e6])
def test_what_a_longer_text_will_lose_is_foreseen(growth: float) -> None:
    """The losses of a longer text are estimated by what a head loses now if it keeps an equally
    small part of the text.
    """
    plan = plan_for("adaptive", 100)
    layers, online = adaptive(plan)
    layers.store.measure_losses(online.knots(growth))
    read(layers.store, [96], HEADS[0])
    online.observe(96, budgets_change=True)
    knots, held = online._knots, online._losses_of_held
    later = (knots / growth).astype(int).tolist()
    asked = sorted({*knots.astype(int).tolist(), *later})
    # Nothing was dropped before these losses were measured.
    measured = layers.store.losses().reshape(len(HEADS), -1)
    np.testing.assert_array_equal(measured[:, np.searchsorted(asked, knots)], held)
    foreseen = measured[:, np.searchsorted(asked, later)]
    of_losses = online.state()[: -len(HEADS)].tolist()
    assert of_losses == [*knots.tolist(), *foreseen.ravel().tolist()]
    assert np.all(foreseen >= held)
    assert np.any(foreseen > held) == (growth > 1.0)


def test_knots_beyond_the_context_do_not_count() -> None:
    plan = plan_for("adaptive", 100)
    _, online = adaptive(plan)
    losses = np.sort(np.random.default_rng(0).uniform(size=(len(HEADS), 2)))[:, ::-1]
    shares = []
    for more in ([], [float(MAX_ENTRIES)], [400.0, 5000.0]):
        beyond = np.full((len(HEADS), len(more)), 1e-3)
        rows = np.concatenate([losses, beyond], axis=1)
        online.load(np.concatenate([[0.0, 30.0], more, rows.ravel()]))
        shares.append(online.budgets(plan))
    assert shares[0] == shares[1] == shares[2] is not None


def test_nothing_is_measured_where_nothing_can_be_evicted() -> None:
    policy = "adaptive"
    layers, online = adaptive(plan_for(policy, 1.0))
    read(layers.store, [96], (0, 0))
    assert layers.store.losses().size == 0
    online.observe(96, budgets_change=True)
    # The state has the numbers of held entries, and no losses.
    assert online.state().tolist() == [-96.0] * len(HEADS)
    assert online.budgets(plan_for(policy, 1.0)) is None
    online.expect(plan_for(policy, 100))
    layers.store.measure_losses(online.knots(1.0))
    read(layers.store, [96], (0, 0))
    online.observe(96, budgets_change=True)
    assert online.budgets(plan_for(policy, 1.0)) == [MAX_ENTRIES] * len(HEADS)
    assert online.budgets(plan_for(policy, 100)) is not None


def most_entries_that_cannot_be(n: int) -> list[list[float]]:
    """Return lists of entries that `n` KV heads can hold at most; none of the lists is possible."""
    one = [40.0] * (n - 1)
    return [one, [*one, 0.5], [*one, -1.0], [*one, 2.0**31], [*one, float("nan")], [*one, 1.0, 1.0]]


def states_that_cannot_be(policy: str) -> list[Any]:
    n = len(HEADS)
    if policy.startswith("layer"):
        nan, inf = float("nan"), float("inf")
        wrong = [
            *([10.0, nan, 1, 1], [nan, 1, 1, 1], [10.0, -1, 1, 1], [-10.0, 1, 1, 1]),
            *([inf, inf, 1, 1], [1.0, 1e15, 1, 1], [0.0, 1, 0, 0]),
        ]
        right = [20.0, 2, 2, 2]
        of_sizes = ([], right, [*right, *right[:3]], [*right, *right, 1])
        halves = [part for half in wrong for part in ([*half, *right], [*right, *half])]
        return [*of_sizes, *halves, [10.0, 1, 1, 1, *right]]
    right = [0.0, 5.0, *([1.0, 0.5] * n)]
    return [
        *(right[:-1], [*right, 1.0], right[1:], [1.0, *right[1:]], [0.0, 0.0, *right[2:]]),
        *([0.0, -5.0, *right[2:]], [0.0, float("nan"), *right[2:]], [*right[:-1], float("nan")]),
        *([*right[:-1], -1.0], [*right[:-1], float("inf")]),
        *([*right, *most] for most in most_entries_that_cannot_be(n)),
    ]


@pytest.mark.parametrize("policy", ONLINE)
def test_states_that_cannot_be_are_named(policy: str) -> None:
    layers = Layers(Rules("mass"), [40, 30, 50])
    online = online_budgets(POLICIES[policy], layers.store, LAYERS, MAX_ENTRIES)
    assert online is not None
    assert online.problem(online.state()) is None
    for state in states_that_cannot_be(policy):
        problem = online.problem(np.array(state, np.float64))
        assert problem is not None, state
        assert "that cannot be" in problem


def test_other_policies_do_not_follow_the_text() -> None:
    layers = Layers(Rules("mass"), [40, 30, 50])
    for name, policy in POLICIES.items():
        online = online_budgets(policy, layers.store, LAYERS, MAX_ENTRIES)
        assert (online is not None) == (name in ONLINE)


@given(st.integers(LEAST_TOKENS, 600), st.integers(0, 2**30), st.integers(1, 600))
def test_budgets_change_with_every_large_micro_batch(n: int, position: int, n_ubatch: int) -> None:
    assert changes_budgets(n, position, max(n, n_ubatch))
    assert not changes_budgets(LEAST_TOKENS - 1, position, max(n, n_ubatch))


def test_no_head_gets_more_than_it_can_hold() -> None:
    """No KV head gets more entries than it can hold until budgets are shared again; the others get
    the rest.
    """
    plan = plan_for("adaptive", 100)
    layers, online = adaptive(plan)
    read(layers.store, [96], HEADS[0])
    online.observe(96, budgets_change=True)
    assert online.is_due
    wanted = online.budgets(plan)
    assert wanted is not None
    assert wanted[0] > 96 + 8
    online.expect_tokens(8, 104)
    assert online.most == [96 + 8] * len(HEADS)
    attainable = online.budgets(replace(plan, limits=tuple(online.most)))
    assert attainable is not None
    assert max(attainable) == attainable[0] == 96 + 8
    assert sum(attainable[1:]) > sum(wanted[1:])
    assert sum(attainable) > 0.95 * 100 * len(HEADS)


@pytest.mark.parametrize("is_due", [True, False])
def test_a_state_says_what_heads_can_hold(is_due: bool) -> None:
    plan = plan_for("adaptive", 100)
    layers, online = adaptive(plan)
    read(layers.store, [96], HEADS[0])
    online.observe(96, budgets_change=True)
    online.expect_tokens(7, 103)
    online.is_due = is_due
    other = MeasuredLosses(layers.store, LAYERS, MAX_ENTRIES)
    other.load(online.state())
    assert other.is_due == is_due
    assert other.most == [96 if is_due else 103] * len(HEADS)
    np.testing.assert_array_equal(other.state(), online.state())
    frozen = MeasuredLosses(layers.store, LAYERS, MAX_ENTRIES, attainable=False)
    frozen.load(online.state()[: -len(HEADS)])
    assert frozen.state().size == online.state().size - len(HEADS)


def by_curves(curves: LossCurves) -> tuple[Layers, CurveBudgets]:
    layers = Layers(Rules("mass"), [MAX_ENTRIES] * 3)
    profile = replace(example(), curves=None, predictor=None)
    # The example is for a model with other numbers of heads.
    object.__setattr__(profile, "curves", curves)
    online = online_budgets(POLICIES["profile"], layers.store, LAYERS, MAX_ENTRIES, profile)
    assert isinstance(online, CurveBudgets)
    frozen = online_budgets(
        POLICIES["profile"], layers.store, LAYERS, MAX_ENTRIES, profile, freezes=True
    )
    assert frozen is None
    return layers, online


@pytest.mark.parametrize("most", [(400, 400, 400), (130, 400, 400), (130, 90, 400), (70, 70, 70)])
def test_curves_give_others_what_a_head_cannot_hold(most: tuple[int, ...]) -> None:
    """With curves, entries that a head cannot hold go to others by the shares of the oracle, in
    pages of one entry.
    """
    curves = curves_of({0: 1.0, 2: 0.6})
    _, online = by_curves(curves)
    n = len(HEADS)
    limits = (*most, *[MAX_ENTRIES] * (n - len(most)))
    plan = replace(plan_for("adaptive", 100), entries_per_page=(1,) * n, limits=limits)
    knots, flat = curves.knots(MAX_ENTRIES, MAX_ENTRIES - plan.floor_entries)
    rooms = [limit - plan.floor_entries for limit in limits]
    total = float((plan.mean_entries - plan.floor_entries) * n)
    expected = reference.curve_shares(knots, np.array(flat).reshape(n, -1), total, rooms)
    shares = np.array(online.budgets(plan))
    reference.check_shares(shares.tolist(), 100, MAX_ENTRIES, plan.floor_entries, [1] * n, limits)
    assert np.abs(shares - plan.floor_entries - expected).max() <= 1.0
    assert shares.sum() == 100 * n


@pytest.mark.parametrize("known", [20, 120, 260, MAX_ENTRIES])
def test_curves_are_those_of_a_text_somewhat_longer_than_now(known: int) -> None:
    curves = curves_of({0: 1.0, 2: 0.6})
    _, online = by_curves(curves)
    n = len(HEADS)
    plan = replace(plan_for("adaptive", 100), entries_per_page=(1,) * n)
    whole = online.budgets(plan)
    online.length = known
    length = min(max(known + known // 2, 101), MAX_ENTRIES)
    shares = np.array(online.budgets(plan))
    floor = plan.floor_entries
    knots, flat = curves.knots(length, length - floor)
    rooms = [length - floor] * n
    total = float((plan.mean_entries - floor) * n)
    expected = reference.curve_shares(knots, np.array(flat).reshape(n, -1), total, rooms)
    assert np.abs(shares - floor - expected).max() <= 1.0
    assert (shares.tolist() == whole) == (length == MAX_ENTRIES)


def test_curves_limit_heads_to_what_they_hold_and_save_it() -> None:
    layers, online = by_curves(curves_of({0: 1.0}))
    assert online.is_due
    assert not online.holds(MAX_ENTRIES)  # Until a text is read, budgets are those of the plan.
    read(layers.store, [96], HEADS[0])
    online.expect_tokens(8, 104)
    assert online.most == [96 + 8] * len(HEADS)
    assert online.holds(96 + 8)
    assert not online.holds(96 + 7)
    for is_due in (True, False):
        online.is_due = is_due
        _, other = by_curves(curves_of({0: 1.0}))
        other.load(online.state())
        assert other.is_due == is_due
        assert other.most == [96 if is_due else 104] * len(HEADS)
        assert other.length == 104
        assert online.problem(online.state()) is None
    for most in most_entries_that_cannot_be(len(HEADS)):
        problem = online.problem(np.array([104.0, *most]))
        assert problem is not None
        assert "that cannot be" in problem
    for state in (
        [],
        [104.0],
        [0.5, *online.most],
        [-1.0, *online.most],
        [float("nan"), *online.most],
    ):
        assert online.problem(np.array(state)) is not None
    online.forget()
    assert online.most == []
    assert online.is_due


@pytest.mark.parametrize("n_ubatch", [1, 2, 16, 31])
def test_budgets_change_every_so_many_tokens_where_micro_batches_are_small(n_ubatch: int) -> None:
    ends = [
        position + n_ubatch
        for position in range(0, 320, n_ubatch)
        if changes_budgets(n_ubatch, position, n_ubatch)
    ]
    assert [end // LEAST_TOKENS for end in ends] == list(range(1, len(ends) + 1))
    assert ends[-1] > 288
    assert not any(changes_budgets(n_ubatch - 1, p, n_ubatch) for p in range(64))
