"""Define what stores with entries per KV head have in common, on the CPU and on devices: the
model's graph is examined, scores are predicted, and one sequence is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.errors import EntropyKVError, ProfileError, SettingsError, UnsupportedModelError
from entropykv.llamacpp.context import (
    context_parameters,
    decode_one_token,
    layer_windows,
    let_hook_change,
    refuse_diffusion,
)
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.positions import RopeRange
from entropykv.llamacpp.recurrent import is_recurrent
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.profile.find import check_model
from entropykv.profile.predictor import ScorePredictor
from entropykv.settings.cache_options import CacheOptions
from entropykv.store.protocol import Pooled, Store, StoreFacts

ATTENTION_ON_DEVICE = "its attention is offloaded to a device"
"""Why the headwise store cannot serve a model, as GraphHook.refusal says it, if llama.cpp computes
attention on a device although K and V are in main memory: see hooked_context().
"""


def refuse_by_kind(model: Model, store: str = "headwise") -> None:
    """Raise UnsupportedModelError for kinds of models that the store cannot serve and that cannot
    be recognised by the graph. `store`: the name of the store, for the message.
    """
    refuse_diffusion(model)
    kinds = {
        "it has only recurrent layers": llama_cpp.llama_model_is_recurrent(model.handle),
        "it has an encoder": llama_cpp.llama_model_has_encoder(model.handle),
    }
    for why, applies in kinds.items():
        if applies:
            raise unsupported(model, why, store)


def hooked_context(
    model: Model,
    options: CacheOptions,
    hook: _core.GraphHook,
    n_ubatch: int,
    n_sequences: int,
    *,
    on_devices: bool = False,
) -> Any:
    """Make a llama_context with cells for one micro-batch, whose graphs the hook changes.

    `on_devices`: the cells of each layer are on its device. A micro-batch has up to `n_ubatch`
    tokens of one sequence, and one token of each other one. Raises ModelFileError if llama.cpp
    cannot make the context.
    """
    n_tokens = n_ubatch + n_sequences - 1
    # In a hybrid model, the last cell of a sequence stays until it reads more.
    cells = n_tokens + n_sequences * is_recurrent(model)
    parameters = context_parameters(model, options, n_tokens, cells, n_sequences)
    parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F16
    # For the headwise store, K, V and attention stay on the CPU, where the extension's ops run,
    # even if layers are on a device.
    parameters.offload_kqv = on_devices
    let_hook_change(parameters, hook)
    return model.new_context(parameters)


def probed_layers(
    model: Model,
    options: CacheOptions,
    hook: _core.GraphHook,
    context: Any,
    store: str = "headwise",
) -> list[_core.LayerShape]:
    """Decode one token, during which the hook examines the graph; returns the shapes of the
    attention layers.

    Raises EntropyKVError if llama.cpp cannot run the model, and UnsupportedModelError if the graph
    has something that the store does not support.
    """
    if not decode_one_token(context):
        raise EntropyKVError(f"{model.geometry.path}: llama.cpp cannot run this model")
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
    if hook.refusal or not hook.nodes:
        raise unsupported(model, hook.refusal or "it has no attention layers", store)
    try:
        windows = layer_windows(model, options)
    except UnsupportedModelError as error:
        raise unsupported(model, str(error), store) from None
    if not windows:
        return [node.shape for node in hook.nodes]
    return [windows[node.cache_layer].of(node.shape) for node in hook.nodes]


def check_config(
    config: ResolvedConfig, model: Model, layers: Sequence[_core.LayerShape], rope_obstacle: str
) -> None:
    """Raise ProfileError for a profile of other layers, and SettingsError for a measure that is
    predicted from keys before RoPE if these are not known; `rope_obstacle`: why, or empty.
    """
    if config.profile is not None:
        heads = (len(layers), layers[0].n_head, layers[0].n_head_kv)
        check_model(config.profile, model.geometry, heads)
    importance = config.policy.importance
    if importance.predicts and rope_obstacle:
        raise SettingsError(
            f"{model.name}: policy {config.policy.name} predicts scores from keys as they were "
            f"before RoPE, which this model does not allow: {rope_obstacle}; use measure mass"
        )


def unsupported(model: Model, why: str, store: str) -> UnsupportedModelError:
    """Return the error for a model that a store cannot serve."""
    way_out = "use --store flat (store='flat'), which serves any model"
    if why == ATTENTION_ON_DEVICE:
        way_out = (
            "leave all layers on the CPU (-ngl 0, n_gpu_layers=0), or use --store device "
            "(store='device')"
        )
    return UnsupportedModelError(
        f"{model.name}: the {store} store cannot serve this model: {why}; {way_out}"
    )


def ranking_predictor(config: ResolvedConfig) -> ScorePredictor | None:
    """Return the predictor of the scores of new entries, by beside_queries() where they are added
    to what queries give; None if the policy predicts nothing, or if no predictor is known.
    """
    predictor = config.predictor
    if predictor is None or not config.policy.importance.adds_predictions:
        return predictor
    return predictor.beside_queries()


def check_features(predictor: ScorePredictor, n_features: Sequence[int]) -> None:
    """Raise ProfileError unless a predictor is for entries with `n_features` features, one number
    for each layer.
    """
    known = [of_layer.shape[1] for of_layer in predictor.weights]
    if known != list(n_features):
        raise ProfileError(
            f"the profile's predictor is for {known[0]} features of an entry, and this model's "
            f"entries have {n_features[0]}; calibrate again"
        )


def fits_nodes(predictor: ScorePredictor, hook: _core.GraphHook) -> bool:
    """Tell whether a predictor is for the KV heads and features of a model's attention layers."""
    expected = [
        (node.shape.n_head_kv, _core.feature_count(node.shape, node.rope)) for node in hook.nodes
    ]
    return [of_layer.shape for of_layer in predictor.weights] == expected


class ScorePrediction:
    """Predict the scores of entries, and collect lessons, for a store and all stores that share its
    pool.
    """

    def __init__(self, store: _core.HeadwiseStore, layers: Sequence[_core.LayerShape]) -> None:
        """Serve a store of these attention layers."""
        self._store = store
        self._layers = range(len(layers))
        self._n_head_kv = [shape.n_head_kv for shape in layers]

    @property
    def n_features(self) -> list[int]:
        """Return how many features an entry of each layer has: see
        HeadwiseStore.predictor_features() in _core.pyi.
        """
        return [self._store.predictor_features(layer) for layer in self._layers]

    def fits(self, predictor: ScorePredictor) -> bool:
        """Tell whether a predictor is for the KV heads and features of the store's entries."""
        expected = zip(self._n_head_kv, self.n_features, strict=True)
        return [of_layer.shape for of_layer in predictor.weights] == list(expected)

    def adopt(self, predictor: ScorePredictor) -> None:
        """Predict scores of new entries in all stores of the pool with a predictor.

        Raises ProfileError if the predictor is for entries with other features.
        """
        check_features(predictor, self.n_features)
        self.set_predictor(predictor.weights)

    def set_predictor(self, weights: Sequence[npt.NDArray[np.float32]]) -> None:
        """Predict scores of new entries in all stores of the pool, if the measure uses predictions.

        `weights`: for every layer, (n_head_kv, n_features). Raises ValueError for another shape,
        for numbers that are not finite, and for RoPE that does not fit the keys.
        """
        for layer, of_layer in zip(self._layers, weights, strict=True):
            self._store.set_predictor(layer, of_layer)

    def collect_lessons(self, on: bool) -> None:
        """Start (`on`) or stop to collect lessons, from the next micro-batch on, in all stores of
        the pool. Raises ValueError for measures without predictions.
        """
        self._store.collect_lessons(on)

    def teach_stored(self, begin: int, end: int, shift: int) -> None:
        """Add the lessons of text at the positions [begin, end), which an echo has repeated after
        it was read.

        `shift`: that of the store. Raises ValueError if lessons are not collected.
        """
        self._store.teach_stored(begin, end, shift)

    def predict_held(self, n_tokens: int, shift: int) -> None:
        """Predict the scores of all entries that are held, for a text of n_tokens.

        This is for entries that were read before there was a predictor; larger scores that an echo
        has given stay. `shift`: that of the store.
        """
        self._store.predict_stored(n_tokens, shift)

    def lessons(self) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
        """Yield for every layer how many entries gave lessons, and their sums of products,
        (n_head_kv, n_features + 1, n_features + 1): see HeadwiseStore.lessons() in _core.pyi.

        Layers are yielded one by one, because all layers of a large model take hundreds of MiB.
        Raises ValueError if no lessons were collected.
        """
        return (self._store.lessons(layer) for layer in self._layers)

    def clear_lessons(self) -> None:
        """Set all lessons to zero, and free their memory if they are no longer collected."""
        self._store.clear_lessons()


class KvHeadStore(Store, Pooled):
    """Keep the entries of one sequence per (layer, KV head), in a store of the extension."""

    _config: ResolvedConfig
    _store: _core.HeadwiseStore | _core.DeviceStore
    _hook: _core.GraphHook
    layers: Sequence[_core.LayerShape]
    shift = 0
    _rebases = 0

    def _facts(self, model: Model, rope_obstacle: str, **others: Any) -> StoreFacts:
        """Return the facts of a store with these layers; `others`: fields of StoreFacts that differ
        among stores.
        """
        limit = self._hook.rope_limit or model.geometry.n_ctx_train
        return StoreFacts(
            n_kv_heads=sum(shape.n_head_kv for shape in self.layers),
            bytes_full_per_token=sum(2 * s.n_head_kv * s.entry_values for s in self.layers),
            rope=RopeRange(limit, self._config.options.n_sinks),
            rope_obstacle=rope_obstacle,
            **others,
        )

    def _seen_position(self, position: int, n_tokens: int) -> int:
        """Return the position at which RoPE sees `position`, from which n_tokens will be read.

        If the positions of these tokens would exceed those that RoPE may see, all keys are moved
        first.
        """
        rope = self.facts.rope
        shift = rope.shift_for(self.shift, position, n_tokens)
        if shift != self.shift:
            ropes = [node.rope for node in self._hook.nodes]
            self._store.rebase(ropes, rope.n_sinks, self.shift, shift)
            self.shift = shift
            self._rebases += 1
        return rope.seen(position, shift)

    def truncate(self, position: int) -> None:
        """Drop entries from a position on.

        Raises ContextError if a recurrent state is beyond it, or if layers with windows have
        dropped entries that later tokens would see.
        """
        self.rollback.check(position)
        self._store.truncate(position)
        self.rollback.note_truncated(position)
        if position == 0:
            self.shift = 0

    def can_return_to(self, position: int) -> bool:
        """Tell whether sliding windows hold everything that they held when the text ended at
        `position`; always False with recurrent layers.
        """
        return self.rollback.leads_to(position)

    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Return the positions that a KV head keeps, ascending, (n,)."""
        return self._store.positions(layer, kv_head)

    def importance(self, layer: int, kv_head: int) -> npt.NDArray[np.float32] | None:
        """Return the importance of the entries of entries(), float32, (n,); None if the measure
        does not add up what queries give.
        """
        if not self._config.policy.importance.adds_up:
            return None
        return self._store.importance(layer, kv_head)

    def _heads(self) -> Iterator[tuple[int, int]]:
        """Yield layer and KV head of every KV head."""
        for layer, shape in enumerate(self.layers):
            for kv_head in range(shape.n_head_kv):
                yield layer, kv_head

    @property
    def pooled(self) -> KvHeadStore:
        """Return the store itself."""
        return self

    @property
    def n_entries(self) -> int:
        """Return how many entries all KV heads hold."""
        return self._store.entries

    def set_evicted(self, n: int) -> None:
        """Set how many entries were evicted so far."""
        self._store.evicted = n

    @property
    def evicted(self) -> int:
        """Return how many entries of all KV heads were evicted so far."""
        return self._store.evicted

    def counters(self) -> dict[str, Any]:
        """Return this store's figures for SessionStats."""
        return {
            "kv_type": self._config.kv_type,
            "kv_bytes_budget": self._store.budget_bytes,
            "kv_bytes_peak": self._store.peak_bytes,
            "kv_bytes_now": self._store.used_bytes,
            "kv_bytes_staging": self._store.staging_bytes,
            "kv_bytes_scratch": self._store.scratch_bytes,
            "products": self._hook.products,
            "products_bytes_scratch": self._hook.products_scratch_bytes,
            "entries_kept": self._store.entries,
            "evictions": self._store.evicted,
            "eviction_seconds": self._store.eviction_seconds,
            "rebases": self._rebases,
        }
