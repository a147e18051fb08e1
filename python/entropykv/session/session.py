"""Decode one sequence of one model under a budget: Session."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Unpack

from entropykv.errors import (
    ContextError,
    EntropyKVError,
)
from entropykv.llamacpp.model import Model
from entropykv.session.echo import LEAST_TOKENS
from entropykv.session.generate import generate
from entropykv.session.image_spans import is_placeholder, text_before_image
from entropykv.session.images import ImageLimits, ImagePart, Images, no_projector
from entropykv.session.model_runner import ModelRunner
from entropykv.session.recovery import Climb
from entropykv.session.sampling import Sampling
from entropykv.session.saving import Saving
from entropykv.session.sequence import TokenSequence
from entropykv.session.trajectory import Trajectory
from entropykv.settings.cache_options import CacheOptions, SessionArguments, shows
from entropykv.settings.options import at_least
from entropykv.settings.recovery import Recovery, Rung
from entropykv.store.protocol import Part


class Session(Saving):
    """Read and write one sequence of tokens with a model, inside a KV budget.

    `model`: path of a GGUF file, or a Model, which the session closes. `options`, or keyword
    arguments of the same names: see CacheOptions; arguments stand in the place of what `options`
    say. `n_ctx` may be more than the model was trained for: then positions are re-based as the
    sequence grows, or ContextError tells why the model cannot. `on_climb` is called with each Climb
    of the recovery ladder. `verbose`: llama.cpp's own log.

    Raises ModelFileError, UnsupportedModelError, BudgetError, ProfileError, SettingsError,
    FreezeError.
    """

    @shows(SessionArguments)
    def __init__(
        self,
        model: str | os.PathLike[str] | Model,
        options: CacheOptions | None = None,
        *,
        on_climb: Callable[[Climb], object] | None = None,
        verbose: bool = False,
        **arguments: Unpack[SessionArguments],
    ) -> None:
        """Load the model and make its store; everything is checked before the weights are read."""
        asked = CacheOptions.of(options, arguments).alone()
        runner = ModelRunner(model, asked, verbose=verbose)
        self._take_part(runner, asked.recovery, on_climb, weight=1.0, alone=True)

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None = None,
        options: CacheOptions | None = None,
        *,
        local_dir: str | os.PathLike[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        on_climb: Callable[[Climb], object] | None = None,
        verbose: bool = False,
        **arguments: Unpack[SessionArguments],
    ) -> Session:
        """Make a session with a model of the Hugging Face Hub, which is fetched once.

        `repo_id`: user/model or user/model:quant; `filename`: a file of it instead of a quant, or a
        pattern of its name. What is fetched, and to where, see fetch_model() of entropykv.hub; the
        other arguments are those of Session. Raises HubError and what Session raises, and
        MissingExtraError without the extra `hub`.
        """
        from entropykv.hub import fetch_model  # noqa: PLC0415  # it needs the extra hub

        path = fetch_model(repo_id, filename, local_dir=local_dir, cache_dir=cache_dir)
        return cls(path, options, on_climb=on_climb, verbose=verbose, **arguments)

    def _take_part(
        self,
        runner: ModelRunner,
        recovery: Recovery | None,
        on_climb: Callable[[Climb], object] | None,
        *,
        weight: float,
        alone: bool,
    ) -> None:
        """Take a slot at a runner, which is closed with the session where it is `alone`."""
        self._runner = runner
        self._alone = alone
        self.recovery = recovery
        self.on_climb = on_climb
        self._model = runner.model
        self.config = runner.config
        """What was asked for, and what it means for the model."""
        try:
            self._slot = runner.add_slot(weight)
        except BaseException:
            if alone:
                runner.close()
            raise
        self._store = self._slot.store
        self.hook = self._store.hook
        """What changes the context's graphs, and can time them: see entropykv.evaluation.work."""
        self.trajectory = Trajectory(self._store.n_kv_heads) if self.freezing else None
        self._closed = False
        self._sequence = TokenSequence(self.config.n_ubatch)
        self._clear_counts()

    def __enter__(self) -> Session:
        """Use the session as a context manager: it closes at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the session."""
        self.close()

    def __del__(self) -> None:
        """Free what nobody has closed; never wait, since this may happen in any thread."""
        if self._closed:
            return
        if self._alone:
            self.close()
        else:
            self._closed = True
            self._runner.remove_slot_later(self._slot)

    def close(self) -> None:
        """Free the context, the store and the model; the session cannot be used any more.

        It waits for the micro-batch that is being read. A thread that reads or writes the session
        gets an EntropyKVError.
        """
        if self._closed:
            return
        self._closed = True
        self._runner.remove_slot(self._slot)
        if self._alone:
            self._runner.close()

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
        self, tokens: Sequence[int], all_logits: bool, *, writes: bool | None = None
    ) -> Iterator[npt.NDArray[np.float32] | None]:
        """Yield each micro-batch's logits as it is read: None for those that have none.

        `writes`: whether they were written, and are not (the rest of) a prompt; None: a single
        token is taken for a written one.
        """
        self._check_usable()
        ids = [int(token) for token in tokens]
        self._check_room(len(ids))
        text = [token for token in ids if not is_placeholder(token)]
        self._model.check_tokens(text)
        if len(text) < len(ids) and self._runner.images is None:
            raise no_projector()
        self.note_turn(writes=len(ids) == 1 if writes is None else writes)
        arrival = self._runner.scheduler.arrive()
        self._slot.expected = max(self._slot.expected, self._sequence.position + len(ids))
        echoes = self._echo is not None and self._evicts(len(ids))
        if echoes or self._awaits_echoes(len(ids)):
            self._catch_up(len(ids), arrival)
        while ids:
            # Echoes may end within the text: once they have taught the predictor enough.
            repeats = self._echo if echoes else None
            if is_placeholder(ids[0]):
                image = self._image_part(ids)
                part, ids = ids[: image.n_tokens], ids[image.n_tokens :]
                n_rows = len(part) if all_logits else int(not ids)
                yield self._decode_micro_batch(part, n_rows, [], arrival, image)
            else:
                size = repeats.chunk if repeats else self._largest_chunk(len(ids))
                size = text_before_image(ids, size)
                part, ids = ids[:size], ids[size:]
                echo = self._echo_of(part) if repeats and len(part) >= LEAST_TOKENS else []
                n_rows = len(part) if all_logits else int(not ids)
                yield self._decode_micro_batch(part, n_rows, echo, arrival)
            if ids:
                self._note_interval(len(part))

    def _largest_chunk(self, n_tokens: int) -> int:
        """Return how many of so many tokens to read at once."""
        return min(
            self.config.n_ubatch, self._store.whole_before(self._sequence.position, n_tokens)
        )

    def _check_room(self, n_tokens: int) -> None:
        if n_tokens == 0:
            raise ContextError("there is nothing to read; give at least one token")
        end, store = self._sequence.position + n_tokens, self._store
        if end > self.n_ctx:
            raise ContextError(
                f"{end} tokens do not fit into a context of {self.n_ctx}; "
                "shorten the prompt or raise --ctx-size (n_ctx)"
            )
        if store.rope_obstacle and end > store.rope.limit:
            raise ContextError(
                f"{self._model.name}: {end} tokens are more than the "
                f"{store.rope.limit} that the model was trained for, and it cannot go beyond them: "
                f"{store.rope_obstacle}; shorten the text, or go back with reset() or truncate()"
            )

    def _image_part(self, ids: list[int]) -> ImagePart:
        """Return the rows of an image that are read next, in the place of the first tokens."""
        images = self._runner.images
        if images is None:
            raise no_projector()
        sequence, n_ubatch = self._sequence, self.config.n_ubatch
        return images.next_part(
            ids, sequence.position, sequence.images, n_ubatch, self._largest_chunk
        )

    def _decode_micro_batch(
        self,
        tokens: list[int],
        n_rows: int,
        echo: list[int],
        arrival: int,
        image: ImagePart | None = None,
    ) -> npt.NDArray[np.float32] | None:
        logits = self._decode(tokens, n_rows, echo, arrival, image)
        if image is not None:
            self._sequence.add_image(image.first, image.n_tokens, image.behind)
        elif echo:
            self._sequence.echoed = self._sequence.position + len(tokens)
        last = None if logits is None else logits[-1].copy()
        self._sequence.add(tokens, last, is_prompt=not self._writes)
        self._sequence.note_evictions(self.evicted)
        if self.trajectory:
            counters = self._store.counters()
            frozen = counters.get("frozen_entries", 0)
            self.trajectory.record(self._sequence.position, counters["entries_kept"], frozen)
        self._broken = False
        self._store.check()
        return logits

    def _decode(
        self,
        tokens: list[int],
        n_rows: int,
        echo: list[int],
        arrival: int,
        image: ImagePart | None = None,
    ) -> npt.NDArray[np.float32] | None:
        """Decode a micro-batch at the end of the text; where that fails, the session is broken."""
        self._broken = True
        embedded = None if image is None else image.embedded
        lag = self._sequence.images.lag if image is None else image.lag
        part = Part(self._store, tokens, self._sequence.position, n_rows, echo, embedded, lag)
        try:
            self._runner.read(self._slot, part, arrival)
            return part.result()
        except EntropyKVError:
            self._broken = not part.untouched  # or nothing was read
            raise

    def _evicts(self, n_tokens: int) -> bool:
        """Tell whether the budget cannot hold all of the text when it is so many tokens longer."""
        slot, shared = self._slot, self._runner.shared
        if shared is not None and (not slot.live or slot.expected > slot.shared_for):
            with self._runner.live_store(slot):
                if shared.holds_whole(slot):  # otherwise echoes come before the share is changed
                    shared.note_growth(slot)
        return self._sequence.position + n_tokens > self._store.whole_entries

    def _awaits_echoes(self, n_tokens: int) -> bool:
        """Tell whether echoes must begin before the bytes are full, so that no token waits long."""
        if self._echo is None or n_tokens >= LEAST_TOKENS:
            return False
        room = self._store.whole_entries - self._sequence.position
        return room <= self._echo.tokens_ahead(self._sequence.position - self._sequence.echoed)

    def _catch_up(self, n_tokens: int, arrival: int) -> None:
        """Read echoes that are missing, if enough, before `n_tokens` more evict the text.

        Before a written token, no more than one chunk is repeated: the others wait for the next
        tokens.
        """
        sequence = self._sequence
        least = self._echo.least_pending(n_tokens, self._store.recent_window) if self._echo else 0
        if self._echo is None or sequence.position - sequence.echoed < least:
            return
        while sequence.echoed < sequence.position:
            first = sequence.echoed
            last = min(first + self._echo.chunk, sequence.position)
            if echo := self._echo_of(sequence.tokens[first:last], first):
                self._decode([], 0, echo, arrival)
                self._broken = False
                self._runner.teach(self._slot, first, last)
            sequence.echoed = last
            if n_tokens < LEAST_TOKENS or self._echo is None:
                break
        with self._runner.live_store(self._slot) as store:
            store.share_again()
        self._sequence.note_evictions(self.evicted)

    def _echo_of(self, chunk: Sequence[int], first: int | None = None) -> list[int]:
        """Return the echo of a chunk that is read now, or was from position `first` on.

        None where it would be at positions that the model does not have.
        """
        if self._echo is None:
            return []
        first = self._sequence.position if first is None else first
        echo = self._echo.of(self._sequence.tokens[:first], chunk)
        end = max(self._sequence.position, first + len(chunk)) + len(echo)
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
        """Pass tokens on; in the end, let no other session of the pool wait for more.

        While a token is found, nobody frees the vocabulary that samplers read.
        """
        try:
            with closing(stream):
                while True:
                    self._check_open()
                    with self._model.in_use():
                        token = next(stream, None)
                    if token is None:
                        return
                    yield token
        finally:
            self.rest()

    def open_projector(
        self,
        path: str | os.PathLike[str],
        limits: ImageLimits | None = None,
        *,
        use_gpu: bool = False,
    ) -> Images:
        """Open the model's projector (mmproj file), and return what reads prompts with images.

        It serves all sessions of the model, and is closed with the model, or where another file
        takes its place. Raises ModelFileError and UnsupportedModelError: see Projector.
        """
        self._check_open()
        return self._runner.open_projector(path, limits, use_gpu=use_gpu)

    @property
    def images(self) -> Images | None:
        """Return what reads prompts with images; None before open_projector()."""
        return self._runner.images

    def rest(self) -> None:
        """Say that nothing more is read soon: a pool may swap out the session for another one."""
        if not self._closed and not self._runner.closed:
            self._runner.rest(self._slot)

    def interrupt(self) -> None:
        """Call off a decode that waits for its turn in another thread, which gets PoolError."""
        self._runner.scheduler.cancel(self._slot)

    def refuse(self) -> None:
        """Read nothing more: a decode in another thread ends with its next micro-batch.

        That thread gets an EntropyKVError. What was read can be looked at until close().
        """
        self._runner.refuse(self._slot)

    def thaw(self, rung: Rung = Rung.FULL, window: int = 0) -> int:
        """Restore frozen entries as far as the budget has room; returns how many, of all KV heads.

        SOFT: those that would stay frozen for more than one further step; WINDOW: those frozen in
        the last `window` steps; FULL: all, and detections start again. With the next token, the
        others are looked through for what it needs.
        """
        self._check_usable()
        at_least("window", window, 0)
        with self._runner.live_store(self._slot) as store:
            return store.thaw(rung, window, self._sequence.position)

    def note_climb(self, climb: Climb) -> None:
        """Take down a climb of the recovery ladder, and tell `on_climb`."""
        name = climb.rung.name.lower()
        climbs = self._counts.climbs
        climbs[name] = climbs.get(name, 0) + 1
        if self.trajectory:
            self.trajectory.mark(climb.position, name)
        if self.on_climb:
            self.on_climb(climb)

    def count_generated(self, n_tokens: int, seconds: float) -> None:
        """Add to what stats() reports as generated."""
        self._counts.generated_tokens += n_tokens
        self._counts.decode_seconds += seconds

    def count_prompt(self, n_tokens: int, seconds: float) -> None:
        """Add to what stats() reports as prompt."""
        self._counts.prompt_tokens += n_tokens
        self._counts.prompt_seconds += seconds
