"""One model, one store, one sequence: decode under a budget."""

from __future__ import annotations

import io
import os
import time
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from entropykv.errors import (
    ContextError,
    EntropyKVError,
    FreezeError,
    PoolError,
    SessionFileError,
    SettingsError,
)
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.recurrent import is_recurrent
from entropykv.policy.names import AUTO
from entropykv.profile.belongs import other_file
from entropykv.profile.profile import EntropyProfile
from entropykv.session.checkpoints import INTERVAL
from entropykv.session.echo import LEAST_TOKENS
from entropykv.session.file import (
    SavedContents,
    SavedSettings,
    SessionReader,
    new_session_file,
    open_session,
    reader_of,
)
from entropykv.session.generate import generate
from entropykv.session.host import Host, HostOptions
from entropykv.session.read_parts import ReadParts
from entropykv.session.recovery import Climb, Recovery
from entropykv.session.sampling import Sampling
from entropykv.session.state import ReadSoFar, load_state, saved_settings, write_state
from entropykv.session.stats import SessionStats, peak_rss_bytes
from entropykv.session.trajectory import Trajectory
from entropykv.settings.freezing import Freezing
from entropykv.settings.options import Budget, at_least
from entropykv.store.protocol import CacheLook, Part, Rung


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
        options = HostOptions(
            n_ctx=n_ctx,
            kv_budget=kv_budget,
            policy=policy,
            kv_type=kv_type,
            store=store,
            entropy_config=entropy_config,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
            n_threads_batch=n_threads_batch,
            n_gpu_layers=n_gpu_layers,
            n_sinks=n_sinks,
            recent_window=recent_window,
            freeze=freeze,
            verbose=verbose,
            recovers=recovery is not None,
        )
        self._take_part(Host(model, options), recovery, on_climb, weight=1.0, alone=True)

    def _take_part(
        self,
        host: Host,
        recovery: Recovery | None,
        on_climb: Callable[[Climb], object] | None,
        *,
        weight: float,
        alone: bool,
    ) -> None:
        """Take a seat at a host, which is closed with the session where it is `alone`."""
        self._host = host
        self._alone = alone
        self.recovery = recovery
        self.on_climb = on_climb
        self._model = host.model
        self.n_ctx = host.n_ctx
        self._n_ubatch = host.n_ubatch
        self._echo = host.echo
        self.profile = host.profile
        self.freezing = host.freezing
        try:
            self._check_recovery()
            self._seat = host.take_seat(weight)
        except BaseException:
            if alone:
                host.close()
            raise
        self._store = self._seat.store
        self.settings = host.settings
        self.policy = host.policy
        self.fallback = host.fallback
        self.trajectory = Trajectory(self._store.n_kv_heads) if self.freezing else None
        self._closed = False
        self._broken = False
        self._position = 0
        self._tokens = array("i")
        self._echoed = 0
        self._parts = ReadParts(self._n_ubatch)
        self._logits: npt.NDArray[np.float32] | None = None
        self._reusable_from = 0
        self._evicted_before = 0
        self._writes = False
        self._clear_counters()

    def _check_recovery(self) -> None:
        if self.recovery and self.recovery.held_back and is_recurrent(self._model):
            raise SettingsError(
                f"{self._model.name}: recovery that generates tokens again goes back, which "
                "recurrent layers cannot; use recovery without its last rung, or none"
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
        self._host.leave_seat(self._seat)
        if self._alone:
            self._host.close()

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

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of one token, for output as it is generated; `special`: of control tokens, too."""
        return self._model.token_bytes(token, special=special)

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
    def n_ubatch(self) -> int:
        """Tokens of text that are read at once, however many follow."""
        return self._echo.stretch if self._echo else self._n_ubatch

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
        self.note_turn(writes=len(ids) == 1)
        arrival = self._host.scheduler.arrive()
        echoes = self._echo is not None and self._evicts(len(ids))
        if echoes:
            self._catch_up(len(ids), arrival)
        size = self._echo.stretch if self._echo and echoes else self._n_ubatch
        for first in range(0, len(ids), size):
            part = ids[first : first + size]
            last = first + len(part) == len(ids)
            echo = self._echo_of(part) if echoes and len(part) >= LEAST_TOKENS else []
            n_rows = len(part) if all_logits else int(last)
            yield self._decode_micro_batch(part, n_rows, echo, arrival)
            if not last:
                self._note_interval(len(part))

    def note_turn(self, *, writes: bool) -> None:
        """Keep a checkpoint where the text turns from what is read to what is written, or back."""
        if self._position and writes != self._writes:
            self.keep_checkpoint()
        self._writes = writes

    def _note_interval(self, n_tokens: int) -> None:
        """Keep a checkpoint within a prompt, where no later one could be cut there."""
        crossed = self._position // INTERVAL > (self._position - n_tokens) // INTERVAL
        if crossed and (self.evicted > 0 or self._host.recurrent):
            self.keep_checkpoint()

    def keep_checkpoint(self) -> None:
        """Keep where the text stands, to come back to: the sessions of a pool do."""

    def return_to_checkpoint(
        self,
        tokens: Sequence[int],  # noqa: ARG002
        beyond: int = 0,  # noqa: ARG002
        *,
        repeatable: bool = False,  # noqa: ARG002
    ) -> bool:
        """Go back to where most of a text was read, if that is more than `beyond` tokens of it.

        Sessions of a pool can, whatever was evicted since; False, and nothing changes, otherwise.
        `repeatable`: only to where a text that is read from 0 is cut, too, or to a checkpoint
        itself, so that asking again gives the same numbers.
        """
        return False

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
        if self._closed or self._host.closed:
            raise EntropyKVError("the session is closed; make a new one")
        if self._broken:
            raise EntropyKVError("the last decode failed half-way; call reset() first")

    def _decode_micro_batch(
        self, tokens: list[int], n_rows: int, echo: list[int], arrival: int
    ) -> npt.NDArray[np.float32] | None:
        logits = self._decode(tokens, n_rows, echo, arrival)
        if echo:
            self._echoed = self._position + len(tokens)
        self._logits = None if logits is None else logits[-1].copy()
        self._parts.note(self._position, len(tokens), self._logits)
        self._position += len(tokens)
        self._tokens.extend(tokens)
        self._note_evictions()
        if self.trajectory:
            counters = self._store.counters()
            frozen = counters.get("frozen_entries", 0)
            self.trajectory.record(self._position, counters["entries_kept"], frozen)
        self._broken = False
        self._store.check()
        return logits

    def _decode(
        self, tokens: list[int], n_rows: int, echo: list[int], arrival: int
    ) -> npt.NDArray[np.float32] | None:
        """Decode a micro-batch at the end of the text; the session is broken until it says not."""
        self._broken = True
        part = Part(self._store, tokens, self._position, n_rows, echo)
        try:
            self._host.read(self._seat, part, arrival)
            return part.result()
        except EntropyKVError:
            self._broken = not part.untouched  # or nothing was read
            raise

    def _evicts(self, n_tokens: int) -> bool:
        """Whether the budget cannot hold all of the text when it is so many tokens longer."""
        if not self._seat.live:  # its budget is that of the share that it gets
            with self._host.with_seat(self._seat):
                pass
        return self._position + n_tokens > self._store.whole_entries

    def _catch_up(self, n_tokens: int, arrival: int) -> None:
        """Read the echoes of what has had none before `n_tokens` more evict it, if it is enough."""
        least = self._echo.least_pending(n_tokens, self._store.recent_window) if self._echo else 0
        if self._echo is None or self._position - self._echoed < least:
            return
        for first in range(self._echoed, self._position, self._echo.stretch):
            last = min(first + self._echo.stretch, self._position)
            if echo := self._echo_of(self._tokens[first:last], first):
                self._decode([], 0, echo, arrival)
                self._broken = False
        self._echoed = self._position
        with self._host.with_seat(self._seat) as store:
            store.share_again()
        self._note_evictions()

    def _echo_of(self, stretch: Sequence[int], first: int | None = None) -> list[int]:
        """The echo of a stretch that is read now, or was from position `first` on.

        None where it would be at positions that the model does not have.
        """
        if self._echo is None:
            return []
        first = self._position if first is None else first
        echo = self._echo.of(self._tokens[:first], stretch)
        end = max(self._position, first + len(stretch)) + len(echo)
        return [] if self._store.rope_obstacle and end > self._store.rope.limit else echo

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
        return self._resting(generate(self, tokens, max_tokens, Sampling(**sampling)))

    def _resting(self, stream: Generator[int, None, None]) -> Generator[int, None, None]:
        """Pass tokens on; in the end, let no other session of the pool wait for more."""
        try:
            with closing(stream):
                yield from stream
        finally:
            self.rest()

    def rest(self) -> None:
        """Say that nothing more is read soon: a pool may park the session for another one."""
        if not self._closed and not self._host.closed:
            self._host.rest(self._seat)

    def interrupt(self) -> None:
        """Call off a decode that waits for its turn in another thread, which gets PoolError."""
        self._host.scheduler.cancel(self._seat)

    # --- the store --------------------------------------------------------------------------------

    @property
    def store(self) -> str:
        """Which store serves the model: headwise or flat."""
        return self._store.name

    @property
    def context(self) -> Any:
        """The llama_context, for samplers of llama.cpp; its logits may be another session's."""
        return self._store.context

    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Positions that a KV head keeps, ascending. IndexError for a head that is not there."""
        budgets = self._store.budgets()
        if not 0 <= layer < len(budgets) or not 0 <= kv_head < len(budgets[layer]):
            raise IndexError(f"the model has no KV head {kv_head} in layer {layer}")
        with self._host.with_seat(self._seat) as store:
            return store.entries(layer, kv_head)

    def cache_map(self) -> CacheLook:
        """Return a function that looks at what all KV heads hold, for those who watch.

        look(first, per_column, n_columns) returns three arrays of bytes, (KV heads of all layers,
        columns), or of one row where all KV heads keep the same: which share of a column's
        positions is held, frozen, or held now and frozen at the look before; in 255ths, rounded up.
        """
        return self._store.cache_map()

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
        try:
            self._host.resize(budget)
        except MemoryError:
            raise self._host.too_large(budget) from None
        self._note_evictions()

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
        with self._host.with_seat(self._seat) as store:
            return store.thaw(rung, window, self._position)

    def note_climb(self, climb: Climb) -> None:
        """Take down a climb of the recovery ladder, and tell `on_climb`."""
        name = climb.rung.name.lower()
        self._climbs[name] = self._climbs.get(name, 0) + 1
        if self.trajectory:
            self.trajectory.mark(climb.position, name)
        if self.on_climb:
            self.on_climb(climb)

    def _note_evictions(self) -> None:
        """Note where the text ended when something was evicted, also to make room for others."""
        evicted = self.evicted
        if evicted != self._evicted_before:
            self._reusable_from = max(self._reusable_from, self._position)
        self._evicted_before = evicted

    @property
    def reusable_from(self) -> int:
        """The position at the end of what last evicted an entry in any KV head; 0 if none ever did.

        Truncating to it or beyond leaves the entries that were there when the session stood there.
        After truncate() to an earlier one, more than n_ctx: entries before it are missing that a
        session that never read on would have, until reset().
        """
        self._note_evictions()
        return self._reusable_from

    def can_return_to(self, position: int) -> bool:
        """Whether truncate(position) leaves the entries of a session that never read on.

        Always so for 0. Where it is False, the tokens must be read again. With freezing, which of
        them are frozen may be others.
        """
        if position == 0:
            return True
        if self._broken or not self.reusable_from <= position <= self._position:
            return False
        return position == self._position or self._store.can_return_to(position)

    @property
    def is_whole(self) -> bool:
        """Whether no decode has failed half-way since the last reset()."""
        return not self._broken

    @property
    def sure_entries(self) -> int:
        """How many tokens every KV head keeps, whatever they are; n_ctx where none is evicted."""
        return self._store.sure_entries

    def repeatable_from(self, position: int, end: int) -> int:
        """Return where to truncate to, so that the text after it is read as it would be from 0.

        The result is at most `position`, where the text departs from what was read; `end` is how
        long it may get. It is 0 where something may be evicted before `end`: what is kept then
        depends on all queries that were ever asked.
        """
        if min(end, self.n_ctx) > self.sure_entries:
            return 0
        begin = self._parts.begin_before(position)
        return begin if self.can_return_to(begin) else 0

    def return_to_prompt(self, position: int, end: int) -> bool:
        """Go back to the end of the last prompt, whose logits are those of the session again.

        Returns False, and nothing changes, where the last prompt did not end at `position`, or
        something may be evicted before `end`: see repeatable_from().
        """
        logits = self._parts.logits_at(position)
        sure = min(end, self.n_ctx) <= self.sure_entries
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
        self._note_evictions()
        if position == 0 or position < self._position:
            self._truncate_store(position)
            del self._tokens[position - self._position :]
            self._position, self._logits = position, None
            self._parts.truncate(position)
            self._echoed = min(self._echoed, position)
            if self.trajectory:
                self.trajectory.truncate(position)
            if position == 0:
                self._reusable_from = 0
            elif position < self._reusable_from:
                self._reusable_from = self.n_ctx + 1  # what is missing stays so, wherever it goes

    def _truncate_store(self, position: int) -> None:
        if position == 0 and self._host.core_pool is not None:
            with self._host.scheduler.between_steps():
                self._host.forget(self._seat)
        else:
            with self._host.with_seat(self._seat) as store:
                store.truncate(position)
        self._seat.position = position

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
            self._host.budget,
            self.freezing,
        )

    def _save(self, file: BinaryIO, chat: bool | None) -> SavedContents:
        self._check_usable()
        read = ReadSoFar(self._position, self._tokens, self._logits, self._echoed)
        with self._host.with_seat(self._seat) as store:
            return write_state(file, self._saved_settings(), store, read, chat)

    def _load(self, reader: SessionReader) -> SavedContents:
        self._check_usable()
        self._broken = True
        try:
            with self._host.with_seat(self._seat) as store:
                read = load_state(reader, self._saved_settings(), store, self.n_vocab)
        except (FreezeError, PoolError, SessionFileError):
            self._broken = False
            raise
        self._clear_counters()
        self._position, self._tokens, self._logits = read.position, read.tokens, read.logits
        self._seat.position = read.position
        self._echoed = read.echoed
        self._parts = ReadParts(self._n_ubatch)  # no file tells how its text was cut
        self._reusable_from = self._position if self.evicted else 0  # nobody knows when it last did
        self._evicted_before = self.evicted
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
            kv_budget=str(self._host.budget),
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
