"""The C++ extension of entropykv: stores, attention and budgets."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float32]
_Ints = npt.NDArray[np.int32]

RECALL_QUERIES: int
"""How many queries of a KV head recall considers in a micro-batch, the last ones."""
SEQUENCE_STATE_VERSION: int
"""The version of llama.cpp's format for the state of a sequence (LLAMA_STATE_SEQ_VERSION)."""

def ggml_version() -> str:
    """Return the version of the loaded ggml."""

def ggml_commit() -> str:
    """Return the commit of the loaded ggml."""

def differences() -> list[str]:
    """Return how the loaded ggml differs from the headers that were compiled in: see
    cpp/llama/built_for.hpp.
    """

def struct_layouts() -> list[tuple[str, int, str, int]]:
    """Return the layout of structures that Python passes to llama.cpp: name, size, a field and its
    offset, in bytes.
    """

class ScoreKind:
    """Name a measure by which entries are ranked: see cpp/decide/measures.hpp."""

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
    """Describe a measure of importance: a row of the table in cpp/decide/measures.cpp."""

    @property
    def kind(self) -> ScoreKind: ...
    @property
    def name(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def by_position(self) -> bool:
        """Tell whether scores depend only on positions."""
    @property
    def adds_up(self) -> bool:
        """Tell whether it adds up shares of attention that queries gave to entries."""
    @property
    def of_echoes(self) -> bool:
        """Tell whether only queries that repeat the text count."""
    @property
    def predicts(self) -> bool:
        """Tell whether scores depend only on keys and values: see HeadwiseStore.set_predictor()."""
    @property
    def threshold(self) -> float:
        """Return the default threshold of the freeze schedule: entries with lower scores may
        freeze.
        """

def measures() -> list[Measure]:
    """Return the table of measures."""

class ImportanceSettings:
    """Hold how entries are ranked: see cpp/decide/importance.hpp."""

    def __init__(
        self,
        kind: ScoreKind,
        decay: float = 0.0,
        observation_window: int = 512,
        by_values: bool = False,
        expected_lookups: float = 0.0,
    ) -> None:
        """Set the values; `observation_window` is in tokens.

        `expected_lookups`: for how many later queries an entry gets the share of attention that is
        predicted from its key and value; 0: nothing is predicted; more than 0 only for mass and
        attention. Errors are found by HeadwiseStore, which raises ValueError for impossible values.
        """
    @property
    def decay(self) -> float:
        """Return the fraction of an observation that is left after one token; 1: nothing decays."""

class LayerShape:
    """Hold the heads, head sizes and window of one attention layer."""

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
        """Set the values. `window`: in tokens, 0 for none; `chunked`: windows begin at multiples of
        their size.

        `latent`: V is the first `v_dim` values of K, and not stored separately. `readers`: how many
        layers of the model attend to its entries.
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
        """Return how many values an entry of a KV head consists of."""
    def with_window(self, window: int, chunked: bool) -> LayerShape:
        """Return the shape of this layer with a sliding window of so many tokens."""

class RopeParams:
    """Hold how a layer's keys depend on their position, with ggml's names; n_dims 0: they
    do not.
    """

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
        """Return the rotation of every pair, in radians per position."""

def key_centre(
    bias: Sequence[float], spread: Sequence[float], rope: RopeParams, magnitude: float = 1.0
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return what is subtracted from the keys of a KV head before they are rounded, and the units
    that divide the rest; each is [k_dim].

    `bias`: is added to keys before RoPE. `spread`: the standard deviations of what it is added to.
    `magnitude`: by which RoPE multiplies keys. Raises ValueError for values that do not fit the
    RoPE, or are not finite.
    """

class AttentionNode:
    """Describe an attention node of the model's graph."""

    @property
    def cache_layer(self) -> int: ...
    @property
    def shape(self) -> LayerShape: ...
    @property
    def scale(self) -> float: ...
    @property
    def softcap(self) -> float: ...
    @property
    def rope(self) -> RopeParams: ...
    @property
    def rope_magnitude(self) -> float: ...
    @property
    def on_device(self) -> bool:
        """Return whether its K and V lie in memory that the CPU cannot read."""

class KShiftProbe:
    """Check at one decode whether llama.cpp's K-shift rotates keys as the model's graph does."""

    def __init__(self) -> None: ...
    @property
    def callback(self) -> int: ...
    @property
    def user_data(self) -> int: ...
    @property
    def obstacle(self) -> str:
        """Return why llama.cpp's K-shift is wrong for the model; empty if it is right."""

class WindowProbe:
    """Count how many cells each attention layer sees, at decodes of single tokens."""

    def __init__(self) -> None: ...
    @property
    def callback(self) -> int: ...
    @property
    def user_data(self) -> int: ...
    @property
    def visible(self) -> list[tuple[int, int]]:
        """Return pairs of llama.cpp's layer number and its visible cells (-1: unreadable) since
        clear().
        """
    def clear(self) -> None: ...

def product_kernels() -> list[str]:
    """Return the names of the kernels for products that this machine can run; the last one
    is used.
    """

class WeightHook:
    """Change what uses weights in the graphs of one llama_context: gates become squared ReLU, and
    our kernels compute products with quantized weights. It can also measure the time of nodes.
    """

    def __init__(self, relu2_layers: int, n_threads: int = 0, few_tokens: int = 1) -> None:
        """Make a hook.

        `relu2_layers`: number of layers whose gates become squared ReLU, all or 0. `n_threads`: the
        most threads of the context; 0: products stay llama.cpp's. `few_tokens`: products of up to
        so many tokens are left to llama.cpp's kernel where that is faster for one; 0: none are.
        """

    @property
    def callback(self) -> int:
        """Return the address for llama_context_params.cb_eval."""

    @property
    def user_data(self) -> int:
        """Return the address for llama_context_params.cb_eval_user_data."""

    @property
    def products(self) -> dict[str, str]:
        """Return which kernel computes the products of each weight type: see
        SessionStats.products.
        """

    @property
    def products_scratch_bytes(self) -> int:
        """Return the bytes of working memory of all threads."""

    def measure_work(self, on: bool) -> None:
        """Start to measure every node separately, from 0; False: stop, so that graphs run as a
        whole again.
        """

    @property
    def work(self) -> dict[str, tuple[float, float, float]]:
        """Return (seconds, operations, bytes) of weights, attention and the rest since
        measure_work(True).

        Operations and bytes are those of products with weights. The overhead of computing nodes
        separately is subtracted from the seconds.
        """

    def begin_step(self) -> None: ...
    def check_step(self) -> None:
        """Raise RuntimeError unless the gate of every layer was changed once since begin_step()."""

class GraphError(RuntimeError):
    """Raised if a graph is not as the first one that was probed."""

class GraphHook:
    """Inspect the graphs of one llama_context, then replace their attention, and products as
    WeightHook does.
    """

    def __init__(
        self,
        relu2_layers: int,
        n_threads: int,
        few_tokens: int = 1,
        on_devices: bool = False,
        products: str = "",
    ) -> None:
        """Make a hook; for the first three arguments see WeightHook.

        `on_devices`: a DeviceStore will serve, so attention may be on any device. `products`: a
        name in product_kernels(); empty: the last one.
        """

    @property
    def callback(self) -> int:
        """Return the address for llama_context_params.cb_eval."""

    @property
    def user_data(self) -> int:
        """Return the address for llama_context_params.cb_eval_user_data."""

    @property
    def nodes(self) -> list[AttentionNode]: ...
    @property
    def refusal(self) -> str:
        """Return why the headwise store cannot serve the model; empty if it can."""

    @property
    def rope_obstacle(self) -> str:
        """Return why stored keys cannot be moved to other positions; empty if they can."""

    @property
    def rope_limit(self) -> int:
        """Return for how many positions the model's frequencies are valid; 0: as many as it was
        trained for.
        """

    @property
    def products(self) -> dict[str, str]:
        """Return which kernel computes the products of each weight type: see
        SessionStats.products.
        """

    @property
    def products_scratch_bytes(self) -> int:
        """Return the bytes of working memory of all threads."""

    def measure_work(self, on: bool) -> None:
        """Start or stop measuring, as WeightHook.measure_work() does."""

    @property
    def work(self) -> dict[str, tuple[float, float, float]]:
        """Return the measurements, as WeightHook.work does."""

    def serve(self, batch: AttentionBatch) -> None:
        """Begin to replace attention in graphs; the batch tells whose tokens the graphs read."""

    def serve_on_devices(self, batch: DeviceBatch) -> None:
        """Begin to leave attention out of graphs; the store computes it on the layers' devices."""

    def help(self, n_threads: int) -> None:
        """Let so many more threads help with products of several tokens until help(0).

        The threads of an op do not wait for them. After help(0), none reads weights any more.
        """

    def begin_step(self) -> None: ...
    def check_step(self) -> None:
        """Raise RuntimeError unless attention of every layer was replaced since begin_step()."""

class ColdStorageError(OSError):
    """Report that cold storage is full, or that its content cannot be read."""

class FreezeSchedule:
    """Hold the detection and timing rules of the freeze schedule: see cpp/decide/freezing.hpp."""

    def __init__(self, window: int, threshold: float, rate: float, history: int) -> None: ...

class FreezeSettings:
    """Hold how entries that are not kept are frozen: see cpp/decide/freezing.hpp."""

    def __init__(
        self,
        kv_type: str,
        limit_bytes: int,
        recall_interval: int,
        schedule: FreezeSchedule | None = None,
        descriptor: int = -1,
        nonce: bytes = b"",
    ) -> None:
        """Set the values. `kv_type`: the stored type, q8_0 or q4_0; `limit_bytes` 0: no limit;
        `recall_interval`: in generated tokens, 0: never.

        `descriptor`: of an open file, which the caller closes; -1: store in memory. `nonce`: 16
        bytes for the checksums of its pages, or empty. Raises ValueError for other values.
        """

class SequencePool:
    """Hold what sequences of one model share: the pages of a hard budget, and memory for a
    micro-batch.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        kv_type: str,
        max_tokens: int,
        n_sequences: int,
        n_drafts: int = 0,
    ) -> None:
        """Make a pool for micro-batches of up to `max_tokens` tokens of one sequence, and one token
        of each other one.

        Each of them may be followed by up to `n_drafts` drafts: see AttentionBatch.add().
        Raises ValueError for more than 256 sequences, or more than 63 drafts.
        """

    def set_pages(self, pages: int) -> None:
        """Set the budget; raises ValueError, and changes nothing, if the sequences' shares are
        larger.
        """

    def on_full(self, drop: Callable[[], bool]) -> None:
        """Call `drop` when pages are missing: it must drop a Checkpoint, and return False if there
        is none.
        """

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
        """Return the bytes of working memory of the threads, for all sequences together."""

class AttentionBatch:
    """Hold the sequences whose tokens are in a micro-batch, in the order of its tokens."""

    def __init__(self) -> None: ...
    def clear(self) -> None:
        """Begin another micro-batch, without tokens."""

    def add(
        self,
        store: HeadwiseStore,
        n_tokens: int,
        position: int,
        rope_position: int,
        n_echo: int = 0,
        see_all: bool = False,
        n_drafts: int = 0,
        recalls: bool = True,
    ) -> None:
        """Add the next tokens, and reserve everything that they need; single tokens must come
        first.

        `n_echo`: as in HeadwiseStore.begin(). `see_all`: each of the tokens attends to all of them,
        also to later ones, and there is no echo. `n_drafts`: how many tokens, the last ones, are
        drafts; one token comes before them. Each token attends to what is left after the eviction
        of the one before, as if they were read one by one. HeadwiseStore.settle_drafts() must
        follow the decode. At most HeadwiseStore.most_drafts(); ValueError for more. `recalls`:
        whether several tokens may recall frozen entries; single ones do at intervals.

        Raises ColdStorageError, and adds nothing, if cold storage is full.
        """

    def most_drafts(self, store: HeadwiseStore, wanted: int) -> int:
        """Return how many drafts may follow the next token of a sequence, at most `wanted`.

        Fewer than HeadwiseStore.most_drafts() where the micro-batch has no room for them.
        """

    @property
    def n_tokens(self) -> int: ...

class MappedFileError(OSError):
    """Raised if entries are lost, because someone has written to the file that has their pages."""

class MappedFile:
    """Hold the rest of a file in memory that processes share; it is a buffer of bytes.

    Writing to the memory copies a page, and never changes the file.
    """

    @staticmethod
    def map(file: int, offset: int, n_bytes: int) -> MappedFile | None:
        """Map bytes of a file from an offset on; `file`: see system.number_of().

        Returns None if the bytes have to be read: where the system does not offer this, for a file
        that is not regular or shorter, and if the process maps 1024 files already.
        """

    @property
    def has_changed(self) -> bool:
        """Tell whether someone has written to the file, or shortened it, since it was mapped."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

class Checkpoint:
    """Hold the state of a HeadwiseStore at a moment: pages that both share until one of them
    changes.
    """

    def drop(self) -> None:
        """Give the pages back; a dropped checkpoint cannot be restored."""

    def copy(self) -> Checkpoint:
        """Return another checkpoint of the same pages."""

    @property
    def pages(self) -> int: ...
    @property
    def is_lost(self) -> bool:
        """Tell whether pages are in a mapped file that someone has changed."""

    @property
    def copied_bytes(self) -> int:
        """Return the bytes that it holds besides the pages."""

    @property
    def entries(self) -> int: ...
    @property
    def evicted(self) -> int: ...

class HeadwiseStore:
    """Hold paged entries per (layer, KV head), and compute attention over them."""

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
        key_centres: Sequence[npt.NDArray[np.float32]] = (),
        freezing: FreezeSettings | None = None,
        pool: SequencePool | None = None,
    ) -> None:
        """Make an empty store.

        `own_windows`: a KV head's recent window is half of its own budget. `counts_dropped`:
        losses() include what was dropped, unless it is frozen. `shared_choice`: the heads of a
        layer rank entries by the observations of all of them. `ropes`: one for each layer, for
        expected attention; empty: keys do not depend on positions. `key_centres`: for each layer,
        [n_head_kv][centre, unit][k_dim] of key_centre(), or an empty array; not for the measure
        `products`. `freezing` None: entries that are not kept are dropped. `pool` None: the store
        has pages of its own, and its budget is all of them. Raises ValueError if the limit of
        `freezing` is too small, or for `freezing` with `own_windows`.
        """

    def checkpoint(self) -> Checkpoint:
        """Return a checkpoint of the current state; raises RuntimeError if the store freezes
        entries.
        """

    def fork_from(self, checkpoint: Checkpoint, ends: bool) -> bool:
        """Replace the store's state by that of a checkpoint of the same pool, and evict down to the
        budgets.

        `ends`: drop the checkpoint, and take over the pages that only it holds. Returns False, with
        an empty store, if the pool lacks pages for the copies that evicting needs. Raises
        ValueError for a checkpoint of another pool.
        """

    def checkpoint_count(self, checkpoint: Checkpoint, layer: int, kv_head: int) -> int:
        """Return how many entries a KV head has in a checkpoint."""

    def checkpoint_state_bytes(self, checkpoint: Checkpoint, layer: int, kv_head: int) -> int:
        """Return the size of save_checkpoint_head() in bytes."""

    def save_checkpoint_head(self, checkpoint: Checkpoint, layer: int, kv_head: int) -> bytes:
        """Return the state of a KV head in a checkpoint, in the format of save_head()."""

    def on_full(self, drop: Callable[[], bool]) -> None:
        """Call `drop` when pages are missing: see SequencePool.on_full()."""

    def give_up_share(self) -> None:
        """Leave the pages of an empty store to other sequences; set_budgets() takes a
        share again.
        """

    def set_budgets(
        self, budgets: Sequence[int], pool_pages: int, n_sinks: int, recent_window: int
    ) -> None:
        """Set the budget of every KV head in entries, layer by layer, within a share of
        `pool_pages`.

        Heads that hold more evict. Raises ValueError if the shares of other sequences do not leave
        so many pages, and ColdStorageError, without any change, if there is no room for the entries
        to freeze.
        """

    def begin(self, n_tokens: int, position: int, rope_position: int, n_echo: int = 0) -> None:
        """Reserve everything that a micro-batch needs; raises ColdStorageError if cold storage is
        full.

        `n_echo` more tokens follow the `n_tokens`. Then only their queries are observed, and none
        of their entries are kept.
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
        n_drafts: int = 0,
    ) -> _Floats:
        """Compute the attention of one micro-batch without a model; all arrays are
        [n_tokens][heads][dim].

        `v`: None where the layer's V is a part of K. `k`, `v`: None for readers after the first.
        `n_echo`: how many of the tokens, the last ones, are an echo (see begin()). `n_drafts`: how
        many of them are drafts (see AttentionBatch.add()).
        """

    def most_drafts(self, wanted: int) -> int:
        """Return how many drafts may follow the next token, at most `wanted`.

        0 where the commits of drafts cannot be undone: where entries freeze, losses, entropies or
        queries are recorded, heads of a layer choose together, or a layer has several readers.
        """

    def settle_drafts(self, n_accepted: int) -> None:
        """Undo the commits of all drafts of the last micro-batch but the first `n_accepted`.

        The store is then, bit by bit, as if the accepted tokens had been read one by one.
        """

    def measure_losses(self, knots: Sequence[int]) -> None:
        """Measure in every micro-batch how much heads lose with limited numbers of unprotected
        entries.

        `knots`: these numbers, ascending from 0; empty: stop measuring, and keep the values of
        losses().
        """

    def losses(self, of_held: bool = False) -> npt.NDArray[np.float64]:
        """Return the losses in the last measured micro-batch, flat: [KV head of all layers][knot].

        `of_held`: without the losses from entries that were dropped before.
        """

    def predictor_features(self, layer: int) -> int:
        """Return how many features an entry of a layer has, including the constant 1 at their end.

        They are, in order: the key before RoPE (k_dim), the value (v_dim; none if it is a part of
        the key), the norms of the key's rotation pairs, log(|key| + 1e-6), log(|value| + 1e-6)
        (none if the value is a part of the key), 1. Raises ValueError if the store's RoPE does not
        fit the keys.
        """

    def set_predictor(self, layer: int, weights: _Floats) -> None:
        """Predict the share of attention of entries that are read from now on, as exp(weights .
        features).

        `weights`: (n_head_kv, predictor_features()), or empty to predict nothing; they apply to all
        stores of the pool. Shares lie between 1e-6 and 1, and do not change after an entry was
        read. Raises ValueError for another shape, for weights that are not finite, and if RoPE does
        not fit the keys of the layer.
        """

    def predict_stored(self, n_positions: int, shift: int) -> None:
        """Predict shares of attention for all stored entries of a text of `n_positions` tokens.

        Use it for entries that were read before a predictor existed. `shift`: that of
        rope_position() for these entries. Larger shares, observed with an echo, are kept. Raises
        ValueError if the store has an entry at `n_positions` or later, and if RoPE does not fit its
        keys.
        """

    def teach_stored(self, begin: int, end: int, shift: int) -> None:
        """Add lessons of the stored entries at positions from `begin` to before `end`.

        This is for text that was stored before an echo repeated it: the shares that the echo gave
        are stored with the entries, in 8 bits. Sinks are left out. `shift`: as for
        predict_stored(). Raises ValueError if lessons are not collected.
        """

    def predicted_shares(self, layer: int, head: int) -> npt.NDArray[np.float32]:
        """Return the shares of attention that later queries are expected to give to entries,
        (n_entries,).

        They are in order of positions, from 2^-20 to 1, with a precision of 8 bits. Each is the
        larger one of the share predicted from key and value, and the share observed with an echo.
        Raises ValueError for measures that predict nothing.
        """

    @property
    def is_predicted(self) -> bool:
        """Tell whether every layer has weights; otherwise, the scores of measure `predicted` are
        all equal.
        """

    def collect_lessons(self, on: bool) -> None:
        """Add up, from the next micro-batch on, which attention echoes give to the entries of their
        text.

        This applies to all stores of the pool. Raises ValueError for measures that predict nothing.
        """

    def lessons(self, layer: int) -> tuple[int, npt.NDArray[np.float64]]:
        """Return how many entries were added up, and their sums, (n_head_kv, n + 1, n + 1).

        The sums are those of the outer products of (features, log(max(a, 1e-5))) with themselves,
        where a is the largest share of attention that a query of the echo gave to the entry.
        Entries before `n_sinks` are left out. Raises ValueError if lessons were never collected.
        """

    def clear_lessons(self) -> None:
        """Set all lessons to zero; if they are not collected any more, free their memory."""

    def track_entropy(self, on: bool) -> None: ...
    def entropies(self, layer: int) -> npt.NDArray[np.float64]:
        """Return the mean entropy in bits of every query head of a layer since track_entropy()."""

    def row_entropies(self, layer: int) -> _Floats:
        """Return the entropy in bits of every attention row of the last micro-batch, (n_tokens,
        n_head).
        """

    def capture_queries(self, on: bool) -> None: ...
    def queries(self, layer: int) -> tuple[_Floats, _Floats, float, int, bool, _Floats]:
        """Return the queries of the last micro-batch, and how the layer computes logits from them.

        In order: scaled queries (n_tokens, n_head, k_dim), attention sinks (n_head,), soft cap (0:
        none), window in tokens (0: none), whether it is chunked, and by how much logits fall per
        position (n_head,).
        """

    def rows(self, layer: int, kv_head: int) -> tuple[_Ints, _Floats, _Floats, _Floats]:
        """Return the kept positions, ascending, with their importance, K (n, k_dim) and V (n,
        v_dim).
        """

    def state_bytes(self, layer: int, kv_head: int) -> int:
        """Return the size in bytes of the state of a KV head; cpp/store/head_states.hpp describes
        the format.
        """

    def state_padding(self, layer: int, kv_head: int) -> int:
        """Return how many zeros follow the state in a file, so that pages can be mapped from it."""

    def save_head(self, layer: int, kv_head: int) -> bytes:
        """Return the state of a KV head; raises ColdStorageError if frozen entries cannot
        be read.
        """

    def state_problem(self, layer: int, count: int, state: bytearray | memoryview, end: int) -> str:
        """Return what is wrong with the state of a KV head, for a text of `end` tokens; empty if it
        is valid.
        """

    def begin_load(
        self,
        counts: Sequence[int],
        states: Sequence[bytearray | memoryview],
        budgets: Sequence[int],
    ) -> None:
        """Reserve room for the states of all KV heads, with `counts` entries, under the `budgets`
        that are set before they are loaded.

        Changes nothing if it raises MemoryError or ColdStorageError.
        """

    def load_head(
        self, layer: int, kv_head: int, count: int, state: bytearray | memoryview
    ) -> None:
        """Replace a head's entries by those of a valid state, and evict down to its budget.

        The memory of the state is given back to the system: it must not be read afterwards.
        """

    def adopt(
        self,
        file: MappedFile,
        counts: Sequence[int],
        states: Sequence[bytearray | memoryview],
    ) -> bool:
        """Replace the entries of all heads by those of states in a mapped file, without a copy.

        begin_load() comes first. Returns False, and changes nothing, if the states have to be
        loaded: cpp/store/head_states.hpp says when.
        """

    def check_files(self) -> None:
        """Raise MappedFileError if someone has changed a file that has pages of entries."""

    @property
    def windows_whole_from(self) -> int:
        """Return the first position whose queries miss no entry of a sliding window."""

    def rebase(
        self, ropes: Sequence[RopeParams], n_sinks: int, old_shift: int, new_shift: int
    ) -> None:
        """Rotate every stored key from its RoPE position under one shift to that under another.

        `ropes`: one for each layer. Raises ValueError if they do not fit the layer's keys.
        """

    def truncate(self, position: int) -> None: ...

    recalls_now: bool
    """True if the next micro-batch searches frozen entries, regardless of the interval."""

    def freeze_all(self, now: int) -> None:
        """Freeze all entries; `now`: the newest position."""

    def restore(
        self, now: int, frozen_after: int = -1, due_after: int = -1, forget: bool = False
    ) -> int:
        """Restore entries that were frozen after one position and are due after another, within the
        budgets.

        `now`: the newest position. `forget`: delete all earlier detections. Returns how many
        entries were restored.
        """

    def stop_freezing(self) -> None:
        """Discard all frozen entries, and never freeze any again."""

    def frozen_positions(self, layer: int, kv_head: int) -> _Ints: ...
    def positions(self, layer: int, kv_head: int) -> _Ints: ...
    def importance(self, layer: int, kv_head: int) -> _Floats: ...
    def budget(self, layer: int, kv_head: int) -> int: ...
    def count(self, layer: int, kv_head: int) -> int: ...
    @property
    def entries(self) -> int: ...
    evicted: int
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
        """Return how many entries of all KV heads are frozen now."""

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
        """Return the first error of reading or writing cold storage, or None."""

class CacheMap:
    """Count which positions every KV head holds, has frozen and has restored, for displays."""

    def __init__(self) -> None: ...
    def count(
        self, store: HeadwiseStore, first: int, per_column: int, n_columns: int
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Count positions in columns of `per_column` positions, from position `first` on.

        Returns three arrays, (KV heads of all layers, columns): the fraction of each column's
        positions that is held, that is frozen, and that is held now but was frozen at the last
        count; in 255ths, rounded up.
        """

def device_rows(
    shape: LayerShape,
    kv_type: str,
    budgets: Sequence[Sequence[int]],
    max_tokens: int,
    max_entries: int,
    n_places: int = 1,
) -> int:
    """Return how many rows layers of one shape, with budgets [layer][KV head], have for `n_places`
    DeviceStores.

    Raises ValueError for an unknown `kv_type`.
    """

def feature_count(shape: LayerShape, rope: RopeParams) -> int:
    """Return how many features the entries of a layer have: see HeadwiseStore.predictor_features.

    `rope` rotates the layer's keys. Raises ValueError if it does not fit them.
    """

class Devices:
    """Hold the devices that the stores of one context share, and their working memory.

    `n_places`: how many stores may be live at a time.
    """

    def __init__(self, n_threads: int, n_places: int) -> None: ...
    def close(self) -> None:
        """Free the working memory; no store may use the devices afterwards."""

    @property
    def on_host(self) -> dict[int, str]:
        """Return why the CPU serves layers that are on other devices, by the numbers of the
        layers: for example `CUDA0 cannot compute FLASH_ATTN_EXT`.
        """

    @property
    def scratch_bytes(self) -> int: ...
    @property
    def traffic(self) -> dict[str, int]:
        """Return how many graphs were computed on devices (`computed`), and how many copies went to
        them (`uploads`) and came from them (`downloads`).
        """

class DeviceStore:
    """Keep K and V of one sequence in rows on the devices of their layers, per KV head.

    The host decides who stays, as HeadwiseStore does; saved states are those of HeadwiseStore.
    """

    def __init__(
        self,
        devices: Devices,
        hook: GraphHook,
        layers: Sequence[LayerShape],
        kv_type: str,
        importance: ImportanceSettings,
        n_sinks: int,
        recent_window: int,
        max_tokens: int,
        max_entries: int,
        budgets: Sequence[int],
        live: bool = True,
        predictor: Sequence[npt.NDArray[np.float32]] = ...,
    ) -> None:
        """Take the first place, with rows for the budgets, by KV head of all layers, and for one
        micro-batch.

        The CPU serves layers whose device cannot compute their attention: see Devices.on_host,
        which the first store of a context finds out. Not `live`: acquire() does so later.
        `predictor`: for every layer, (n_head_kv, n_features), by which the device predicts the
        scores of new entries; none: the least scores.

        Raises ValueError for a measure that needs keys on the host and for a predictor of other
        features, RuntimeError if the CPU cannot compute attention either, MemoryError if a device
        has no memory.
        """

    def most_drafts(self, position: int, wanted: int) -> int:
        """Return how many drafts may follow the token at `position`, at most `wanted`."""

    def commit_step(self) -> None:
        """Take the entries of a micro-batch that was read; evict what budgets cannot hold. What
        DeviceBatch.commit() has done is not done again.
        """

    def settle_drafts(self, n_accepted: int) -> None:
        """Undo what all drafts of the last micro-batch but the first `n_accepted` have changed."""

    def rotation_problem(self, ropes: Sequence[RopeParams]) -> str:
        """Return why keys cannot be moved to other positions, or an empty string.

        `ropes` are those of the layers.
        """

    def rebase(
        self, ropes: Sequence[RopeParams], n_sinks: int, old_shift: int, new_shift: int
    ) -> None:
        """Move all keys from their positions under one shift to those under another one."""

    @staticmethod
    def resize(
        stores: Sequence[DeviceStore], budgets: Sequence[int], n_sinks: int, recent_window: int
    ) -> None:
        """Set the budgets of all stores of a context; heads that hold more evict. Larger ones than
        there are rows for have them allocated anew, and the entries stay.

        Raises MemoryError if the devices have none; then nothing has changed.
        """

    def release(self) -> None:
        """Free the memory of the devices; nothing may be read until acquire()."""

    def acquire(self, place: int) -> None:
        """Take a place, from 0 on, with rows for its budgets. The first store of a context makes
        those of all places; raises MemoryError.
        """

    @property
    def is_live(self) -> bool:
        """Tell whether there are rows."""

    def truncate(self, position: int) -> None: ...
    def positions(self, layer: int, kv_head: int) -> _Ints: ...
    def importance(self, layer: int, kv_head: int) -> _Floats:
        """Return the scores of the entries of positions(), as HeadwiseStore does."""

    def budget(self, layer: int, kv_head: int) -> int: ...
    def count(self, layer: int, kv_head: int) -> int: ...
    def state_bytes(self, layer: int, kv_head: int) -> int: ...
    def save_layer(self, layer: int) -> list[bytes]:
        """Return the states of the KV heads of a layer, as HeadwiseStore.save_head() does."""

    def state_problem(self, layer: int, count: int, state: bytearray | memoryview, end: int) -> str:
        """Return what is wrong with the state of a text of `end` tokens, or an empty string."""

    def load(self, counts: Sequence[int], states: Sequence[bytearray | memoryview]) -> None:
        """Replace the entries of all KV heads by states that state_problem() accepts, and evict
        what budgets cannot hold.
        """

    evicted: int
    @property
    def entries(self) -> int: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def staging_bytes(self) -> int:
        """Return the bytes of the rows beyond the budgets: for one micro-batch, and padding."""

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of working memory on devices and host, and of the host's ledger, without
        that of Devices.
        """

    @property
    def device_bytes(self) -> list[tuple[str, int]]:
        """Return the name of each device, and the bytes of rows and working memory there."""

    @property
    def windows_whole_from(self) -> int:
        """Return the first position whose window is complete, as HeadwiseStore does."""

    @property
    def eviction_seconds(self) -> float: ...

class DeviceBatch:
    """List the stores whose sequences have tokens in a micro-batch, in their order."""

    def clear(self) -> None: ...
    def add(
        self,
        store: DeviceStore,
        n_tokens: int,
        position: int,
        rope_position: int,
        n_drafts: int = 0,
        see_all: bool = False,
    ) -> None:
        """Choose the rows of the next tokens, the first of which is at `position` of its text.

        RoPE sees the first one at `rope_position`. The last `n_drafts` are drafts. With `see_all`,
        every token attends to all of them, also to later ones.
        """

    def commit(self) -> None:
        """Commit the steps of all stores without drafts, at once."""

class FlatStore:
    """Evict whole positions from the cache of a llama_context, which is given by its address."""

    def __init__(
        self,
        context: int,
        budget: int,
        score: ScoreKind,
        n_sinks: int,
        recent_window: int,
        rope_sinks: int,
    ) -> None: ...
    def make_room(self, n_tokens: int) -> None: ...
    def settle(self, position: int, n_tokens: int) -> None: ...
    def set_budget(self, budget: int, n_sinks: int, recent_window: int) -> None: ...
    def truncate(self, position: int) -> None: ...
    def rebase(self, shift: int) -> None:
        """Continue at another shift; entries that would be clamped to the sinks are dropped."""

    shift: int
    """The current shift; it can be set for a cache that was filled at another one."""

    def move_to(self, context: int) -> None: ...
    def save_state(self) -> bytes:
        """Compact the cache, then return llama.cpp's state of the sequence."""

    def load_state(
        self, positions: Sequence[int], state: bytearray | memoryview, evicted: int, shift: int
    ) -> None:
        """Replace everything, then evict; raises RuntimeError if llama.cpp rejects the state."""

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
        """Return the bytes of the largest copy of llama.cpp's state that was made so far."""
    @property
    def evicted(self) -> int: ...
    @property
    def eviction_seconds(self) -> float: ...

def rope_position(position: int, n_sinks: int, shift: int) -> int:
    """Return the position that RoPE uses for a position: `shift` less, but not within the sinks."""

def read_bandwidth(n_bytes: int, n_threads: int) -> float:
    """Measure the bytes per second of a plain read of memory."""

def available_kernels() -> list[str]:
    """Return the instruction sets that this machine can run, the slowest first."""

def select_survivors(
    scores: npt.ArrayLike,
    positions: npt.ArrayLike,
    keep: int,
    n_sinks: int,
    recent_window: int,
    newest: int,
) -> npt.NDArray[np.uint8]:
    """Return 1 for every entry that survives, and 0 for the others."""

def entries_to_keep(budget: int, n_new: int, n_sinks: int, recent_window: int) -> int:
    """Return how many entries an eviction after n_new tokens leaves, with room for others."""

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
    """Return the budget of every KV head in entries; raises ValueError if the mean is below the
    floor.

    `limits`: what each head can use at most; empty: max_entries.
    """

def alibi_slopes(n_head: int, max_bias: float) -> _Floats:
    """Return by how much the logits of every query head fall per position."""

def kv_types() -> list[str]:
    """Return the names of the types that pages can store K and V in: see
    cpp/page/page_codec.cpp.
    """

def most_entries(layer: LayerShape, max_entries: int) -> int:
    """Return how many entries a KV head of a layer can use at most."""

def losses_at(
    scores: npt.ArrayLike,
    knots: Sequence[int],
    dropped: Sequence[float] = (),
    unit: float = 1.0,
) -> npt.NDArray[np.float32]:
    """Return for every k of the ascending knots the sum of all but the largest k scores.

    Of `dropped` scores, those within one octave count as their mean, times `unit`.
    """

def curve_shares(knots: Sequence[float], losses: Sequence[float], total: float) -> list[float]:
    """Divide `total` entries among heads by their loss curves; losses are [head][knot], flat."""

def share_by_curves(
    mean_entries: int,
    max_entries: int,
    floor_entries: int,
    entries_per_page: Sequence[int],
    knots: Sequence[float],
    losses: Sequence[float],
    limits: Sequence[int] = (),
) -> list[int]:
    """Return budgets as share_budget() does, with the least summed loss; knots count entries beyond
    the floor.
    """

def pages_for(entries: int, entries_per_page: int) -> int: ...
def page_geometry(layers: Sequence[LayerShape], kv_type: str) -> tuple[int, list[int]]:
    """Return the bytes of a page, and for every layer the entries that fit into a page."""

def cold_page_bytes(layers: Sequence[LayerShape], kv_type: str, cold_type: str) -> int:
    """Return the bytes of a page of cold storage; `cold_type`: as `kv_type` of FreezeSettings."""

def plan_flat_eviction(
    positions: Sequence[int],
    keep: int,
    score: ScoreKind,
    n_sinks: int,
    recent_window: int,
) -> tuple[_Ints, list[tuple[int, int]]]:
    """Return the positions to keep, and the ranges [first, last) to remove."""
