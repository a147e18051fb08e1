"""Fit the predictor of a model: read its long texts again, and repeat every chunk (echo).

The queries of an echo tell how much attention each entry gets when the text is repeated. The
predictor learns to compute this from the entry's key and value. Nothing is evicted meanwhile, so
that queries can attend to the whole text. Each text has a fit of its own, and the predictor is
their mean, as in sessions that learn (growing.py). The fit of the texts before the last one is
tested with the last one, or that of the beginning of a single text with its last quarter, which
shows the quality of a predictor for a text that it was not fitted to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from entropykv.calibration.spread import Arrays, Spread, StepSettings, TextWork
from entropykv.llamacpp.model import Model
from entropykv.policy.resolved_config import config_for
from entropykv.profile.curves import N_SINKS
from entropykv.profile.growing import GrowingPredictor
from entropykv.profile.predictor import Lessons, ScorePredictor, lookups_of
from entropykv.session.second_readings import LEAST_ECHO, Echo, value_features
from entropykv.settings.cache_options import CacheOptions
from entropykv.store.headwise import HeadwiseContext, HeadwiseStore
from entropykv.store.step import MicroBatch, decode_inside

Rows = npt.NDArray[np.float32]

POLICY = "uniform:predicted"
"""The policy of the store that reads; it makes the store collect lessons."""
HELD_BACK = 1 / 4
"""The fraction of a calibration text, at its end, that tests the predictor fitted to the rest, if
there is only one text.
"""


def fitting_tokens(lengths: Sequence[int]) -> int:
    """Return how many tokens fit_by_echoes() reads of texts of these lengths, without echoes."""
    return sum(lengths) + lengths[-1] if lengths else 0


def fit_by_echoes(
    spread: Spread,
    settings: StepSettings,
    texts: Sequence[tuple[int, ...]],
    on_progress: Callable[[int], None] = lambda _: None,
) -> ScorePredictor | None:
    """Return the predictor of a GGUF model, fitted to the tokens of `texts`, at least one; None if
    no text teaches anything.

    All texts are one piece of work, because each of them tests what was learnt before. Memory: the
    weights, a pool that holds the longest text, and for every KV head the sums of lessons,
    (n_features + 1)^2 / 2 numbers of 8 bytes. Raises ModelFileError, UnsupportedModelError, and
    SettingsError for a model whose keys before RoPE are not known.
    """
    (arrays,) = spread.run(fit, settings, [TextWork("predictor", tuple(texts))], on_progress)
    if not arrays:
        return None
    n_tokens, correlation, lookups, *weights = arrays
    return ScorePredictor(
        weights=tuple(weights),
        n_tokens=int(n_tokens),
        correlation=float(correlation[0]) if len(correlation) else None,
        lookups=lookups,
    )


def fit(
    settings: StepSettings, work: Sequence[TextWork], on_progress: Callable[[int], None]
) -> Iterator[Arrays]:
    """Fit a predictor to the texts of each piece of work, and yield its arrays: the number of
    tokens, (); the correlation, (1,), or (0,) if there is none; the lookups, (layers, KV heads);
    and the weights of every layer, (KV heads, features). A piece of work whose texts teach nothing
    yields an empty tuple.
    """
    for each in work:
        longest = max(map(len, each.texts))
        with _EchoReader(settings.path, longest, settings.kv_type, settings.n_threads) as reader:
            growing = GrowingPredictor(reader.value_features, None)
            for text in each.texts:
                split = 0 if len(each.texts) > 1 else int(len(text) * (1 - HELD_BACK))
                if split:
                    reader.read(text[:split])
                    growing.grow(reader.lessons())
                reader.read(text, split)
                growing.grow(reader.take_lessons())
                growing.settle()
                on_progress(len(text))
            predictor, last = growing.predictor, each.texts[-1]
            lookups = None if predictor is None else lookups_of(reader.scores(last, predictor))
            on_progress(len(last))
        if predictor is None:
            yield ()
            continue
        r = predictor.correlation
        yield (
            np.array(predictor.n_tokens),
            np.array([] if r is None else [r]),
            np.array(lookups),
            *predictor.weights,
        )


class _EchoReader:
    """Read texts with all entries kept, and sum up which entries their echoes attend to."""

    def __init__(
        self, path: str | os.PathLike[str], n_ctx: int, kv_type: str, n_threads: int
    ) -> None:
        options = CacheOptions(
            policy=POLICY,
            learn=False,
            kv_type=kv_type,
            store="headwise",
            n_ctx=n_ctx,
            n_sinks=N_SINKS,
            n_threads=n_threads,
            n_threads_batch=n_threads,
        )
        self._model = Model(path, n_gpu_layers=0, verbose=False)
        try:
            config = config_for(options, self._model.geometry)
            self._echo = Echo(self._tokenize_plainly, config.n_ubatch)
            self._context = HeadwiseContext(self._model, config, self._echo.n_ubatch)
        except BaseException:
            self._model.close()
            raise
        self._batch = MicroBatch(self._echo.n_ubatch, self._model.n_vocab)
        try:
            self._store = HeadwiseStore(self._model, config, self._context)
            self._store.sharing.keep_everything()
            self._store.learning.collect_lessons(True)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> _EchoReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the context and the model."""
        self._batch.close()
        self._context.close()
        self._model.close()

    @property
    def value_features(self) -> list[slice]:
        """Return for each layer which features of an entry are values of V."""
        return value_features(self._store.layers)

    def _tokenize_plainly(self, text: str) -> list[int]:
        return self._model.tokenize(text, add_bos=False, special=False)

    def read(self, tokens: Sequence[int], first: int = 0) -> None:
        """Read a text from token `first` on; the tokens before it must have been read already."""
        if first == 0:
            self._store.truncate(0)
        for start in range(first, len(tokens), self._echo.chunk):
            chunk = tokens[start : start + self._echo.chunk]
            echo = self._echo.of(tokens[:start], chunk) if len(chunk) >= LEAST_ECHO else []
            self._decode(chunk, start, echo)

    def lessons(self) -> Lessons:
        """Return the sums that were collected since the last call of take_lessons()."""
        return list(self._store.learning.lessons())

    def take_lessons(self) -> Lessons:
        """Return the sums that were collected since the last call, and begin anew."""
        lessons = self.lessons()
        self._store.learning.clear_lessons()
        return lessons

    def scores(self, tokens: Sequence[int], predictor: ScorePredictor) -> list[list[Rows]]:
        """Read a text without echoes; returns the predicted scores as [layer][KV head][entry].

        Sinks are left out, because every query attends to them in any text.
        """
        self._store.learning.collect_lessons(False)
        self._store.learning.adopt(predictor)
        self._store.truncate(0)
        for start in range(0, len(tokens), self._echo.chunk):
            self._decode(tokens[start : start + self._echo.chunk], start, [])
        return [
            [self._store.core.importance(number, head)[N_SINKS:] for head in range(layer.n_head_kv)]
            for number, layer in enumerate(self._store.layers)
        ]

    def _decode(self, tokens: Sequence[int], position: int, echo: Sequence[int]) -> None:
        decode_inside(
            self._store,
            self._batch,
            tokens,
            position,
            n_rows=0,
            model_name=self._model.name,
            echo=echo,
        )
