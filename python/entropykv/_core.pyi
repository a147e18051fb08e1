"""Stores, attention and budgets of entropykv (C++)."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float32]
_Ints = npt.NDArray[np.int32]

SEQUENCE_STATE_VERSION: int
"""Of what llama.cpp writes for a sequence (LLAMA_STATE_SEQ_VERSION)."""

def ggml_version() -> str:
    """Return the version of the loaded ggml."""

def ggml_commit() -> str:
    """Return the commit of the loaded ggml."""

def differences() -> list[str]:
    """Return what the loaded ggml has otherwise than the headers: cpp/llama/built_for.hpp."""

def struct_layouts() -> list[tuple[str, int, str, int]]:
    """Return name, size, a field and its offset of structures that Python passes to llama.cpp."""

class ScoreKind:
    """What ranks entries: cpp/decide/measures.hpp."""

    streaming: ScoreKind
    recency: ScoreKind
    mass: ScoreKind
    attention: ScoreKind
    products: ScoreKind
    reconstruct: ScoreKind
    expected: ScoreKind
    predicted: ScoreKind
    def __init__(self, value: int) -> None: ...
    @property
    def name(self) -> str: ...

class Measure:
    """What a measure of importance means: a row of the table in cpp/decide/measures.cpp."""

    @property
    def kind(self) -> ScoreKind: ...
    @property
    def name(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def by_position(self) -> bool:
        """Whether scores follow from positions alone."""
    @property
    def adds_up(self) -> bool:
        """Whether it adds up what queries gave to entries."""
    @property
    def of_echoes(self) -> bool:
        """Whether queries that repeat the text count alone."""
    @property
    def turns_queries(self) -> bool:
        """Whether it turns the queries so far to later positions."""
    @property
    def predicts(self) -> bool:
        """Whether scores follow from keys and values alone: see HeadwiseStore.set_predictor()."""
    @property
    def threshold(self) -> float:
        """What the schedule of freezing calls little, unless somebody says otherwise."""

def measures() -> list[Measure]:
    """Return the table of measures."""

class ImportanceSettings:
    """How entries are ranked: cpp/decide/importance.hpp."""

    def __init__(
        self,
        kind: ScoreKind,
        variation: float = 0.0,
        decay: float = 0.0,
        observation_window: int = 512,
        by_values: bool = False,
        distinct: bool = False,
        future_positions: int = 512,
        expected_lookups: float = 0.0,
    ) -> None:
        """`observation_window` and `future_positions` in tokens.

        `expected_lookups`: how many later queries count that give an entry the share of attention
        that its key and value predict; 0: nothing is predicted, and more only for mass and
        attention. A HeadwiseStore raises ValueError for what is impossible.
        """
    @property
    def decay(self) -> float:
        """Share of an observation that is left after one token; 1: nothing decays."""

class LayerShape:
    """Heads and head sizes of one attention layer."""

    def __init__(
        self,
        n_head: int,
        n_head_kv: int,
        k_dim: int,
        v_dim: int,
        window: int = 0,
        chunked: bool = False,
        latent: bool = False,
        readers: int = 1,
    ) -> None:
        """`window`: in tokens, 0: none; `chunked`: it begins at multiples of its size.

        `latent`: V is the first `v_dim` values of K, and not held on its own. `readers`: layers of
        the model that attend to its entries.
        """
    @property
    def n_head(self) -> int: ...
    @property
    def n_head_kv(self) -> int: ...
    @property
    def k_dim(self) -> int: ...
    @property
    def v_dim(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def chunked(self) -> bool: ...
    @property
    def latent(self) -> bool: ...
    @property
    def readers(self) -> int: ...
    @property
    def entry_values(self) -> int:
        """Values that an entry of a KV head is made of."""
    def with_window(self, window: int, chunked: bool) -> LayerShape:
        """The same layer with a window."""

class RopeParams:
    """How a layer's keys depend on their position, by ggml's names; n_dims 0: they do not."""

    def __init__(
        self,
        n_dims: int,
        offset: int = 0,
        neox: bool = False,
        n_ctx_orig: int = 0,
        freq_base: float = 10000.0,
        freq_scale: float = 1.0,
        ext_factor: float = 0.0,
        beta_fast: float = 0.0,
        beta_slow: float = 0.0,
        freq_factors: Sequence[float] = (),
    ) -> None: ...
    @property
    def n_dims(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def neox(self) -> bool: ...
    @property
    def n_ctx_orig(self) -> int: ...
    @property
    def freq_base(self) -> float: ...
    @property
    def freq_scale(self) -> float: ...
    @property
    def ext_factor(self) -> float: ...
    @property
    def beta_fast(self) -> float: ...
    @property
    def beta_slow(self) -> float: ...
    @property
    def freq_factors(self) -> list[float]: ...
    @property
    def frequencies(self) -> list[float]:
        """Radians per position of every pair."""

class AttentionNode:
    """An attention node that the probe saw."""

    @property
    def cache_layer(self) -> int: ...
    @property
    def shape(self) -> LayerShape: ...
    @property
    def scale(self) -> float: ...
    @property
    def softcap(self) -> float: ...
    @property
    def has_sinks(self) -> bool: ...
    @property
    def rope(self) -> RopeParams: ...

class KShiftProbe:
    """Inspections at one decode: whether llama.cpp's K-shift does what the model's rotation did."""

    def __init__(self) -> None: ...
    @property
    def callback(self) -> int: ...
    @property
    def user_data(self) -> int: ...
    @property
    def obstacle(self) -> str:
        """Why it does not; empty if it does."""

class WindowProbe:
    """Inspections at decodes of single tokens: how many cells each attention layer sees."""

    def __init__(self) -> None: ...
    @property
    def callback(self) -> int: ...
    @property
    def user_data(self) -> int: ...
    @property
    def visible(self) -> list[tuple[int, int]]:
        """llama.cpp's number of the layer, and cells (-1: unreadable), since clear()."""
    def clear(self) -> None: ...

class SquaredReluHook:
    """Makes the SwiGLU gates in the graphs of one llama_context squared ReLU."""

    def __init__(self, n_layers: int) -> None: ...
    @property
    def callback(self) -> int:
        """Address for llama_context_params.cb_eval."""

    @property
    def user_data(self) -> int:
        """Address for llama_context_params.cb_eval_user_data."""

    def begin_step(self) -> None: ...
    def check_step(self) -> None:
        """RuntimeError unless the gate of every layer was changed once since begin_step()."""

class StockHook:
    """Leaves a context's graphs as they are, but for squared ReLU; can time their nodes."""

    def __init__(self, relu2_layers: int) -> None:
        """`relu2_layers`: layers whose gates become squared ReLU, all or 0."""

    @property
    def callback(self) -> int:
        """Address for llama_context_params.cb_eval."""

    @property
    def user_data(self) -> int:
        """Address for llama_context_params.cb_eval_user_data."""

    def measure_work(self, on: bool) -> None:
        """Begin to time every node by itself, from 0; or end it: graphs run as a whole again."""

    @property
    def work(self) -> dict[str, tuple[float, float, float]]:
        """Since measure_work(True): (seconds, operations, bytes) of weights, attention and rest.

        Operations and bytes are those of products of weights; seconds are without what it takes to
        compute a node by itself.
        """

def product_kernels() -> list[str]:
    """Kernels of products that this machine can run, the one that is used last."""

class WeightHook:
    """Computes products of quantised weights in the graphs of one llama_context."""

    def __init__(self, relu2_layers: int, n_threads: int) -> None:
        """`relu2_layers`: layers whose gates become squared ReLU too, all or 0.

        `n_threads`: most threads that an op of the context has.
        """

    @property
    def callback(self) -> int:
        """Address for llama_context_params.cb_eval."""

    @property
    def user_data(self) -> int:
        """Address for llama_context_params.cb_eval_user_data."""

    @property
    def products(self) -> dict[str, str]:
        """Who computes the products of each type of weights seen: see SessionStats.products."""

    @property
    def products_scratch_bytes(self) -> int:
        """Bytes that the threads work with."""

    def measure_work(self, on: bool) -> None:
        """As StockHook."""

    @property
    def work(self) -> dict[str, tuple[float, float, float]]:
        """As StockHook."""

    def begin_step(self) -> None: ...
    def check_step(self) -> None:
        """RuntimeError unless the gate of every layer was changed once since begin_step()."""

class GraphHook:
    """Inspect, then change, the graphs of one llama_context: attention, and as WeightHook."""

    def __init__(self, relu2_layers: int, n_threads: int, batch_invariant: bool = False) -> None:
        """As WeightHook.

        `batch_invariant`: tokens of several sequences are read together, and each gets the bits
        that it gets alone.
        """

    @property
    def callback(self) -> int:
        """Address for llama_context_params.cb_eval."""

    @property
    def user_data(self) -> int:
        """Address for llama_context_params.cb_eval_user_data."""

    @property
    def nodes(self) -> list[AttentionNode]: ...
    @property
    def refusal(self) -> str:
        """Why the headwise store cannot serve the model; empty if it can."""

    @property
    def rope_obstacle(self) -> str:
        """Why stored keys cannot be moved to other positions; empty if they can."""

    @property
    def rope_limit(self) -> int:
        """Positions that the model's frequencies hold for; 0: as many as it was trained for."""

    @property
    def products(self) -> dict[str, str]:
        """As WeightHook."""

    @property
    def products_scratch_bytes(self) -> int:
        """As WeightHook."""

    def measure_work(self, on: bool) -> None:
        """As StockHook."""

    @property
    def work(self) -> dict[str, tuple[float, float, float]]:
        """As StockHook."""

    def serve(self, batch: AttentionBatch) -> None:
        """From now on, change graphs: the batch says whose tokens they read."""

    def begin_step(self) -> None: ...
    def check_step(self) -> None:
        """RuntimeError unless every layer was served since begin_step()."""

class ColdStorageError(OSError):
    """Cold storage has no room, or what it holds cannot be read."""

class FreezeSchedule:
    """Detections and timers of the freeze document: cpp/decide/freezing.hpp."""

    def __init__(self, window: int, threshold: float, rate: float, history: int) -> None: ...

class FreezeSettings:
    """What becomes of entries that are not kept: cpp/decide/freezing.hpp."""

    def __init__(
        self,
        kv_type: str,
        limit_bytes: int,
        recall_interval: int,
        schedule: FreezeSchedule | None = None,
        descriptor: int = -1,
        nonce: bytes = b"",
    ) -> None:
        """`kv_type`: as stored, q8_0 or q4_0; `limit_bytes` 0: none; `recall_interval` 0: never.

        `descriptor`: of an open file, which stays the caller's; -1: in memory. `nonce`: 16 bytes
        for the checksums of its pages, or none. ValueError for anything else.
        """

class SequencePool:
    """What sequences of one model share: the pages of a hard budget, and a micro-batch's memory."""

    def __init__(
        self, layers: Sequence[LayerShape], kv_type: str, max_tokens: int, n_sequences: int
    ) -> None:
        """Micro-batches have up to `max_tokens` tokens of one sequence, and one of each other.

        ValueError for more than 256 sequences.
        """

    def set_pages(self, pages: int) -> None:
        """Set the budget; ValueError where the sequences' shares are more, and nothing changes."""

    def on_full(self, drop: Callable[[], bool]) -> None:
        """Have `drop` called where pages are needed: it drops a Checkpoint, if there is one."""

    @property
    def shared_pages(self) -> int:
        """Pages of all shares."""

    @property
    def budget_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def mapped_bytes(self) -> int: ...
    @property
    def staging_bytes(self) -> int: ...
    @property
    def scratch_bytes(self) -> int:
        """Bytes that the threads work with, whosever entries they attend to."""

class AttentionBatch:
    """The sequences whose tokens are in a micro-batch, in the order of its tokens."""

    def __init__(self) -> None: ...
    def clear(self) -> None:
        """Begin another micro-batch, of no tokens yet."""

    def add(
        self,
        store: HeadwiseStore,
        n_tokens: int,
        position: int,
        rope_position: int,
        n_echo: int = 0,
        see_all: bool = False,
    ) -> None:
        """Add the next tokens, and get all that they need; single tokens come first.

        `n_echo`: as in HeadwiseStore.begin(). `see_all`: each of the tokens attends to all of them,
        also to later ones, and there is no echo.

        ColdStorageError where cold storage has no room; nothing is added then.
        """

    @property
    def n_tokens(self) -> int: ...

class Checkpoint:
    """What a HeadwiseStore held at a moment: pages that it shares until one of them changes."""

    def drop(self) -> None:
        """Give the pages back; nothing can go on from it any more."""

    def copy(self) -> Checkpoint:
        """Return another one of the same pages."""

    @property
    def is_dropped(self) -> bool: ...
    @property
    def pages(self) -> int: ...
    @property
    def own_pages(self) -> int:
        """Pages that nobody else holds."""

    @property
    def copied_bytes(self) -> int:
        """Bytes besides the pages."""

    @property
    def entries(self) -> int: ...
    @property
    def evicted(self) -> int: ...

class HeadwiseStore:
    """Paged entries per (layer, KV head), and the attention over them."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        kv_type: str,
        importance: ImportanceSettings,
        n_sinks: int,
        recent_window: int,
        max_tokens: int,
        max_entries: int,
        n_threads: int,
        own_windows: bool = False,
        counts_dropped: bool = False,
        shared_choice: bool = False,
        kernels: str | None = None,
        ropes: Sequence[RopeParams] = (),
        freezing: FreezeSettings | None = None,
        pool: SequencePool | None = None,
    ) -> None:
        """`own_windows`: a KV head's recent window is half of its own budget; `counts_dropped`:
        losses() count what was dropped, too, unless it is frozen; `shared_choice`: the
        heads of a layer rank entries by what all of them observed; `ropes`: one for each layer, for
        expected attention; none: nothing has a position. `freezing` None: what is not kept is
        dropped; ValueError where its limit is too small, or with `own_windows`. `pool` None: the
        store has pages of its own, and its budget is all of them.
        """

    def checkpoint(self) -> Checkpoint:
        """Return what is held now. RuntimeError where the store freezes."""

    def fork_from(self, checkpoint: Checkpoint, ends: bool) -> bool:
        """Replace what is held by what a checkpoint of the same pool has, and evict what is more.

        `ends`: it is dropped, and its own pages are taken over. False where there is no room for
        the copies that evicting needs: then nothing is held. ValueError for another pool's.
        """

    def checkpoint_count(self, checkpoint: Checkpoint, layer: int, kv_head: int) -> int:
        """Entries of a KV head of a checkpoint."""

    def checkpoint_state_bytes(self, checkpoint: Checkpoint, layer: int, kv_head: int) -> int:
        """Size of save_checkpoint_head()."""

    def save_checkpoint_head(self, checkpoint: Checkpoint, layer: int, kv_head: int) -> bytes:
        """As save_head(), of a checkpoint."""

    def on_full(self, drop: Callable[[], bool]) -> None:
        """As SequencePool.on_full()."""

    def give_up_share(self) -> None:
        """Leave the pool's pages to others; nothing may be held. set_budgets() takes a share."""

    def set_budgets(
        self, budgets: Sequence[int], pool_pages: int, n_sinks: int, recent_window: int
    ) -> None:
        """Budgets in entries of every KV head, layer by layer, within a share of `pool_pages`.

        Heads that hold more evict. ValueError where others' shares do not leave so many pages.
        ColdStorageError where there is no room for what they would freeze; nothing has changed.
        """

    def begin(self, n_tokens: int, position: int, rope_position: int, n_echo: int = 0) -> None:
        """Get all that a micro-batch needs; ColdStorageError where cold storage has no room.

        `n_echo` more tokens follow the `n_tokens`, whose queries alone are observed, and of which
        nothing is kept.
        """

    def attend(
        self,
        layer: int,
        q: _Floats,
        k: _Floats | None,
        v: _Floats | None,
        scale: float,
        softcap: float = 0.0,
        sinks: _Floats | None = None,
        position: int = 0,
        slopes: _Floats | None = None,
        reader: int = 0,
        n_echo: int = 0,
    ) -> _Floats:
        """Attention of one micro-batch without a model: [n_tokens][heads][dim] each.

        `v`: None where the layer's V is a part of K. `k`, `v`: None for readers after the first.
        `n_echo`: how many of the tokens, the last ones, are an echo (see begin()).
        """

    def measure_losses(self, knots: Sequence[int]) -> None:
        """Let micro-batches measure what heads lose with so many entries beyond the protected.

        `knots` ascend from 0; none: off, and losses() stay as they are.
        """

    def losses(self, of_held: bool = False) -> npt.NDArray[np.float64]:
        """Of the last micro-batch that measured: [KV head of all layers][knot], one array.

        `of_held`: without what was dropped before.
        """

    def predictor_features(self, layer: int) -> int:
        """How many features an entry of a layer has, the constant 1 at their end included.

        They are, in order: the key before RoPE (k_dim), the value (v_dim; none where it is a part
        of the key), the norms of the key's rotation pairs, log(|key| + 1e-6), log(|value| + 1e-6)
        (none where the value is a part of the key), 1. ValueError where the RoPE that the store was
        given does not fit the keys.
        """

    def set_predictor(self, layer: int, weights: _Floats) -> None:
        """Predict an entry's share of attention as exp(weights . features), from now on.

        `weights`: (n_head_kv, predictor_features()), or empty: none; all stores of the pool have
        them then. Shares lie from 1e-6 to 1, and stay what they were when an entry was read.
        ValueError for another shape, for weights that are no finite numbers, and for RoPE that does
        not fit the keys of the layer.
        """

    def predict_stored(self, n_positions: int, shift: int) -> None:
        """Predict what entries of a text of `n_positions` tokens will be looked up.

        For entries that were read before there was a predictor. RoPE sees them by `shift`, as
        rope_position() says. A larger share that an echo has shown stays. ValueError where the
        store has an entry at `n_positions` or later, and for RoPE that does not fit its keys.
        """

    def teach_stored(self, begin: int, end: int, shift: int) -> None:
        """Add lessons of the stored entries at positions from `begin` to before `end`.

        For text that was stored before an echo repeated it: what that has shown is kept with the
        entries, 8 bits precise. Sinks are left out. `shift`: as for predict_stored(). ValueError
        where lessons are not collected.
        """

    def predicted_shares(self, layer: int, head: int) -> npt.NDArray[np.float32]:
        """Shares of attention, 2^-20 to 1, that later queries are expected to give: (n_entries,).

        In order of positions; 8 bits precise. Each is the larger of what key and value predict and
        of what an echo has shown. ValueError for measures that predict nothing.
        """

    @property
    def is_predicted(self) -> bool:
        """Whether every layer has weights; without, measure predicted scores all the same."""

    def collect_lessons(self, on: bool) -> None:
        """Add up, from the next micro-batch on, what echoes show of the entries of their text.

        Of all stores of the pool. ValueError for measures that predict nothing.
        """

    def lessons(self, layer: int) -> tuple[int, npt.NDArray[np.float64]]:
        """How many entries were added up, and their sums, (n_head_kv, n + 1, n + 1).

        The sums are of the outer products of (features, log(max(a, 1e-5))) with themselves, where a
        is the largest share of attention that a query of the echo gave to the entry. Entries
        before `n_sinks` are left out. ValueError where none were ever collected.
        """

    def clear_lessons(self) -> None:
        """Begin them anew; where they are not collected any more, give their memory back."""

    def track_entropy(self, on: bool) -> None: ...
    def entropies(self, layer: int) -> npt.NDArray[np.float64]:
        """Mean entropy in bits of every query head since track_entropy()."""

    def row_entropies(self, layer: int) -> _Floats:
        """Bits of every attention row of the last micro-batch, (n_tokens, n_head)."""

    def capture_queries(self, on: bool) -> None: ...
    def queries(self, layer: int) -> tuple[_Floats, _Floats, float, int, bool, _Floats]:
        """Of the last micro-batch: scaled queries (n_tokens, n_head, k_dim), attention sinks
        (n_head,), soft cap (0: none), window in tokens (0: none), whether it is chunked, and what
        logits fall by per position (n_head,).
        """

    def rows(self, layer: int, kv_head: int) -> tuple[_Ints, _Floats, _Floats, _Floats]:
        """Positions kept, ascending, with their importance, K (n, k_dim) and V (n, v_dim)."""

    def state_bytes(self, layer: int, kv_head: int) -> int:
        """Size of the state of a KV head; cpp/store/head_states.hpp describes it."""

    def save_head(self, layer: int, kv_head: int) -> bytes:
        """Return the state; ColdStorageError where what is frozen cannot be read."""

    def state_problem(self, layer: int, count: int, state: bytearray, end: int) -> str:
        """What is wrong with the state of a sequence of `end` tokens; empty: nothing."""

    def begin_load(
        self, counts: Sequence[int], states: Sequence[bytearray], budgets: Sequence[int]
    ) -> None:
        """Get room for the states of all KV heads, with so many entries each, under budgets that
        will be set before they are loaded.

        MemoryError and ColdStorageError change nothing.
        """

    def set_evicted(self, evicted: int) -> None:
        """Say how many entries have been evicted so far."""

    def load_head(self, layer: int, kv_head: int, count: int, state: bytearray) -> None:
        """Replace a head's entries by a state without problems; evicts down to its budget."""

    @property
    def windows_whole_from(self) -> int:
        """Queries from this position on see nothing that was dropped because it left a window."""

    def rebase(
        self, ropes: Sequence[RopeParams], n_sinks: int, old_shift: int, new_shift: int
    ) -> None:
        """Rotate every stored key from its rope position under one shift to that under another.

        `ropes`: one for each layer; ValueError where they do not fit its keys.
        """

    def truncate(self, position: int) -> None: ...

    recalls_now: bool
    """Whether the next micro-batch looks for frozen entries, whatever the interval says."""

    def freeze_all(self, now: int) -> None:
        """Freeze everything that is held; `now`: the newest position."""

    def restore(
        self, now: int, frozen_after: int = -1, due_after: int = -1, forget: bool = False
    ) -> int:
        """Restore what was frozen after a position and is due after another, within the budgets.

        `forget`: detections so far. Returns how many entries.
        """

    def stop_freezing(self) -> None:
        """Give up what is frozen, for good, and freeze nothing more."""

    def frozen_positions(self, layer: int, kv_head: int) -> _Ints: ...
    def positions(self, layer: int, kv_head: int) -> _Ints: ...
    def importance(self, layer: int, kv_head: int) -> _Floats: ...
    def budget(self, layer: int, kv_head: int) -> int: ...
    def count(self, layer: int, kv_head: int) -> int: ...
    @property
    def entries(self) -> int: ...
    @property
    def evicted(self) -> int: ...
    @property
    def eviction_seconds(self) -> float: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def mapped_bytes(self) -> int: ...
    @property
    def staging_bytes(self) -> int: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def frozen(self) -> int:
        """Entries that are frozen now, of all KV heads."""

    @property
    def frozen_total(self) -> int: ...
    @property
    def restored_total(self) -> int: ...
    @property
    def recalled_total(self) -> int: ...
    @property
    def cold_seconds(self) -> float: ...
    @property
    def cold_bytes(self) -> int: ...
    @property
    def sketch_bytes(self) -> int: ...
    @property
    def cold_overhead_bytes(self) -> int: ...
    @property
    def cold_file_bytes(self) -> int: ...
    @property
    def cold_failure(self) -> str | None:
        """What could not be read or written; stays."""

class CacheMap:
    """What every KV head holds, has frozen and got back, for those who watch a session."""

    def __init__(self) -> None: ...
    def count(
        self, store: HeadwiseStore, first: int, per_column: int, n_columns: int
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Count positions in columns of `per_column` positions, from `first` on.

        Three arrays, (KV heads of all layers, columns): which share of a column's positions is
        held, frozen, or held now and frozen at the count before; in 255ths, rounded up.
        """

class FlatStore:
    """Position-level eviction in the cache of a llama_context (its address)."""

    def __init__(
        self,
        context: int,
        budget: int,
        score: ScoreKind,
        variation: float,
        n_sinks: int,
        recent_window: int,
        rope_sinks: int,
    ) -> None: ...
    def make_room(self, n_tokens: int) -> None: ...
    def settle(self, position: int, n_tokens: int) -> None: ...
    def set_budget(self, budget: int, n_sinks: int, recent_window: int) -> None: ...
    def truncate(self, position: int) -> None: ...
    def rebase(self, shift: int) -> None:
        """Go on at another shift; entries that would be clamped to the sinks are dropped."""

    shift: int
    """Settable for a cache that was filled at another one."""

    def move_to(self, context: int) -> None: ...
    def save_state(self) -> bytes:
        """Compact, then return llama.cpp's bytes of the sequence."""

    def load_state(
        self, positions: Sequence[int], state: bytearray, evicted: int, shift: int
    ) -> None:
        """Replace everything, then evict; RuntimeError where llama.cpp does not take the state."""

    @property
    def positions(self) -> _Ints: ...
    @property
    def entries(self) -> int: ...
    @property
    def budget(self) -> int: ...
    @property
    def peak(self) -> int: ...
    @property
    def largest_copy(self) -> int:
        """Bytes of the largest copy of llama.cpp's state that was made so far."""
    @property
    def evicted(self) -> int: ...
    @property
    def compactions(self) -> int: ...
    @property
    def eviction_seconds(self) -> float: ...

class TokenTrie:
    """The texts of a vocabulary's tokens, in order: cpp/grammar/token_trie.hpp."""

    def __init__(self, texts: Sequence[bytes], ends: Sequence[bool]) -> None:
        """Take the texts of all tokens, and of each whether it ends a text.

        Raises ValueError where there are not as many of both.
        """

    @staticmethod
    def of_vocabulary(vocabulary: int) -> TokenTrie:
        """Read the texts of a llama_vocab at an address."""

    @property
    def n_tokens(self) -> int: ...

class GrammarLimits:
    """What a grammar may cost: cpp/grammar/grammar_effort.hpp."""

    most_symbols: int
    """Of all its rules."""
    most_repeats: int
    """What a number in {m,n} may be."""
    most_stacks: int
    """Ways in which a text may be meant, at one time."""
    most_work: int
    """Steps for one token."""
    most_kept: int
    """Stacks, states and transitions that are remembered."""

class GrammarMatcher:
    """Which tokens a grammar allows after those that were taken: cpp/grammar/grammar_matcher.hpp.

    Used by one thread at a time. Every call raises ValueError where a limit is reached, and what
    `poll` raises.
    """

    def __init__(
        self,
        text: bytes,
        root: str,
        trie: TokenTrie,
        limits: GrammarLimits,
        find_token: Callable[[str], int | None],
        poll: Callable[[], object],
    ) -> None:
        """Read a grammar (GBNF) with a rule `root`; raises ValueError for what is none."""

    def apply(self, candidates: int, n_candidates: int) -> None:
        """Give tokens that are not allowed the logit -inf, in llama_token_data at an address."""

    def accept(self, token: int) -> None:
        """Go on after a token; raises ValueError for one that is not allowed."""

    @property
    def may_end(self) -> bool: ...

def rope_position(position: int, n_sinks: int, shift: int) -> int:
    """Where RoPE sees a position: moved back by `shift`, but not before the sinks."""

def read_bandwidth(n_bytes: int, n_threads: int) -> float:
    """Bytes per second of a plain read of memory."""

def available_kernels() -> list[str]:
    """Instruction sets that this machine runs, the slowest first."""

def select_survivors(
    scores: npt.ArrayLike,
    positions: npt.ArrayLike,
    keep: int,
    n_sinks: int,
    recent_window: int,
    newest: int,
) -> npt.NDArray[np.uint8]:
    """1 for every entry that survives."""

def recency_score(position: int, newest: int, variation: float) -> float: ...
def entropy_weights(
    entropies: Sequence[float], mean: float, low: float, high: float
) -> list[float]: ...
def share_budget(
    mean_entries: int,
    max_entries: int,
    floor_entries: int,
    entries_per_page: Sequence[int],
    weights: Sequence[float],
    limits: Sequence[int] = (),
) -> list[int]:
    """Entries of every KV head; ValueError where the mean is below the floor.

    `limits`: what each head can use; none: max_entries.
    """

def alibi_slopes(n_head: int, max_bias: float) -> _Floats:
    """What the logits of every query head fall by per position."""

def kv_types() -> list[str]:
    """Return the names of the types of K and V that pages can hold: cpp/page/page_codec.cpp."""

def most_entries(layer: LayerShape, max_entries: int) -> int:
    """Entries that a KV head of a layer can use."""

def losses_at(
    scores: npt.ArrayLike,
    knots: Sequence[int],
    dropped: Sequence[float] = (),
    unit: float = 1.0,
) -> npt.NDArray[np.float32]:
    """Sums of all but the largest k scores, for every k of the knots, which ascend.

    Of `dropped` scores, those of an octave count as their mean, times the `unit`.
    """

def curve_shares(knots: Sequence[float], losses: Sequence[float], total: float) -> list[float]:
    """Entries of every head from `total`; losses are [head][knot], one after the other."""

def share_by_curves(
    mean_entries: int,
    max_entries: int,
    floor_entries: int,
    entries_per_page: Sequence[int],
    knots: Sequence[float],
    losses: Sequence[float],
    limits: Sequence[int] = (),
) -> list[int]:
    """As share_budget, for the least summed loss; knots count entries beyond the floor."""

def pages_for(entries: int, entries_per_page: int) -> int: ...
def page_geometry(layers: Sequence[LayerShape], kv_type: str) -> tuple[int, list[int]]:
    """Bytes of a page, and the entries that fit into one for every layer."""

def cold_page_bytes(layers: Sequence[LayerShape], kv_type: str, cold_type: str) -> int:
    """Bytes of a page of cold storage; `cold_type`: as in FreezeSettings."""

def plan_flat_eviction(
    positions: Sequence[int],
    keep: int,
    score: ScoreKind,
    variation: float,
    n_sinks: int,
    recent_window: int,
) -> tuple[_Ints, list[tuple[int, int]]]:
    """Positions kept, and the ranges [first, last) to remove."""
