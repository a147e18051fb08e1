"""Define loss curves: what a KV head loses when it keeps k entries beyond sinks and recent
window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from entropykv.errors import ProfileError

KEEP_FRACTIONS = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""How many entries are kept beyond the protected ones, as fractions of the text."""
RECENT_FRACTION = 0.1
"""The recent window as a fraction of the text, as it would be with a budget of 0.2."""
QUERY_FRACTION = 0.125
"""The fraction at the end of the text whose queries show what is lost."""
N_SINKS = 4
IMPORTANCES = ("mass+values+predicted", "predicted")
"""The measures by which policy auto can rank entries if there are curves; the first is the
default.
"""
EARLIER_IMPORTANCES = {"mass+values+echo": IMPORTANCES[0], "reconstruct": IMPORTANCES[1]}
"""Measures that profiles of earlier versions name, and the measures that replace them.

The earlier ones read a text twice, for what is now predicted.
"""

FloatArray = npt.NDArray[np.float64]
Rows = npt.NDArray[np.float32]
_MOST_ERROR = 1e4
_LEAST_LOSS = 1e-12
MOST_DAMAGE = 1e4
"""The largest damage that is accepted, in nats; predictions that are confidently wrong have a large
damage.
"""


@dataclass(frozen=True, eq=False)
class LossCurves:
    """Hold what every KV head loses, averaged over texts of `length` tokens.

    When all but the last `queries` tokens have been read, a head evicts: it keeps `n_sinks` sinks,
    the `recent_window` newest entries, and those `keep[i]` others that contributed most to the
    outputs (squared attention mass times the squared norm of the value), as policies by mass and
    values do. `mass_lost` is the mean attention mass that the last queries give to evicted entries.
    `output_error` is the norm of the evicted part of their outputs (sum of p * v), relative to the
    norm of the whole outputs; norms are root mean squares. Both average over the last queries of
    all query heads of the group, and have the shape (n_layer, n_head_kv, len(keep)).

    `layer_damage`, (n_layer,), is what the model's predictions lose if all KV heads of a layer keep
    only the protected entries, see calibration/damage.py; None if it was not measured. `importance`
    is the measure in IMPORTANCES by which policy auto ranks entries when it shares a budget by
    these curves; only calibrations of earlier versions chose one, otherwise it is None. For another
    context length, `keep` is scaled in proportion to `length`. Raises ProfileError, naming the
    field.
    """

    length: int
    queries: int
    n_sinks: int
    recent_window: int
    n_texts: int
    keep: tuple[int, ...]
    mass_lost: FloatArray
    output_error: FloatArray
    layer_damage: FloatArray | None = None
    importance: str | None = None

    def __post_init__(self) -> None:
        """Check every field and take read-only copies of the arrays."""
        if not self.keep or self.keep[0] != 0 or list(self.keep) != sorted(set(self.keep)):
            raise ProfileError(
                "profile: curves.keep must ascend from 0 without repetition; calibrate again"
            )
        for name, most in (("mass_lost", 1.0 + 1e-6), ("output_error", _MOST_ERROR)):
            values = np.array(getattr(self, name), dtype=np.float64)
            if values.ndim != 3 or values.shape[2] != len(self.keep):
                raise ProfileError(
                    f"profile: curves.{name} must be [layer][KV head][{len(self.keep)}]; "
                    "calibrate again"
                )
            if not np.all((values >= 0.0) & (values <= most)):
                raise ProfileError(
                    f"profile: curves.{name} must lie between 0 and {most:g}; calibrate again"
                )
            values.flags.writeable = False
            object.__setattr__(self, name, values)
        if self.layer_damage is not None:
            self._check_damage()
        if self.importance is not None and self.importance not in IMPORTANCES:
            raise ProfileError(
                f"profile: curves.importance must be one of {', '.join(IMPORTANCES)}; calibrate "
                "again"
            )

    def _check_damage(self) -> None:
        damage = np.array(self.layer_damage, dtype=np.float64)
        if damage.shape != (len(self.output_error),) or not np.all(
            (damage >= 0.0) & (damage <= MOST_DAMAGE)
        ):
            raise ProfileError(
                f"profile: curves.layer_damage must be a number from 0 to {MOST_DAMAGE:g} for "
                "every layer; calibrate again"
            )
        damage.flags.writeable = False
        object.__setattr__(self, "layer_damage", damage)

    def knots(self, n_ctx: int, most: int) -> tuple[list[float], list[float]]:
        """Return numbers of entries beyond the protected ones in a context of n_ctx, and the losses
        there.

        The numbers (knots) ascend from 0 to `most`, where everything is kept and nothing is lost.
        The losses are a flat list [layer * KV head][knot], as _core.share_by_curves takes them.
        They are squares of output_error, because independent errors add up as squares.
        """
        scaled = [k * n_ctx / self.length for k in self.keep]
        inside = [k for k in scaled if k < most] or [0.0]
        losses = self._losses().reshape(-1, len(self.keep))[:, : len(inside)]
        complete = np.concatenate([losses, np.zeros((len(losses), 1))], axis=1)
        return [*inside, float(max(most, 1))], cast("list[float]", complete.ravel().tolist())

    def _losses(self) -> FloatArray:
        """Return what every KV head loses, in a unit that is common to all heads, in the shape of
        output_error.
        """
        losses = np.square(self.output_error)
        if self.layer_damage is None:
            return losses
        of_layers = np.maximum(losses[:, :, 0].sum(axis=1), _LEAST_LOSS)
        scaled: FloatArray = losses * (self.layer_damage / of_layers)[:, None, None]
        return scaled / (scaled.max() or 1.0)  # Only ratios matter.


@dataclass(frozen=True)
class CurveRules:
    """Hold what is kept and which queries attend to it, in tokens, for texts of `length` tokens."""

    length: int
    queries: int
    n_sinks: int
    recent_window: int
    keep: tuple[int, ...]

    @classmethod
    def for_length(cls, length: int) -> CurveRules:
        """Return the rules of the default calibration, whose sizes are fractions of the text."""
        keep = sorted({int(fraction * length) for fraction in KEEP_FRACTIONS})
        queries = max(1, int(QUERY_FRACTION * length))
        return cls(length, queries, N_SINKS, max(1, int(RECENT_FRACTION * length)), tuple(keep))

    @property
    def n_read(self) -> int:
        """Return how many tokens have been read when the head evicts."""
        return self.length - self.queries


class Queries(NamedTuple):
    """Hold the last queries of a text in one layer, and how they attend."""

    rows: Rows
    """The queries, (n, n_head, k_dim), already scaled."""
    sinks: Rows
    """The logit of each head's attention sink, (n_head,), which is added to every row."""
    softcap: float
    window: int = 0
    """The layer's sliding window in tokens; 0 for none."""
    chunked: bool = False
    """True if windows begin at multiples of their size."""
    slopes: Rows | None = None
    """The slope per position that is subtracted from logits (ALiBi), (n_head,); None
    without ALiBi.
    """

    def of_heads(self, heads: slice) -> Queries:
        """Return the queries of only these query heads."""
        slopes = None if self.slopes is None else self.slopes[heads]
        return self._replace(rows=self.rows[:, heads], sinks=self.sinks[heads], slopes=slopes)


class Entries(NamedTuple):
    """Hold the entries of a KV head at the end of a text, with positions ascending from 0."""

    k: Rows
    """The keys, (n, k_dim)."""
    v: Rows
    """The values, (n, v_dim)."""
    importance: Rows
    """The importance of each entry at the time of eviction, (n_read,)."""


class HeadLoss(NamedTuple):
    """Hold what one KV head loses in one text, for every number of kept entries."""

    mass: FloatArray
    """The mean attention mass that is lost, (len(keep),)."""
    dropped: FloatArray
    """The mean square of the evicted part of the outputs, (len(keep),)."""
    whole: float
    """The mean square of the whole outputs."""


def weights_of(queries: Queries, k: Rows, positions: npt.NDArray[np.intp]) -> tuple[Rows, Rows]:
    """Return the unnormalised attention weights of the last n tokens over all T entries.

    Entries are in the order of `positions`; the last n of them belong to the queries. Returns the
    weights, (n * heads, T), and the weight of the attention sink in each row, (n * heads, 1).
    """
    n_queries, n_heads, _ = queries.rows.shape
    logits: Rows = queries.rows.reshape(n_queries * n_heads, -1) @ k[positions].T
    if queries.softcap > 0.0:
        logits = np.float32(queries.softcap) * np.tanh(logits / np.float32(queries.softcap))
    own = len(k) - n_queries + np.repeat(np.arange(n_queries), n_heads)
    if queries.slopes is not None:
        distance = own[:, None] - positions[None, :]
        logits -= np.tile(queries.slopes, n_queries)[:, None] * distance
    if queries.window > 0:
        begin = (
            own // queries.window * queries.window if queries.chunked else own - queries.window + 1
        )
        logits[positions[None, :] < begin[:, None]] = -np.inf
    newest = logits[:, -n_queries:]  # All other entries precede every query.
    newest[positions[None, -n_queries:] > own[:, None]] = -np.inf
    sinks = np.tile(queries.sinks, n_queries)[:, None]
    largest = np.maximum(logits.max(axis=1, keepdims=True), sinks)
    logits -= largest
    return np.exp(logits, out=logits), np.exp(sinks - largest)


def head_loss(queries: Queries, entries: Entries, rules: CurveRules) -> HeadLoss:
    """Return what one KV head loses; `queries` are those of its query heads.

    Entries are sorted by the order of eviction, last evicted first, followed by those that are
    never evicted. Therefore the entries between two numbers kept are a slice, which is summed only
    once.
    """
    candidates = np.arange(rules.n_sinks, max(rules.n_sinks, rules.n_read - rules.recent_window))
    scores = entries.importance[candidates] * np.square(entries.v[candidates]).sum(axis=1)
    order = candidates[np.argsort(-scores, kind="stable")]
    kept = np.setdiff1d(np.arange(len(entries.k)), order, assume_unique=True)
    positions = np.concatenate([order, kept])
    weights, of_sinks = weights_of(queries, entries.k, positions)
    ones = np.ones((len(positions), 1), np.float32)
    values = np.concatenate([entries.v[positions], ones], axis=1)
    mass = np.zeros(len(rules.keep))
    dropped = np.zeros(len(rules.keep))
    # `lost` holds the outputs of evicted entries, and in its last column their mass.
    lost = np.zeros((len(weights), values.shape[1]), np.float32)
    ends = [min(keep, len(order)) for keep in rules.keep]
    all_lost = []
    for first, last in zip(reversed(ends), [len(order), *reversed(ends[1:])], strict=True):
        lost = lost + weights[:, first:last] @ values[first:last]
        all_lost.append(lost)
    rest = weights[:, : ends[0]] @ values[: ends[0]]
    whole = lost + rest + weights[:, len(order) :] @ values[len(order) :]
    total = whole[:, -1:] + of_sinks
    for i, lost in enumerate(reversed(all_lost)):
        of_all = (lost / total).astype(np.float64)
        mass[i] = min(of_all[:, -1].mean(), 1.0)
        dropped[i] = np.square(of_all[:, :-1]).sum(axis=1).mean()
    outputs = (whole[:, :-1] / total).astype(np.float64)
    return HeadLoss(mass, dropped, float(np.square(outputs).sum(axis=1).mean()))


def average_curves(rules: CurveRules, texts: Sequence[Sequence[Sequence[HeadLoss]]]) -> LossCurves:
    """Average the losses of [text][layer][KV head] over the texts."""
    mass = np.array([[[head.mass for head in layer] for layer in text] for text in texts])
    dropped = np.array([[[head.dropped for head in layer] for layer in text] for text in texts])
    whole = np.array([[[head.whole for head in layer] for layer in text] for text in texts])
    total = np.maximum(whole.mean(axis=0), 1e-30)[:, :, None]
    return LossCurves(
        length=rules.length,
        queries=rules.queries,
        n_sinks=rules.n_sinks,
        recent_window=rules.recent_window,
        n_texts=len(texts),
        keep=rules.keep,
        mass_lost=mass.mean(axis=0),
        output_error=np.minimum(np.sqrt(dropped.mean(axis=0) / total), _MOST_ERROR),
    )
