"""Define the comparison that a calibration ends with: what a model loses with each way to use its
profile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv.errors import ProfileError
from entropykv.profile.curves import IMPORTANCES
from entropykv.profile.json_fields import (
    ADVICE,
    integer_in,
    number_in,
    object_in,
    rounded,
    shown,
    table_in,
    text_in,
)

NO_PROFILE = "none"
"""The way of policy auto without any profile, once it has learnt: budgets follow the text, and the
predictor is one that was learnt from another text.
"""
PREDICTOR_ONLY = f"adaptive:{IMPORTANCES[0]}"
"""The way of policy auto that uses only a profile's predictor: budgets follow the text."""
WAYS = (
    NO_PROFILE,
    PREDICTOR_ONLY,
    f"guided:{IMPORTANCES[0]}",
    f"profile:{IMPORTANCES[0]}",
)
"""The ways in which policy auto can use a profile, the simplest first."""

SURE = 1.64
"""An advantage above this, in standard deviations, is not due to chance, with a confidence of 95
%.
"""
_FEW_FACTS = 6
"""If the full cache knows fewer facts, repetitions are compared instead."""
_MOST_LOSS = 1e4
_NO_LOSS = 1e-9
_MOST = 2**31 - 1

Table = tuple[tuple[float, ...], ...]
"""Numbers, [budget][text]."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ComparedWay:
    """Hold what a model loses with one of WAYS, for every budget and text of a WayComparison."""

    way: str
    divergences: Table
    """The KL from the predictions with a full cache while a text goes on, in nats per token."""
    repetitions: Table
    """The KL while the beginning of a text is repeated, in nats per token."""
    facts: tuple[tuple[int, ...], ...]
    """For every planted fact that the full cache knows, in all texts, 1 if it is known, else 0,
    [budget][fact].
    """

    @property
    def n_known(self) -> tuple[int, ...]:
        """Return for every budget how many facts are known."""
        return tuple(map(sum, self.facts))


@dataclass(frozen=True)
class WayComparison:
    """Hold what was compared on texts that the profile was not made with, and what won.

    `budgets`: fractions of the bytes of a full f16 cache. The longest text had `n_tokens` tokens.
    `repeats`: for every text, the share of the tokens of a repetition that the full cache predicts,
    from 0 to 1. `compared` is empty if the texts were too short. `best` is the way that policy auto
    uses, one of WAYS; with NO_PROFILE, the profile has no predictor. Raises ProfileError, naming
    the field.
    """

    budgets: tuple[float, ...]
    n_tokens: int
    repeats: tuple[float, ...]
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
            columns = ((each.divergences, self.n_texts), (each.repetitions, self.n_texts))
            for table, n in (*columns, (each.facts, self.n_facts)):
                if len(table) != len(self.budgets) or {*map(len, table)} - {n}:
                    raise ProfileError(
                        "profile: comparison.compared must have a figure for every budget, and "
                        f"every text or fact; {ADVICE}"
                    )

    @property
    def n_texts(self) -> int:
        """Return how many texts were read."""
        return len(self.repeats)

    @property
    def n_facts(self) -> int:
        """Return how many of the planted facts the full cache knows, in all texts."""
        facts = [of_budget for each in self.compared for of_budget in each.facts]
        return max(map(len, facts), default=0)

    @property
    def uses_curves(self) -> bool:
        """Tell whether the loss curves of the profile count when budgets are shared."""
        return self.policy != PREDICTOR_ONLY.partition(":")[0]

    @property
    def policy(self) -> str:
        """Return the policy that shares the budget in the best way, without its measure."""
        best = PREDICTOR_ONLY if self.best == NO_PROFILE else self.best
        return best.partition(":")[0]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the comparison."""
        return {
            "budgets": list(self.budgets),
            "n_tokens": self.n_tokens,
            "repeats": rounded(np.array(self.repeats)),
            "compared": [
                {
                    "way": each.way,
                    "divergences": rounded(np.array(each.divergences)),
                    "repetitions": rounded(np.array(each.repetitions)),
                    "facts": [list(of_budget) for of_budget in each.facts],
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
        n_texts = len(_list_in(data["repeats"], where, "comparison.repeats"))
        repeats = table_in(data["repeats"], where, "comparison.repeats", (n_texts,), 1.0)
        rows = _list_in(data["compared"], where, "comparison.compared")
        shape = (len(budgets), n_texts)
        compared = [
            _way_in(row, where, f"comparison.compared[{i}]", shape) for i, row in enumerate(rows)
        ]
        try:
            return cls(
                tuple(budgets),
                integer_in(data["n_tokens"], where, "comparison.n_tokens", 0, _MOST),
                tuple(repeats.tolist()),
                tuple(compared),
                text_in(data["best"], where, "comparison.best"),
            )
        except ProfileError as error:
            raise ProfileError(f"{where}: {str(error).removeprefix('profile: ')}") from None


def _list_in(value: object, where: str, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise ProfileError(f"{where}: {field} must be a list; {ADVICE}")
    return value


def _way_in(value: object, where: str, field: str, shape: tuple[int, int]) -> ComparedWay:
    data = object_in(value, where, field, tuple(ComparedWay.__dataclass_fields__))
    divergences, repetitions = (
        tuple(
            map(tuple, table_in(data[name], where, f"{field}.{name}", shape, _MOST_LOSS).tolist())
        )
        for name in ("divergences", "repetitions")
    )
    facts = [
        [
            integer_in(known, where, f"{field}.facts[{i}][{j}]", 0, 1)
            for j, known in enumerate(_list_in(of_budget, where, f"{field}.facts[{i}]"))
        ]
        for i, of_budget in enumerate(_list_in(data["facts"], where, f"{field}.facts"))
    ]
    return ComparedWay(
        text_in(data["way"], where, f"{field}.way"),
        divergences,
        repetitions,
        tuple(map(tuple, facts)),
    )


def advantage(base: ComparedWay, other: ComparedWay, comparison: WayComparison) -> float:
    """Return how much less `other` loses than `base`, in standard deviations of what chance gives.

    KL and facts count equally, over all budgets. Of a model that knows hardly any facts,
    repetitions count instead, as far as the full cache predicts them.
    """
    found = [(1.0, _gains(base.divergences, other.divergences))]
    if comparison.n_facts >= _FEW_FACTS:
        found.append((1.0, np.subtract(other.facts, base.facts, dtype=np.float64)))
    else:
        repeated = _gains(base.repetitions, other.repetitions)
        found.append((float(np.mean(comparison.repeats)), repeated))
    total = sum(weight * _against_chance(gains) for weight, gains in found)
    return float(total / np.linalg.norm([weight for weight, _ in found]))


def _gains(base: Table, other: Table) -> Floats:
    """Return log(base / other) of every loss, which is positive where `other` loses less."""
    logs = [np.log(np.maximum(np.array(table), _NO_LOSS)) for table in (base, other)]
    gains: Floats = logs[0] - logs[1]
    return gains


def _against_chance(gains: Floats) -> float:
    """Return the sum of gains, divided by the standard deviation that it would have if their signs
    were chance.
    """
    deviation = np.linalg.norm(gains)
    return float(gains.sum() / deviation) if deviation else 0.0


def best_way(comparison: WayComparison) -> str:
    """Go through the compared ways from the simplest, NO_PROFILE, and return the best.

    A way replaces the best so far if its advantage over that one and its advantage over NO_PROFILE
    exceed SURE. PREDICTOR_ONLY needs only an advantage of 0 or more, because with it a model's
    first texts are read once.
    """
    by_name = {each.way: each for each in comparison.compared}
    none = best = by_name[NO_PROFILE]
    for found in filter(None, map(by_name.get, WAYS[1:])):
        gain = min(advantage(base, found, comparison) for base in (none, best))
        if gain > SURE or (found.way == PREDICTOR_ONLY and gain >= 0.0):
            best = found
    return best.way
