"""Read texts with a full cache, and record a GGUF model's attention rows as they are computed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from entropykv.errors import CalibrationError, UnsupportedModelError
from entropykv.llamacpp.distributions import Logits, mean_divergence
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.recurrent import is_recurrent
from entropykv.policy.resolved_config import config_for
from entropykv.profile.curves import CurveRules, Entries, HeadLoss, Queries, Rows, head_loss
from entropykv.profile.predictor import ScorePredictor
from entropykv.settings.cache_options import CacheOptions
from entropykv.store.headwise import HeadwiseContext, HeadwiseStore
from entropykv.store.step import MicroBatch, decode_inside

Entropies = npt.NDArray[np.float32]
_TIMED_TOKENS = 384
"""How many tokens are read to find out how long calibration will take."""
_TIMED_ROWS = 64
"""How many tokens' logits are computed to find out how long calibration will take."""


class Observer:
    """Read one text after the other, with the model quantised as users run it.

    `n_ctx`: the longest text, in tokens; `kv_type`: the type in which K and V are stored meanwhile.
    With a `predictor`, the importance of entries is what it predicts; without one, it is their
    attention mass. Memory: the weights, and one pool that holds n_ctx tokens. Raises ModelFileError
    for a file that cannot be loaded, UnsupportedModelError if the headwise store cannot serve the
    model, or its layers have different numbers of heads, and ProfileError for a predictor of
    another model.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_ctx: int,
        kv_type: str = "f16",
        n_threads: int = 0,
        n_ubatch: int = 512,
        predictor: ScorePredictor | None = None,
    ) -> None:
        """Load the model and replace its attention by that of the headwise store."""
        options = CacheOptions(
            policy="uniform" if predictor is None else "uniform:predicted",
            kv_type=kv_type,
            store="headwise",
            n_ctx=n_ctx,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
            n_threads_batch=n_threads,
            learn=False,
        )
        self.n_ubatch = min(n_ubatch, n_ctx)
        """The most tokens of a micro-batch."""
        self._model = Model(path, n_gpu_layers=0, verbose=False)
        self.geometry = self._model.geometry
        try:
            self._store = self._full_store(options, predictor)
        except BaseException:
            self._model.close()
            raise
        self._batch = MicroBatch(self.n_ubatch, self._model.n_vocab)
        self._core = self._store.core
        self._core.track_entropy(True)
        try:
            self.n_layer, self.n_head, self.n_head_kv = self._shape()
        except UnsupportedModelError:
            self.close()
            raise

    def _full_store(self, options: CacheOptions, predictor: ScorePredictor | None) -> HeadwiseStore:
        """Make the context, and a store that evicts nothing, with the predictor if there is one."""
        config = config_for(options, self.geometry)
        self._context = HeadwiseContext(self._model, config, config.n_ubatch)
        try:
            store = HeadwiseStore(self._model, config, self._context)
            if predictor is not None:
                store.learning.adopt(predictor)
        except BaseException:
            self._context.close()
            raise
        store.sharing.keep_everything()
        return store

    def _shape(self) -> tuple[int, int, int]:
        """Return the numbers of layers, query heads and KV heads; raises UnsupportedModelError if
        layers differ.
        """
        layers = self._store.layers
        shapes = {(layer.n_head, layer.n_head_kv) for layer in layers}
        if len(shapes) > 1:
            raise UnsupportedModelError(
                f"{self._model.name}: its layers have different numbers of heads, which no entropy "
                "profile describes; use --policy uniform, which needs none"
            )
        return (len(layers), *shapes.pop())

    def __enter__(self) -> Observer:
        """Return the observer itself; leaving the `with` block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the context and the model."""
        self.close()

    def close(self) -> None:
        """Free the context and the model."""
        self._batch.close()
        self._store.close()
        self._context.close()
        self._model.close()

    @property
    def name(self) -> str:
        """Return the model's name, or the name of its file."""
        return self._model.name

    @property
    def predictable(self) -> bool:
        """Tell whether scores can be predicted from this model's keys and values.

        They cannot if a text cannot be read twice, as with recurrent layers, or if the keys before
        RoPE are not known.
        """
        recurrent = self.geometry.recurrent or is_recurrent(self._model)
        return not recurrent and not self._store.facts.rope_obstacle

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text as a prompt, with BOS if the model wants it."""
        return self._model.tokenize(text, add_bos=self._model.adds_bos, special=False)

    def tokenize_plainly(self, text: str) -> list[int]:
        """Return the tokens of a text that stands within another one, without BOS."""
        return self._model.tokenize(text, add_bos=False, special=False)

    def seconds_per_token(self, tokens: Sequence[int]) -> tuple[float, float]:
        """Return how many seconds this machine takes for a token of a text, which has at least
        three, and how many more if its logits are computed and compared.

        A third of the tokens is read before, because the first micro-batch waits for the weights.
        """
        part = tokens[:_TIMED_TOKENS]
        first = len(part) // 3
        self._store.truncate(0)
        self._read(part[:first], 0)
        start = time.perf_counter()
        self._read(part[first:], first)
        of_token = (time.perf_counter() - start) / (len(part) - first)
        predicted = part[: min(first, _TIMED_ROWS)]
        self._store.truncate(0)
        start = time.perf_counter()
        rows = self._predict(predicted, 0, len(predicted))
        mean_divergence(rows, rows)
        of_row = (time.perf_counter() - start) / len(predicted) - of_token
        return of_token, max(0.0, of_row)

    def entropies(self, tokens: Sequence[int]) -> Entropies:
        """Return the entropy of every attention row in bits: (n_layer, len(tokens), n_head)."""
        self._store.truncate(0)
        rows = np.empty((self.n_layer, len(tokens), self.n_head), np.float32)
        for first in range(0, len(tokens), self.n_ubatch):
            part = tokens[first : first + self.n_ubatch]
            self._read(part, first)
            for layer in range(self.n_layer):
                rows[layer, first : first + len(part)] = self._core.row_entropies(layer)
        return rows

    def losses(self, tokens: Sequence[int], rules: CurveRules) -> list[list[HeadLoss]]:
        """Return the losses of a text of rules.length tokens, as [layer][KV head]."""
        self._store.truncate(0)
        for first in range(0, rules.n_read, self.n_ubatch):
            self._read(tokens[first : min(first + self.n_ubatch, rules.n_read)], first)
        losses: list[list[HeadLoss]] = [[] for _ in range(self.n_layer)]
        for layer, _, queries, entries in self._attended(
            tokens[rules.n_read : rules.length], rules.n_read
        ):
            losses[layer].append(head_loss(queries, entries, rules))
        return losses

    def importance_of(self, tokens: Sequence[int]) -> list[list[Rows]]:
        """Read a text; returns the importance of entries at its end, [layer][KV head][entry]."""
        self._store.truncate(0)
        for first in range(0, len(tokens), self.n_ubatch):
            self._read(tokens[first : first + self.n_ubatch], first)
        return self._importance()

    def _importance(self) -> list[list[Rows]]:
        return [
            [self._core.importance(layer, head) for head in range(self.n_head_kv)]
            for layer in range(self.n_layer)
        ]

    def _attended(
        self, tokens: Sequence[int], position: int
    ) -> Iterator[tuple[int, int, Queries, Entries]]:
        """Read at most a micro-batch of tokens; yields the queries and entries of each KV head.

        Each item has the layer, the KV head, the queries of its group of heads, and the entries of
        the whole text, with the importance that they had before these tokens were read.
        """
        importance = self._importance()
        self._core.capture_queries(True)
        self._read(tokens, position)
        self._core.capture_queries(False)
        group = self.n_head // self.n_head_kv
        for layer in range(self.n_layer):
            queries = Queries(*self._core.queries(layer))
            for head in range(self.n_head_kv):
                _, _, k, v = self._core.rows(layer, head)
                of_group = queries.of_heads(slice(head * group, (head + 1) * group))
                yield layer, head, of_group, Entries(k, v, importance[layer][head])

    @contextmanager
    def reading(self, tokens: Sequence[int]) -> Iterator[ReadText]:
        """Replace the store's text by this one while the block runs; drop it at the end."""
        self._store.truncate(0)
        for first in range(0, len(tokens), self.n_ubatch):
            self._read(tokens[first : first + self.n_ubatch], first)
        text = ReadText(self._store, len(tokens), self._predict, self._attended)
        try:
            yield text
        finally:
            text.end()
            self._store.truncate(0)
            self._store.sharing.keep_everything()

    def _predict(self, tokens: Sequence[int], position: int, n_last: int) -> Logits:
        parts = []
        for first in range(0, len(tokens), self.n_ubatch):
            part = tokens[first : first + self.n_ubatch]
            n_after = len(tokens) - first - len(part)
            n_rows = min(len(part), max(0, n_last - n_after))
            logits = self._read(part, position + first, n_rows=n_rows)
            if logits is not None:
                parts.append(logits)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read(self, tokens: Sequence[int], position: int, *, n_rows: int = 0) -> Logits | None:
        return decode_inside(
            self._store, self._batch, tokens, position, n_rows=n_rows, model_name=self._model.name
        )


class ReadText:
    """Hold a text, read with all entries kept, after which several continuations can be read."""

    def __init__(
        self,
        store: HeadwiseStore,
        position: int,
        predict: Callable[[Sequence[int], int, int], Logits],
        attend: Callable[[Sequence[int], int], Iterator[tuple[int, int, Queries, Entries]]],
    ) -> None:
        """Use `store`, which holds the text.

        `position`: where the text ends; `predict` and `attend`: functions that read tokens after
        it.
        """
        self._store = store
        self._position = position
        self._predict = predict
        self._attend = attend
        self._whole = store.checkpoint()

    def rollback(self) -> None:
        """Restore the store's state at the end of the text; raises CalibrationError if the pool has
        no room for it.
        """
        if self._whole is None or not self._store.go_on_from(self._whole, ends=False):
            raise CalibrationError("the pool has no room to read a text twice; use fewer tokens")

    def forget(self, layer: int, recent_window: int) -> None:
        """Drop a layer's entries but sinks and the newest `recent_window`, until rollback()."""
        self._store.sharing.limit_layer(layer, recent_window)

    def predictions(self, tokens: Sequence[int], n_last: int | None = None) -> Logits:
        """Read tokens after the text, which stay until rollback(); returns the logits of the last
        `n_last`, (n_last, n_vocab), by default of all.
        """
        return self._predict(tokens, self._position, len(tokens) if n_last is None else n_last)

    def attended(self, tokens: Sequence[int]) -> Iterator[tuple[int, int, Queries, Entries]]:
        """Read at most a micro-batch of tokens after the text, which stay until rollback().

        Yields the layer, the KV head, the queries of its group of heads, and the entries of the
        whole text, with the importance that they had before these tokens were read.
        """
        return self._attend(tokens, self._position)

    def end(self) -> None:
        """Forget the state at the end of the text, whose pages go back to the pool."""
        if self._whole is not None:
            self._whole.drop()
