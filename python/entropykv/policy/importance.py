"""What ranks entries: measures of importance and their modifiers, by name."""

from __future__ import annotations

from dataclasses import dataclass

from entropykv._core import ImportanceSettings, ScoreKind
from entropykv.errors import SettingsError

MEASURES = {
    "mass": "squared attention probabilities",
    "attention": "attention probabilities",
    "products": "|q.k|, scaled as the softmax sees it",
    "expected": "attention probabilities that queries like those so far would give from the next "
    "positions on",
}
"""What queries give to entries, summed over the query heads of a KV head."""

MODIFIERS = {
    "window": "only the queries of the last micro-batch count",
    "exposure": "per query that could have seen the entry",
    "values": "times the norm of the entry's value",
    "distinct": "less where a newer entry's key is similar",
}

_OBSERVED = ("mass", "attention", "products")
"""Measures that add up what queries gave."""
_OF_OBSERVED = ("window", "exposure")
"""Modifiers of what queries gave; nothing is counted where it is expected."""

_BY_POSITION = ("streaming", "recency")


@dataclass(frozen=True)
class Importance:
    """How entries are ranked; the higher, the longer they stay."""

    measure: str = "mass"
    """Of MEASURES, or `streaming` or `recency`: by position alone."""
    modifiers: tuple[str, ...] = ("values",)
    """Of MODIFIERS, in that order."""
    decay: float = 0.998
    """What is left of an entry's importance after one more token."""
    observation_window: int = 512
    """Queries at the end of a micro-batch that count, in tokens."""

    @staticmethod
    def parse(text: str) -> Importance:
        """Read MEASURE[+MODIFIER...]; SettingsError for names that do not exist, or come twice."""
        measure, *modifiers = text.split("+")
        if measure not in MEASURES:
            raise SettingsError(
                f"there is no measure {measure!r} of importance; use one of {', '.join(MEASURES)}"
            )
        for modifier in modifiers:
            if modifier not in MODIFIERS:
                raise SettingsError(
                    f"there is no modifier {modifier!r} of importance; use {_any_of(MODIFIERS)}"
                )
            if measure == "expected" and modifier in _OF_OBSERVED:
                raise SettingsError(
                    f"measure expected counts no queries and takes no modifier {modifier}; use "
                    "expected with values or distinct, or another measure"
                )
        if len(set(modifiers)) < len(modifiers):
            raise SettingsError(f"{text!r} names a modifier twice; name it once")
        return Importance(measure, tuple(name for name in MODIFIERS if name in modifiers))

    def __str__(self) -> str:
        """As parse() reads it."""
        return "+".join((self.measure, *self.modifiers))

    @property
    def by_position(self) -> bool:
        """Whether it needs no attention: every head would choose the same."""
        return self.measure in _BY_POSITION

    @property
    def of_observed(self) -> bool:
        """Whether it ranks by what queries gave, and by nothing else of a KV head."""
        return {self.measure, *self.modifiers} <= {*_OBSERVED, *_OF_OBSERVED}

    @property
    def kind(self) -> ScoreKind:
        """By the name that the extension gives it."""
        kind: ScoreKind = getattr(ScoreKind, self.measure)
        return kind

    def settings(self, variation: float) -> ImportanceSettings:
        """For the headwise store; `variation`: of the profile's entropies, for recency."""
        return ImportanceSettings(
            kind=self.kind,
            variation=variation,
            decay=0.0 if "window" in self.modifiers else self.decay,
            observation_window=self.observation_window,
            by_exposure="exposure" in self.modifiers,
            by_values="values" in self.modifiers,
            distinct="distinct" in self.modifiers,
        )


def _any_of(names: dict[str, str]) -> str:
    return "any of " + ", ".join(names)
