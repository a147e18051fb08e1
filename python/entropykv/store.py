"""What a session needs of a store, whichever it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.batch import MicroBatch
from entropykv.config import Budget, Settings
from entropykv.errors import UnsupportedModelError
from entropykv.model import Model
from entropykv.recovery import Rung
from entropykv.rope import RopeRange
from entropykv.session_file import SavedContents, SessionReader

GGML_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}
"""llama.cpp's numbers of the types that config.KV_TYPES names."""


@dataclass(frozen=True)
class StoreState:
    """What a session file holds of a store: see session_file."""

    entries: list[list[int]]
    """[layer][KV head]"""
    evicted: int
    section_bytes: list[int]
    sections: Iterator[bytes]


class Store(Protocol):
    """A KV cache under a budget, in one llama_context."""

    name: str
    context: Any
    """The llama_context to decode with; may change in resize()."""
    n_kv_heads: int
    """Of all layers."""
    bytes_full_per_token: int
    """K and V of one token for all KV heads, in f16."""

    rope: RopeRange
    """Positions that RoPE may see."""
    rope_obstacle: str
    """Why the session cannot go on beyond them; empty if it can."""
    rebases: int
    """How often stored keys were moved to other positions."""

    @property
    def shift(self) -> int:
        """How far positions of the text are before what RoPE sees; set where a state is loaded."""

    @shift.setter
    def shift(self, shift: int) -> None: ...

    def rope_position(self, position: int) -> int:
        """Where RoPE sees a position of the text."""
        return _core.rope_position(position, self.rope.n_sinks, self.shift)

    def before(self, n_tokens: int, position: int) -> None:
        """Make room for a micro-batch, below the positions that RoPE may see."""

    def after(self, n_tokens: int, position: int) -> None:
        """Bring the store in order after llama_decode; raises where the graph was not as served."""

    def check(self) -> None:
        """Raise what went wrong beside a micro-batch that was read well: FreezeError."""
        return  # without cold storage, nothing can

    def thaw(self, rung: Rung, window: int, position: int) -> int:  # noqa: ARG002
        """Restore frozen entries: see Session.thaw(). None without cold storage."""
        return 0

    def resize(self, budget: Budget) -> None:
        """Apply a new budget: grows at once, shrinks by evicting."""

    def truncate(self, position: int) -> None:
        """Drop entries at and beyond a position; ContextError, and nothing has changed, where that
        would leave other entries than are needed to go on.
        """

    def can_return_to(self, position: int) -> bool:  # noqa: ARG002
        """Whether truncate() to an earlier position, not 0, leaves what was there, had nothing been

        evicted meanwhile.
        """
        return True

    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Positions kept, ascending."""

    def budgets(self) -> list[tuple[int, ...]]:
        """[layer][KV head] in entries."""

    @property
    def evicted(self) -> int:
        """Entries evicted so far, of all KV heads."""

    def counters(self) -> dict[str, Any]:
        """The store's part of SessionStats; of frozen entries only where it has any."""

    def state(self) -> StoreState:
        """Everything that decoding depends on; valid until the next change."""

    def check_state(
        self, reader: SessionReader, contents: SavedContents, sections: Sequence[bytearray]
    ) -> None:
        """Raise SessionFileError where load_state() would not go well."""

    def load_state(self, contents: SavedContents, sections: Sequence[bytearray]) -> None:
        """Replace everything by a checked state, and evict down to the budget.

        The sections may be changed. An Exception leaves the store as it was.
        """

    def close(self) -> None:
        """Free the context."""
        if self.context:
            llama_cpp.llama_free(self.context)
            self.context = None


def decode_inside(
    store: Store,
    batch: MicroBatch,
    tokens: Sequence[int],
    position: int,
    *,
    n_rows: int,
    model_name: str,
) -> npt.NDArray[np.float32] | None:
    """Decode one micro-batch inside a store; logits as MicroBatch.decode returns them.

    Raises UnsupportedModelError where the graph is not what the store must change.
    """
    try:
        store.before(len(tokens), position)
        logits = batch.decode(store.context, tokens, store.rope_position(position), n_rows=n_rows)
        store.after(len(tokens), position)
    except RuntimeError as error:  # the extension: the graph or the cache is not as it needs it
        raise UnsupportedModelError(f"{model_name}: {error}") from error
    return logits


def context_parameters(model: Model, settings: Settings, n_ubatch: int, cells: int) -> Any:
    """Parameters that both stores share: one sequence, `cells` cells of llama.cpp's cache."""
    parameters = model.context_defaults()
    parameters.n_ctx = cells
    parameters.n_batch = n_ubatch
    parameters.n_ubatch = n_ubatch
    parameters.n_seq_max = 1
    parameters.n_threads = settings.threads
    parameters.n_threads_batch = settings.threads_batch
    return parameters


def decode_one_token(context: Any) -> bool:
    """Decode a token in an empty context, for hooks to see its graph; False where that fails."""
    batch = llama_cpp.llama_batch_get_one((llama_cpp.llama_token * 1)(0), 1)
    return bool(llama_cpp.llama_decode(context, batch) == 0)


def refuse_diffusion(model: Model) -> None:
    """Raise UnsupportedModelError for a model whose tokens are not read one after the other."""
    if llama_cpp.llama_model_is_diffusion(model.handle):
        raise UnsupportedModelError(
            f"{model.name}: it is a diffusion model, whose tokens all see each other, so there is "
            "no KV cache to keep inside a budget; run it with llama.cpp alone"
        )


def relu2_layers(model: Model, settings: Settings) -> int:
    """Layers whose gates a hook must make squared ReLU: all of them, or 0.

    Raises UnsupportedModelError where layers are offloaded: the hook's op runs on the CPU.
    """
    if model.geometry.activation != "relu2":
        return 0
    if settings.n_gpu_layers:
        raise UnsupportedModelError(
            f"{model.name}: its squared ReLU is computed on the CPU, but layers are offloaded; "
            "use no --n-gpu-layers"
        )
    return model.geometry.n_layer


def let_hook_change(
    parameters: Any,
    hook: _core.GraphHook
    | _core.WeightHook
    | _core.GateHook
    | _core.KShiftProbe
    | _core.WindowProbe,
) -> None:
    """Let a hook look at a context's graphs, or change them; it must live as long as that."""
    parameters.cb_eval = llama_cpp.ggml_backend_sched_eval_callback(hook.callback)
    parameters.cb_eval_user_data = hook.user_data
    parameters.op_offload = False  # the nodes around a large product would go to the device too
