"""Combine policies, types and budgets to be evaluated, each combination as a session."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from entropykv.errors import SettingsError
from entropykv.llamacpp.stock import StockSession
from entropykv.model.geometry import read_geometry
from entropykv.session.session import Session
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.options import Budget

STOCK = "stock"
"""The name of stock llama.cpp with its full f16 cache, which all else is compared with."""


@dataclass(frozen=True)
class EngineSettings:
    """Say how every session runs the model."""

    model: str
    options: CacheOptions
    """The options of all sessions, which a combination's policy, type and budget are put into."""
    equal_bytes: bool = False
    """True where a fraction is that of the bytes of the full f16 cache, not of the entries."""

    @functools.cached_property
    def full_bytes_per_token(self) -> int:
        """Return the bytes that K and V of one token take in a full f16 cache."""
        return 2 * read_geometry(self.model).cached_values

    def budget_for(self, budget: Budget, n_tokens: int) -> Budget:
        """Return what a budget is for a text of n_tokens."""
        if budget.kind != "fraction":
            return budget
        if budget.value == 1.0 and not self.equal_bytes:
            return budget  # the fraction 1, at which nothing is ever evicted
        if self.equal_bytes:
            n_bytes = budget.value * n_tokens * self.full_bytes_per_token
            return Budget("bytes", max(1, int(n_bytes)))
        return Budget("tokens", max(2, int(round(budget.value * n_tokens, 9))))  # 0.29 of 100: 29

    def open_stock(self, n_ctx: int) -> StockSession:
        """Open stock llama.cpp; the caller closes it."""
        threads, n_ubatch = self.options.n_threads, self.options.micro_batch
        return StockSession(self.model, n_ctx=n_ctx, n_threads=threads, n_ubatch=n_ubatch)


@dataclass(frozen=True)
class Combination:
    """Name a policy, a type of K and V, and a budget."""

    policy: str
    kv_type: str
    budget: Budget

    @property
    def key(self) -> str:
        """Return what names it in a log of results."""
        return f"{self.policy}, {self.kv_type}, {self.budget}"

    @contextmanager
    def session(self, engine: EngineSettings, n_ctx: int, n_tokens: int) -> Iterator[Session]:
        """Open a session whose budget is that of a text of n_tokens; it closes at the end."""
        with Session(
            engine.model,
            engine.options,
            n_ctx=n_ctx,
            kv_budget=engine.budget_for(self.budget, n_tokens),
            policy=self.policy,
            kv_type=self.kv_type,
        ) as session:
            yield session

    def prepare(self, session: Session, engine: EngineSettings, n_tokens: int) -> None:
        """Make a session ready to read a text of n_tokens inside the budget."""
        session.reset()
        session.resize(engine.budget_for(self.budget, n_tokens))


def combinations(
    policies: Sequence[str], kv_types: Sequence[str], budgets: Sequence[str]
) -> list[Combination]:
    """Return all combinations, once each; raises BudgetError or SettingsError."""
    for kv_type in kv_types:
        CacheOptions(kv_type=kv_type)
    if "" in policies:
        raise SettingsError("a policy has no name; separate names by one comma each")
    parsed = [Budget.parse(budget) for budget in budgets]
    made = itertools.product(policies, kv_types, parsed)
    return list(dict.fromkeys(Combination(*parts) for parts in made))


def grow(session: Session, n_tokens: int) -> None:
    """Give a session's budget room for so many more entries per KV head."""
    heads = [entries for layer in session.budgets() for entries in layer]
    session.resize(Budget("tokens", round(sum(heads) / len(heads)) + n_tokens))
