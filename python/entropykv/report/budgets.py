"""Compute the entries per KV head that a profile gives for some budgets, to draw them."""

from __future__ import annotations

import contextlib

import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.errors import BudgetError
from entropykv.policy.plan import plan_headwise
from entropykv.policy.policy import POLICIES
from entropykv.profile.curves import N_SINKS
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.options import Budget

BUDGETS = (0.5, 0.2, 0.1)


def budget_tables(profile: EntropyProfile, policy: str) -> dict[float, npt.NDArray[np.int64]]:
    """Return the entries per KV head, (n_layer, n_head_kv), that `policy` gives by the profile.

    The keys are those of BUDGETS, fractions of profile.n_ctx, that hold the protected entries.
    """
    layers = [_core.LayerShape(profile.n_head, profile.n_head_kv, 64, 64)] * profile.n_layer
    tables = {}
    for fraction in BUDGETS:
        budget, chosen = Budget("fraction", fraction), POLICIES[policy]
        with contextlib.suppress(BudgetError):
            plan = plan_headwise(
                budget, layers, profile.n_ctx, "f16", chosen, profile, N_SINKS, None
            )
            tables[fraction] = np.array(plan.budgets)
    return tables
