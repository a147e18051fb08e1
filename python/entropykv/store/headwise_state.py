"""Save and load the content of the headwise store: as sections of a session file, or as shared
pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.errors import EntropyKVError, SessionFileError
from entropykv.llamacpp.recurrent import RecurrentState
from entropykv.policy.policy import Policy
from entropykv.policy.readings import OnlineBudgets
from entropykv.store.cold import ColdSide
from entropykv.store.states import (
    DamagedState,
    SavedState,
    Section,
    StoreCheckpoint,
    StoreState,
)

LOST = (
    "the file of a saved session or document was changed while its entries were in use, so that "
    "they are lost; load it again, and replace such files instead of writing to them"
)
"""The message of the error for entries that are lost with a mapped file."""


class HeadwiseState:
    """Save and load a store: one section for every KV head, layer by layer.

    Further sections follow: the measurements of budgets that follow the text, and the state of
    recurrent layers, if the store has them.
    """

    def __init__(
        self,
        store: _core.HeadwiseStore,
        layers: Sequence[_core.LayerShape],
        policy: Policy,
        cold: ColdSide,
        online: OnlineBudgets | None,
        recurrent: RecurrentState | None,
    ) -> None:
        """Use the parts of a store whose state is saved and loaded. `online`: budgets that follow
        the text, None if there are none; `recurrent`: the state of recurrent layers, None without
        such layers.
        """
        self._store = store
        self._layers = layers
        self._n_kv_heads = sum(shape.n_head_kv for shape in layers)
        self._policy = policy
        self._cold = cold
        self._online = online
        self._recurrent = recurrent

    def save(self, whole_from: int) -> StoreState:
        """Return the state of the store, with `whole_from` (see StoreState).

        The sections of the KV heads are made when they are read, and are padded so that a file of
        them can be mapped.
        """
        entries = [
            [self._store.count(layer, head) for head in range(shape.n_head_kv)]
            for layer, shape in enumerate(self._layers)
        ]
        rest = [] if self._online is None else [self._online.state().astype("<f8").tobytes()]
        rest += [] if self._recurrent is None else [self._recurrent.save()]
        return StoreState(
            entries=entries,
            evicted=self._store.evicted,
            section_bytes=[
                *(self._section_bytes(i, head) for i, head, _ in _per_head(entries)),
                *map(len, rest),
            ],
            sections=itertools.chain(
                (self._section(i, head) for i, head, _ in _per_head(entries)), rest
            ),
            recalls_now=self._cold.recalls_now,
            whole_from=whole_from,
        )

    def checkpoint(self, shift: int, whole_from: int) -> StoreCheckpoint:
        """Return a checkpoint that shares the store's pages. `shift`, `whole_from`: see
        StoreCheckpoint. The store must be one that never freezes entries.
        """
        core = self._store.checkpoint()
        seen = None if self._online is None else self._online.state()
        recurrent = b"" if self._recurrent is None else self._recurrent.save()
        n_bytes = core.copied_bytes + len(recurrent) + (0 if seen is None else seen.nbytes)
        return StoreCheckpoint(core, shift, whole_from, seen, recurrent, n_bytes, core.pages)

    def go_on_from(
        self, checkpoint: StoreCheckpoint, share: Callable[[], None], *, ends: bool
    ) -> bool:
        """Replace the content of the store by that of a checkpoint; `share` sets the budgets for
        it. `ends`: the checkpoint is dropped.

        Returns False if the pool has no room for the copies of pages that this needs; then the
        store is empty.
        """
        if self._recurrent is not None:
            self._recurrent.replace(checkpoint.recurrent)
        self._store.truncate(0)
        if self._online is not None and checkpoint.seen is not None:
            self._online.load(checkpoint.seen)
        share()
        return self._store.fork_from(checkpoint.core, ends)

    def state_of(self, checkpoint: StoreCheckpoint) -> StoreState:
        """Return the state that save() would have returned when a checkpoint was made."""
        core, store = checkpoint.core, self._store
        entries = [
            [store.checkpoint_count(core, layer, head) for head in range(shape.n_head_kv)]
            for layer, shape in enumerate(self._layers)
        ]
        heads = [(layer, head) for layer, head, _ in _per_head(entries)]
        rest = [] if checkpoint.seen is None else [checkpoint.seen.astype("<f8").tobytes()]
        rest += [checkpoint.recurrent] if checkpoint.recurrent else []
        return StoreState(
            entries=entries,
            evicted=core.evicted,
            section_bytes=[
                *(store.checkpoint_state_bytes(core, layer, head) for layer, head in heads),
                *map(len, rest),
            ],
            sections=itertools.chain(
                (store.save_checkpoint_head(core, layer, head) for layer, head in heads), rest
            ),
            whole_from=checkpoint.whole_from,
        )

    def _section_bytes(self, layer: int, kv_head: int) -> int:
        return self._store.state_bytes(layer, kv_head) + self._store.state_padding(layer, kv_head)

    def _section(self, layer: int, kv_head: int) -> bytes:
        with self._cold.reading():
            section = self._store.save_head(layer, kv_head)
        self.check_files()
        return section + bytes(self._store.state_padding(layer, kv_head))

    def check_files(self) -> None:
        """Raise SessionFileError if someone has changed a file that has pages of the store."""
        try:
            self._store.check_files()
        except _core.MappedFileError:
            raise SessionFileError(LOST) from None

    def check(self, state: SavedState) -> None:
        """Check number, size, positions and importance of the entries of every KV head."""
        self._cold.check_loading()
        sections = state.sections
        heads = [len(layer) for layer in state.entries]
        n_sections = self._n_kv_heads + (self._online is not None) + (self._recurrent is not None)
        if heads != [shape.n_head_kv for shape in self._layers] or len(sections) != n_sections:
            raise DamagedState("other KV heads than the model has")
        if self._policy.rule.by_layer and any(len(set(layer)) > 1 for layer in state.entries):
            raise DamagedState("KV heads of a layer that keep different positions")
        if self._online:
            seen = sections[self._n_kv_heads]
            problem = "a cut number" if len(seen) % 8 else self._online.problem(_floats(seen))
            if problem:
                raise DamagedState(problem)
        for (layer, head, count), section in zip(
            _per_head(state.entries), sections[: self._n_kv_heads], strict=True
        ):
            problem = self._store.state_problem(layer, count, section, state.position)
            if problem:
                raise DamagedState(f"KV head {head} of layer {layer} has {problem}")

    def load(
        self,
        state: SavedState,
        shares: Callable[[], list[int]],
        share: Callable[[], None],
    ) -> None:
        """Reserve room for everything, then replace the content by a state.

        Pages of a mapped file stay where they are if that is possible; else they are copied.
        `shares` returns budgets that follow the loaded measurements; `share` sets them. If it
        raises, nothing has changed, unless the system takes back memory that was reserved: then it
        raises EntropyKVError itself, and the store is not whole.
        """
        heads = list(_per_head(state.entries))
        of_heads = state.sections[: self._n_kv_heads]
        with self._seen_as_in(state.sections), self._cold.growing():
            self._store.begin_load([count for _, _, count in heads], of_heads, shares())
        self._store.truncate(0)
        self._store.evicted = state.evicted
        share()
        counts = [count for _, _, count in heads]
        try:
            if state.file is None or not self._store.adopt(state.file, counts, of_heads):
                for (layer, head, count), section in zip(heads, of_heads, strict=True):
                    self._store.load_head(layer, head, count, section)
        except MemoryError as error:
            raise EntropyKVError(
                "other programs took the memory for a saved session while it was loaded; call "
                "reset() and load it again"
            ) from error
        self._cold.recalls_now = state.recalls_now

    @contextmanager
    def _seen_as_in(self, sections: Sequence[Section]) -> Iterator[None]:
        """Load the states of recurrent layers and online budgets before the `with` block, and
        restore the former ones if the block raises.
        """
        state = self._recurrent.replace(sections[-1]) if self._recurrent else b""
        seen = self._online.state() if self._online else None
        if self._online:
            self._online.load(_floats(sections[self._n_kv_heads]))
        try:
            yield
        except BaseException:
            if self._recurrent:
                self._recurrent.replace(state)
            if self._online and seen is not None:
                self._online.load(seen)
            raise


def _floats(section: Section) -> npt.NDArray[np.float64]:
    return np.frombuffer(section, "<f8").astype(np.float64)


def _per_head(entries: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """Yield layer, KV head and number of entries of every KV head."""
    for layer, counts in enumerate(entries):
        for head, count in enumerate(counts):
            yield layer, head, count
