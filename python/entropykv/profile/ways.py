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
"""The way that uses only the predictor of a profile: budgets follow the text."""
WAYS = (
    NO_PROFILE,
    PREDICTOR_ONLY,
    f"guided:{IMPORTANCES[0]}",
    f"profile:{IMPORTANCES[0]}",
)
"""The ways in which policy auto can use a profile, the simplest first."""

MARGIN = 0.05
"""A gain in KL must be larger than this to count; less is not worth budgets by curves."""
_FEW_FACTS = 6
"""If the full cache knows fewer facts, repetitions are compared instead."""
_SURE = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89)
"""Student's t for a probability of 95 %, by degrees of freedom from 1: a mean difference that is
larger than so many of its standard errors is no noise.
"""
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
    """How many planted facts are known, of those that the full cache knows."""

    @property
    def n_known(self) -> tuple[int, ...]:
        """Return for every budget how many facts are known, in all texts."""
        return tuple(map(sum, self.facts))


@dataclass(frozen=True)
class WayComparison:
    """Hold what was compared on texts that the profile was not made with, and what won.

    `budgets`: fractions of the bytes of a full f16 cache. The longest text had `n_tokens` tokens.
    For every text, the full cache knows `n_facts` of the facts that were planted in it, and
    `repeats` is the share of the tokens of a repetition that it predicts, from 0 to 1. `compared`
    is empty if the texts were too short. `best` is the way that policy auto goes, one of WAYS; with
    NO_PROFILE, the profile has no predictor. Raises ProfileError, naming the field.
    """

    budgets: tuple[float, ...]
    n_tokens: int
    n_facts: tuple[int, ...]
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
            for table in (each.divergences, each.repetitions, each.facts):
                if len(table) != len(self.budgets) or {*map(len, table)} - {self.n_texts}:
                    raise ProfileError(
                        "profile: comparison.compared must have a figure for every budget and "
                        f"text; {ADVICE}"
                    )
        if len(self.n_facts) != self.n_texts:
            raise ProfileError(
                f"profile: comparison.n_facts must have a number for every text; {ADVICE}"
            )
        for each in self.compared:
            if np.any(np.array(each.facts) > np.array(self.n_facts)):
                raise ProfileError(
                    "profile: comparison.compared must not have more facts than "
                    f"comparison.n_facts; {ADVICE}"
                )

    @property
    def n_texts(self) -> int:
        """Return how many texts were read."""
        return len(self.repeats)

    @property
    def tells_facts(self) -> bool:
        """Tell whether the full cache knows enough facts to compare ways by them."""
        return sum(self.n_facts) >= _FEW_FACTS

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
            "n_facts": list(self.n_facts),
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
        n_facts = _counts_in(data["n_facts"], where, "comparison.n_facts")
        repeats = table_in(data["repeats"], where, "comparison.repeats", (len(n_facts),), 1.0)
        rows = _list_in(data["compared"], where, "comparison.compared")
        shape = (len(budgets), len(n_facts))
        compared = [
            _way_in(row, where, f"comparison.compared[{i}]", shape) for i, row in enumerate(rows)
        ]
        try:
            return cls(
                tuple(budgets),
                integer_in(data["n_tokens"], where, "comparison.n_tokens", 0, _MOST),
                n_facts,
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


def _counts_in(value: object, where: str, field: str) -> tuple[int, ...]:
    counts = enumerate(_list_in(value, where, field))
    return tuple(integer_in(count, where, f"{field}[{i}]", 0, _MOST) for i, count in counts)


def _way_in(value: object, where: str, field: str, shape: tuple[int, int]) -> ComparedWay:
    data = object_in(value, where, field, tuple(ComparedWay.__dataclass_fields__))
    divergences, repetitions = (
        tuple(
            map(tuple, table_in(data[name], where, f"{field}.{name}", shape, _MOST_LOSS).tolist())
        )
        for name in ("divergences", "repetitions")
    )
    facts = _list_in(data["facts"], where, f"{field}.facts")
    return ComparedWay(
        text_in(data["way"], where, f"{field}.way"),
        divergences,
        repetitions,
        tuple(_counts_in(of, where, f"{field}.facts[{i}]") for i, of in enumerate(facts)),
    )


def gains_over(base: ComparedWay, other: ComparedWay, comparison: WayComparison) -> Floats:
    """Return how much less a way loses than another one, (budgets, texts); more is negative.

    It is the logarithm of the ratio of their divergences. Of a model that knows hardly any facts,
    repetitions count, too, as far as the full cache predicts them.
    """
    gains = _log_ratios(base.divergences, other.divergences)
    if comparison.tells_facts:
        return gains
    weights = np.array(comparison.repeats)
    repeated = _log_ratios(base.repetitions, other.repetitions)
    weighted: Floats = (gains + weights * repeated) / (1.0 + weights)
    return weighted


def _log_ratios(base: Table, other: Table) -> Floats:
    logs = [np.log(np.maximum(np.array(table), _NO_LOSS)) for table in (base, other)]
    ratios: Floats = logs[0] - logs[1]
    return ratios


def exceeds_noise(differences: Floats) -> bool:
    """Tell whether the mean of differences, one for each text, is larger than 0 by more than chance
    explains.
    """
    n = len(differences)
    if n < 2:
        return False
    error = differences.std(ddof=1) / np.sqrt(n)
    return bool(differences.mean() > _SURE[min(n - 1, len(_SURE)) - 1] * error)


def is_no_worse(base: ComparedWay, other: ComparedWay, comparison: WayComparison) -> bool:
    """Tell whether a way, at every budget, loses no more than another one in the mean of the texts,
    and knows no fewer facts.
    """
    knows = all(b >= a for a, b in zip(base.n_known, other.n_known, strict=True))
    return knows and bool(np.all(gains_over(base, other, comparison).mean(axis=1) >= 0.0))


def beats(base: ComparedWay, other: ComparedWay, comparison: WayComparison) -> bool:
    """Tell whether a way is no worse than another one, and gains more than noise: in KL, where less
    than MARGIN does not count, or in facts.
    """
    if not is_no_worse(base, other, comparison):
        return False
    gains = gains_over(base, other, comparison).mean(axis=0)
    more = np.array(other.facts).sum(axis=0) - np.array(base.facts).sum(axis=0)
    return exceeds_noise(more) or (bool(gains.mean() > MARGIN) and exceeds_noise(gains))


def best_way(comparison: WayComparison) -> str:
    """Return the way that loses least; a simpler one (earlier in WAYS) unless a later one beats it.

    What is chosen must beat no profile. Only the profile's predictor needs to be no worse: with it,
    a model's first texts are read once, too.
    """
    by_name = {each.way: each for each in comparison.compared}
    none = best = by_name[NO_PROFILE]
    for way in filter(by_name.get, WAYS[1:]):
        found = by_name[way]
        if way == PREDICTOR_ONLY:
            chosen = is_no_worse(none, found, comparison)
        else:
            chosen = all(beats(base, found, comparison) for base in (none, best))
        if chosen:
            best = found
    return best.way
