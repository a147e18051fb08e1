"""The numpy oracle: every algorithm of the C++ core, written to be read, in float64.

Arrays are named as in cpp/: n tokens of a micro-batch, T entries, `group` query heads per KV head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

F16_LARGEST = 65504.0
QUANT_BLOCK = 32  # values that share one scale in q8_0
DECODE_ROOM = 16  # most entries that one eviction makes room for

# ---------------------------------------------------------------------------------------------
# what K and V are after they were stored


def round_f16(values: npt.NDArray[Any]) -> Floats:
    """Nearest f16; beyond the range, the largest one."""
    clipped = np.clip(values.astype(np.float32), -F16_LARGEST, F16_LARGEST)
    return clipped.astype(np.float16).astype(np.float64)


def round_q8_0(rows: npt.NDArray[Any]) -> Floats:
    """Rows [..., dim] as int8 times a scale per 32 values; the scale is max |x| / 127 in f16.

    In float32, as the store does it, so that halves round the same way.
    """
    result = np.zeros(rows.shape)
    for first in range(0, rows.shape[-1], QUANT_BLOCK):
        block = rows[..., first : first + QUANT_BLOCK].astype(np.float32)
        limit = np.abs(block).max(axis=-1, keepdims=True)
        scale = round_f16(limit / np.float32(127.0)).astype(np.float32)
        safe = np.where(scale > 0.0, scale, np.float32(1.0))
        steps = np.where(scale > 0.0, block * (np.float32(1.0) / safe), np.float32(0.0))
        steps = np.clip(steps, np.float32(-127.0), np.float32(127.0))
        away_from_zero = np.trunc(steps + np.copysign(np.float32(0.5), steps))
        result[..., first : first + QUANT_BLOCK] = away_from_zero.astype(np.float64) * scale
    return result


def stored(rows: npt.NDArray[Any], kv_type: str) -> Floats:
    """Rows of K or V as attention reads them back."""
    return {"f16": round_f16, "q8_0": round_q8_0}[kv_type](rows)


# ---------------------------------------------------------------------------------------------
# rotary position embedding of stored keys


class Rope(NamedTuple):
    """By ggml's names; `factors`: divisors of the frequencies, one for each pair, or none."""

    n_dims: int
    offset: int = 0
    neox: bool = False
    n_ctx_orig: int = 0
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    freq_factors: tuple[float, ...] = ()


def rope_frequencies(rope: Rope) -> Floats:
    """Radians per position of every pair: ggml's rope_yarn, divided by the position."""
    pairs = np.arange(rope.n_dims // 2)
    own = rope.freq_base ** (-2.0 * pairs / rope.n_dims)
    if rope.freq_factors:
        own = own / np.asarray(rope.freq_factors)
    interpolated = own * rope.freq_scale
    if rope.ext_factor == 0.0:
        return interpolated

    def pair_that_turns(times: float) -> float:
        wave = rope.n_ctx_orig / (times * 2.0 * np.pi)
        return float(rope.n_dims * np.log(wave) / (2.0 * np.log(rope.freq_base)))

    low = max(0.0, np.floor(pair_that_turns(rope.beta_fast)))
    high = min(rope.n_dims - 1.0, np.ceil(pair_that_turns(rope.beta_slow)))
    ramp = 1.0 - np.clip((pairs - low) / max(0.001, high - low), 0.0, 1.0)
    mix = ramp * rope.ext_factor
    return interpolated * (1.0 - mix) + own * mix


def rope_pairs(rope: Rope) -> list[tuple[int, int]]:
    """The values of a row that are turned together."""
    pairs = np.arange(rope.n_dims // 2)
    first = rope.offset + (pairs if rope.neox else 2 * pairs)
    return [(int(i), int(i + (len(pairs) if rope.neox else 1))) for i in first]


def rotated(rows: npt.NDArray[Any], by: npt.NDArray[Any], rope: Rope) -> Floats:
    """Rows [n][dim] turned on by `by` [n] positions."""
    result = rows.astype(np.float64).copy()
    if rope.n_dims == 0:
        return result
    first, second = np.array(rope_pairs(rope)).T
    turned = (rows[:, first] + 1j * rows[:, second]) * np.exp(
        1j * np.outer(by, rope_frequencies(rope))
    )
    result[:, first], result[:, second] = turned.real, turned.imag
    return result


def rope_positions(positions: npt.NDArray[Any], n_sinks: int, shift: int) -> Ints:
    """Where RoPE sees positions of the text: sinks stay, the rest moves up to them at most."""
    return np.where(positions < n_sinks, positions, np.maximum(positions - shift, n_sinks))


# ---------------------------------------------------------------------------------------------
# attention


class Attention(NamedTuple):
    """Outputs [n][heads][v_dim], entropies in bits [n][heads], what entries were given."""

    outputs: Floats
    entropies: Floats
    observed: Floats
    """Of a KV head: [n][T], summed over its query heads. Of a layer: [n_head_kv][n][T]."""


NEIGHBOURHOOD = 32  # queries nearer to an entry do not score it
SCORING_INTERVAL = 4
WINDOW_MARGIN = 32  # entries that stay beyond a sliding window where there is room


@dataclass(frozen=True)
class Options:
    """Constants of a layer's attention."""

    scale: float
    softcap: float = 0.0
    window: int = 0
    sinks: npt.NDArray[Any] | None = None
    """One logit per query head."""
    chunked: bool = False
    """The window begins at multiples of its size."""
    slopes: npt.NDArray[Any] | None = None
    """What logits fall by per position, one per query head."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What HeadwiseStore.attend takes; the window is the layer's."""
        names = ("scale", "softcap", "sinks", "slopes")
        return {name: getattr(self, name) for name in names}

    def of_heads(self, heads: slice) -> Options:
        """The same, with the sinks of those query heads."""
        sinks = None if self.sinks is None else self.sinks[heads]
        slopes = None if self.slopes is None else self.slopes[heads]
        return replace(self, sinks=sinks, slopes=slopes)


def oldest_seen(query_position: int, window: int, chunked: bool) -> int:
    """The first position that a query sees."""
    if window == 0:
        return 0
    return query_position // window * window if chunked else query_position - window + 1


def visible(query_positions: Ints, positions: Ints, options: Options) -> Bools:
    """[n][T]: whether a query sees an entry: not a later one, nor one that left its window."""
    window = (options.window, options.chunked)
    oldest = np.array([oldest_seen(int(query), *window) for query in query_positions])
    seen = positions[None, :] <= query_positions[:, None]
    return seen & (positions[None, :] >= oldest[:, None])


def biased(logits: Floats, queries: Ints, positions: Ints, options: Options) -> Floats:
    """ALiBi: logits [n][group][T] fall linearly with the distance."""
    if options.slopes is None:
        return logits
    distance = queries[:, None, None] - positions[None, None, :]
    biased: Floats = logits - options.slopes.astype(np.float64)[None, :, None] * distance
    return biased


def given(measure: str, weights: Floats, logits: Floats) -> Floats:
    """What a query gives to an entry, by measure; to one that it does not see: nothing."""
    return {
        "mass": weights**2,
        "attention": weights,
        "products": np.where(np.isfinite(logits), np.abs(logits), 0.0),
    }[measure]


def attend_kv_head(
    q: npt.NDArray[Any],
    k: Floats,
    v: Floats,
    positions: Ints,
    first_query: int,
    options: Options,
    measure: str = "mass",
    neighbourhood: int = NEIGHBOURHOOD,
) -> Attention:
    """One KV head: q [n][group][k_dim] at positions first_query.., k [T][k_dim], v [T][v_dim]."""
    logits = np.einsum("ngd,td->ngt", q.astype(np.float64), k) * options.scale
    if options.softcap > 0.0:
        logits = options.softcap * np.tanh(logits / options.softcap)
    logits = biased(logits, first_query + np.arange(len(q)), positions, options)
    seen = visible(first_query + np.arange(len(q)), positions, options)
    logits = np.where(seen[:, None, :], logits, -np.inf)
    if options.sinks is not None:
        column = np.broadcast_to(options.sinks.astype(np.float64)[None, :, None], (*q.shape[:2], 1))
        logits = np.concatenate([logits, column], axis=2)
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    entropies = -np.where(weights > 0.0, weights * np.log2(np.maximum(weights, 1e-300)), 0.0)
    weights_of_entries = weights[:, :, : len(k)]
    outputs = np.einsum("ngt,td->ngd", weights_of_entries, v)
    distance = first_query + np.arange(len(q))[:, None] - positions[None, :]
    observed = given(measure, weights_of_entries, logits[:, :, : len(k)])
    observed = np.where(distance[:, None, :] >= neighbourhood, observed, 0.0)
    return Attention(outputs, entropies.sum(axis=2), observed.sum(axis=1))


def attend_layer(
    q: npt.NDArray[Any],
    k: Floats,
    v: Floats,
    first_query: int,
    options: Options,
    measure: str = "mass",
) -> Attention:
    """One layer whose entries 0..T-1 are all kept: k [T][n_head_kv][k_dim]."""
    group = q.shape[1] // k.shape[1]
    parts = []
    for head in range(k.shape[1]):
        heads = slice(head * group, (head + 1) * group)
        of_heads = options.of_heads(heads)
        positions = np.arange(len(k))
        rows = (q[:, heads], k[:, head], v[:, head])
        parts.append(attend_kv_head(*rows, positions, first_query, of_heads, measure))
    return Attention(
        np.concatenate([part.outputs for part in parts], axis=1),
        np.concatenate([part.entropies for part in parts], axis=1),
        np.stack([part.observed for part in parts]),
    )


# ---------------------------------------------------------------------------------------------
# which entries stay


def updated_importance(
    importance: Floats,
    observed: Floats,
    decay: float,
    window: int,
    first_position: int,
    *,
    by_exposure: bool = False,
    interval: int = SCORING_INTERVAL,
) -> Floats:
    """After a micro-batch of n tokens that gave `observed` [n][T]: its last `window` queries count.

    Of tokens that come one by one, every fourth (`interval`) counts, for four. What is divided by
    an exposure decays within the micro-batch too.
    """
    n_tokens = len(observed)
    weights = np.ones(n_tokens)
    if n_tokens == 1:
        if first_position % interval != 0:
            return importance
        n_tokens, weights = interval, np.full(1, float(interval))
    elif by_exposure and decay > 0.0:
        weights = decay ** np.arange(n_tokens)[::-1]
    kept = decay**n_tokens if decay > 0.0 else 0.0
    updated: Floats = importance * kept + (weights[:, None] * observed)[-window:].sum(axis=0)
    return updated


def exposure(age: int, decay: float, window: int) -> float:
    """Queries that an entry could have been seen by at so many positions before the newest.

    Decayed; with decay 0, those of the window of a micro-batch that holds it.
    """
    queries = max(age - NEIGHBOURHOOD + 1, 1)
    if decay == 0.0:
        return float(min(queries, window))
    return float((decay ** np.arange(queries)).sum())


@dataclass
class QueryStatistics:
    """Queries of a KV head's group that were read so far, as they are at position 0."""

    rope: Rope
    decay: float
    queries: list[npt.NDArray[Any]] = field(default_factory=list)
    """[group][k_dim] each, scaled"""

    def add(self, q: npt.NDArray[Any], first_position: int, scale: float) -> None:
        """Read the queries [n][group][k_dim] of a micro-batch."""
        for token, rows in enumerate(q * scale):
            back = np.full(len(rows), -(first_position + token))
            self.queries.append(rotated(rows, back, self.rope))

    def expected_logits(self, k: Floats, newest: int, n_future: int) -> Floats:
        """Of entries [T][k_dim], [group][T]: the mean of the logarithm of a normal distribution.

        A token of the next n_future turns the mean; values vary independently of each other, and
        the two of a pair equally: the mean of both, with what the turning of the mean adds.
        """
        weights = self.decay ** np.arange(len(self.queries))[::-1]
        rows = np.array(self.queries)
        mean = np.einsum("n,ngd->gd", weights, rows) / weights.sum()
        variance = np.einsum("n,ngd->gd", weights, rows**2) / weights.sum() - mean**2
        future = newest + 1 + np.arange(n_future)
        means = np.array([rotated(mean, np.full(len(mean), t), self.rope) for t in future])
        variance = variance + means.var(axis=0)
        for first, second in rope_pairs(self.rope):
            both = (variance[:, first] + variance[:, second]) / 2
            variance[:, first] = variance[:, second] = both
        return means.mean(axis=0) @ k.T + 0.5 * variance @ (k.T**2)


def expected_attention(logits: Floats, positions: Ints, n_sinks: int) -> Floats:
    """Of [group][T]: the softmax over the entries that are no sinks, summed over query heads."""
    logits = np.where(positions < n_sinks, -np.inf, logits)
    if not np.isfinite(logits).any():
        return np.zeros(len(positions))
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray((weights / weights.sum(axis=1, keepdims=True)).sum(axis=0))


SIMILAR = 0.9  # cosine from which on the older of two keys counts less
CONTEST = 512  # entries around the threshold that are compared


def distinctness(k: Floats, positions: Ints, scores: Floats, free: Bools, keep: int) -> Floats:
    """Factors of the scores: less than 1 where a newer entry's key is similar.

    Only what an eviction decides on is compared: the free entries of the ranks around the last one
    that would stay.
    """
    factors = np.ones(len(k))
    candidates = np.flatnonzero(free)
    wanted = keep - (len(k) - len(candidates))
    if not 0 < wanted < len(candidates):
        return factors
    ranked = candidates[np.argsort(-scores[candidates], kind="stable")]
    last = min(len(ranked), max(wanted + CONTEST // 2, CONTEST))
    contest = sorted(ranked[max(0, last - CONTEST) : last], key=lambda i: int(positions[i]))
    lengths = np.linalg.norm(k[contest], axis=1, keepdims=True)
    keys = np.divide(k[contest], lengths, out=np.zeros_like(k[contest]), where=lengths > 0)
    for j, i in enumerate(contest[:-1]):
        cosine = float((keys[j + 1 :] @ keys[j]).max())
        factors[i] = min(1.0, (1.0 - cosine) / (1.0 - SIMILAR))
    return factors


def recency_score(position: int, newest: int, variation: float) -> float:
    """The BitNet document's score; what is the newest tenth is decided in float32."""
    span = max(newest, 1)
    distance = newest - position
    in_newest_tenth = np.float32(distance) < np.float32(0.1) * np.float32(span)
    alpha = 2.0 / (span * (1.0 + variation))
    return float(np.exp(-alpha * distance)) + (0.5 if in_newest_tenth else 0.0)


def protected(positions: Ints, newest: int, n_sinks: int, recent_window: int) -> Bools:
    """Entries that no eviction takes."""
    return (positions < n_sinks) | (positions > newest - recent_window)


def select_survivors(
    scores: npt.NDArray[Any], positions: Ints, keep: int, n_sinks: int, recent: int, newest: int
) -> Bools:
    """The protected entries, then the highest scores (ties: the earlier index) up to `keep`."""
    kept = protected(positions, newest, n_sinks, recent)
    for index in np.argsort(-scores, kind="stable"):
        if kept.sum() >= keep:
            break
        kept[index] = True
    return kept


def entries_to_keep(budget: int, n_new: int, n_sinks: int, recent_window: int) -> int:
    """What an eviction leaves: room for some more tokens while they come one by one."""
    beyond_protection = budget - n_sinks - recent_window
    room = min(max(beyond_protection // 4, 1), DECODE_ROOM)
    return budget - max(room - n_new, 0)


# ---------------------------------------------------------------------------------------------
# a KV head that reads micro-batches


class Schedule(NamedTuple):
    """The freeze document's section 3, by the names of cpp/decide/freezing.hpp."""

    window: int = 32
    threshold: float = 1.0
    rate: float = 2.0
    history: int = 0


@dataclass
class Rules:
    """What the KV heads of a store have in common."""

    score: str
    """streaming, recency, or a measure: see given()."""
    kv_type: str = "f16"
    n_sinks: int = 4
    recent_window: int = 8
    variation: float = 0.0
    decay: float = 0.0
    observation_window: int = 64
    by_exposure: bool = False
    by_values: bool = False
    distinct: bool = False
    future_positions: int = 64
    rope: Rope = field(default_factory=lambda: Rope(0))
    own_windows: bool = False
    """Half of a KV head's own budget is for its sinks and recent window."""
    schedule: Schedule | None = None
    """Of what freezes: every query counts then, for every entry."""

    @property
    def observes(self) -> bool:
        """Whether queries give importance to entries."""
        return self.score in ("mass", "attention", "products")

    @property
    def tolerance(self) -> float:
        """Of scores: q.k of q8_0 is of a query of 16-bit integers, of another rounding."""
        return 2e-3 if (self.score, self.kv_type) == ("products", "q8_0") else 1e-4


@dataclass
class ReferenceHead:
    """What one KV head keeps, in the order of positions."""

    rules: Rules
    k_dim: int
    v_dim: int
    budget: int
    window: int = 0
    chunked: bool = False
    whole_from: int = 0
    """Later queries see nothing that was dropped because it had left the window."""
    positions: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    k: Floats = field(init=False)
    v: Floats = field(init=False)
    importance: Floats = field(default_factory=lambda: np.zeros(0))
    evicted: int = 0

    def __post_init__(self) -> None:
        """Start empty."""
        self.k, self.v = np.zeros((0, self.k_dim)), np.zeros((0, self.v_dim))
        self.queries = QueryStatistics(self.rules.rope, self.rules.decay)

    def read(
        self,
        q: npt.NDArray[Any],
        k: npt.NDArray[Any],
        v: npt.NDArray[Any],
        first_position: int,
        options: Options,
    ) -> Attention:
        """Attend to a micro-batch and rank by it; nothing is evicted yet."""
        result = self.attend(q, k, v, first_position, options)
        self.give(result.observed, first_position)
        return result

    @property
    def recent_window(self) -> int:
        """Newest entries that no eviction takes."""
        if not self.rules.own_windows:
            return self.rules.recent_window
        return max(self.budget // 2 - self.rules.n_sinks, 1)

    def attend(
        self,
        q: npt.NDArray[Any],
        k: npt.NDArray[Any],
        v: npt.NDArray[Any],
        first_position: int,
        options: Options,
    ) -> Attention:
        """Attend to a micro-batch (q [n][group][k_dim], k [n][k_dim]), and hold all of it."""
        self.positions = np.append(self.positions, first_position + np.arange(len(k)))
        self.k = np.concatenate([self.k, stored(k, self.rules.kv_type)])
        self.v = np.concatenate([self.v, stored(v, self.rules.kv_type)])
        self.importance = np.append(self.importance, np.zeros(len(k)))
        rules = self.rules
        if rules.score == "expected":
            self.queries.add(q, first_position, options.scale)
            self.newest_query = first_position + len(q) - 1
        measure = rules.score if rules.observes else "mass"
        rows = (q, self.k, self.v, self.positions, first_position)
        neighbourhood = 0 if rules.schedule else NEIGHBOURHOOD
        return attend_kv_head(*rows, options, measure, neighbourhood)

    def give(self, observed: Floats, first_position: int) -> None:
        """Add what a micro-batch that began at `first_position` gave: [n][T]."""
        rules = self.rules
        if rules.observes:
            self.importance = updated_importance(
                self.importance,
                observed,
                rules.decay,
                rules.observation_window,
                first_position,
                by_exposure=rules.by_exposure,
                interval=1 if rules.schedule else SCORING_INTERVAL,
            )

    def losses(self, knots: Sequence[int], outputs: Floats) -> Floats:
        """What dropping all but so many of the unprotected entries loses, before any eviction.

        Squared outputs (mass+values) are relative to those of the micro-batch, [n][group][v_dim].
        """
        rules, newest = self.rules, int(self.positions.max())
        free = ~protected(self.positions, newest, rules.n_sinks, self.recent_window)
        free &= self.positions >= oldest_seen(newest + 1, self.window, self.chunked)
        losses = losses_at(self.scores(self.budget)[free], knots)
        squares = rules.score == "mass" and rules.by_values
        return losses / (outputs**2).sum() if squares else losses

    def settle(self, n_new: int, theirs: Sequence[int] | npt.NDArray[Any]) -> None:
        """Evict after a micro-batch of n_new tokens, to `theirs` if that is a right choice."""
        if len(self.positions) > self.budget:
            self._leave_window(0 if self.chunked else WINDOW_MARGIN)
        if len(self.positions) > self.budget:
            sinks, recent = self.rules.n_sinks, self.recent_window
            self._evict(entries_to_keep(self.budget, n_new, sinks, recent), theirs)
        np.testing.assert_array_equal(theirs, self.positions)

    def set_budget(self, budget: int, theirs: Sequence[int] | npt.NDArray[Any]) -> None:
        """Evict down to another budget, to `theirs` if that is a right choice."""
        self.budget = budget
        if len(self.positions) > budget:
            self._leave_window(0)
        if len(self.positions) > budget:
            self._evict(budget, theirs)
        np.testing.assert_array_equal(theirs, self.positions)

    def truncate(self, position: int) -> None:
        """Forget what was read from `position` on."""
        self._keep(self.positions < position)
        self.whole_from = min(self.whole_from, position)
        if position == 0:
            self.queries = QueryStatistics(self.rules.rope, self.rules.decay)

    def scores(self, keep: int) -> Floats:
        """Of every entry of which `keep` stay: the higher, the longer it stays."""
        rules, newest = self.rules, int(self.positions.max())
        if rules.score == "streaming":
            return 1.0 / (1.0 + newest - self.positions)
        if rules.score == "recency":
            return np.array(
                [recency_score(int(p), newest, rules.variation) for p in self.positions]
            )
        scores = self.importance.copy()
        if rules.score == "expected":
            logits = self.queries.expected_logits(self.k, self.newest_query, rules.future_positions)
            scores = expected_attention(logits, self.positions, rules.n_sinks)
        if rules.by_exposure:
            ages = newest - self.positions
            window = rules.observation_window
            scores /= [exposure(int(age), rules.decay, window) for age in ages]
        if rules.by_values:
            norms = np.sqrt((self.v**2).sum(axis=1))
            scores *= norms**2 if rules.score == "mass" else norms
        if rules.distinct:
            free = ~protected(self.positions, newest, rules.n_sinks, self.recent_window)
            scores *= distinctness(self.k, self.positions, scores, free, keep)
        return scores

    def _evict(self, keep: int, theirs: Sequence[int] | npt.NDArray[Any]) -> None:
        """Keep the survivors; where scores are as good as equal, those that `theirs` chose."""
        scores, newest = self.scores(keep), int(self.positions.max())
        n_sinks, recent = self.rules.n_sinks, self.recent_window
        ours = select_survivors(scores, self.positions, keep, n_sinks, recent, newest)
        chosen = np.isin(self.positions, theirs)
        free = ~protected(self.positions, newest, n_sinks, recent)
        if (ours != chosen).any() and ours.sum() == chosen.sum() and (ours & free).any():
            threshold = scores[ours & free].min()
            nearly_equal = np.isclose(scores, threshold, rtol=self.rules.tolerance, atol=1e-6)
            if nearly_equal[ours != chosen].all():
                ours = chosen
        self._let_go(ours, newest)

    def _let_go(self, kept: Bools, newest: int) -> None:  # noqa: ARG002
        self.evicted += int((~kept).sum())
        self._keep(kept)

    def _leave_window(self, margin: int) -> None:
        """Drop what no later query sees, but for `margin` positions if the budget has room."""
        newest = int(self.positions.max())
        oldest = oldest_seen(newest + 1, self.window, self.chunked)
        if (self.positions >= oldest - margin).sum() <= self.budget:
            oldest -= margin
        stays = self.positions >= oldest
        gone = self.positions[~stays]
        if gone.size:
            query = int(gone.max())
            while oldest_seen(query, self.window, self.chunked) <= gone.max():
                query += 1
            self.whole_from = max(self.whole_from, query)
        self._keep(stays)

    def _keep(self, kept: Bools) -> None:
        self.positions, self.importance = self.positions[kept], self.importance[kept]
        self.k, self.v = self.k[kept], self.v[kept]


# ---------------------------------------------------------------------------------------------
# a KV head that freezes what it does not keep


class Undecided(Exception):  # noqa: N818
    """What an entry was given is so close to the limit that rounding decides."""


@dataclass
class Detections:
    """Of one entry, in windows of `history` positions; 0: one window holds everything."""

    history: int
    counts: dict[int, int] = field(default_factory=dict)

    def detect(self, now: int) -> int:
        """Count one more; the window before counts by what a sliding one still covers of it."""
        if self.history == 0:
            self.counts[0] = self.counts.get(0, 0) + 1
            return self.counts[0]
        number, elapsed = divmod(now, self.history)
        last = max(self.counts, default=0)
        if number < last:  # the text went back: what came later never was
            self.counts = {}
        self.counts[number] = self.counts.get(number, 0) + 1
        before = self.counts.get(number - 1, 0)
        return self.counts[number] + before * (self.history - 1 - elapsed) // self.history


@dataclass
class FrozenEntry:
    """What is known of a frozen entry; `due`: the newest position that restores it, or none."""

    k: Floats
    v: Floats
    importance: float
    frozen_at: int
    due: int | None = None


@dataclass
class FreezingHead(ReferenceHead):
    """Evictions freeze. Nothing is looked for (recall is off), and cold storage has no limit."""

    frozen: dict[int, FrozenEntry] = field(default_factory=dict)
    """By position."""
    detections: dict[int, Detections] = field(default_factory=dict)
    """By position, of active and of frozen entries."""

    def read(
        self,
        q: npt.NDArray[Any],
        k: npt.NDArray[Any],
        v: npt.NDArray[Any],
        first_position: int,
        options: Options,
    ) -> Attention:
        """As without freezing; takes down what the queries gave, for settle()."""
        self.n_stored = len(self.positions)
        result = super().read(q, k, v, first_position, options)
        self.given = result.observed[-self.rules.observation_window :]
        self.group = q.shape[1]
        self.newest = first_position + len(q) - 1
        return result

    def settle(self, n_new: int, theirs: Sequence[int] | npt.NDArray[Any]) -> None:
        """Freeze what is detected, then what the budget does not hold; restore what is due."""
        if self.rules.schedule and self.rules.observes:
            self._freeze_detected(self.rules.schedule)
        if len(self.positions) > self.budget:
            sinks, recent = self.rules.n_sinks, self.recent_window
            self._evict(entries_to_keep(self.budget, n_new, sinks, recent), theirs)
        if self.rules.schedule:
            due = [p for p, e in self.frozen.items() if e.due is not None and e.due <= self.newest]
            self._restore(due, self.newest, theirs)
        np.testing.assert_array_equal(theirs, self.positions)

    def freeze_all(self, now: int) -> None:
        """Everything that is held."""
        self._freeze(np.ones(len(self.positions), bool), now)

    def restore(
        self,
        now: int,
        theirs: Sequence[int] | npt.NDArray[Any],
        frozen_after: int = -1,
        due_after: int = -1,
        *,
        forget: bool = False,
    ) -> int:
        """What is asked for, as far as the budget has room; returns how many."""
        if forget:
            self.detections = {}
        wanted = [
            position
            for position, entry in self.frozen.items()
            if entry.frozen_at > frozen_after and (entry.due is None or entry.due > due_after)
        ]
        n = self._restore(wanted, now, theirs)
        np.testing.assert_array_equal(theirs, self.positions)
        return n

    def truncate(self, position: int) -> None:
        """Forget what was read from `position` on; timers go on from there."""
        super().truncate(position)
        now = position - 1
        self.detections = {p: d for p, d in self.detections.items() if p < position}
        self.frozen = {p: entry for p, entry in self.frozen.items() if p < position}
        for entry in self.frozen.values():
            if entry.frozen_at > now:
                if entry.due is not None:
                    entry.due -= entry.frozen_at - now
                entry.frozen_at = now

    def _freeze_detected(self, schedule: Schedule) -> None:
        """Stored entries outside of the window that get less than an even share, or than |q.k|."""
        means = self.given.mean(axis=0) / self.group
        limit = schedule.threshold
        if self.rules.score != "products":
            limit = schedule.threshold / max(self.n_stored, 1)
            limit = limit**2 if self.rules.score == "mass" else limit
        timers = {}
        for i in range(self.n_stored):
            position = int(self.positions[i])
            if position < self.rules.n_sinks or position > self.newest - schedule.window:
                continue
            if abs(means[i] - limit) <= 1e-4 * limit:
                raise Undecided
            if means[i] < limit:
                known = self.detections.setdefault(position, Detections(schedule.history))
                steps = int(np.sqrt(known.detect(self.newest)) / schedule.rate)
                if steps > 0:
                    timers[position] = self.newest + steps
        self._freeze(np.isin(self.positions, list(timers)), self.newest, timers)

    def _let_go(self, kept: Bools, newest: int) -> None:
        self._freeze(~kept, newest)

    def _freeze(self, chosen: Bools, now: int, timers: dict[int, int] | None = None) -> None:
        for i in np.flatnonzero(chosen):
            position = int(self.positions[i])
            due = (timers or {}).get(position)
            importance = float(self.importance[i])
            self.frozen[position] = FrozenEntry(self.k[i], self.v[i], importance, now, due)
        self._keep(~chosen)

    def _restore(
        self, wanted: Sequence[int], now: int, theirs: Sequence[int] | npt.NDArray[Any]
    ) -> int:
        """All of them, or as many as fit: then those that `theirs` chose."""
        room = self.budget - len(self.positions)
        if len(wanted) > room:
            wanted = [p for p in wanted if p in set(np.asarray(theirs).tolist())]
            assert len(wanted) == max(room, 0)
        for position in wanted:
            entry = self.frozen.pop(position)
            decay = self.rules.decay
            left = decay ** (now - entry.frozen_at) if decay > 0.0 else 0.0
            self.positions = np.append(self.positions, position)
            self.k = np.concatenate([self.k, entry.k[None]])
            self.v = np.concatenate([self.v, entry.v[None]])
            self.importance = np.append(self.importance, entry.importance * left)
        order = np.argsort(self.positions)
        self.positions, self.importance = self.positions[order], self.importance[order]
        self.k, self.v = self.k[order], self.v[order]
        return len(wanted)


# ---------------------------------------------------------------------------------------------
# budgets


def pages_for(entries: int, entries_per_page: int) -> int:
    """Whole pages that hold so many entries."""
    return -(-entries // entries_per_page)


def check_shares(
    budgets: Sequence[int],
    mean: int,
    most: int,
    floor: int,
    pages: list[int],
    limits: Sequence[int] = (),
) -> None:
    """Assert what must hold for every shared budget; `pages`: entries per page of every head."""
    mean = min(mean, most)
    assert len(budgets) == len(pages)
    limits = [min(limit, most) for limit in limits or [most] * len(pages)]
    for budget, limit in zip(budgets, limits, strict=True):
        assert min(floor, limit) <= budget <= limit
    assert sum(budgets) <= mean * len(budgets)
    used = sum(pages_for(budget, n) for budget, n in zip(budgets, pages, strict=True))
    assert used <= sum(pages_for(mean, n) for n in pages)


def convex_hull_at(knots: Sequence[float], losses: Sequence[float], at: float) -> float:
    """The lower convex hull of a curve: the lowest of all chords over a point."""
    best = np.inf
    for i, left in enumerate(knots):
        for j, right in enumerate(knots):
            if i == j and left == at:
                best = min(best, losses[i])
            elif left <= at <= right and left < right:
                share = (at - left) / (right - left)
                best = min(best, losses[i] + share * (losses[j] - losses[i]))
    return float(best)


def curve_shares(knots: Sequence[float], losses: Floats, total: float) -> Floats:
    """Entries of every head, losses [head][knot]: the least summed hull.

    By the price of an entry: at a price, every head takes the smallest and the largest number of
    entries that are optimal for it; at the price where `total` lies between the two sums, all take
    the same part of the way.
    """
    hulls = np.array([[convex_hull_at(knots, head, k) for k in knots] for head in losses])
    slopes = (hulls[:, :-1] - hulls[:, 1:]) / np.diff(knots)
    steps = np.broadcast_to(np.diff(knots), slopes.shape)
    tolerance = 1e-9 * max(1.0, float(slopes.max(initial=0.0)))
    for price in sorted(set(slopes.ravel().tolist()), reverse=True):
        least = np.where(slopes > price + tolerance, steps, 0.0).sum(axis=1)
        most = np.where(slopes >= price - tolerance, steps, 0.0).sum(axis=1)
        if most.sum() >= total:
            part = (total - least.sum()) / max(most.sum() - least.sum(), 1e-300)
            return np.asarray(least + np.clip(part, 0.0, 1.0) * (most - least))
    return np.full(len(losses), float(knots[-1]))


def losses_at(scores: Floats, knots: Sequence[int]) -> Floats:
    """Sums of all but the largest k scores, for every k of the knots."""
    ascending = np.sort(scores)
    return np.array([ascending[: max(len(scores) - k, 0)].sum() for k in knots])


def layer_shares(entropies: Floats, total: float, in_range: tuple[int, int] | None) -> Floats:
    """The layer document: k_l = total * I_l / sum I, or from a least to a largest k_l, scaled."""
    weights = entropies
    if in_range is not None:
        least, most = in_range
        low, high = entropies.min(), entropies.max()
        weights = least + (most - least) * (entropies - low) / (high - low)
    return np.asarray(total * weights / weights.sum())


# ---------------------------------------------------------------------------------------------
# loss curves


def curve_losses(
    q: Floats, k: Floats, v: Floats, importance: Floats, rules: Any, options: Options
) -> tuple[Floats, Floats, float]:
    """Mass lost, mean square of the dropped and of the whole outputs, of one KV head.

    Entries are ranked by what they gave to the outputs: importance * |v|^2.

    q [n][group][k_dim] are the last queries of a text; k, v [T]; importance [n_read]. Every number
    of rules.keep by itself: what is kept is what select_survivors keeps.
    """
    first = len(k) - len(q)
    positions = np.arange(len(k))
    mass, dropped = [], []
    scores = importance * (v[:first] ** 2).sum(axis=1)
    logits = np.einsum("ngd,td->ngt", q, k) * options.scale
    if options.softcap > 0.0:
        logits = options.softcap * np.tanh(logits / options.softcap)
    logits = biased(logits, first + np.arange(len(q)), positions, options)
    seen = visible(first + np.arange(len(q)), positions, options)
    weights = np.exp(np.where(seen[:, None, :], logits, -np.inf))
    sinks = 0.0 if options.sinks is None else np.exp(options.sinks)[None, :]
    p = weights / (weights.sum(axis=2) + sinks)[:, :, None]
    whole = np.einsum("ngt,td->ngd", p, v)
    for extra in rules.keep:
        keep = rules.n_sinks + rules.recent_window + extra
        kept = select_survivors(
            scores, positions[:first], keep, rules.n_sinks, rules.recent_window, first - 1
        )
        gone = np.flatnonzero(~kept)
        mass.append(p[:, :, gone].sum(axis=2).mean())
        lost = np.einsum("ngt,td->ngd", p[:, :, gone], v[gone])
        dropped.append((lost**2).sum(axis=2).mean())
    return np.array(mass), np.array(dropped), float((whole**2).sum(axis=2).mean())
