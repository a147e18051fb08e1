"""Combine policies, KV types and budgets; each combination is evaluated in a session."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from entropykv.errors import SettingsError
from entropykv.evaluation.stock import StockSession
from entropykv.model.geometry import read_geometry
from entropykv.session.session import Session
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.options import Budget

COMPARED_TYPES = ("f16", "q8_0")
"""The types of K and V that are compared unless others are given."""
STOCK = "stock"
"""The name of stock llama.cpp, which all combinations are compared with."""


@dataclass(frozen=True)
class EngineSettings:
    """Hold how every session runs the model."""

    model: str
    options: CacheOptions
    """The options of all sessions; a combination replaces policy, type and budget."""
    equal_bytes: bool = False
    """If true, a budget that is a fraction means a share of the bytes of the full f16 cache, not of
    its entries.
    """

    @functools.cached_property
    def full_bytes_per_token(self) -> int:
        """Return the bytes that K and V of one token take in a full f16 cache."""
        return 2 * read_geometry(self.model).cached_values

    def budget_for(self, budget: Budget, n_tokens: int) -> Budget:
        """Return a fraction as the entries (or bytes, with equal_bytes) that it means for a text of
        n_tokens; fraction 1 without equal_bytes, and other budgets, as they are.
        """
        if budget.kind != "fraction":
            return budget
        if budget.value == 1.0 and not self.equal_bytes:
            return budget  # At fraction 1, nothing is ever evicted.
        if self.equal_bytes:
            n_bytes = budget.value * n_tokens * self.full_bytes_per_token
            return Budget("bytes", max(1, int(n_bytes)))
        # Rounded first, because 0.29 * 100 is slightly less than 29 in floating point.
        return Budget("tokens", max(2, int(round(budget.value * n_tokens, 9))))

    def open_stock(self, n_ctx: int) -> StockSession:
        """Open a session of stock llama.cpp; the caller closes it."""
        threads, n_ubatch = self.options.n_threads, self.options.micro_batch
        return StockSession(self.model, n_ctx=n_ctx, n_threads=threads, n_ubatch=n_ubatch)


@dataclass(frozen=True)
class Combination:
    """Hold a policy, a KV type and a budget."""

    policy: str
    kv_type: str
    budget: Budget

    @property
    def key(self) -> str:
        """Return the name of this combination in a log of results."""
        return f"{self.policy}, {self.kv_type}, {self.budget}"

    def session(self, engine: EngineSettings, n_ctx: int, n_tokens: int) -> Session:
        """Open a session with the budget for a text of n_tokens; the caller closes it."""
        return Session(
            engine.model,
            engine.options,
            n_ctx=n_ctx,
            kv_budget=engine.budget_for(self.budget, n_tokens),
            policy=self.policy,
            kv_type=self.kv_type,
        )

    def prepare(self, session: Session, engine: EngineSettings, n_tokens: int) -> None:
        """Reset a session and set its budget for a text of n_tokens."""
        session.reset()
        session.cache.resize(engine.budget_for(self.budget, n_tokens))


def combinations(
    policies: Sequence[str], kv_types: Sequence[str], budgets: Sequence[str]
) -> list[Combination]:
    """Return all combinations without duplicates; raises BudgetError or SettingsError for an
    invalid policy, type or budget.
    """
    for kv_type in kv_types:
        CacheOptions(kv_type=kv_type)
    if "" in policies:
        raise SettingsError("a policy has no name; separate names by one comma each")
    parsed = [Budget.parse(budget) for budget in budgets]
    made = itertools.product(policies, kv_types, parsed)
    return list(dict.fromkeys(Combination(*parts) for parts in made))
