"""Calibrate a model: measure the entropy of every query head, and the losses of KV heads, over
texts.

The method is that of README_ENTROPY_KV: H = -sum p log2 p of the attention rows at 25, 50, 75 and
100 % of every text, averaged over 20 texts. The attention op of the headwise store computes the
entropy of every row anyway. Therefore one pass over a text gives all of them, with the model
quantised as users run it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from entropykv import _version
from entropykv.calibration.comparing import (
    LEAST_HELD_BACK,
    PlantedPassage,
    compare_ways,
    compared_rows,
    comparison_tokens,
    lessons_of,
    passages_of,
)
from entropykv.calibration.damage import damage_of_text, mean_damage, texts_of_damage
from entropykv.calibration.fitting import fit_by_echoes, fitting_tokens
from entropykv.calibration.observe import Observer
from entropykv.calibration.predictions import predicted_tokens
from entropykv.calibration.spread import Arrays, Progress, Spread, StepSettings, TextWork
from entropykv.calibration.texts import (
    LEAST_CURVE_TOKENS,
    Excerpt,
    choose_sequences,
    hold_back,
    long_sequences,
)
from entropykv.calibration.trust import head_trust, trust_tokens
from entropykv.errors import CalibrationError, SettingsError
from entropykv.evaluation.texts import Text
from entropykv.model.geometry import read_geometry
from entropykv.profile.curves import CurveRules, HeadLoss, LossCurves, average_curves
from entropykv.profile.find import fingerprint_of
from entropykv.profile.json_fields import FloatArray
from entropykv.profile.parts import ROWS, Measurement
from entropykv.profile.profile import EntropyProfile
from entropykv.profile.ways import NO_PROFILE

RowEntropies = Callable[[Sequence[int]], npt.NDArray[np.float32]]
"""Returns the entropy in bits of each attention row of a text, (n_layer, n_tokens, n_head)."""

_ENTROPIES, _LOSSES, _LOSSES_AND_DAMAGE = "entropies", "losses", "losses and damage"
"""What is measured of a text."""


@dataclass(frozen=True)
class Extent:
    """Hold what a calibration will read."""

    n_tokens: int
    """How many tokens are read, without the repetitions that the predictor is fitted to."""
    seconds: float | None = None
    """About how long the calibration takes on this machine; None without loss curves."""
    curve_texts: int = 0
    """How many texts the loss curves will be measured in."""
    curve_length: int = 0
    """How many tokens each text of the loss curves has."""


@dataclass(frozen=True)
class CalibrationSettings:
    """Hold how much is read; for entropies, the defaults are those of README_ENTROPY_KV.

    Entropies are measured in `n_sequences` sequences of up to `max_length` tokens, which `seed`
    chooses, over the attention rows that `rows` names, one of entropykv.profile.parts.ROWS. K and V
    are stored as `kv_type` meanwhile. `n_threads` 0: the usable cores. The loss curves are measured
    in `curve_texts` texts of `curve_length` tokens each; 0 texts measure none. The ways to use the
    profile are compared in `compared_texts` others; with 0, policy auto will use its predictor
    only. Raises SettingsError for a value out of range, naming the field.
    """

    n_sequences: int = 20
    max_length: int = 128
    seed: int = 0
    rows: str = "quarters"
    kv_type: str = "f16"
    n_threads: int = 0
    curve_length: int = 2048
    curve_texts: int = 4
    compared_texts: int = 6

    def __post_init__(self) -> None:
        """Raise SettingsError for a value out of range, naming the field."""
        least = {"n_sequences": 1, "max_length": 4, "seed": 0, "n_threads": 0, "curve_texts": 0}
        for name, low in {**least, "compared_texts": 0}.items():
            if getattr(self, name) < low:
                raise SettingsError(f"{name} must be {low} or more, not {getattr(self, name)}")
        if self.curve_texts and self.curve_length < LEAST_CURVE_TOKENS:
            raise SettingsError(
                f"curve_length must be {LEAST_CURVE_TOKENS} or more, not {self.curve_length}; "
                "without curves, curve_texts is 0"
            )
        if self.rows not in ROWS:
            raise SettingsError(f"rows must be one of {', '.join(ROWS)}, not {self.rows!r}")


QUICK = CalibrationSettings(curve_length=1024, compared_texts=4)
"""Settings that read less, in about half of the time."""


def calibrate(
    path: str | os.PathLike[str],
    texts: Sequence[Text],
    settings: CalibrationSettings,
    on_start: Callable[[Extent], None] = lambda _: None,
    on_progress: Progress = lambda _: None,
    spread: Spread | None = None,
) -> EntropyProfile:
    """Measure a GGUF model; returns its profile.

    If loss curves are measured, the profile also gets a predictor, unless the model has recurrent
    layers or its keys before RoPE are not known. Then the ways to use the profile are compared on
    texts that were held back from curves and predictor. If the best way is to use none
    (best_way()), the profile has no predictor, and policy auto does not use it.

    `on_start` is called once, before anything is measured; it may raise to stop here. `spread` runs
    the steps, by default on this machine. Raises the errors of Observer and `spread`, SettingsError
    if max_length exceeds the trained context, and CalibrationError if texts are too short, or an
    entropy is not finite.
    """
    trained = _trained_context(path, settings)
    spread = spread or Spread()
    longest = max(settings.max_length, settings.curve_length if settings.curve_texts else 0)
    n_ctx = min(longest, trained)
    with Observer(
        path, n_ctx=n_ctx, kv_type=settings.kv_type, n_threads=settings.n_threads
    ) as observer:
        excerpts = excerpts_of(texts, observer.tokenize, settings)
        kept, held_back = hold_back(
            texts,
            lambda text: len(observer.tokenize(text)),
            LEAST_HELD_BACK,
            settings.seed,
            settings.compared_texts,
        )
        long_texts = _long_texts(kept, observer, settings, trained)
        fitted: Sequence[tuple[int, ...]] = ()
        if observer.predictable:
            fitted = _long_texts(kept, observer, settings, trained, mixed=True)
        passages: list[PlantedPassage] = []
        if long_texts:
            passages = _passages(held_back, observer, settings, trained)
        taught = lessons_of(kept, observer.tokenize, trained)
        on_start(_extent_of(observer, excerpts, long_texts, fitted, passages, taught))
        shape = (observer.n_layer, observer.n_head, observer.n_head_kv)
        name, fingerprint = observer.name, fingerprint_of(observer.geometry)
        step = StepSettings.of(
            path, n_ctx=n_ctx, kv_type=settings.kv_type, n_threads=settings.n_threads
        )
    measured, curves = _observed(spread, step, excerpts, long_texts, on_progress)
    profile = EntropyProfile(
        n_layer=shape[0],
        n_head=shape[1],
        n_head_kv=shape[2],
        n_ctx=trained,
        head_entropies=measured.chosen(settings.rows).mean(axis=0),
        model=name,
        source=f"entropykv calibrate, {len(excerpts)} texts",
        fingerprint=fingerprint,
        measurement=measured.summary(settings, settings.kv_type),
        curves=curves,
    )
    if curves is None:
        return profile
    predictor = fit_by_echoes(spread, step, fitted, on_progress) if fitted else None
    if predictor is not None:
        step = replace(step, profile=replace(profile, predictor=predictor))
        trust = head_trust(spread, step, long_texts, on_progress)
        profile = replace(profile, predictor=replace(predictor, trust=trust))
    step = replace(step, profile=profile)
    comparison = compare_ways(spread, step, passages, taught, on_progress)
    if comparison.best == NO_PROFILE:
        profile = replace(profile, predictor=None)
    return replace(profile, comparison=comparison)


def _observed(
    spread: Spread,
    step: StepSettings,
    excerpts: Sequence[Excerpt],
    long_texts: Sequence[tuple[int, ...]],
    on_progress: Progress,
) -> tuple[Measured, LossCurves | None]:
    """Measure the entropies of the excerpts, and the loss curves of the long texts, if any."""
    n_damaged = texts_of_damage(long_texts)
    work = [TextWork(_ENTROPIES, (excerpt.tokens,)) for excerpt in excerpts]
    for number, text in enumerate(long_texts):
        whole = number < n_damaged
        work.append(TextWork(_LOSSES_AND_DAMAGE if whole else _LOSSES, (text,)))
    found = spread.run(observe, step, work, on_progress)
    of_excerpts, of_texts = found[: len(excerpts)], found[len(excerpts) :]
    measured = Measured(
        excerpts,
        np.array([quarters for quarters, _ in of_excerpts]),
        np.array([all_rows for _, all_rows in of_excerpts]),
    )
    for excerpt, arrays in zip(excerpts, of_excerpts, strict=True):
        _check_finite(excerpt.name, arrays[0])
        _check_finite(excerpt.name, arrays[1])
    if not of_texts:
        return measured, None
    rules = CurveRules.for_length(len(long_texts[0]))
    curves = average_curves(rules, [losses_of(arrays) for arrays in of_texts])
    damage = mean_damage([arrays[3] for arrays in of_texts[:n_damaged]])
    return measured, replace(curves, layer_damage=damage)


def observe(
    settings: StepSettings, work: Sequence[TextWork], on_progress: Progress
) -> Iterator[Arrays]:
    """Yield for each short text the means of its entropies over the quarters' rows and over all
    rows, each (n_layer, n_head); for each long one the arrays that losses_of() reads, and its
    damage where asked for, (n_layer,). This function is a Step.
    """
    with Observer(
        settings.path,
        n_ctx=settings.n_ctx,
        kv_type=settings.kv_type,
        n_threads=settings.n_threads,
    ) as observer:
        for each in work:
            (tokens,) = each.texts
            if each.what == _ENTROPIES:
                yield mean_entropies(observer.entropies(tokens))
                on_progress(len(tokens))
                continue
            losses = observer.losses(tokens, CurveRules.for_length(len(tokens)))
            on_progress(len(tokens))
            arrays = (
                np.array([[head.mass for head in layer] for layer in losses]),
                np.array([[head.dropped for head in layer] for layer in losses]),
                np.array([[head.whole for head in layer] for layer in losses]),
            )
            if each.what == _LOSSES:
                yield arrays
            else:
                yield (*arrays, damage_of_text(observer, tokens, on_progress))


def losses_of(arrays: Arrays) -> list[list[HeadLoss]]:
    """Return the losses of a long text, [layer][KV head]; `arrays` begins with mass and dropped,
    each (n_layer, n_head_kv, knots), and whole, (n_layer, n_head_kv): see observe().
    """
    mass, dropped, whole = arrays[:3]
    n_layer, n_head_kv = whole.shape
    return [
        [
            HeadLoss(mass[layer, head], dropped[layer, head], float(whole[layer, head]))
            for head in range(n_head_kv)
        ]
        for layer in range(n_layer)
    ]


def _long_texts(
    texts: Sequence[Text],
    observer: Observer,
    settings: CalibrationSettings,
    trained: int,
    *,
    mixed: bool = False,
) -> list[tuple[int, ...]]:
    """Return the texts to read for the loss curves, as tokens; raises CalibrationError for too
    little text.

    If `mixed`, the result is for fitting the predictor, and more texts are represented in it: what
    a model looks up differs more between kinds of text than between parts of one. Curves need texts
    that belong together, because where a text has to do with nothing before it, no head loses much.
    """
    found = long_sequences(
        texts,
        observer.tokenize,
        n_sequences=settings.curve_texts,
        length=min(settings.curve_length, trained),
        seed=settings.seed,
        mixed=mixed,
    )
    if settings.curve_texts and not found:
        raise CalibrationError(
            f"the texts have fewer than {LEAST_CURVE_TOKENS} tokens together, too few for loss "
            "curves, without which a profile gives policy `profile` no budgets; give longer ones "
            "with --text, or --curve-texts 0 for a profile without curves"
        )
    return found


def _passages(
    held_back: Sequence[Text],
    observer: Observer,
    settings: CalibrationSettings,
    trained: int,
) -> list[PlantedPassage]:
    """Return the passages that the ways to use the profile are compared on."""
    passages = passages_of(
        held_back,
        observer.tokenize,
        observer.tokenize_plainly,
        trained,
        settings.seed,
    )
    return passages[: settings.compared_texts]


def _trained_context(path: str | os.PathLike[str], settings: CalibrationSettings) -> int:
    """Return the length of the trained context in tokens; raises SettingsError if
    `settings.max_length` is more.
    """
    trained = read_geometry(path).n_ctx_train
    if settings.max_length > trained:
        raise SettingsError(
            f"max_length {settings.max_length} is more than the {trained} tokens that the model "
            "was trained for; use a smaller --max-length"
        )
    return trained


def excerpts_of(
    texts: Sequence[Text], tokenize: Callable[[str], list[int]], settings: CalibrationSettings
) -> list[Excerpt]:
    """Cut texts as `settings` says; raises CalibrationError for a text of fewer than 4 tokens."""
    return choose_sequences(
        texts,
        tokenize,
        n_sequences=settings.n_sequences,
        max_length=settings.max_length,
        seed=settings.seed,
    )


@dataclass(frozen=True, eq=False)
class Measured:
    """Hold mean entropies of every text, in bits, as arrays of shape (n_texts, n_layer, n_head)."""

    excerpts: Sequence[Excerpt]
    quarters: FloatArray
    all_rows: FloatArray

    def chosen(self, rows: str) -> FloatArray:
        """Return the entropies over the attention rows with this name, one of ROWS; the shape is
        (n_texts, n_layer, n_head).
        """
        return self.quarters if rows == "quarters" else self.all_rows

    def summary(self, settings: CalibrationSettings, kv_type: str) -> Measurement:
        """Return the mean and spread over the texts, and the correlation between two halves of the
        texts.
        """
        chosen = self.chosen(settings.rows)
        halves = [
            chosen[[excerpt.half == half for excerpt in self.excerpts]].reshape(
                -1, *chosen[0].shape
            )
            for half in (0, 1)
        ]
        return Measurement(
            engine=f"entropykv {_version.VERSION}",
            rows=settings.rows,
            max_length=settings.max_length,
            seed=settings.seed,
            kv_type=kv_type,
            texts=tuple((excerpt.name, len(excerpt.tokens)) for excerpt in self.excerpts),
            stability=correlation(*(half.mean(axis=0) for half in halves))
            if all(map(len, halves))
            else None,
            quarters=self.quarters.mean(axis=0),
            all_rows=self.all_rows.mean(axis=0),
            spread=chosen.std(axis=0),
        )


def measure(
    entropies: RowEntropies, excerpts: Sequence[Excerpt], on_progress: Progress
) -> Measured:
    """Return the mean entropies of texts; raises CalibrationError if one is not a finite number."""
    quarters, all_rows = [], []
    for excerpt in excerpts:
        of_quarters, of_all = mean_entropies(entropies(excerpt.tokens))
        _check_finite(excerpt.name, of_quarters)
        _check_finite(excerpt.name, of_all)
        quarters.append(of_quarters)
        all_rows.append(of_all)
        on_progress(len(excerpt.tokens))
    return Measured(excerpts, np.array(quarters), np.array(all_rows))


def mean_entropies(rows: npt.NDArray[np.float32]) -> tuple[FloatArray, FloatArray]:
    """Return the means of (n_layer, n_tokens, n_head) over the quarters' rows and over all rows,
    each (n_layer, n_head).
    """
    precise = rows.astype(np.float64)
    return precise[:, quarter_rows(rows.shape[1])].mean(axis=1), precise.mean(axis=1)


def _check_finite(name: str, entropies: FloatArray) -> None:
    if not np.isfinite(entropies).all():
        raise CalibrationError(
            f"{name}: the model computes attention entropies that are not numbers; check the model "
            "file"
        )


def quarter_rows(n_tokens: int) -> list[int]:
    """Return the rows at 25, 50, 75 and 100 % of a text: the last of each quarter, rounded up."""
    return [-(-n_tokens * quarter // 4) - 1 for quarter in (1, 2, 3, 4)]


def correlation(a: FloatArray, b: FloatArray) -> float | None:
    """Return Pearson's r of two arrays of the same shape, over all their values; None if one of
    them does not vary.
    """
    if a.std() < 1e-12 or b.std() < 1e-12:
        return None
    return float(np.clip(np.corrcoef(a.ravel(), b.ravel())[0, 1], -1.0, 1.0))


def _extent_of(
    observer: Observer,
    excerpts: Sequence[Excerpt],
    texts: Sequence[Sequence[int]],
    fitted: Sequence[Sequence[int]],
    passages: Sequence[PlantedPassage],
    taught: Sequence[Sequence[int]],
) -> Extent:
    """Return what a calibration will read, and how long this will take."""
    damaged = [len(text) for text in texts[: texts_of_damage(texts)]]
    n_tokens = sum(len(excerpt.tokens) for excerpt in excerpts) + sum(map(len, texts))
    n_rows = sum(map(predicted_tokens, damaged)) * observer.n_layer
    n_tokens += n_rows
    lengths = [len(text) for text in texts]
    n_echoed = 0
    if fitted:
        n_echoed = fitting_tokens(list(map(len, fitted)))
        n_tokens += n_echoed + trust_tokens(lengths)
    n_tokens += comparison_tokens(passages, taught, observer.predictable)
    n_rows += compared_rows(passages, observer.predictable)
    seconds = None
    if lengths:
        of_token, of_row = observer.seconds_per_token(texts[0])
        seconds = (n_tokens + n_echoed) * of_token + n_rows * of_row
    return Extent(n_tokens, seconds, len(lengths), lengths[0] if lengths else 0)
