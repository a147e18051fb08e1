"""Run the headwise store in a session: its llama_context, which several sequences may share, how
keys are stored in it, and the budgets and the attention of each sequence.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv import _core
from entropykv.errors import EntropyKVError, SessionFileError
from entropykv.llamacpp.context import relu2_layers
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.recurrent import WHY, RecurrentState, is_recurrent
from entropykv.model.key_biases import KeyBias, read_key_biases
from entropykv.policy.plan import HeadwisePlan, by_layer
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.settings.options import Budget
from entropykv.store.cold import ColdSide
from entropykv.store.headwise_budgets import HeadwiseBudgets, online_budgets
from entropykv.store.kv_heads import (
    KvHeadStore,
    ScorePrediction,
    check_config,
    hooked_context,
    probed_layers,
    ranking_predictor,
    refuse_by_kind,
)
from entropykv.store.protocol import (
    LOST,
    CacheMapFunction,
    DamagedState,
    Reach,
    RollbackRange,
    SavedState,
    Section,
    StoreCheckpoint,
    StoreContext,
    StoreState,
    TokensToRead,
)

KeyCentres = list[npt.NDArray[np.float32]]
"""For each layer, the centres and the units of keys, (KV heads, 2, values of a key), or an empty
array; an empty list if all keys are stored as they are.
"""


def key_centres(config: ResolvedConfig, hook: _core.GraphHook) -> KeyCentres:
    """Return the centres that are subtracted from the keys of every layer, and the units that
    divide the differences.

    Keys are stored as they are without ResolvedConfig.centres_keys, if the model rotates keys in an
    unknown way, and in layers that cap their logits: a centre changes all logits of a query by the
    same number, which only a softmax without a cap ignores. Raises ModelFileError for a damaged
    file.
    """
    if not config.centres_keys or hook.rope_obstacle:
        return []
    biases = read_key_biases(config.geometry)
    centres = [
        np.empty(0, np.float32) if node.softcap else _centres_of(node, biases.get(node.cache_layer))
        for node in hook.nodes
    ]
    return centres if any(layer.size for layer in centres) else []


def _centres_of(node: _core.AttentionNode, of: KeyBias | None) -> npt.NDArray[np.float32]:
    if of is None or of.bias.shape != (node.shape.n_head_kv, node.shape.k_dim) or node.shape.latent:
        return np.empty(0, np.float32)
    return np.array(
        [
            _core.key_centre(bias.tolist(), spread.tolist(), node.rope, node.rope_magnitude)
            for bias, spread in zip(of.bias, of.spread, strict=True)
        ],
        np.float32,
    )


def digest_of(centres: Sequence[npt.NDArray[np.float32]]) -> str | None:
    """Return a hash of how keys are stored, which is equal for stores that can read the keys of
    each other; None if keys are stored as they are.
    """
    if not centres:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for layer in centres:
        digest.update(f"{layer.shape}\n".encode())
        digest.update(layer.astype("<f4").tobytes())
    return digest.hexdigest()


class HeadwiseContext(StoreContext):
    """Hold a context whose attention the extension computes; llama.cpp's own cells hold only one
    micro-batch.
    """

    def __init__(
        self,
        model: Model,
        config: ResolvedConfig,
        n_ubatch: int,
    ) -> None:
        """Probe the model's graph, and change it from then on.

        `n_ubatch` is the most tokens of a sequence in a micro-batch, including its echo. Stores of
        a pool share the context's pages; otherwise there is a single store with pages of its own.
        Raises UnsupportedModelError if the graph has something that this store does not support,
        and ModelFileError or EntropyKVError if llama.cpp cannot run the model.
        """
        options = config.options
        refuse_by_kind(model)
        self.n_sequences = options.n_sequences or 1
        self.n_ubatch = n_ubatch
        self.hook: _core.GraphHook = _core.GraphHook(
            relu2_layers(model, options),
            options.most_threads,
            # 0 in a pool: a step reads tokens of several sequences, and their number changes.
            few_tokens=0 if options.in_pool else 1 + options.draft_max,
        )
        n_tokens = n_ubatch + self.n_sequences * config.n_drafts
        self.let_help = self.hook.help
        self.handle = hooked_context(model, options, self.hook, n_tokens, self.n_sequences)
        self.recurrent = is_recurrent(model)
        self.reads_together = not self.recurrent
        try:
            self.layers = probed_layers(model, options, self.hook, self.handle)
            self.key_centres = key_centres(config, self.hook)
            """How the keys of each layer are stored: see key_centres()."""
            if options.in_pool:
                self.pages = _core.SequencePool(
                    self.layers, config.kv_type, n_ubatch, self.n_sequences, config.n_drafts
                )
        except BaseException:
            self.close()
            raise
        self.batch = _core.AttentionBatch()
        self.hook.serve(self.batch)
        self._unfinished = False

    def begin_step(self) -> None:
        """Begin a micro-batch, before the stores of its sequences begin it."""
        if self._unfinished and not self.recurrent:
            self.forget_cells()  # A failed decode leaves some cells.
        self._unfinished = True
        self.batch.clear()
        self.hook.begin_step()

    def end_step(self) -> None:
        """End the micro-batch: free llama.cpp's cells, and check that attention of every layer was
        replaced.
        """
        self.batch.clear()
        if not self.recurrent:  # With recurrent layers, each store frees those of its sequence.
            self.forget_cells()
        self._unfinished = False
        self.hook.check_step()

    def forget_cells(self) -> None:
        """Free the cells and states of all sequences."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.handle), False)


class HeadwiseStore(KvHeadStore):
    """Keep the entries of one sequence in pages, per (layer, KV head)."""

    name = "headwise"
    context: HeadwiseContext
    sharing: HeadwiseBudgets
    learning: ScorePrediction
    _store: _core.HeadwiseStore
    _longest: int | None = None
    """The last value of take_share()'s `longest`."""

    def __init__(
        self,
        model: Model,
        config: ResolvedConfig,
        context: HeadwiseContext,
        budget: Budget | None = None,
    ) -> None:
        """Make a store in a context.

        `budget` None takes that of the config. In a context of several sequences, the budget is for
        all together, and the store holds nothing before take_share(). Raises SettingsError if the
        policy needs something that the model does not have, ProfileError for a profile of another
        model, BudgetError for a budget that is too small, FreezeError if cold storage cannot be
        made, and MemoryError.
        """
        policy = config.policy
        self._config = config
        self.context = context
        self.layers = context.layers
        hook = self._hook = context.hook
        try:
            self._recurrent = RecurrentState(context.handle) if context.recurrent else None
            check_config(config, model, self.layers, hook.rope_obstacle)
            self.facts = self._facts(
                model,
                hook.rope_obstacle or (WHY if self._recurrent else ""),
                key_centres=digest_of(context.key_centres),
                saves_cells=self._recurrent is not None,
            )
            self.cold = ColdSide(config.freezing, model, self.layers, config.kv_type, policy)
            asked = config.options.budget if budget is None else budget
            plan = self.plan_of(asked)
            self._store = _core_of(config, context, self.cold, plan)
            self.learning = ScorePrediction(self._store, self.layers)
            if predictor := ranking_predictor(config):
                self.learning.adopt(predictor)
            self.rollback = RollbackRange(model, self._store, self._recurrent)
            self.cold.serve(self._store)
            self.freezing = self.cold if self.cold.settings else None
            freezes = config.freezing is not None
            self._online = online_budgets(
                policy, self._store, self.layers, config.n_ctx, config.profile, freezes=freezes
            )
            self.sharing = HeadwiseBudgets(
                self._store, config, self.layers, self._online, self.cold
            )
            if context.pages is None:
                self.sharing.take(plan)
            else:
                self.sharing.await_share(plan, asked)
        except BaseException:
            self.close()
            raise

    def plan_of(self, budget: Budget) -> HeadwisePlan:
        """Return what a budget means for every KV head; raises BudgetError if it is too small."""
        return self._config.headwise_plan(budget, self.layers)

    @property
    def core(self) -> _core.HeadwiseStore:
        """Return the extension's store, for callers that examine attention rows."""
        return self._store

    def before(self, reading: TokensToRead) -> None:
        """Reserve pages for all entries that the micro-batch may add; raises as Store.before()."""
        self.cold.check_file()
        self._check_files()
        position = reading.position
        rope_position = self._seen_position(position, reading.n_tokens)
        self.sharing.prepare(reading.n_tokens - reading.n_drafts, position, reading.n_echo)
        with self.cold.growing():
            self.context.batch.add(
                self._store,
                reading.n_tokens,
                position,
                rope_position,
                reading.n_echo,
                see_all=reading.embedded is not None and reading.embedded.sees_all,
                n_drafts=reading.n_drafts,
                recalls=reading.recalls,
            )

    @property
    def drafts(self) -> HeadwiseStore | None:
        """Return the store itself; None with recurrent layers, a policy that reads texts twice, or
        micro-batches of one token.
        """
        config = self._config
        none = self._recurrent or config.policy.importance.repeats or config.n_ubatch == 1
        return None if none else self

    def most_drafts(self, position: int, wanted: int) -> int:
        """Return how many drafts may follow the token at `position`, at most `wanted`: as many as
        move no keys to other positions, change no budgets, and can be undone.
        """
        wanted = self.facts.rope.drafts_in_place(self.shift, position, wanted)
        wanted = self.sharing.most_drafts(position, wanted)
        return self.context.batch.most_drafts(self._store, wanted)

    def settle(self, n_right: int) -> None:
        """Undo all that drafts after the first `n_right` have changed, bit for bit."""
        self._store.settle_drafts(n_right)

    def after(self, n_tokens: int) -> None:
        """Bring the store in order after a micro-batch: share the budget again if the policy
        follows the text.

        Raises SessionFileError if a file was changed while the micro-batch read its pages.
        """
        self._check_files()
        if self._recurrent:
            self._recurrent.forget_cells()
        if self.sharing.observe(n_tokens):
            self.sharing.share_again()

    def resize(self, budget: Budget) -> None:
        """Share the new budget among the KV heads; heads that hold more than their part evict.

        Raises BudgetError for a budget that is too small, FreezeError if cold storage has no room.
        """
        plan = self.plan_of(budget)
        with self.cold.growing():
            self.sharing.take(plan)

    def reach(self) -> Reach:
        """Return how much of a text the budget holds; nothing is sure if entries are frozen."""
        sharing = self.sharing
        return Reach(
            whole=max(sharing.whole_entries, sharing.longest_whole),
            sure=sharing.sure_entries,
            recent_window=sharing.least_window,
        )

    def truncate(self, position: int) -> None:
        """Drop entries from a position on, and all measurements if it is 0: see KvHeadStore."""
        super().truncate(position)
        if self._recurrent:
            self._recurrent.forget()
        self.sharing.expect(position)
        if position == 0:
            self.sharing.forget()

    def cache_map(self) -> CacheMapFunction:
        """Return a function that shows what is held, with a row for every KV head of all layers:
        see SessionCache.map().
        """
        return partial(_core.CacheMap().count, self._store)

    def budgets(self) -> list[tuple[int, ...]]:
        """Return the budgets in entries, as [layer][KV head]."""
        return [
            tuple(self._store.budget(layer, head) for head in range(shape.n_head_kv))
            for layer, shape in enumerate(self.layers)
        ]

    def state(self) -> StoreState:
        """Return the content to save: a section for every KV head, layer by layer, then the
        measurements of budgets that follow the text, and the state of recurrent layers, if there
        are any.

        The sections of the KV heads are made when they are read, and are padded so that a file of
        them can be mapped.
        """
        rest = [] if self._online is None else [self._online.state().astype("<f8").tobytes()]
        rest += [] if self._recurrent is None else [self._recurrent.save()]
        core, heads = self._store, list(self._heads())
        return StoreState(
            entries=self._per_layer([core.count(*of) for of in heads]),
            evicted=core.evicted,
            section_bytes=[
                *(core.state_bytes(*of) + core.state_padding(*of) for of in heads),
                *map(len, rest),
            ],
            sections=itertools.chain((self._section(*of) for of in heads), rest),
            recalls_now=self.cold.recalls_now,
            whole_from=self.rollback.whole_from,
        )

    def _section(self, layer: int, kv_head: int) -> bytes:
        with self.cold.reading():
            section = self._store.save_head(layer, kv_head)
        self._check_files()
        return section + bytes(self._store.state_padding(layer, kv_head))

    def _per_layer(self, of_heads: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all KV heads, which `of_heads` has layer by layer, as
        [layer][KV head].
        """
        return [list(layer) for layer in by_layer(of_heads, self.layers)]

    def _check_files(self) -> None:
        """Raise SessionFileError if someone has changed a file that has pages of the store."""
        try:
            self._store.check_files()
        except _core.MappedFileError:
            raise SessionFileError(LOST) from None

    def check_state(self, state: SavedState) -> None:
        """Check number, size, positions and importance of the entries of every KV head; raises
        DamagedState, or StateDoesNotFit if cold storage has failed.
        """
        self.cold.check_loading()
        heads, sections = list(self._heads()), state.sections
        n_sections = len(heads) + (self._online is not None) + (self._recurrent is not None)
        of_layers = [len(layer) for layer in state.entries]
        if of_layers != [shape.n_head_kv for shape in self.layers] or len(sections) != n_sections:
            raise DamagedState("other KV heads than the model has")
        equal = self._config.policy.rule.by_layer
        if equal and any(len(set(layer)) > 1 for layer in state.entries):
            raise DamagedState("KV heads of a layer that keep different positions")
        if self._online:
            seen = sections[len(heads)]
            problem = "a cut number" if len(seen) % 8 else self._online.problem(_floats(seen))
            if problem:
                raise DamagedState(problem)
        for (layer, head), section in zip(heads, sections, strict=False):
            count = state.entries[layer][head]
            problem = self._store.state_problem(layer, count, section, state.position)
            if problem:
                raise DamagedState(f"KV head {head} of layer {layer} has {problem}")

    def load_state(self, state: SavedState) -> None:
        """Reserve room for everything, then replace the content; heads that hold more than their
        budget evict.

        Pages of a mapped file stay where they are if that is possible; else they are copied. Raises
        FreezeError, and changes nothing, if cold storage has no room; EntropyKVError if the system
        takes back reserved memory: then entries are missing, and the store must be emptied.
        """
        counts = list(itertools.chain(*state.entries))
        of_heads = state.sections[: len(counts)]
        with self.sharing.expecting(state.position):
            with self._seen_as_in(state.sections), self.cold.growing():
                self._store.begin_load(counts, of_heads, self.sharing.shares())
            self._store.truncate(0)
            self._store.evicted = state.evicted
            self.sharing.share()
            try:
                if state.file is None or not self._store.adopt(state.file, counts, of_heads):
                    for of, count, section in zip(self._heads(), counts, of_heads, strict=True):
                        self._store.load_head(*of, count, section)
            except MemoryError as error:
                raise EntropyKVError(
                    "other programs took the memory for a saved session while it was loaded; call "
                    "reset() and load it again"
                ) from error
            self.cold.recalls_now = state.recalls_now
        self.shift = state.shift
        self.rollback.begin_from(state.whole_from)

    @contextmanager
    def _seen_as_in(self, sections: Sequence[Section]) -> Iterator[None]:
        """Load the states of recurrent layers and online budgets before the `with` block, and
        restore the former ones if the block raises.
        """
        state = self._recurrent.replace(sections[-1]) if self._recurrent else b""
        seen = self._online.state() if self._online else None
        if self._online:
            self._online.load(_floats(sections[sum(1 for _ in self._heads())]))
        try:
            yield
        except BaseException:
            if self._recurrent:
                self._recurrent.replace(state)
            if self._online and seen is not None:
                self._online.load(seen)
            raise

    def take_share(self, pages: int, longest: int | None) -> None:
        """Hold at most `pages` pages, and evict what exceeds them: see Pooled."""
        if (pages, longest) == (self.share_pages, self._longest):
            return
        budget = Budget("bytes", max(1, pages * self.sharing.plan.page_bytes))
        plan = self._config.headwise_plan(budget, self.layers, longest)
        with self.cold.growing():
            self.sharing.follow(plan)
        self.share_pages, self._longest = pages, longest

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page of the pool."""
        return self.sharing.plan.page_bytes

    def set_aside(self) -> None:
        """Drop everything, and leave the pages to other stores of the pool until take_share()."""
        self.truncate(0)
        self._store.give_up_share()
        self.share_pages, self._longest = 0, None
        if self._recurrent:
            self._recurrent.forget()

    def take_place(self, sequence: int) -> None:
        """Take a place of the pool; `sequence`: llama.cpp's number for the sequence from now on."""
        self.sequence = sequence
        if self._recurrent:
            self._recurrent.sequence = sequence

    def checkpoint(self) -> StoreCheckpoint | None:
        """Return a checkpoint that shares the current pages; None if the store freezes, because
        frozen entries must be copied.
        """
        if self.cold.settings is not None:
            return None
        core, whole_from = self._store.checkpoint(), self.rollback.whole_from
        seen = None if self._online is None else self._online.state()
        recurrent = b"" if self._recurrent is None else self._recurrent.save()
        n_bytes = core.copied_bytes + len(recurrent) + (0 if seen is None else seen.nbytes)
        return StoreCheckpoint(core, self.shift, whole_from, seen, recurrent, n_bytes, core.pages)

    def go_on_from(self, checkpoint: StoreCheckpoint, *, ends: bool) -> bool:
        """Replace the content by that of a checkpoint; entries beyond the share are evicted.

        `ends`: the checkpoint is dropped. Returns False if the pool has no room for the copies of
        pages that this needs; then the store is empty.
        """
        if self._recurrent is not None:
            self._recurrent.replace(checkpoint.recurrent)
        self._store.truncate(0)
        if self._online is not None and checkpoint.seen is not None:
            self._online.load(checkpoint.seen)
        self.sharing.share()
        done = self._store.fork_from(checkpoint.core, ends)
        self.shift = checkpoint.shift if done else 0
        self.rollback.begin_from(checkpoint.whole_from if done else 0)
        return done

    def state_of(self, checkpoint: StoreCheckpoint) -> StoreState:
        """Return what state() would have returned when a checkpoint was made."""
        core, store, heads = checkpoint.core, self._store, list(self._heads())
        rest = [] if checkpoint.seen is None else [checkpoint.seen.astype("<f8").tobytes()]
        rest += [checkpoint.recurrent] if checkpoint.recurrent else []
        return StoreState(
            entries=self._per_layer([store.checkpoint_count(core, *of) for of in heads]),
            evicted=core.evicted,
            section_bytes=[
                *(store.checkpoint_state_bytes(core, *of) for of in heads),
                *map(len, rest),
            ],
            sections=itertools.chain((store.save_checkpoint_head(core, *of) for of in heads), rest),
            whole_from=checkpoint.whole_from,
        )

    def counters(self) -> dict[str, Any]:
        """Return this store's figures for SessionStats."""
        return {
            **super().counters(),
            "centred_layers": sum(of.size > 0 for of in self.context.key_centres),
            **self.cold.counters(),
        }

    def close(self) -> None:
        """Remove the file of frozen entries, if there is one."""
        if hasattr(self, "cold"):
            self.cold.close()


def _core_of(
    config: ResolvedConfig, context: HeadwiseContext, cold: ColdSide, plan: HeadwisePlan
) -> _core.HeadwiseStore:
    return _core.HeadwiseStore(
        layers=context.layers,
        kv_type=config.kv_type,
        importance=config.policy.importance.settings(),
        n_sinks=plan.protection.n_sinks,
        recent_window=plan.protection.recent_window,
        max_tokens=context.n_ubatch,
        max_entries=config.n_ctx,
        n_threads=config.options.most_threads,
        own_windows=config.own_windows,
        counts_dropped=config.policy.rule.by_losses,
        shared_choice=config.policy.rule.by_layer,
        ropes=[node.rope for node in context.hook.nodes],
        key_centres=context.key_centres,
        freezing=cold.settings,
        pool=context.pages,
    )


def _floats(section: Section) -> npt.NDArray[np.float64]:
    return np.frombuffer(section, "<f8").astype(np.float64)
