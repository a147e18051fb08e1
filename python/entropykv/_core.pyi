"""The C++ extension of entropykv: stores, attention, products of weights, and budgets."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float32]
_Ints = npt.NDArray[np.int32]

RECALL_QUERIES: int
"""The most query rows of a KV head that recall compares with frozen keys in a micro-batch: its last
ones.
"""
SEQUENCE_STATE_VERSION: int
"""The version of llama.cpp's format for the state of a sequence (LLAMA_STATE_SEQ_VERSION)."""

def ggml_version() -> str:
    """Return the version of the loaded ggml."""

def ggml_commit() -> str:
    """Return the commit of the loaded ggml."""

def differences() -> list[str]:
    """Return how the loaded ggml and llama.cpp differ from the headers that were compiled in, one
    sentence for each difference; empty if they do not: see cpp/llama/built_for.hpp.
    """

def struct_layouts() -> list[tuple[str, int, str, int]]:
    """Return the layout of structures that Python passes to llama.cpp, as (name of the structure,
    its size in bytes, name of a field, the offset of the field in bytes).
    """

class ScoreKind:
    """Name a measure by which entries are ranked: see cpp/decide/importance.hpp."""

    streaming: ScoreKind
    recency: ScoreKind
    mass: ScoreKind
    attention: ScoreKind
    products: ScoreKind
    reconstruct: ScoreKind
    predicted: ScoreKind
    def __init__(self, value: int) -> None: ...
    @property
    def name(self) -> str: ...

class Measure:
    """Describe a measure of importance: a row of the table in cpp/decide/importance.cpp."""

    @property
    def kind(self) -> ScoreKind: ...
    @property
    def name(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def by_position(self) -> bool:
        """Tell whether the measure depends only on positions."""
    @property
    def adds_up(self) -> bool:
        """Tell whether scores are sums of what queries gave to entries: shares of attention, their
        squares, or |q.k|.
        """
    @property
    def of_echoes(self) -> bool:
        """Tell whether only queries of an echo count, where there is one: of a request to repeat
        the text, and of the text once more.
        """
    @property
    def predicts(self) -> bool:
        """Tell whether scores are predicted from keys and values: see set_predictor()."""
    @property
    def threshold(self) -> float:
        """Return the default threshold of the freeze schedule, below which an entry counts as
        little attended: a mean of |q.k| for measure `products`, a multiple of the mean share of
        attention for the other measures.
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
        """Set the values.

        `decay`: the fraction of an observation that is left after one token; 1: nothing decays.
        `observation_window`: how many of the last queries of a micro-batch count, in tokens.
        `by_values`: scores are multiplied by the norm of the entry's value, or by its square where
        scores are squares. `expected_lookups`: how many later queries are assumed to give an entry
        the share of attention that its key and value predict; this is added to what queries gave,
        only for measures `mass` and `attention`; 0: nothing is added. Nothing is checked here:
        HeadwiseStore raises ValueError for impossible values.
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
        layers of the model attend to its entries. Nothing is checked here: stores and pools raise
        ValueError for impossible values.
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
        """Return how many values an entry of a KV head consists of: those of K and, unless
        `latent`, V.
        """
    def with_window(self, window: int, chunked: bool) -> LayerShape:
        """Return the shape of this layer with a sliding window of `window` tokens, 0 for none;
        `chunked` is as in LayerShape().
        """

class RopeParams:
    """Hold the RoPE of a layer's keys, by ggml's names of the parameters. With `n_dims` 0, keys do
    not depend on their position.
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
        """Return by how many radians each pair of values turns from one position to the next,
        (n_dims / 2). Raises ValueError if `n_dims` is odd or negative, `offset` is negative, or
        there are fewer `freq_factors` than pairs, unless there are none.
        """

def key_centre(
    bias: Sequence[float], spread: Sequence[float], rope: RopeParams, magnitude: float = 1.0
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return what is subtracted from the keys of a KV head before they are rounded, and the units
    that then divide them: two arrays of shape (k_dim,).

    `bias`: what the model adds to keys before RoPE. `spread`: the standard deviations of keys
    before the bias is added. Both have k_dim values. `magnitude`: the factor by which RoPE
    multiplies keys. Raises ValueError if bias and spread differ in length or do not
    fit the RoPE, and for values that are not finite.
    """

class AttentionNode:
    """Describe an attention node of the model's graph: one for every layer that has K and V of its
    own.
    """

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
        """Return whether K and V of the layer lie in memory that the CPU cannot read."""

class KShiftProbe:
    """Check, while one token is decoded, whether llama.cpp's K-shift rotates keys as the model's
    graph does.
    """

    def __init__(self) -> None: ...
    @property
    def callback(self) -> int: ...
    @property
    def user_data(self) -> int: ...
    @property
    def obstacle(self) -> str:
        """Return why llama.cpp's K-shift is wrong for the model; empty if it is right."""

class WindowProbe:
    """Record how many cells of the cache each attention layer sees when single tokens are
    decoded.
    """

    def __init__(self) -> None: ...
    @property
    def callback(self) -> int: ...
    @property
    def user_data(self) -> int: ...
    @property
    def visible(self) -> list[tuple[int, int]]:
        """Return (llama.cpp's number of the layer, how many cells it sees) for each attention node
        that was computed since clear(); -1 cells: the mask could not be read.
        """
    def clear(self) -> None:
        """Forget what `visible` returns."""

def product_kernels() -> list[str]:
    """Return the names of the kernels for products of quantized weights that this machine can run.
    The last one, which is the fastest, is used by default.
    """

class WeightHook:
    """Change what uses weights in the graphs of one llama_context: gates become squared ReLU, and
    our kernels compute products with quantized weights. It can also measure the time of nodes.
    """

    def __init__(self, relu2_layers: int, n_threads: int = 0, few_tokens: int = 1) -> None:
        """Make a hook.

        `relu2_layers`: the number of layers whose gates become squared ReLU: all layers of the
        model, or 0. `n_threads`: the most threads of the context; 0: products stay llama.cpp's.
        `few_tokens`: products of at most this many tokens are left to llama.cpp's kernel where that
        kernel is faster for one token; 0: none are.
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
        """Return the bytes of working memory that products take, of all threads together."""

    def measure_work(self, on: bool) -> None:
        """Start to compute and time every node separately, counting from 0; False: stop, so that
        graphs are computed as a whole again.
        """

    @property
    def work(self) -> dict[str, tuple[float, float, float]]:
        """Return (seconds, operations, bytes) by the names `weights`, `attention` and `rest`, added
        up since measure_work(True).

        Operations and bytes are those of products with weights. The overhead of computing nodes
        separately is subtracted from the seconds.
        """

    def begin_step(self) -> None:
        """Begin to count the layers whose gate is changed; must be called before every decode."""
    def check_step(self) -> None:
        """Raise GraphError unless the gate of every layer was changed since begin_step(); without
        squared ReLU, there is nothing to check.
        """

class GraphError(RuntimeError):
    """Raised if a graph differs from the first one of its context, which was probed."""

class GraphHook:
    """Inspect the graph of the first decode of a llama_context; after serve(), replace attention in
    all graphs, and change products of weights as WeightHook does. Gates are changed in all graphs.
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
        name in product_kernels(); empty: the last one, which is the fastest. Raises ValueError for
        any other name.
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
        """Return why the store cannot serve the model; empty if it can."""

    @property
    def rope_obstacle(self) -> str:
        """Return why stored keys cannot be moved to other positions; empty if they can."""

    @property
    def rope_limit(self) -> int:
        """Return for how many positions the model's RoPE frequencies are valid; 0: for as many as
        the model was trained for.
        """

    @property
    def products(self) -> dict[str, str]:
        """Return which kernel computes the products of each weight type: see
        SessionStats.products.
        """

    @property
    def products_scratch_bytes(self) -> int:
        """Return the bytes of working memory that products take, of all threads together."""

    def measure_work(self, on: bool) -> None:
        """Start or stop measuring, as WeightHook.measure_work() does."""

    @property
    def work(self) -> dict[str, tuple[float, float, float]]:
        """Return the measurements, as WeightHook.work does."""

    def serve(self, batch: AttentionBatch) -> None:
        """Begin to replace attention in the graphs; in every decode, `batch` must list the
        sequences whose tokens the graph reads.
        """

    def serve_on_devices(self, batch: DeviceBatch) -> None:
        """Begin to let the device stores in `batch` compute the attention of the graphs, on the
        devices of the layers.
        """

    def help(self, n_threads: int) -> None:
        """Let `n_threads` further threads compute products of several tokens, until help(0).

        The threads of llama.cpp do not wait for these helpers. After help(0) returns, no helper
        reads weights any more. Raises MemoryError if there is no memory for their results.
        """

    def begin_step(self) -> None:
        """Begin to count the layers whose attention is replaced, for check_step(); must be called
        before every decode.
        """
    def check_step(self) -> None:
        """Raise GraphError unless, since begin_step(), the attention of every layer was replaced
        for all tokens, and its gate was changed where that is necessary. Raises RuntimeError if a
        device could not compute attention, or had no memory left for it.
        """

class ColdStorageError(OSError):
    """Raised if cold storage is full, or if frozen entries cannot be read from it."""

class FreezeSchedule:
    """Hold the detection and timing rules of the freeze schedule: see cpp/decide/freezing.hpp."""

    def __init__(self, window: int, threshold: float, rate: float, history: int) -> None:
        """Set the values.

        `window`: how many of the newest positions are never detected. `threshold`: an entry that
        gets less in a step is detected; a mean of |q.k| for measure `products`, a multiple of the
        mean share of attention for the other measures. `rate`: after c detections, an entry is
        frozen for floor(sqrt(c) / rate) steps. `history`: for how many positions a detection
        counts; 0: since the beginning of the text. Nothing is checked here: HeadwiseStore raises
        ValueError for impossible values.
        """

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
        """Set the values.

        `kv_type`: the type of frozen entries: `q8_0`, `q4_0`, or `as stored`, that of the store.
        `limit_bytes`: the most bytes of all KV heads together; 0: no limit. `recall_interval`:
        after how many generated tokens queries search the frozen entries again; 0: never.
        `schedule` None: what is evicted is frozen, until it is recalled or restored. `descriptor`:
        the number of an open file, which the caller closes; -1: store in memory. `nonce`: 16 bytes
        for the checksums of its pages, or empty. Raises ValueError for another type and for a nonce
        of another length.
        """

class SequencePool:
    """Hold what sequences of one model share: the pages of a hard budget, memory for a micro-batch
    and for the threads, and predictors.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        kv_type: str,
        max_tokens: int,
        n_sequences: int,
        n_drafts: int = 0,
    ) -> None:
        """Make a pool for micro-batches of up to `max_tokens` tokens of one of the `n_sequences`
        sequences, and one token of each other one.

        The tokens of each sequence may be followed by up to `n_drafts` drafts: see
        AttentionBatch.add(). Raises ValueError for an unknown `kv_type`, impossible layers,
        `max_tokens` outside of 1 to 2^30, other than 1 to 256 sequences, or other than 0 to 63
        drafts; MemoryError without memory for a micro-batch.
        """

    def set_pages(self, pages: int) -> None:
        """Set the budget in pages. Raises ValueError, and changes nothing, if the shares of the
        sequences are larger together; RuntimeError if checkpoints that on_full() does not drop keep
        more pages in use.
        """

    def on_full(self, drop: Callable[[], bool]) -> None:
        """Call `drop` whenever pages are missing: it must drop a Checkpoint and return True, or
        return False if there is none to drop.
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
        """Return the bytes of the threads' working memory, of predictors and of lessons."""

class AttentionBatch:
    """List the sequences whose tokens are in a micro-batch, in the order of these tokens."""

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
        """Add `n_tokens` tokens of a sequence, and reserve all memory that they need. The first is
        at `position` in its text, and RoPE sees it at `rope_position`. Sequences with a single
        token must be added first.

        `n_echo`: as in HeadwiseStore.begin(). `see_all`: each of the tokens attends to all of them,
        also to later ones, and there is no echo. `n_drafts`: how many of the tokens, the last ones,
        are drafts; one other token comes before them. As if tokens were read one by one, each
        attends to the entries that are left after the token before was stored and the budget has
        evicted. HeadwiseStore.settle_drafts() must follow the decode. `recalls`: whether several
        tokens may recall frozen entries; single tokens do so at intervals.

        Raises ValueError for a store that was added already, a single token behind several, no
        tokens, more tokens than `max_tokens` of the store or than there is room for, more drafts
        than HeadwiseStore.most_drafts(), two of `n_echo`, `see_all` and `n_drafts` together, and a
        position outside of 0 to 2^30; MemoryError without memory; RuntimeError if the pool has no
        pages left; ColdStorageError if cold storage is full. In each case, nothing was added.
        """

    def most_drafts(self, store: HeadwiseStore, wanted: int) -> int:
        """Return how many drafts may follow the next token of a sequence, at most `wanted`.

        This is less than HeadwiseStore.most_drafts() where the micro-batch has no room for so many.
        """

    @property
    def n_tokens(self) -> int: ...

class MappedFileError(OSError):
    """Raised if entries are lost because someone has changed the file that their pages are mapped
    from.
    """

class MappedFile:
    """Hold bytes of a file in memory that processes share; the object is a buffer of these bytes.

    Writing to the buffer copies a page of memory, and never changes the file.
    """

    @staticmethod
    def map(file: int, offset: int, n_bytes: int) -> MappedFile | None:
        """Map `n_bytes` bytes of a file from `offset` on; `file`: the number that
        system.number_of() gives for a descriptor.

        Returns None if the bytes have to be read instead: where the system cannot map files so, for
        a file that is not regular or is shorter, for no bytes, and if the process already maps 1024
        files. Raises MemoryError without memory for the object.
        """

    @property
    def has_changed(self) -> bool:
        """Tell whether someone has written to the file, or shortened it, since it was mapped."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

class Checkpoint:
    """Hold the state of a HeadwiseStore at a moment. Checkpoint and store share pages until one of
    them changes a page, which is then copied.
    """

    def drop(self) -> None:
        """Give the pages back; a dropped checkpoint cannot be restored."""

    def copy(self) -> Checkpoint:
        """Return another checkpoint of the same pages."""

    @property
    def pages(self) -> int: ...
    @property
    def is_lost(self) -> bool:
        """Tell whether entries are lost, because someone has changed a file that their pages are
        mapped from.
        """

    @property
    def copied_bytes(self) -> int:
        """Return the bytes that the checkpoint holds besides its pages."""

    @property
    def entries(self) -> int: ...
    @property
    def evicted(self) -> int: ...

class HeadwiseStore:
    """Hold paged entries per (layer, KV head), and compute attention over them.

    Methods that allocate raise MemoryError without memory.
    """

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

        `max_tokens`: the most tokens of a micro-batch, with an echo. `max_entries`: the context in
        tokens; no KV head keeps more. `own_windows`: sinks and recent window of a KV head take at
        most half of its own budget. `counts_dropped`: losses() include what was dropped, unless it
        is frozen. `shared_choice`: the heads of a layer rank entries by the observations of all of
        them. `kernels`: a name in available_kernels(); None: the last one. `ropes`: one for each
        layer, for predictions from keys before RoPE; empty: keys do not depend on positions.
        `key_centres`: for each layer, [n_head_kv][centre, unit][k_dim] of key_centre(), or an empty
        array; not for the measure `products`. `freezing` None: entries that are not kept are
        dropped. `pool` None: the store has pages of its own, and its budget is all of them.

        Raises ValueError for impossible values or unknown names, for key centres that do not fit
        the keys, and for `freezing` with `own_windows`, with too small a limit, or if every layer
        has a sliding window; MemoryError without memory.
        """

    def checkpoint(self) -> Checkpoint:
        """Return a checkpoint of the current state; raises RuntimeError if the store freezes
        entries.
        """

    def fork_from(self, checkpoint: Checkpoint, ends: bool) -> bool:
        """Replace the store's state by that of a checkpoint of the same pool, and evict what
        exceeds the budgets.

        `ends`: drop the checkpoint, and take over the pages that only it holds. Returns False, with
        an empty store, if the pool lacks pages for the copies that evicting needs. Raises
        ValueError for a checkpoint of another pool or one that was dropped, and RuntimeError if the
        store freezes entries.
        """

    def checkpoint_count(self, checkpoint: Checkpoint, layer: int, kv_head: int) -> int:
        """Return how many entries a KV head has in a checkpoint. Raises ValueError for a head that
        does not exist, and for a checkpoint of another pool or one that was dropped.
        """

    def checkpoint_state_bytes(self, checkpoint: Checkpoint, layer: int, kv_head: int) -> int:
        """Return the size of save_checkpoint_head() in bytes. Raises ValueError for a head that
        does not exist, and for a checkpoint of another pool or one that was dropped.
        """

    def save_checkpoint_head(self, checkpoint: Checkpoint, layer: int, kv_head: int) -> bytes:
        """Return the state of a KV head in a checkpoint, in the format of save_head(). Raises
        ValueError for a head that does not exist, and for a checkpoint of another pool or one that
        was dropped.
        """

    def on_full(self, drop: Callable[[], bool]) -> None:
        """Call `drop` when pages are missing: see SequencePool.on_full()."""

    def give_up_share(self) -> None:
        """Leave the pages of an empty store to other sequences of its pool, until set_budgets()
        takes a share again. Raises RuntimeError if the store holds pages.
        """

    def set_budgets(
        self, budgets: Sequence[int], pool_pages: int, n_sinks: int, recent_window: int
    ) -> None:
        """Set the budget of every KV head in entries, layer by layer, and the share of the pool in
        pages.

        Heads that hold more evict. Raises ValueError for another number of budgets, a budget
        outside of 1 to `max_entries` or (without `own_windows`) below sinks and recent window
        together, if the budgets need more than `pool_pages`, or if the shares of other sequences do
        not leave that many pages; and without any change ColdStorageError if there is no room for
        the entries to freeze, and RuntimeError if shared pages must be copied, and checkpoints that
        on_full() does not drop leave no page.
        """

    def begin(self, n_tokens: int, position: int, rope_position: int, n_echo: int = 0) -> None:
        """Reserve all memory that a micro-batch of `n_tokens` tokens needs, the first of which is
        at `position` of the text, where RoPE sees it at `rope_position`.

        `n_echo` tokens of an echo follow. None of their own entries are kept. Their queries count
        towards the importance of entries (with the measure `reconstruct`, no other queries do);
        where scores are predicted, they only raise these. Raises ValueError for no tokens, for more
        than `max_tokens` in all, and for a position outside of 0 to 2^30; RuntimeError if the pool
        has no pages left; ColdStorageError if cold storage is full.
        """

    def attend_alone(
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
        """Compute the attention of one micro-batch without a model: `q`, `k`, `v` and the result
        are float32 arrays, [n_tokens][heads][dim].

        `v`: None where V of the layer is a part of K. `k`, `v`: None for readers after the first.
        `scale`, `softcap`: of the logits; 0: no cap. `sinks`: a logit for each query head that
        takes part in the softmax without a value. `position`: that of the first token. `slopes`: as
        alibi_slopes() returns them. `reader`: which of the layers that share K and V attends.
        `n_echo`: how many of the tokens, the last ones, are an echo (see begin()). `n_drafts`: how
        many of them are drafts (see AttentionBatch.add()). Raises ValueError for arrays of other
        shapes, a layer or reader that does not exist or is not the next one, and more drafts than
        most_drafts(); and the errors of begin().
        """

    def most_drafts(self, wanted: int) -> int:
        """Return how many drafts may follow the next token, at most `wanted`.

        It is 0 where what drafts change cannot be undone: where entries freeze, losses, entropies
        or queries are recorded, the heads of a layer choose together, or a layer has several
        readers. It is smaller than `wanted` where a layer with a sliding window would evict.
        """

    def settle_drafts(self, n_accepted: int) -> None:
        """Undo what all drafts of the last micro-batch but the first `n_accepted` have changed.

        The store is then, bit for bit, as if the accepted tokens had been read one by one. Raises
        ValueError for a negative number.
        """

    def measure_losses(self, knots: Sequence[int]) -> None:
        """Measure in every micro-batch how much each KV head would lose if it kept only a limited
        number of unprotected entries.

        `knots`: these numbers, ascending, 0 or more; empty: stop measuring, and keep the values of
        losses(). Raises ValueError for other numbers.
        """

    def losses(self, of_held: bool = False) -> npt.NDArray[np.float64]:
        """Return the losses in the last measured micro-batch, flat: [KV head of all layers][knot].

        A loss is the sum of the scores of the entries that would not be kept; for measure `mass`
        with `by_values`, it is divided by the squared norms of the head's outputs. `of_held`:
        without the losses from entries that were dropped before.
        """

    def predictor_features(self, layer: int) -> int:
        """Return how many features an entry of a layer has, including the constant 1 at their end.

        They are, in order: the key before RoPE (k_dim), the value (v_dim; none if it is a part of
        the key), the norms of the key's rotation pairs, log(|key| + 1e-6), log(|value| + 1e-6)
        (none if the value is a part of the key), 1. Raises ValueError for a layer that does not
        exist, and if the store's RoPE does not fit the keys.
        """

    def set_predictor(self, layer: int, weights: _Floats) -> None:
        """Predict the share of attention of entries that are read from now on, as exp(weights .
        features).

        `weights`: (n_head_kv, predictor_features()), or empty to predict nothing; they apply to all
        stores of the pool. Predicted shares lie between 1e-6 and 1, and an entry keeps the one that
        it got when it was read. Raises ValueError for a layer that does not exist, for another
        shape, for weights that are not finite, and if RoPE does not fit the keys of the layer.
        """

    def predict_stored(self, n_positions: int, shift: int) -> None:
        """Predict shares of attention for all stored entries of a text of `n_positions` tokens.

        Use it for entries that were read before a predictor existed. `shift`: that of
        rope_position() for these entries. Larger shares, observed with an echo, are kept. Raises
        ValueError if the store has an entry at `n_positions` or later, if RoPE does not fit its
        keys, and for numbers outside of 0 to 2^30.
        """

    def teach_stored(self, begin: int, end: int, shift: int) -> None:
        """Add the lessons of the stored entries at the positions [begin, end): see lessons().

        This is for text that was stored before an echo repeated it: the shares of attention that
        the queries of the echo gave are stored with the entries, in 8 bits. Sinks are left out.
        `shift`: as for predict_stored(). Raises ValueError if lessons are not collected, and for
        numbers outside of 0 to 2^30.
        """

    def predicted_shares(self, layer: int, head: int) -> npt.NDArray[np.float32]:
        """Return the shares of attention that later queries are expected to give to the entries of
        a KV head, (n_entries,), in the order of positions().

        They lie between 2^-20 and 1, with a precision of 8 bits. Each is the larger one of the
        share that was predicted from key and value, and the largest share that a query of an echo
        gave. Raises ValueError for measures that predict nothing, and for a head that does not
        exist.
        """

    @property
    def is_predicted(self) -> bool:
        """Tell whether set_predictor() has given weights to every layer. Without weights, all
        entries of a layer are predicted the same share.
        """

    def collect_lessons(self, on: bool) -> None:
        """Start to add up lessons in the next micro-batch with an echo, or stop: see lessons().

        This applies to all stores of the pool. Raises ValueError for measures that predict nothing,
        and if the store's RoPE does not fit the keys.
        """

    def lessons(self, layer: int) -> tuple[int, npt.NDArray[np.float64]]:
        """Return how many entries have been added up, and the sums of a layer, (n_head_kv, n + 1, n
        + 1), to which a predictor with n features is fitted.

        The sums are those of the outer products of (features, log(max(a, 1e-5))) with themselves,
        where a is the largest share of attention that a query of the echo gave to the entry. Sinks
        are left out. Raises ValueError for a layer that does not exist, and if lessons were never
        collected.
        """

    def clear_lessons(self) -> None:
        """Set all lessons to zero; if they are not collected any more, free their memory."""

    def track_entropy(self, on: bool) -> None:
        """Start to measure the entropies of attention rows, from zero, or stop."""
    def entropies(self, layer: int) -> npt.NDArray[np.float64]:
        """Return the mean entropy in bits of every query head of a layer since track_entropy(True),
        (n_head,). Raises ValueError for a layer that does not exist, and if nothing was attended
        to.
        """

    def row_entropies(self, layer: int) -> _Floats:
        """Return the entropy in bits of every attention row of the last micro-batch, without an
        echo, (n_tokens, n_head). Raises ValueError for a layer that does not exist, and if
        entropies were not tracked.
        """

    def capture_queries(self, on: bool) -> None:
        """Start to copy the queries of every micro-batch for queries(), or stop."""
    def queries(self, layer: int) -> tuple[_Floats, _Floats, float, int, bool, _Floats]:
        """Return the queries of the last micro-batch, and how the layer computes logits from them.

        In order: scaled queries (n_tokens, n_head, k_dim), attention sinks (n_head,), soft cap (0:
        none), window in tokens (0: none), whether windows begin at multiples of their size, and by
        how much logits fall per position (n_head,). Raises ValueError for a layer that does not
        exist, and if queries were not captured.
        """

    def rows(self, layer: int, kv_head: int) -> tuple[_Ints, _Floats, _Floats, _Floats]:
        """Return the kept positions, ascending, (n,), with importance() (n,), K (n, k_dim) and V
        (n, v_dim). Raises ValueError for a head that does not exist.
        """

    def state_bytes(self, layer: int, kv_head: int) -> int:
        """Return the size in bytes of the state of a KV head; cpp/store/head_states.hpp describes
        the format. Raises ValueError for a head that does not exist.
        """

    def state_padding(self, layer: int, kv_head: int) -> int:
        """Return how many zero bytes follow the state of a KV head in a file, so that its pages can
        be mapped; 0 if they cannot. Raises ValueError for a head that does not exist.
        """

    def save_head(self, layer: int, kv_head: int) -> bytes:
        """Return the state of a KV head, state_bytes() long. Raises ValueError for a head that does
        not exist, and ColdStorageError if frozen entries cannot be read.
        """

    def state_problem(self, layer: int, count: int, state: bytearray | memoryview, end: int) -> str:
        """Return what is wrong with the state of a KV head that is said to have `count` entries of
        a text of `end` tokens; empty if it is valid. Raises ValueError for a layer that does not
        exist, and BufferError for a buffer that is read-only.
        """

    def begin_load(
        self,
        counts: Sequence[int],
        states: Sequence[bytearray | memoryview],
        budgets: Sequence[int],
    ) -> None:
        """Reserve room to load states of all KV heads, layer by layer, with `counts` entries each;
        state_problem() must accept them. `budgets`: what set_budgets() will set before load_head().

        Raises IndexError for fewer numbers or states than KV heads, ValueError for more counts, and
        BufferError for a buffer that is read-only. Changes nothing if it raises MemoryError, or
        ColdStorageError because cold storage is full.
        """

    def load_head(
        self, layer: int, kv_head: int, count: int, state: bytearray | memoryview
    ) -> None:
        """Replace the entries of a KV head by those of a state that state_problem() accepts, and
        evict what exceeds its budget.

        The memory of `state` is given back to the system: it must not be read afterwards. Raises
        ValueError for a head that does not exist, and BufferError for a buffer that is read-only.
        """

    def adopt(
        self,
        file: MappedFile,
        counts: Sequence[int],
        states: Sequence[bytearray | memoryview],
    ) -> bool:
        """Fill all heads, which must be empty, from states in a mapped file, without a copy.

        begin_load() comes first. Returns False, and changes nothing, if load_head() must load the
        states instead: cpp/store/head_states.hpp says when. Raises IndexError for fewer numbers or
        states than KV heads, and BufferError for a buffer that is read-only.
        """

    def check_files(self) -> None:
        """Raise MappedFileError if someone has changed a file that has pages of entries."""

    @property
    def windows_whole_from(self) -> int:
        """Return the first position from which on no sliding window misses an entry: the store can
        be truncated to it and later ones.
        """

    def rebase(
        self, ropes: Sequence[RopeParams], n_sinks: int, old_shift: int, new_shift: int
    ) -> None:
        """Rotate every stored or frozen key from its RoPE position under `old_shift` to that
        under `new_shift`: see rope_position().

        `ropes`: one for each layer. Raises ValueError if they do not fit the keys of the layers,
        and RuntimeError if the pool has no pages left for copies of shared ones.
        """

    def truncate(self, position: int) -> None:
        """Drop the entries at `position` and later ones, including frozen ones. Raises ValueError
        for a negative position, and RuntimeError, without any change, if shared pages must be
        copied, and checkpoints that on_full() does not drop leave no page.
        """

    recalls_now: bool
    """True if the next micro-batch searches frozen entries, regardless of `recall_interval`."""

    def freeze_all(self, now: int) -> None:
        """Freeze all entries of layers without a window; `now`: the newest position. Raises
        ColdStorageError, and freezes nothing, if cold storage is full.
        """

    def restore(
        self, now: int, frozen_after: int = -1, due_after: int = -1, forget: bool = False
    ) -> int:
        """Restore frozen entries as far as budgets have room; returns how many of all KV heads.

        Restored are those that were frozen when the newest position was greater than
        `frozen_after`, and that the schedule would restore later than at position `due_after`.
        `now`: the newest position. `forget`: set all counts of detections to zero, also those of
        other entries.
        """

    def stop_freezing(self) -> None:
        """Discard all frozen entries, which count as evicted, and freeze none from now on."""

    def frozen_positions(self, layer: int, kv_head: int) -> _Ints:
        """Return the positions of the frozen entries of a KV head, ascending, (n,). Raises
        ValueError for a head that does not exist.
        """
    def positions(self, layer: int, kv_head: int) -> _Ints:
        """Return the positions that a KV head keeps, ascending, (n,). Raises ValueError for a head
        that does not exist.
        """
    def importance(self, layer: int, kv_head: int) -> _Floats:
        """Return the scores of the entries of a KV head, in the order of positions(), (n,), before
        norms of values count; 0 for measures by position. Raises ValueError for a head that does
        not exist.
        """
    def budget(self, layer: int, kv_head: int) -> int:
        """Return how many entries a KV head may keep. Raises ValueError for a head that does not
        exist.
        """
    def count(self, layer: int, kv_head: int) -> int:
        """Return how many entries a KV head keeps. Raises ValueError for a head that does not
        exist.
        """
    @property
    def entries(self) -> int: ...
    evicted: int
    """How many entries of all KV heads were evicted so far; loading a text may set it."""
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
        count; in 255ths, rounded up. Raises ValueError if `first` is negative, or if `per_column`
        or `n_columns` is below 1.
        """

def device_rows(
    shape: LayerShape,
    kv_type: str,
    budgets: Sequence[Sequence[int]],
    max_tokens: int,
    max_entries: int,
    n_places: int = 1,
) -> int:
    """Return how many rows of K and V the layers of one shape, with budgets [layer][KV head] in
    entries, have together for `n_places` DeviceStores. `max_tokens`, `max_entries`: as for
    HeadwiseStore. Raises ValueError for a `kv_type` other than `f16` and `q8_0`.
    """

def feature_count(shape: LayerShape, rope: RopeParams) -> int:
    """Return how many features the entries of a layer have: see HeadwiseStore.predictor_features.

    `rope` rotates the layer's keys. Raises ValueError if it does not fit them.
    """

class Devices:
    """Hold the devices that the stores of one context share, and their working memory.

    `n_threads`: how many threads of the CPU decide which entries stay, and compute layers whose
    device cannot. `n_places`: how many stores may be live at a time.
    """

    def __init__(self, n_threads: int, n_places: int) -> None: ...
    def close(self) -> None:
        """Free the working memory; no store may use the devices afterwards."""

    @property
    def on_host(self) -> dict[int, str]:
        """Return why the CPU computes the attention of layers that are on other devices, by the
        numbers of the layers: for example `CUDA0 cannot compute FLASH_ATTN_EXT`.
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

    The host decides which entries stay, as HeadwiseStore does, and saved states have the format of
    HeadwiseStore.
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
        """Make an empty store. If `live`, it takes the first place of `devices`, with rows for the
        budgets and for one micro-batch; otherwise it has no rows before acquire().

        `hook`: has seen the graph of the model. `budgets`: in entries, one for each KV head of all
        layers. `max_tokens`, `max_entries`: as for HeadwiseStore. The CPU serves layers whose
        device cannot compute their attention: see Devices.on_host, which the first live store finds
        out. `predictor`: for every layer, weights (n_head_kv, n_features), by which the device
        predicts the scores of new entries; none: they get the least score.

        Raises ValueError for another number of layers than the model has, a `kv_type` other than
        `f16` and `q8_0`, budgets as HeadwiseStore.set_budgets() refuses them, a measure that needs
        keys on the host, and a predictor of other features; RuntimeError if the CPU cannot compute
        attention either, MemoryError if a device has no memory.
        """

    def most_drafts(self, position: int, wanted: int) -> int:
        """Return how many drafts may follow the token at `position`, at most `wanted`: as many as
        evict nothing, and let no query count towards importance, before they are settled.
        """

    def commit_step(self) -> None:
        """Store the entries of a micro-batch that was read, and evict what budgets cannot hold. A
        step that DeviceBatch.commit() has committed stays as it is; of a step with drafts,
        settle_drafts() stores entries. Raises RuntimeError if a device fails.
        """

    def settle_drafts(self, n_accepted: int) -> None:
        """Store the first token of the last micro-batch and the first `n_accepted` of its drafts,
        one by one, and evict what budgets cannot hold. The others are dropped.

        Raises ValueError for fewer drafts than none, or more than the micro-batch had, and
        RuntimeError if a device fails.
        """

    def rotation_problem(self, ropes: Sequence[RopeParams]) -> str:
        """Return why keys cannot be moved to other positions; empty if they can.

        `ropes`: one for each layer. Raises ValueError if they do not fit the keys, and if the store
        has no rows.
        """

    def rebase(
        self, ropes: Sequence[RopeParams], n_sinks: int, old_shift: int, new_shift: int
    ) -> None:
        """Rotate every stored key from its RoPE position under `old_shift` to that under
        `new_shift`; the first `n_sinks` positions stay. `ropes`: one for each layer. Raises
        ValueError if they do not fit the keys, and if the store has no rows; RuntimeError if a
        device fails.
        """

    @staticmethod
    def resize(
        stores: Sequence[DeviceStore], budgets: Sequence[int], n_sinks: int, recent_window: int
    ) -> None:
        """Set the budgets of all stores of a context, in entries, one for each KV head of all
        layers; heads that hold more evict. If there are not enough rows, the rows of all places are
        allocated anew, and the entries stay.

        Raises MemoryError if the devices have no memory for the rows; then nothing has changed.
        Raises ValueError for budgets as HeadwiseStore.set_budgets() refuses them, and RuntimeError
        if a device fails.
        """

    def release(self) -> None:
        """Leave the place; rows are freed when the last store leaves. Nothing may be read or saved
        until acquire().
        """

    def acquire(self, place: int) -> None:
        """Take the place with number `place`, from 0 on, with rows for the budgets; the store is
        empty then. The rows of all places are allocated together, anew if the place is in use or
        its rows are too few. Raises MemoryError if a device has no memory for them.
        """

    @property
    def is_live(self) -> bool:
        """Tell whether the store has a place with rows."""

    def truncate(self, position: int) -> None:
        """Drop the entries at `position` and later ones. Raises ValueError for a negative position,
        and RuntimeError if a device fails.
        """
    def positions(self, layer: int, kv_head: int) -> _Ints:
        """Return the positions that a KV head keeps, ascending, (n,). Raises ValueError for a head
        that does not exist.
        """

    def importance(self, layer: int, kv_head: int) -> _Floats:
        """Return the scores of the entries of a KV head, as HeadwiseStore.importance() does. Raises
        ValueError for a head that does not exist, and RuntimeError if a device fails.
        """

    def budget(self, layer: int, kv_head: int) -> int:
        """Return how many entries a KV head may keep. Raises ValueError for a head that does not
        exist.
        """

    def count(self, layer: int, kv_head: int) -> int:
        """Return how many entries a KV head keeps. Raises ValueError for a head that does not
        exist.
        """

    def state_bytes(self, layer: int, kv_head: int) -> int:
        """Return the size in bytes of the state of a KV head. Raises ValueError for a head that
        does not exist, and IndexError if the store has no rows.
        """

    def save_layer(self, layer: int) -> list[bytes]:
        """Return the state of every KV head of a layer, each as HeadwiseStore.save_head() returns
        it. Raises ValueError for a layer that does not exist, IndexError if the store has no rows,
        and RuntimeError if a device fails.
        """

    def state_problem(self, layer: int, count: int, state: bytearray | memoryview, end: int) -> str:
        """Return what is wrong with the state of a KV head that is said to have `count` entries of
        a text of `end` tokens; empty if it is valid. Raises ValueError for a layer that does not
        exist, IndexError if the store has no rows, and BufferError for a buffer that is read-only.
        """

    def load(self, counts: Sequence[int], states: Sequence[bytearray | memoryview]) -> None:
        """Replace the entries of all KV heads by states that state_problem() accepts, and evict
        what budgets cannot hold. Raises IndexError for fewer counts or states than KV heads,
        ValueError for more counts, BufferError for a buffer that is read-only, RuntimeError if a
        device fails, and MemoryError without memory.
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
        """Return the first position from which on no sliding window misses an entry."""

    @property
    def eviction_seconds(self) -> float: ...

class DeviceBatch:
    """List the stores whose sequences have tokens in a micro-batch, in the order of the tokens."""

    def clear(self) -> None:
        """Begin another micro-batch, without tokens."""
    def add(
        self,
        store: DeviceStore,
        n_tokens: int,
        position: int,
        rope_position: int,
        n_drafts: int = 0,
        see_all: bool = False,
    ) -> None:
        """Choose rows for the next `n_tokens` tokens of the micro-batch, of a store that has none
        in it yet.

        The first of them is at `position` of its text, and RoPE sees it at `rope_position`. The
        last `n_drafts` are drafts. With `see_all`, every token attends to all of them, also to
        later ones. Raises ValueError for a store that has tokens in the micro-batch already, and
        for more than `max_tokens`; RuntimeError if a device fails.
        """

    def commit(self) -> None:
        """Call DeviceStore.commit_step() together for all stores whose tokens include no drafts.
        Raises RuntimeError if a device fails.
        """

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
    ) -> None:
        """Make a store for an empty cache. `context`: the address of the llama_context. `budget`:
        in positions. `rope_sinks`: how many of the first positions rebase() does not move. Raises
        ValueError for a `score` that does not depend on positions alone.
        """

    def make_room(self, n_tokens: int) -> None:
        """Compact the cells if holes would slow attention down; to be called before `n_tokens` are
        read. Raises RuntimeError if llama.cpp does not save or restore the state of its cache.
        """
    def settle(self, position: int, n_tokens: int) -> None:
        """Note that `n_tokens` were read from `position` on, and evict what exceeds the budget.
        Raises RuntimeError if llama.cpp cannot remove the positions.
        """
    def set_budget(self, budget: int, n_sinks: int, recent_window: int) -> None:
        """Set the budget in positions, and evict what exceeds it. Raises RuntimeError if llama.cpp
        cannot remove the positions.
        """

    def truncate(self, position: int) -> None:
        """Drop `position` and all later positions. Raises RuntimeError if llama.cpp cannot remove
        the positions.
        """
    def rebase(self, shift: int) -> None:
        """Continue at another shift: llama.cpp rotates the keys in its next decode. Entries whose
        RoPE position would be clamped to the first one after the sinks are dropped. Raises
        RuntimeError if llama.cpp cannot remove the positions.
        """

    shift: int
    """How far positions of the text are ahead of those that RoPE sees. Setting it says at which
    shift the cache was filled, and moves nothing.
    """

    def move_to(self, context: int) -> None:
        """Move to another context of any size, which must be empty. Raises RuntimeError, and stays
        in the old one, if llama.cpp does not save or restore the state of its cache.
        """
    def save_state(self) -> bytes:
        """Compact the cache, then return llama.cpp's state of the sequence. Raises RuntimeError if
        llama.cpp does not save it.
        """

    def load_state(
        self, positions: Sequence[int], state: bytearray | memoryview, evicted: int, shift: int
    ) -> None:
        """Replace everything by what save_state() returned, then evict what exceeds the budget.
        Raises RuntimeError if llama.cpp rejects the state, or if it does not end at the last one of
        `positions`; then nothing has changed. Raises BufferError for a buffer that is read-only.
        """

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
    """Return the position that RoPE sees for a position of the text: the same for the first
    `n_sinks`, otherwise `shift` less, but at least `n_sinks`.
    """

def read_bandwidth(n_bytes: int, n_threads: int) -> float:
    """Return the bytes per second at which `n_threads` threads together read `n_bytes` bytes of
    memory once. Raises ValueError for fewer than 8 bytes or no threads, and RuntimeError for fewer
    than 128 bytes per thread.
    """

def available_kernels() -> list[str]:
    """Return the names of the attention kernels that this machine can run, the slowest first."""

def select_survivors(
    scores: npt.ArrayLike,
    positions: npt.ArrayLike,
    keep: int,
    n_sinks: int,
    recent_window: int,
    newest: int,
) -> npt.NDArray[np.uint8]:
    """Return 1 for every entry that survives an eviction, and 0 for the others, (n,).

    Protected entries survive: the first `n_sinks` positions of the text, and the `recent_window`
    positions up to `newest`. Of the others, those with the highest scores do, until `keep` survive
    in all. Raises ValueError if `scores` and `positions` differ in length.
    """

def entries_to_keep(budget: int, n_new: int, n_sinks: int, recent_window: int) -> int:
    """Return how many entries an eviction leaves, including `n_new` new ones. If tokens come one by
    one, it makes room for several, so that one selection serves them all.
    """

def entropy_weights(
    entropies: Sequence[float], mean: float, low: float, high: float
) -> list[float]:
    """Return a weight for every KV head: its entropy divided by `mean`, which is in the same unit,
    but at least `low` and at most `high`. All weights are 1 if `mean` is not positive.
    """

def share_budget(
    mean_entries: int,
    max_entries: int,
    floor_entries: int,
    entries_per_page: Sequence[int],
    weights: Sequence[float],
    limits: Sequence[int] = (),
) -> list[int]:
    """Return the budget of every KV head in entries: the floor, and a part of the rest in
    proportion to the weight of the head, in whole pages.

    `entries_per_page`, `weights`: one for each KV head, layer by layer; no weights: all are equal.
    `limits`: what each head can use at most; empty: `max_entries`. Raises ValueError if the mean is
    below the floor, for a page of no entries, for another number of weights or limits than there
    are heads, a weight outside of 0 to 1e6, and a limit below 1.
    """

def alibi_slopes(n_head: int, max_bias: float) -> _Floats:
    """Return by how much logits fall per position of distance, for every query head, (n_head,).
    `max_bias`: the parameter of ggml's flash attention.
    """

def kv_types() -> list[str]:
    """Return the names of the types that pages can store K and V in: see
    cpp/page/page_codec.cpp.
    """

def most_entries(layer: LayerShape, max_entries: int) -> int:
    """Return how many entries a KV head of a layer can use at most: `max_entries`, or those that
    the window of the layer needs.
    """

def losses_at(
    scores: npt.ArrayLike,
    knots: Sequence[int],
    dropped: Sequence[float] = (),
    unit: float = 1.0,
) -> npt.NDArray[np.float32]:
    """Return for every k of the ascending `knots` the sum of all but the largest k scores.

    `dropped` are further scores: those within one octave count as their mean, multiplied by `unit`.
    """

def curve_shares(knots: Sequence[float], losses: Sequence[float], total: float) -> list[float]:
    """Divide `total` entries among heads so that the sum of their losses is least; returns the part
    of each head, at most the last knot. `losses`: [head][knot], flat, for `knots` entries of a
    head. Raises ValueError unless `knots` ascend from 0, for losses outside of 0 to 1e9, and if
    their number is not a multiple of that of the knots.
    """

def share_by_curves(
    mean_entries: int,
    max_entries: int,
    floor_entries: int,
    entries_per_page: Sequence[int],
    knots: Sequence[float],
    losses: Sequence[float],
    limits: Sequence[int] = (),
) -> list[int]:
    """Return budgets as share_budget() does, but with the least sum of losses instead of by
    weights. `losses`: [head][knot], flat; `knots`: numbers of entries beyond the floor. Raises the
    errors of share_budget(); ValueError unless `knots` ascend from 0, for losses outside of 0 to
    1e9, and unless every head has one for each knot.
    """

def pages_for(entries: int, entries_per_page: int) -> int:
    """Return how many pages hold `entries` entries; raises ValueError for less than 1 per page, or
    more than 2^30 entries.
    """

def page_geometry(layers: Sequence[LayerShape], kv_type: str) -> tuple[int, list[int]]:
    """Return the bytes of a page, and for every layer how many entries of a KV head fit into a
    page. Raises ValueError for an unknown `kv_type`, and for impossible layers.
    """

def cold_page_bytes(layers: Sequence[LayerShape], kv_type: str, cold_type: str) -> int:
    """Return the bytes of a page of cold storage. `cold_type`: as `kv_type` of FreezeSettings.
    Raises ValueError for unknown types, and for impossible layers.
    """

def plan_flat_eviction(
    positions: Sequence[int],
    keep: int,
    score: ScoreKind,
    n_sinks: int,
    recent_window: int,
) -> tuple[_Ints, list[tuple[int, int]]]:
    """Return the positions that stay, ascending, and the ranges [first, last) of positions to
    remove. `keep` positions stay, or more if more are protected. Raises ValueError for a `score`
    that does not depend on positions alone.
    """
