"""Define the comparison that a calibration ends with: what a model loses with each way to use its
profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from entropykv.errors import ProfileError
from entropykv.profile.curves import IMPORTANCES
from entropykv.profile.json_fields import (
    ADVICE,
    integer_in,
    number_in,
    object_in,
    shown,
    text_in,
)

NO_PROFILE = "none"
"""The way of policy auto without any profile, once it has learnt: budgets follow the text, and the
predictor is one that was learnt from another text.
"""
PREDICTOR_ONLY = f"adaptive:{IMPORTANCES[0]}"
"""The way that uses only the predictor of a profile: budgets follow the text."""
WAYS = (
    NO_PROFILE,
    PREDICTOR_ONLY,
    *(f"guided:{importance}" for importance in IMPORTANCES),
    f"profile:{IMPORTANCES[0]}",
)
"""The ways in which policy auto can use a profile, the simplest first."""

MARGIN = 0.05
"""A way must lose less than a simpler one by more than this to be chosen; less is noise."""
_FEW_FACTS = 6
"""If the full cache knows fewer facts, repetitions are compared instead."""
_MOST_LOSS = 1e4
_NO_LOSS = 1e-9
_MOST = 2**31 - 1


@dataclass(frozen=True)
class ComparedWay:
    """Hold what a model loses with one of WAYS, for every budget of a WayComparison."""

    way: str
    divergences: tuple[float, ...]
    """The mean KL from the predictions with a full cache while texts go on, in nats per token."""
    repetitions: tuple[float, ...]
    """The mean KL while the beginnings of the texts are repeated, in nats per token, weighted by
    how well the full cache repeats them.
    """
    facts: tuple[int, ...]
    """How many planted facts are known, of those that the full cache knows."""


@dataclass(frozen=True)
class WayComparison:
    """Hold what was compared on texts that the profile was not made with, and what won.

    `budgets`: fractions of the bytes of a full f16 cache. `n_texts` texts of `n_tokens` tokens were
    read, and the full cache knows `n_facts` of the facts that were planted in them. `repeats` is
    the share of the tokens of a repetition that it predicts, from 0 to 1. `compared` is empty if
    the texts were too short. `best` is the way that policy auto goes, one of WAYS; with NO_PROFILE,
    the profile has no predictor. Raises ProfileError, naming the field.
    """

    budgets: tuple[float, ...]
    n_texts: int
    n_tokens: int
    n_facts: int
    repeats: float
    compared: tuple[ComparedWay, ...]
    best: str

    def __post_init__(self) -> None:
        """Check the names and the number of figures."""
        if self.best not in WAYS:
            raise ProfileError(
                f"profile: comparison.best must be one of {', '.join(WAYS)}, not "
                f"{shown(self.best)}; {ADVICE}"
            )
        for each in self.compared:
            if each.way not in WAYS:
                raise ProfileError(
                    f"profile: comparison.compared has no way {shown(each.way)}; {ADVICE}"
                )
            figures = (each.divergences, each.repetitions, each.facts)
            if {*map(len, figures)} != {len(self.budgets)}:
                raise ProfileError(
                    f"profile: comparison.compared must have a figure for every budget; {ADVICE}"
                )

    @property
    def uses_curves(self) -> bool:
        """Tell whether the loss curves of the profile count when budgets are shared."""
        return self.policy != PREDICTOR_ONLY.partition(":")[0]

    @property
    def policy(self) -> str:
        """Return the policy that shares the budget in the best way, without its measure."""
        best = PREDICTOR_ONLY if self.best == NO_PROFILE else self.best
        return best.partition(":")[0]

    @property
    def importance(self) -> str:
        """Return the measure by which policy auto ranks entries, one of IMPORTANCES."""
        return self.best.partition(":")[2] or IMPORTANCES[0]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the comparison."""
        return {
            "budgets": list(self.budgets),
            "n_texts": self.n_texts,
            "n_tokens": self.n_tokens,
            "n_facts": self.n_facts,
            "repeats": round(self.repeats, 6),
            "compared": [
                {
                    "way": each.way,
                    "divergences": [round(kl, 6) for kl in each.divergences],
                    "repetitions": [round(kl, 6) for kl in each.repetitions],
                    "facts": list(each.facts),
                }
                for each in self.compared
            ],
            "best": self.best,
        }

    @classmethod
    def from_json(cls, value: object, where: str) -> WayComparison:
        """Read the JSON object; ProfileError names the field."""
        data = object_in(value, where, "comparison", tuple(cls.__dataclass_fields__))
        budgets = [
            number_in(budget, where, f"comparison.budgets[{i}]", 0.0, 1.0)
            for i, budget in enumerate(_list_in(data["budgets"], where, "comparison.budgets"))
        ]
        sizes = {
            name: integer_in(data[name], where, f"comparison.{name}", 0, _MOST)
            for name in ("n_texts", "n_tokens", "n_facts")
        }
        repeats = number_in(data["repeats"], where, "comparison.repeats", 0.0, 1.0)
        rows = _list_in(data["compared"], where, "comparison.compared")
        best = text_in(data["best"], where, "comparison.best")
        compared = [
            _way_in(row, where, f"comparison.compared[{i}]", sizes["n_facts"])
            for i, row in enumerate(rows)
        ]
        try:
            return cls(
                tuple(budgets), repeats=repeats, compared=tuple(compared), best=best, **sizes
            )
        except ProfileError as error:
            raise ProfileError(f"{where}: {str(error).removeprefix('profile: ')}") from None


def _list_in(value: object, where: str, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise ProfileError(f"{where}: {field} must be a list; {ADVICE}")
    return value


def _way_in(value: object, where: str, field: str, n_facts: int) -> ComparedWay:
    data = object_in(value, where, field, tuple(ComparedWay.__dataclass_fields__))
    divergences, repetitions = (
        tuple(
            number_in(kl, where, f"{field}.{name}[{i}]", 0.0, _MOST_LOSS)
            for i, kl in enumerate(_list_in(data[name], where, f"{field}.{name}"))
        )
        for name in ("divergences", "repetitions")
    )
    facts = [
        integer_in(known, where, f"{field}.facts[{i}]", 0, n_facts)
        for i, known in enumerate(_list_in(data["facts"], where, f"{field}.facts"))
    ]
    way = text_in(data["way"], where, f"{field}.way")
    return ComparedWay(way, divergences, repetitions, tuple(facts))


def loss_relative_to(base: ComparedWay, other: ComparedWay, comparison: WayComparison) -> float:
    """Return how much more a way loses than another one; less is negative.

    It is the mean, over budgets, of the surplus of divergence, relative to that of `base`, and of
    the share of the facts that `base` knows and `other` does not. Of a model that knows hardly any
    facts, repetitions count instead, as far as the full cache predicts them.
    """
    continued = _surplus(base.divergences, other.divergences)
    if comparison.n_facts >= _FEW_FACTS:
        fewer = [a - b for a, b in zip(base.facts, other.facts, strict=True)]
        return (continued + sum(fewer) / len(fewer) / comparison.n_facts) / 2
    weight = comparison.repeats
    return (continued + weight * _surplus(base.repetitions, other.repetitions)) / (1 + weight)


def _surplus(base: Sequence[float], other: Sequence[float]) -> float:
    ratios = [b / max(a, _NO_LOSS) - 1.0 for a, b in zip(base, other, strict=True)]
    return sum(ratios) / len(ratios)


def best_way(comparison: WayComparison) -> str:
    """Return the way that loses least; a simpler one (earlier in WAYS) unless the gain exceeds
    MARGIN.

    A predictor alone is chosen if it loses no more than no profile: with it, first texts are read
    once, too. Nothing is chosen that loses more than no profile, or that knows fewer facts,
    whatever else it gains.
    """
    by_name = {each.way: each for each in comparison.compared}
    none = best = by_name[NO_PROFILE]
    for way in WAYS[1:]:
        if way not in by_name or loss_relative_to(none, by_name[way], comparison) > 0.0:
            continue
        if comparison.n_facts >= _FEW_FACTS and sum(by_name[way].facts) < sum(none.facts):
            continue
        least = 0.0 if way == PREDICTOR_ONLY else MARGIN
        if -loss_relative_to(best, by_name[way], comparison) >= least:
            best = by_name[way]
    return best.way
