"""Read the tokens of one sequence in chunks, with the echoes that a policy requires."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from entropykv.errors import ContextError, EntropyKVError
from entropykv.session.drafter import Drafter
from entropykv.session.drafting import Drafting
from entropykv.session.images import ImagePart, no_projector
from entropykv.session.model_runner import ModelRunner
from entropykv.session.second_readings import LEAST_ECHO, Echo
from entropykv.session.sequence import is_placeholder, text_before_image
from entropykv.session.session_text import SessionText
from entropykv.session.shared_pool import SequenceSlot
from entropykv.store.protocol import Logits
from entropykv.store.step import Part


class SequenceReader:
    """Cut the tokens of a sequence into chunks, and let the runner read them in its steps."""

    def __init__(
        self,
        runner: ModelRunner,
        slot: SequenceSlot,
        text: SessionText,
        drafter: Drafter | None = None,
    ) -> None:
        """Read the text of one slot of a runner; meanwhile, `text` keeps checkpoints.

        `drafter` guesses tokens ahead, and is closed with the reader; None: no tokens are guessed.
        """
        self._runner = runner
        self._slot = slot
        self._store = slot.store
        self._text = text
        self.drafting: Drafting | None = None
        """The object that guesses the next tokens; None: no tokens are guessed."""
        self._own_products: bool | None = None
        """Whether the extension computes all products of weights; None: not known yet."""
        if drafter is not None:
            self.drafting = Drafting(drafter, runner.step_costs, runner.config.n_drafts)

    def close(self) -> None:
        """Free the drafter."""
        if self.drafting is not None:
            self.drafting.close()

    @property
    def chunk(self) -> int:
        """Return the most tokens of text that one micro-batch reads."""
        return self._echo.chunk if self._echo else self._runner.config.n_ubatch

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the tokens and logits of the text, of the records of its
        micro-batches, and of the drafter.
        """
        return self._slot.text.n_bytes + (self.drafting.n_bytes if self.drafting else 0)

    @property
    def _echo(self) -> Echo | None:
        """Return the object that makes echoes; None if this text is not read twice, or not any
        more.
        """
        runner = self._runner
        return runner.second_readings.echo_of(self._slot) if runner.config.reads_twice else None

    def read(
        self,
        tokens: Sequence[int],
        all_logits: bool,
        *,
        n_last: int = 1,
        writes: bool | None = None,
        gives_way: bool = False,
    ) -> Iterator[Logits | None]:
        """Yield each micro-batch's logits after reading it: None for those without logits.

        Logits have the shape (tokens of the micro-batch, n_vocab) with `all_logits`. Otherwise only
        the last `n_last` of all tokens have logits, as in (n_last, n_vocab). `writes`: True if the
        tokens were written, False if they belong to a prompt; None: a single token counts as
        written. `gives_way`: prompts of other sessions of the pool that arrive meanwhile are read
        first. Raises what Session.decode() raises.
        """
        self._runner.check_usable(self._slot)
        config = self._runner.config
        ids = [int(token) for token in tokens]
        n_last = len(ids) if all_logits else n_last
        self._check_room(len(ids))
        text = [token for token in ids if not is_placeholder(token)]
        self._runner.model.check_tokens(text)
        if len(text) < len(ids) and self._runner.images is None:
            raise no_projector()
        self._text.checkpoint_at_turn(writes=len(ids) == 1 if writes is None else writes)
        arrival = self._runner.scheduler.arrive()
        slot = self._slot
        slot.expected = max(slot.expected, slot.text.position + len(ids))
        echoes = self._echo is not None and self._evicts(len(ids))
        if echoes or self._awaits_echoes(len(ids)):
            self._catch_up(len(ids), arrival)
        # True if reading a longer text would not begin a micro-batch here.
        continues = False
        while ids:
            # Echoes may end within the text, once the predictor is fitted.
            repeats = self._echo if echoes else None
            n_before = self._before_end(len(ids), all_logits)
            image = self._image_part(ids, n_before) if is_placeholder(ids[0]) else None
            if image is None:
                size = repeats.chunk if repeats else self._largest_chunk(len(ids), n_before)
                size = text_before_image(ids, size)
            else:
                repeats, size = None, image.n_tokens
            chunk, ids = ids[:size], ids[size:]
            n_rows = min(len(chunk), max(0, n_last - len(ids)))
            part = self._part(chunk, n_rows, image)
            part.echo = self._echo_of(chunk) if repeats and len(chunk) >= LEAST_ECHO else []
            part.recalls = config.recalls_before_end or n_before < len(chunk)
            yield self._read_micro_batch(part, arrival, image, continues=continues)
            continues = config.recall_micro_batch <= len(chunk) < config.n_ubatch
            if ids:
                self._text.checkpoint_at_interval(len(chunk))
                if gives_way:
                    arrival = self._runner.scheduler.arrive()

    def propose_drafts(self, token: int, most: int) -> list[int]:
        """Return up to `most` guesses of what follows a token that is read next.

        Returns fewer, or none, where reading more guesses would cost more time than it saves.
        """
        if self.drafting is None or most < 1 or self._may_change_bits():
            return []
        tokens = np.append(np.array(self._slot.text.tokens, np.int32), np.int32(token))
        drafts = self.drafting.propose(tokens, most, self._slot.n_others)
        return list(itertools.takewhile(lambda draft: not is_placeholder(draft), drafts))

    def _may_change_bits(self) -> bool:
        """Tell whether drafts may change results that the option spec_type `auto` should not
        change: where llama.cpp computes products of weights, whose bits depend on the number of
        tokens.
        """
        if self._runner.config.options.spec_type != "auto":
            return False
        if self._own_products is None:
            kernels = self._store.context.hook.products.values()
            if not kernels:  # Nothing was read yet.
                return True
            self._own_products = not any("llama.cpp" in kernel for kernel in kernels)
        return not self._own_products

    def read_drafts(
        self, token: int, drafts: Sequence[int], verify: Callable[[Logits], int]
    ) -> int:
        """Read a token, and those of the drafts behind it that are right; returns how many are.

        `verify` gets the logits of all tokens that were read, (1 + drafts, n_vocab), float32, and
        returns how many of the drafts are right. It is called within a step, in any thread, and
        must not raise; `verify` is not called if no drafts are read, as where wrong ones could not
        be undone. Afterwards the session is as if the right tokens had been read one by one, bit by
        bit where the extension computes all products of weights. Raises what Session.decode()
        raises, and EntropyKVError if `verify` returns an impossible number.
        """
        runner, slot, text = self._runner, self._slot, self._slot.text
        runner.check_usable(slot)
        drafts = drafts[: self._most_drafts()]
        if not drafts:
            for _ in self.read([token], all_logits=False, writes=True):
                pass
            if self.drafting is not None:
                self.drafting.note(0, 0)
            return 0
        self._check_room(1)
        runner.model.check_tokens([token, *drafts])
        self._text.checkpoint_at_turn(writes=True)
        slot.expected = max(slot.expected, text.position + 1)
        tokens = [token, *drafts]
        part = Part(self._store, tokens, text.position, len(tokens), lag=text.images.lag)
        part.n_drafts, part.verify = len(drafts), verify
        logits = self._decode(part, runner.scheduler.arrive())
        for i in range(part.n_read):
            row = None if logits is None else logits[i].copy()
            text.add([tokens[i]], row, is_prompt=False)
        if self.drafting is not None:
            self.drafting.note(part.n_drafts, part.n_right)
        slot.note_evictions()
        slot.broken = False
        self._check_freezing()
        return part.n_right

    def _most_drafts(self) -> int:
        """Return how many drafts may follow the next token: at most as many as the settings say, as
        fit into the context and the length of text for which the pool gave the sequence its share,
        and as can be read before an echo is due.
        """
        config, slot = self._runner.config, self._slot
        end = min(config.n_ctx, slot.shared_for or config.n_ctx)
        most = max(0, min(config.n_drafts, end - slot.text.position - 1))
        while most and self._awaits_echoes(1, ahead=most):
            most -= 1
        return most

    def _before_end(self, n_tokens: int, all_logits: bool) -> int:
        """Return how many of n_tokens tokens come before the end of a prompt. The end is read in
        small micro-batches if frozen entries are searched.
        """
        config = self._runner.config
        n_before = n_tokens - config.recall_end
        if all_logits or n_before <= 0:
            return 0
        # The number is rounded down to whole micro-batches, since a few tokens take nearly as long
        # as many.
        return n_before - n_before % config.recall_micro_batch

    def _largest_chunk(self, n_tokens: int, n_before: int) -> int:
        """Return how many of n_tokens tokens to read at once; the first `n_before` come before the
        end of the prompt.
        """
        config = self._runner.config
        most = min(config.n_ubatch, n_before) or config.recall_micro_batch
        if self._store.sharing is not None:
            n_tokens = self._store.sharing.whole_before(self._slot.text.position, n_tokens)
        return min(most, n_tokens)

    def _image_part(self, ids: list[int], n_before: int) -> ImagePart:
        """Return the rows of an image that are read next, in the place of the first tokens."""
        images, text = self._runner.images, self._slot.text
        if images is None:
            raise no_projector()
        n_ubatch = self._runner.config.n_ubatch
        most = partial(self._largest_chunk, n_before=n_before)
        return images.next_part(ids, text.position, text.images, n_ubatch, most)

    def _check_room(self, n_tokens: int) -> None:
        if n_tokens == 0:
            raise ContextError("there is nothing to read; give at least one token")
        end, n_ctx = self._slot.text.position + n_tokens, self._runner.config.n_ctx
        facts = self._store.facts
        if end > n_ctx:
            raise ContextError(
                f"{end} tokens do not fit into a context of {n_ctx}; "
                "shorten the prompt or raise --ctx-size (n_ctx)"
            )
        if facts.rope_obstacle and end > facts.rope.limit:
            raise ContextError(
                f"{self._runner.model.name}: {end} tokens are more than the "
                f"{facts.rope.limit} that the model was trained for, and it cannot go beyond them: "
                f"{facts.rope_obstacle}; shorten the text, or go back with reset() or truncate()"
            )

    def _part(self, tokens: list[int], n_rows: int, image: ImagePart | None) -> Part:
        text = self._slot.text
        embedded = None if image is None else image.embedded
        lag = text.images.lag if image is None else image.lag
        return Part(self._store, tokens, text.position, n_rows, embedded=embedded, lag=lag)

    def _read_micro_batch(
        self, part: Part, arrival: int, image: ImagePart | None = None, *, continues: bool = False
    ) -> Logits | None:
        slot, text = self._slot, self._slot.text
        logits = self._decode(part, arrival)
        if image is not None:
            text.add_image(image.first, image.n_tokens, image.behind)
        elif part.echo:
            text.echoed = text.position + len(part.tokens)
        last = None if logits is None else logits[-1].copy()
        text.add(part.tokens, last, is_prompt=not slot.writes, continues=continues)
        slot.note_evictions()
        if slot.trajectory:
            counters = self._store.counters()
            frozen = counters.get("frozen_entries", 0)
            slot.trajectory.record(text.position, counters["entries_kept"], frozen)
        slot.broken = False
        self._check_freezing()
        return logits

    def _check_freezing(self) -> None:
        """Raise FreezeError if frozen entries could not be read or written."""
        if self._store.freezing is not None:
            self._store.freezing.check()

    def _decode(self, part: Part, arrival: int) -> Logits | None:
        """Decode a micro-batch at the end of the text, and return its logits, or None without any;
        if this fails half-way, the sequence is marked as broken.
        """
        slot = self._slot
        slot.broken = True
        try:
            slot.rests = False
            self._runner.scheduler.submit(slot, part, arrival)
            return part.result()
        except EntropyKVError:
            slot.broken = not part.untouched  # If the store is unchanged, the sequence can go on.
            raise

    def _evicts(self, n_tokens: int) -> bool:
        """Tell whether the budget must evict entries of the text if the text grows by n_tokens;
        first, the pool divides its pages for the expected length, unless it has done so.
        """
        slot = self._slot
        if not slot.live or slot.expected > slot.shared_for:
            with self._runner.live_store(slot):
                self._runner.shared.foresee(slot)
        return slot.text.position + n_tokens > self._store.reach().whole

    def _awaits_echoes(self, n_tokens: int, ahead: int = 0) -> bool:
        """Tell whether echoes of written text must begin now, before the budget is full, so that no
        token waits long. `ahead`: how many further tokens will be written first.
        """
        if self._echo is None or n_tokens >= LEAST_ECHO:
            return False
        whole = self._store.reach().whole
        if whole >= self._runner.config.n_ctx:
            return False
        text = self._slot.text
        position = text.position + ahead
        room = whole - position
        return room <= self._echo.tokens_ahead(position - text.echoed)

    def _catch_up(self, n_tokens: int, arrival: int) -> None:
        """Read the echoes of text that has none yet, if it is long enough, before reading
        `n_tokens` more evicts some of it.

        Before a written token, only one chunk is repeated; the other chunks follow before later
        tokens.
        """
        slot, text = self._slot, self._slot.text
        if self._echo is None:
            return
        window = self._store.reach().recent_window
        if text.position - text.echoed < self._echo.least_pending(n_tokens, window):
            return
        while text.echoed < text.position:
            first = text.echoed
            last = min(first + self._echo.chunk, text.position)
            if echo := self._echo_of(text.tokens[first:last], first):
                self._decode(Part(self._store, [], text.position, 0, echo), arrival)
                slot.broken = False
                with self._runner.live_store(slot) as store:
                    self._runner.second_readings.teach(store, slot, first, last)
            text.echoed = last
            if n_tokens < LEAST_ECHO or self._echo is None:
                break
        with self._runner.live_store(slot) as store:
            if store.sharing is not None:
                store.sharing.share_again()
        slot.note_evictions()

    def _echo_of(self, chunk: Sequence[int], first: int | None = None) -> list[int]:
        """Return the echo of a chunk that is read now, or was read from position `first` on.

        The echo is empty if it would exceed the positions of the model, or if scores can be
        predicted and the chunk would not improve the predictor; then its tokens count as taught.
        """
        text = self._slot.text
        first = text.position if first is None else first
        if self._echo is None:
            return []
        if not self._runner.second_readings.is_worth_echo(chunk):
            text.note_lessons(first, len(chunk))
            return []
        echo = self._echo.of(text.tokens[:first], chunk)
        end = max(text.position, first + len(chunk)) + len(echo)
        facts = self._store.facts
        return [] if facts.rope_obstacle and end > facts.rope.limit else echo
