"""One model, one store, one sequence: decode under a budget."""

from __future__ import annotations

import io
import os
import time
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from entropykv.errors import (
    BudgetError,
    ContextError,
    EntropyKVError,
    FreezeError,
    SessionFileError,
    SettingsError,
    UnsupportedModelError,
)
from entropykv.llamacpp.batch import MicroBatch
from entropykv.llamacpp.model import Model, offloaded_layers
from entropykv.llamacpp.positions import check_sinks, largest_micro_batch
from entropykv.llamacpp.recurrent import is_recurrent
from entropykv.policy.names import AUTO, Policy, policy_named
from entropykv.policy.plan import kv_type_for
from entropykv.profile.belongs import other_file
from entropykv.profile.profile import EntropyProfile
from entropykv.session.file import (
    SavedContents,
    SavedSettings,
    SessionReader,
    new_session_file,
    open_session,
    reader_of,
)
from entropykv.session.generate import generate
from entropykv.session.profile import given_profile, profile_for
from entropykv.session.read_parts import ReadParts
from entropykv.session.recovery import Climb, Recovery
from entropykv.session.sampling import Sampling
from entropykv.session.state import ReadSoFar, load_state, saved_settings, write_state
from entropykv.session.stats import SessionStats, peak_rss_bytes
from entropykv.session.trajectory import Trajectory
from entropykv.settings.freezing import RECALL_MICRO_BATCH, Freezing, check_freezing
from entropykv.settings.options import Budget, Settings, at_least
from entropykv.store.flat import FlatStore, flat_kv_type
from entropykv.store.headwise import HeadwiseStore
from entropykv.store.protocol import Rung, Store, decode_inside


class Session:
    """A model that reads and writes one sequence of tokens inside a KV budget.

    `model`: path of a GGUF file, or a Model, which the session closes. `kv_budget`: a fraction of
    n_ctx in (0, 1], tokens per KV head (2 or more), or bytes ("64MiB"). `n_ctx`: the longest
    sequence, in tokens; 0: what the model was trained for. It may be longer: then positions are
    re-based as the sequence grows (see rope.py), or ContextError tells why the model cannot.
    `policy`: see entropykv.policy. `kv_type`: f16, q8_0, or auto: see budget.kv_type_for().
    `entropy_config`: an EntropyProfile or the path of one; None: that beside the model file or in
    this package (see profile_search.py), where the policy takes one. `store`: headwise, flat, or
    auto: headwise where it can serve the model (`fallback` says why it cannot). `recent_window`:
    newest entries that every KV head keeps; None: half of the mean budget. `freeze`: keep what is
    evicted in cold storage: "ram", "disk:DIR", or a Freezing with settings of its own; None: no,
    unless policy is freeze. `recovery`: the ladder that restores what is frozen where the output
    grows uncertain (see recovery.py); `on_climb` is called with each Climb. None: off.

    Raises ModelFileError, UnsupportedModelError, BudgetError, ProfileError, SettingsError,
    FreezeError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Model,
        *,
        n_ctx: int = 0,
        kv_budget: Budget | str | float = 1.0,
        policy: str = AUTO,
        kv_type: str = "auto",
        store: str = "auto",
        entropy_config: EntropyProfile | str | os.PathLike[str] | None = None,
        n_ubatch: int = 512,
        n_threads: int = 0,
        n_threads_batch: int = 0,
        n_gpu_layers: int = 0,
        n_sinks: int = 4,
        recent_window: int | None = None,
        freeze: Freezing | str | None = None,
        recovery: Recovery | None = None,
        on_climb: Callable[[Climb], object] | None = None,
        verbose: bool = False,
    ) -> None:
        """Load the model and make its store; everything is checked before the weights are read."""
        self._closed = True
        self.recovery = recovery
        self.on_climb = on_climb
        self.settings = Settings(
            kv_type=kv_type,
            store=store,
            n_ctx=n_ctx,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
            n_threads_batch=n_threads_batch,
            n_gpu_layers=offloaded_layers(n_gpu_layers),
            n_sinks=n_sinks,
            recent_window=recent_window,
        )
        self._asked_kv_type = kv_type
        self._budget = Budget.parse(kv_budget)
        profile = given_profile(entropy_config)
        schedule = policy_named(policy, profile, store).schedule
        self.freezing = Freezing.parse(freeze) or (Freezing() if schedule else None)
        check_freezing(self.freezing, store, kv_type)
        if recovery and not self.freezing:
            raise SettingsError(
                "recovery restores what is frozen, and nothing is; use --freeze ram or --policy "
                "freeze (freeze=), or leave recovery out"
            )
        self._model = (
            model
            if isinstance(model, Model)
            else Model(model, n_gpu_layers=n_gpu_layers, verbose=verbose)
        )
        self.n_ctx = n_ctx or self._model.geometry.n_ctx_train
        trained = self._model.geometry.n_ctx_train
        if self.freezing and self.freezing.recall_interval:
            n_ubatch = min(n_ubatch, RECALL_MICRO_BATCH)
        self._n_ubatch = largest_micro_batch(n_ubatch, self.n_ctx, trained)
        try:
            geometry = self._model.geometry
            self.profile = profile_for(policy, geometry, profile)
            self.settings = replace(
                self.settings, kv_type=kv_type_for(kv_type, self._budget, geometry, self.n_ctx)
            )
            if self.freezing:
                cold = self.freezing.type_for(self.settings.kv_type)
                self.freezing = replace(self.freezing, kv_type=cold)
            check_sinks(n_sinks, self.n_ctx, trained)
            self._store, self.policy = self._make_store(policy)
        except BaseException:
            self._model.close()
            raise
        self.trajectory = Trajectory(self._store.n_kv_heads) if self.freezing else None
        self._batch = MicroBatch(self._n_ubatch, self._model.n_vocab)
        self._closed = False
        self._broken = False
        self._position = 0
        self._tokens = array("i")
        self._parts = ReadParts(self._n_ubatch)
        self._logits: npt.NDArray[np.float32] | None = None
        self._reusable_from = 0
        self._clear_counters()

    def _make_store(self, policy: str) -> tuple[Store, Policy]:
        """The store that was asked for; with `auto`, flat where headwise cannot serve the model."""
        if self.recovery and self.recovery.held_back and is_recurrent(self._model):
            raise SettingsError(
                f"{self._model.name}: recovery that generates tokens again goes back, which "
                "recurrent layers cannot; use recovery without its last rung, or none"
            )
        self.fallback: str | None = None
        wanted = self.settings.store
        if wanted != "auto":
            return self._store_named(wanted, policy)
        try:
            return self._store_named("headwise", policy)
        except UnsupportedModelError as error:
            if self.freezing:
                raise UnsupportedModelError(
                    f"{error}; the flat store cannot freeze: use it without --freeze (freeze=) and "
                    "without policy freeze"
                ) from error
            self.fallback = str(error)
            return self._store_named("flat", policy)

    def _store_named(self, store: str, name: str) -> tuple[Store, Policy]:
        policy = policy_named(name, self.profile, store, freezes=self.freezing is not None)
        if store == "flat":
            kv_type = flat_kv_type(self._asked_kv_type, self.settings.kv_type, self._model)
            self.settings = replace(self.settings, kv_type=kv_type)
        arguments = (
            self._model,
            self.settings,
            self.n_ctx,
            self._n_ubatch,
            self._budget,
            policy,
            self.profile,
        )
        try:
            if store == "flat":
                return FlatStore(*arguments), policy
            return HeadwiseStore(*arguments, freezing=self.freezing), policy
        except MemoryError:
            raise self._too_large(self._budget) from None

    def _too_large(self, budget: Budget) -> BudgetError:
        return BudgetError(
            f"{self._model.name}: a KV budget of {budget} in a context of {self.n_ctx} tokens does "
            "not fit into this machine's memory; give a smaller one (kv_budget, n_ctx)"
        )

    def __enter__(self) -> Session:
        """Use the session as a context manager: it closes at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the session."""
        self.close()

    def __del__(self) -> None:
        """Free what close() was not called for."""
        self.close()

    def close(self) -> None:
        """Free the context, the store and the model; the session cannot be used any more."""
        if self._closed:
            return
        self._closed = True
        self._batch.close()
        self._store.close()
        self._model.close()

    # --- text -------------------------------------------------------------------------------------

    @property
    def n_vocab(self) -> int:
        """Size of the vocabulary."""
        return self._model.n_vocab

    @property
    def vocabulary(self) -> Any:
        """The llama_vocab, for samplers of llama.cpp."""
        return self._model.vocabulary

    def tokenize(self, text: str, add_bos: bool | None = None, special: bool = True) -> list[int]:
        """Tokens of a text. `add_bos` None: as the model wants; `special` reads control tokens."""
        add = self._model.adds_bos if add_bos is None else add_bos
        return self._model.tokenize(text, add_bos=add, special=special)

    def detokenize(self, tokens: Sequence[int], special: bool = False) -> str:
        """Text of tokens; control tokens are left out unless `special`."""
        return self._model.detokenize(tokens, special=special)

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one token, for output as it is generated."""
        return self._model.token_bytes(token)

    def chat_prompt(self, text: str, system: str | None = None) -> str | None:
        """The prompt of one user turn: see Model.chat_prompt."""
        return self._model.chat_prompt(text, system)

    def chat_turn(self, text: str) -> str | None:
        """What a further user turn adds after an answer: see Model.chat_turn."""
        return self._model.chat_turn(text)

    def is_end(self, token: int) -> bool:
        """Whether a token ends the generation."""
        return self._model.is_end(token)

    # --- decoding ---------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Tokens decoded so far."""
        return self._position

    @property
    def tokens(self) -> list[int]:
        """Every token read or generated so far, evicted or not."""
        return self._tokens.tolist()

    @property
    def logits(self) -> npt.NDArray[np.float32] | None:
        """Logits of the last token, (n_vocab,), float32; None before one and after truncate()."""
        return self._logits

    def decode(self, tokens: Sequence[int], all_logits: bool = False) -> npt.NDArray[np.float32]:
        """Read tokens inside the budget; returns their logits.

        Shape (len(tokens), n_vocab) with `all_logits`, else (1, n_vocab) of the last token. Raises
        ContextError for no tokens, unknown tokens, or more than the context holds, and
        UnsupportedModelError where the graph turns out not to be what the store must change.
        """
        start = time.perf_counter()
        parts = [p for p in self.decode_micro_batches(tokens, all_logits) if p is not None]
        self.count_prompt(len(tokens), time.perf_counter() - start)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def decode_micro_batches(
        self, tokens: Sequence[int], all_logits: bool
    ) -> Iterator[npt.NDArray[np.float32] | None]:
        """Yield each micro-batch's logits as it is read: None for those that have none."""
        self._check_usable()
        ids = [int(token) for token in tokens]
        self._check_room(len(ids))
        self._model.check_tokens(ids)
        for first in range(0, len(ids), self._n_ubatch):
            part = ids[first : first + self._n_ubatch]
            last = first + len(part) == len(ids)
            yield self._decode_micro_batch(part, len(part) if all_logits else int(last))

    def _check_room(self, n_tokens: int) -> None:
        if n_tokens == 0:
            raise ContextError("there is nothing to read; give at least one token")
        if self._position + n_tokens > self.n_ctx:
            raise ContextError(
                f"{self._position + n_tokens} tokens do not fit into a context of {self.n_ctx}; "
                "shorten the prompt or raise --ctx-size (n_ctx)"
            )

        store = self._store
        if store.rope_obstacle and self._position + n_tokens > store.rope.limit:
            raise ContextError(
                f"{self._model.name}: {self._position + n_tokens} tokens are more than the "
                f"{store.rope.limit} that the model was trained for, and it cannot go beyond them: "
                f"{store.rope_obstacle}; shorten the text, or go back with reset() or truncate()"
            )

    def _check_usable(self) -> None:
        if self._closed:
            raise EntropyKVError("the session is closed; make a new one")
        if self._broken:
            raise EntropyKVError("the last decode failed half-way; call reset() first")

    def _decode_micro_batch(self, tokens: list[int], n_rows: int) -> npt.NDArray[np.float32] | None:
        self._broken = True
        evicted = self.evicted
        try:
            logits = decode_inside(
                self._store,
                self._batch,
                tokens,
                self._position,
                n_rows=n_rows,
                model_name=self._model.name,
            )
        except FreezeError:
            self._broken = False  # nothing was read
            raise
        self._logits = None if logits is None else logits[-1].copy()
        self._parts.note(self._position, len(tokens), self._logits)
        self._position += len(tokens)
        self._tokens.extend(tokens)
        self._note_evictions(evicted)
        if self.trajectory:
            counters = self._store.counters()
            frozen = counters.get("frozen_entries", 0)
            self.trajectory.record(self._position, counters["entries_kept"], frozen)
        self._broken = False
        self._store.check()
        return logits

    def generate(
        self, tokens: Sequence[int], max_tokens: int = -1, **sampling: Any
    ) -> Generator[int, None, None]:
        """Read `tokens`, then yield generated ones as they come.

        Without tokens, it goes on after the last one read, where `logits` is not None. A token is
        read when the next one is asked for: the last one that was yielded is not read yet. With
        recovery, tokens are read ahead of those yielded: close() the generator where you stop early
        (contextlib.closing), before you look at the session.

        Ends at an end-of-generation token (not yielded), after `max_tokens` (-1: no limit), or when
        the context is full. `sampling`: the fields of entropykv.sampling.Sampling; temperature 0 is
        greedy, and with it the result does not depend on `seed`.
        """
        return generate(self, tokens, max_tokens, Sampling(**sampling))

    # --- the store --------------------------------------------------------------------------------

    @property
    def store(self) -> str:
        """Which store serves the model: headwise or flat."""
        return self._store.name

    @property
    def context(self) -> Any:
        """The llama_context, for samplers of llama.cpp."""
        return self._store.context

    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Positions that a KV head keeps, ascending. IndexError for a head that is not there."""
        budgets = self._store.budgets()
        if not 0 <= layer < len(budgets) or not 0 <= kv_head < len(budgets[layer]):
            raise IndexError(f"the model has no KV head {kv_head} in layer {layer}")
        return self._store.entries(layer, kv_head)

    def budgets(self) -> list[tuple[int, ...]]:
        """Entries that every KV head may keep, as `[layer][KV head]`."""
        return self._store.budgets()

    def other_file(self) -> str | None:
        """A sentence where the profile was made with another file of the model's shape."""
        return None if self.profile is None else other_file(self.profile, self._model.geometry)

    def resize(self, kv_budget: Budget | str | float) -> None:
        """Change the budget while running: it grows at once, and shrinks by evicting.

        BudgetError leaves the session as it was.
        """
        self._check_usable()
        budget = Budget.parse(kv_budget)
        evicted = self.evicted
        try:
            self._store.resize(budget)
        except MemoryError:
            raise self._too_large(budget) from None
        self._note_evictions(evicted)
        self._budget = budget

    @property
    def evicted(self) -> int:
        """Entries evicted so far, of all KV heads: dropped for good."""
        return self._store.evicted

    def thaw(self, rung: Rung = Rung.FULL, window: int = 0) -> int:
        """Restore frozen entries as far as the budget has room; returns how many, of all KV heads.

        SOFT: those that would stay frozen for more than one further step; WINDOW: those frozen in
        the last `window` steps; FULL: all, and detections start again. With the next token, the
        others are looked through for what it needs.
        """
        self._check_usable()
        at_least("window", window, 0)
        return self._store.thaw(rung, window, self._position)

    def note_climb(self, climb: Climb) -> None:
        """Take down a climb of the recovery ladder, and tell `on_climb`."""
        name = climb.rung.name.lower()
        self._climbs[name] = self._climbs.get(name, 0) + 1
        if self.trajectory:
            self.trajectory.mark(climb.position, name)
        if self.on_climb:
            self.on_climb(climb)

    def _note_evictions(self, before: int) -> None:
        if self.evicted != before:
            self._reusable_from = max(self._reusable_from, self._position)

    @property
    def reusable_from(self) -> int:
        """The position at the end of what last evicted an entry in any KV head; 0 if none ever did.

        Truncating to it or beyond leaves the entries that were there when the session stood there.
        After truncate() to an earlier one, more than n_ctx: entries before it are missing that a
        session that never read on would have, until reset().
        """
        return self._reusable_from

    def can_return_to(self, position: int) -> bool:
        """Whether truncate(position) leaves the entries of a session that never read on.

        Always so for 0. Where it is False, the tokens must be read again. With freezing, which of
        them are frozen may be others.
        """
        if position == 0:
            return True
        if self._broken or not self._reusable_from <= position <= self._position:
            return False
        return position == self._position or self._store.can_return_to(position)

    def repeatable_from(self, position: int, end: int) -> int:
        """Return where to truncate to, so that the text after it is read as it would be from 0.

        The result is at most `position`, where the text departs from what was read; `end` is how
        long it may get. It is 0 where something may be evicted before `end`: what is kept then
        depends on all queries that were ever asked.
        """
        if min(end, self.n_ctx) > self._store.sure_entries:
            return 0
        begin = self._parts.begin_before(position)
        return begin if self.can_return_to(begin) else 0

    def return_to_prompt(self, position: int, end: int) -> bool:
        """Go back to the end of the last prompt, whose logits are those of the session again.

        Returns False, and nothing changes, where the last prompt did not end at `position`, or
        something may be evicted before `end`: see repeatable_from().
        """
        logits = self._parts.logits_at(position)
        sure = min(end, self.n_ctx) <= self._store.sure_entries
        if logits is None or not sure or not self.can_return_to(position):
            return False
        self.truncate(position)
        self._logits = logits
        return True

    def truncate(self, position: int) -> None:
        """Go back to `position` tokens; 0 is possible after a decode that failed, too.

        What was evicted before `position` does not come back: see can_return_to(). ContextError
        where a model's recurrent layers or sliding windows cannot go back that far.
        """
        if position == 0:
            self._broken = False
        self._check_usable()
        if not 0 <= position <= self._position:
            raise ContextError(
                f"cannot truncate to position {position}; give 0 to {self._position}"
            )
        if position == 0 or position < self._position:
            self._store.truncate(position)
            del self._tokens[position - self._position :]
            self._position, self._logits = position, None
            self._parts.truncate(position)
            if self.trajectory:
                self.trajectory.truncate(position)
            if position == 0:
                self._reusable_from = 0
            elif position < self._reusable_from:
                self._reusable_from = self.n_ctx + 1  # what is missing stays so, wherever it goes

    def reset(self) -> None:
        """Forget every token; counters start again."""
        self.truncate(0)
        self._clear_counters()

    # --- sessions on disk -------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, chat: bool | None = None) -> SavedContents:
        """Write all that decoding depends on to a file, which appears complete or not at all.

        `chat`: whether the text is a chat by the model's template. Raises SessionFileError.
        """
        with new_session_file(path) as file:
            return self._save(file, chat)

    def save_state(self) -> bytes:
        """Return the bytes that save() would write."""
        file = io.BytesIO()
        self._save(file, None)
        return file.getvalue()

    def load(self, path: str | os.PathLike[str]) -> SavedContents:
        """Go on with a session that was saved: the same numbers as if it had never ended.

        Model file, store, kv_type and policy must be those of the file. Where the budget is smaller
        than what the file holds, it evicts. All of the file is read and checked before anything
        changes. Raises SessionFileError, or FreezeError where cold storage has no room for it, and
        is as it was before.
        """
        with open_session(path) as reader:
            return self._load(reader)

    def load_state(self, data: bytes) -> SavedContents:
        """As load(), from the bytes of save_state()."""
        return self._load(reader_of(data))

    def _saved_settings(self) -> SavedSettings:
        return saved_settings(
            self._model,
            self.settings,
            self._store,
            self.policy,
            self.n_ctx,
            self._budget,
            self.freezing,
        )

    def _save(self, file: BinaryIO, chat: bool | None) -> SavedContents:
        self._check_usable()
        read = ReadSoFar(self._position, self._tokens, self._logits)
        return write_state(file, self._saved_settings(), self._store, read, chat)

    def _load(self, reader: SessionReader) -> SavedContents:
        self._check_usable()
        self._broken = True
        try:
            read = load_state(reader, self._saved_settings(), self._store, self.n_vocab)
        except (FreezeError, SessionFileError):
            self._broken = False
            raise
        self._clear_counters()
        self._position, self._tokens, self._logits = read.position, read.tokens, read.logits
        self._parts = ReadParts(self._n_ubatch)  # no file tells how its text was cut
        self._reusable_from = self._position if self.evicted else 0  # nobody knows when it last did
        self._broken = False
        return reader.contents

    def _clear_counters(self) -> None:
        self._prompt_tokens = 0
        self._prompt_seconds = 0.0
        self._generated_tokens = 0
        self._decode_seconds = 0.0
        self._climbs: dict[str, int] = {}
        if self.trajectory:
            self.trajectory.clear()

    def count_generated(self, n_tokens: int, seconds: float) -> None:
        """Add to what stats() reports as generated."""
        self._generated_tokens += n_tokens
        self._decode_seconds += seconds

    def count_prompt(self, n_tokens: int, seconds: float) -> None:
        """Add to what stats() reports as prompt."""
        self._prompt_tokens += n_tokens
        self._prompt_seconds += seconds

    def stats(self) -> SessionStats:
        """Counts, bytes and times so far."""
        store = self._store
        return SessionStats(
            model=self._model.name,
            store=store.name,
            policy=self.policy.name,
            kv_budget=str(self._budget),
            n_ctx=self.n_ctx,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            prompt_seconds=self._prompt_seconds,
            decode_seconds=self._decode_seconds,
            kv_bytes_full=self._position * store.bytes_full_per_token,
            entries_full=self._position * store.n_kv_heads,
            peak_rss_bytes=peak_rss_bytes(),
            freeze=self.freezing.where if self.freezing else None,
            climbs=dict(self._climbs),
            **store.counters(),
        )
