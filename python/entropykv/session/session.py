"""Read and write one sequence of a model under a budget: Session."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Unpack

from entropykv import system
from entropykv.constraint.vocabulary import TokenTexts
from entropykv.errors import ContextError, PoolError
from entropykv.llamacpp.foreign_text import ControlNames
from entropykv.llamacpp.model import Model
from entropykv.policy.policy import Policy
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.profile.find import other_file
from entropykv.profile.profile import EntropyProfile
from entropykv.session.checkpoints import Checkpoint
from entropykv.session.document import open_documents, question_tokens
from entropykv.session.draft_model import open_draft_model
from entropykv.session.drafting import DraftCounts, Drafting
from entropykv.session.file import DocumentNote, SavedContents, SavedSettings
from entropykv.session.generate import generate
from entropykv.session.image_spans import is_placeholder
from entropykv.session.images import ImageLimits, Images
from entropykv.session.model_runner import ModelRunner
from entropykv.session.predictor_fit import PredictorFit
from entropykv.session.reader import SequenceReader
from entropykv.session.recovery import Climb
from entropykv.session.reuse import Demand, HeldText
from entropykv.session.rollback import Rollback
from entropykv.session.sampling import Sampling
from entropykv.session.saving import Saver
from entropykv.session.shared_pool import PoolStatus
from entropykv.session.stats import SessionCounts, SessionStats
from entropykv.session.trajectory import Trajectory
from entropykv.settings.cache_options import CacheOptions, SessionArguments, shows
from entropykv.settings.freezing import Freezing
from entropykv.settings.options import Budget, at_least
from entropykv.settings.recovery import Recovery, Rung
from entropykv.store.protocol import CacheMapFunction, Logits
from entropykv.thinking.tags import AnswerFrame, ThoughtTags


class Session:
    """Read and write one sequence of tokens with a model, inside a KV budget.

    `model`: the path of a GGUF file, or a Model, which the session closes. `options`, or keyword
    arguments of the same names, which take precedence: see CacheOptions. `n_ctx` may exceed the
    trained context: then positions are re-based as the sequence grows, or a ContextError says why
    the model cannot. `on_climb` is called with each Climb of the recovery ladder. `verbose`: print
    llama.cpp's own log.

    Raises ModelFileError, UnsupportedModelError, BudgetError, ProfileError, SettingsError,
    FreezeError.
    """

    name: str | None = None
    """A name that callers may set, to find it among the sessions of a pool."""
    is_document: bool = False
    """Whether it holds a document and nothing else, so that questions get copies of it; callers may
    set it, to tell viewers of a pool.
    """
    _closed = True
    """True until it holds something, so that close() works even if __init__ raises."""

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
        runner = ModelRunner(model, asked, verbose=verbose, ends_with_session=True)
        try:
            open_draft_model(runner)
            self._begin(runner, asked.recovery, on_climb)
        except BaseException:
            runner.close()
            raise

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
        """Make a session with a model of the Hugging Face Hub, which is downloaded only once.

        `repo_id`: user/model or user/model:quant; `filename`: the name of a file instead of a
        quant, or a pattern. fetch_model() of entropykv.hub explains which files are downloaded, and
        to where; the other arguments are those of Session. Raises HubError, the errors of Session,
        and MissingExtraError without the extra `hub`.
        """
        from entropykv.hub import fetch_model  # noqa: PLC0415  # it needs the extra hub

        path = fetch_model(repo_id, filename, local_dir=local_dir, cache_dir=cache_dir)
        return cls(path, options, on_climb=on_climb, verbose=verbose, **arguments)

    @classmethod
    def of_pool(
        cls,
        pool: object,
        runner: ModelRunner,
        recovery: Recovery | None,
        on_climb: Callable[[Climb], object] | None,
        *,
        weight: float = 1.0,
        tenant: Hashable = None,
        origin: Checkpoint | None = None,
    ) -> Session:
        """Make a session of a pool, which owns the runner and is kept as long as the session: see
        Pool.session().

        `origin` is a swapped out state to continue from, which becomes its own.
        """
        self = cls.__new__(cls)
        runner.config.check_recovery(recovery)
        self._begin(runner, recovery, on_climb, weight=weight, tenant=tenant, pool=pool)
        runner.sessions[self.number] = self
        if origin is not None:
            self._rollback.go_on_from(origin)
        return self

    def _begin(
        self,
        runner: ModelRunner,
        recovery: Recovery | None,
        on_climb: Callable[[Climb], object] | None,
        *,
        weight: float = 1.0,
        tenant: Hashable = None,
        pool: object = None,
    ) -> None:
        """Get a slot of a runner, and make the parts that work on it."""
        self._runner = runner
        self._pool = pool
        self.recovery = recovery
        self.on_climb = on_climb
        self.tenant = tenant
        """The tenant, whose texts it shares: see Pool.session()."""
        self._model = runner.model
        self.config: ResolvedConfig = runner.config
        """The options, and what they mean for the model."""
        self._slot = runner.add_slot(weight)
        self._store = self._slot.store
        self.hook = self._store.context.hook
        """Changes the context's graphs, and can time them: see entropykv.evaluation.work."""
        self._rollback = Rollback(runner, self._slot, tenant)
        self._reader = SequenceReader(runner, self._slot, self._rollback, runner.drafter())
        self._saver = Saver(runner, self._slot)
        self._counts = SessionCounts()
        self.snapshot_bytes = 0
        """The bytes of the importance that is remembered of it: see session/passages.py."""
        self._closed = False

    def __enter__(self) -> Session:
        """Return the session itself; leaving the `with` block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the session."""
        self.close()

    def __del__(self) -> None:
        """Free what was not closed, without waiting, because this may happen in any thread."""
        if not self._closed:
            self._closed = True
            self._reader.close()
            self._runner.remove_slot_later(self._slot)

    def close(self) -> None:
        """Free the sequence, and leave its share to the others of a pool; a session alone also
        frees the model.

        It waits for the running micro-batch. The session cannot be used any more: a thread that
        reads or writes it gets an EntropyKVError.
        """
        if not self._closed:
            self._closed = True
            self._reader.close()
            self._runner.remove_slot(self._slot)

    # --- read and write ---------------------------------------------------------------------------

    def decode(self, tokens: Sequence[int], all_logits: bool = False) -> npt.NDArray[np.float32]:
        """Read tokens inside the budget; returns their logits.

        Shape (len(tokens), n_vocab) with `all_logits`, else (1, n_vocab) of the last token. Raises
        ContextError for no tokens, unknown tokens, or more than the context holds, and
        UnsupportedModelError if the graph is not as the store expects.
        """
        start = time.perf_counter()
        parts = [p for p in self.decode_micro_batches(tokens, all_logits) if p is not None]
        self.count_prompt(len(tokens), time.perf_counter() - start)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def decode_micro_batches(
        self,
        tokens: Sequence[int],
        all_logits: bool,
        *,
        writes: bool | None = None,
        gives_way: bool = False,
    ) -> Iterator[npt.NDArray[np.float32] | None]:
        """Yield each micro-batch's logits after reading it: None for those without logits.

        `writes`: the tokens were written, and are not (the rest of) a prompt; None: a single token
        counts as written. `gives_way`: prompts of other sessions of the pool that arrive meanwhile
        are read first.
        """
        return self._reader.read(tokens, all_logits, writes=writes, gives_way=gives_way)

    @property
    def drafting(self) -> Drafting | None:
        """Return what guesses the next tokens, with its counts; None where nothing does."""
        return self._reader.drafting

    def propose_drafts(self, token: int, most: int) -> list[int]:
        """Return up to `most` guesses of what follows a token that is read next.

        Fewer, or none, where reading more of them would cost more time than it saves.
        """
        return self._reader.propose_drafts(token, most)

    def decode_drafts(
        self, token: int, drafts: Sequence[int], verify: Callable[[Logits], int]
    ) -> int:
        """Read a token, and those of the drafts behind it that are right; returns how many are.

        `verify` gets the logits of all tokens that were read, (1 + drafts, n_vocab), float32, and
        returns how many of the drafts are right. It is called within a step, in any thread, and
        must not raise; it is not called where no drafts are read, because wrong ones could not be
        undone. Afterwards the session is as if the right tokens had been read one by one: bit by
        bit where the products of all weights are ours. Raises what decode() raises, and
        EntropyKVError for a number of drafts that `verify` did not get.
        """
        return self._reader.read_drafts(token, drafts, verify)

    def generate(
        self, tokens: Sequence[int], max_tokens: int = -1, **sampling: Any
    ) -> Generator[int, None, None]:
        """Read `tokens`, then yield generated ones one by one.

        Without tokens, it continues after the last token read; `logits` must not be None. A token
        is read when the next one is requested, so the last one that was yielded is not read yet.
        With recovery, tokens are read before they are yielded: if you stop early, close() the
        generator (contextlib.closing) before you use the session.

        Ends at an end-of-generation token (not yielded), after `max_tokens` (-1: no limit), or when
        the context is full. `sampling`: the fields of entropykv.sampling.Sampling; with temperature
        0, sampling is greedy and does not depend on `seed`.
        """
        return self._resting(generate(self, tokens, max_tokens, Sampling(**sampling)))

    def _resting(self, stream: Generator[int, None, None]) -> Generator[int, None, None]:
        """Yield tokens unchanged; at the end, tell the pool not to wait for more.

        The vocabulary, which samplers read, is kept while a token is chosen.
        """
        try:
            with closing(stream):
                while True:
                    self._runner.check_open(self._slot)
                    with self._model.in_use():
                        token = next(stream, None)
                    if token is None:
                        return
                    yield token
        finally:
            self.rest()

    def rest(self) -> None:
        """Tell the pool that no tokens follow soon, so that it may swap the session out for another
        one.
        """
        if not self._closed and not self._runner.closed:
            self._runner.rest(self._slot)

    def interrupt(self) -> None:
        """Cancel a decode that waits for its turn in another thread, which gets PoolError."""
        self._runner.scheduler.cancel(self._slot)

    def refuse(self) -> None:
        """Refuse further tokens: a decode in another thread ends with its next micro-batch.

        That thread gets an EntropyKVError. The text can still be examined until close().
        """
        self._runner.refuse(self._slot)

    # --- text and model ---------------------------------------------------------------------------

    def tokenize(
        self, text: str | None, add_bos: bool | None = None, special: bool = True
    ) -> list[int]:
        """Return the tokens of a text; `add_bos` None adds BOS if the model wants it.

        `special`: recognise names of control tokens. Raises ContextError for None, which
        chat_prompt() and chat_turn() return if the model has no chat template.
        """
        if text is None:
            raise ContextError(
                "there is no text to read: the model has no chat template, so chat_prompt() and "
                "chat_turn() return None; tokenize the text itself"
            )
        add = self._model.adds_bos if add_bos is None else add_bos
        return self._model.tokenize(text, add_bos=add, special=special)

    @property
    def model(self) -> Model:
        """Return the model, whose vocabulary and chat template it uses."""
        return self._model

    @property
    def control_names(self) -> ControlNames:
        """Return the names of the model's control tokens."""
        return self._model.control_names

    def said(self, text: str) -> str:
        """Return a foreign text in which tokenize() finds no control tokens: see Model.said()."""
        return str(self._model.said(text))

    def detokenize(self, tokens: Sequence[int], special: bool = False) -> str:
        """Return the text of tokens, without images; `special`: with control tokens."""
        text = [token for token in tokens if not is_placeholder(token)]
        return self._model.detokenize(text, special=special)

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of a token, to print it at once; `special`: also of control tokens.

        Placeholders of images have none.
        """
        if is_placeholder(token):
            return b""
        return self._model.token_bytes(token, special=special)

    def chat_prompt(self, text: str, system: str | None = None) -> str | None:
        """Return the prompt of one user turn: see Model.chat_prompt()."""
        return self._model.chat_prompt(text, system)

    def chat_turn(self, text: str) -> str | None:
        """Return the text between an answer and the next one, with a further user turn: see
        Model.chat_turn().
        """
        return self._model.chat_turn(text)

    @property
    def thought_tags(self) -> ThoughtTags | None:
        """Return the tags of the model's thoughts; None if its chat template has none."""
        return self._model.thought_tags

    @property
    def answer_frame(self) -> AnswerFrame:
        """Return what the chat template writes before answers: see Model.answer_frame()."""
        return self._model.answer_frame

    def is_end(self, token: int) -> bool:
        """Tell whether a token ends the generation."""
        return self._model.is_end(token)

    @property
    def tag_tokens(self) -> dict[int, bytes]:
        """Return the control tokens that are tags of thoughts, with their texts."""
        return self._model.tag_tokens

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Return the tokens that end the generation."""
        return self._model.end_tokens

    @property
    def n_vocab(self) -> int:
        """Return the size of the vocabulary."""
        return self._model.n_vocab

    @property
    def vocabulary(self) -> Any:
        """Return the llama_vocab, for samplers of llama.cpp."""
        return self._model.vocabulary

    def token_texts(self) -> TokenTexts:
        """Return the texts of all tokens, for constraints."""
        return self._model.token_texts()

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
        self._runner.check_open(self._slot)
        return self._runner.open_projector(path, limits, use_gpu=use_gpu)

    @property
    def images(self) -> Images | None:
        """Return what reads prompts with images; None before open_projector()."""
        return self._runner.images

    # --- what was read ----------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Return how many tokens were decoded so far."""
        return self._slot.text.position

    @property
    def tokens(self) -> list[int]:
        """Return every token read or generated so far, evicted or not."""
        return self._slot.text.tokens.tolist()

    @property
    def logits(self) -> npt.NDArray[np.float32] | None:
        """Return the last token's logits, (n_vocab,), float32.

        They are None before the first token, and after truncate().
        """
        return self._slot.text.logits

    @property
    def text_bytes(self) -> int:
        """Return the bytes of its tokens and logits, and of the records where the text was cut."""
        drafting = self.drafting
        return self._slot.text.n_bytes + (drafting.n_bytes if drafting else 0)

    @property
    def trajectory(self) -> Trajectory | None:
        """Return the numbers of entries over the text, if entries are frozen; else None."""
        return self._slot.trajectory

    @property
    def is_whole(self) -> bool:
        """Tell whether no decode has failed half-way since the last reset()."""
        return not self._slot.broken

    @property
    def is_closed(self) -> bool:
        """Tell whether it or its pool was closed."""
        return self._closed or self._runner.closed

    # --- settings ---------------------------------------------------------------------------------

    @property
    def n_ctx(self) -> int:
        """Return the most tokens of a sequence."""
        return self.config.n_ctx

    @property
    def n_ubatch(self) -> int:
        """Return how many tokens of text are read at once at most."""
        return self._reader.chunk

    @property
    def policy(self) -> Policy:
        """Return the policy that shares the budget; never `auto`."""
        return self.config.policy

    @property
    def profile(self) -> EntropyProfile | None:
        """Return the entropy profile that was given or found, if the policy uses one."""
        return self.config.profile

    @property
    def freezing(self) -> Freezing | None:
        """Return the settings of freezing; None if evicted entries are dropped."""
        return self.config.freezing

    @property
    def fallback(self) -> str | None:
        """Return why the device or flat store serves the model although `auto` prefers headwise;
        None if neither does.
        """
        return self.config.fallback

    @property
    def on_host(self) -> str | None:
        """Return which layers the device store serves in main memory because their device cannot
        compute their attention; None if there are none, and for other stores.
        """
        return self._runner.on_host

    @property
    def store(self) -> str:
        """Return the name of the store: headwise, device or flat."""
        return self._store.name

    @property
    def context(self) -> Any:
        """Return the llama_context, for samplers; its logits may belong to another session."""
        return self._store.context.handle

    @property
    def is_alone(self) -> bool:
        """Tell whether no other session reads in the llama_context, so that its logits are
        its own.
        """
        return self._runner.shared.is_private

    @property
    def predictor_fit(self) -> PredictorFit | None:
        """Return the object that fits the model's predictor to its first texts; None if there is
        one already.
        """
        return self._runner.fit

    def other_file(self) -> str | None:
        """Return a note if the profile was made with another file of the model's shape;
        else None.
        """
        return None if self.profile is None else other_file(self.profile, self._model.geometry)

    # --- the cache --------------------------------------------------------------------------------

    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Return the positions that a KV head keeps, ascending; raises IndexError for an unknown
        head.
        """
        budgets = self._store.budgets()
        if not 0 <= layer < len(budgets) or not 0 <= kv_head < len(budgets[layer]):
            raise IndexError(f"the model has no KV head {kv_head} in layer {layer}")
        with self._runner.live_store(self._slot) as store:
            return store.entries(layer, kv_head)

    def importance(
        self,
    ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]] | None:
        """Return for every KV head of all layers the positions that it keeps, ascending, and their
        importance.

        Returns None if the store or the policy does not measure attention. Raises PoolError if the
        pool has no room for the session.
        """
        with self._runner.live_store(self._slot) as store:
            found = []
            for layer, budgets in enumerate(store.budgets()):
                for head in range(len(budgets)):
                    importance = store.importance(layer, head)
                    if importance is None:
                        return None
                    found.append((store.entries(layer, head), importance))
            return found

    def cache_map(self) -> CacheMapFunction:
        """Return a function that shows what all KV heads hold, for viewers.

        look(first, per_column, n_columns) returns three arrays of bytes, (KV heads of all layers,
        columns), or with one row if all KV heads keep the same: the shares of a column's positions
        that are held, that are frozen, and that are held now but were frozen at the last call; in
        255ths, rounded up.
        """
        return self._store.cache_map()

    def budgets(self) -> list[tuple[int, ...]]:
        """Return the entries that every KV head may keep, as `[layer][KV head]`."""
        return self._store.budgets()

    @property
    def bytes_full_per_token(self) -> int:
        """Return the bytes that a full cache in f16 would take for a token."""
        return self._store.facts.bytes_full_per_token

    @property
    def evicted(self) -> int:
        """Return how many entries of all KV heads were dropped for good so far."""
        return self._store.evicted

    @property
    def sure_entries(self) -> int:
        """Return how many of the newest tokens every KV head certainly keeps; n_ctx if nothing is
        evicted.
        """
        return self._store.reach().sure

    def resize(self, kv_budget: Budget | str | float) -> None:
        """Change the budget while running: a larger one takes effect at once, a smaller one evicts.

        BudgetError leaves the session unchanged.
        """
        self._runner.check_usable(self._slot)
        budget = Budget.parse(kv_budget)
        try:
            self._runner.resize(budget)
        except MemoryError:
            raise self._runner.too_large(budget) from None
        self._slot.note_evictions()

    def thaw(self, rung: Rung = Rung.FULL, window: int = 0) -> int:
        """Restore frozen entries as far as the budget has room; returns how many entries of all KV
        heads.

        SOFT: those that would stay frozen for more than one further step; WINDOW: those frozen in
        the last `window` steps; FULL: all, and detections start again. The next token also searches
        the remaining ones.
        """
        self._runner.check_usable(self._slot)
        at_least("window", window, 0)
        with self._runner.live_store(self._slot) as store:
            return store.freezing.thaw(rung, window, self.position) if store.freezing else 0

    # --- go back ----------------------------------------------------------------------------------

    @property
    def reusable_from(self) -> int:
        """Return where the text ended when an entry was last evicted; 0 if none ever was.

        Truncating to this position or a later one leaves the same entries as at that time. After
        truncate() to an earlier one, it is more than n_ctx until reset(): entries are missing that
        a session without the later text would have.
        """
        return self.held().reusable_from

    @property
    def end_of_prompt(self) -> int:
        """Return where the last prompt ended; later tokens were written one by one."""
        return self._slot.text.parts.end_of_prompt

    def can_return_to(self, position: int) -> bool:
        """Tell whether truncate(position) leaves the entries of a session that never read further.

        This is always true for 0. If it is False, the tokens must be read again. With freezing,
        other entries may be frozen.
        """
        return self.held().can_return_to(position)

    def cut_before(self, position: int) -> int:
        """Return the last position up to `position` where reading the text started a micro-batch.

        It is 0 if the session cannot return there: see can_return_to().
        """
        return self.held().cut_before(position)

    def repeatable_from(self, position: int, end: int) -> int:
        """Return where to truncate to, so that the later text is read as it would be from position
        0.

        The result is at most `position`, where the text differs from the one that was read; `end`
        is the length that it may reach. It is 0 if something may be evicted before `end`, because
        then the kept entries depend on all earlier queries.
        """
        return self.held().repeatable_from(position, end)

    def held(self) -> HeldText:
        """Describe the text that was read, for reuse_of() in reuse.py."""
        return self._rollback.held()

    def truncate(self, position: int) -> None:
        """Roll back to `position` tokens; 0 is possible even after a failed decode.

        Entries before `position` that were evicted do not return: see can_return_to(). Raises
        ContextError if recurrent layers or sliding windows cannot roll back that far.
        """
        self._rollback.truncate(position)

    def reset(self) -> None:
        """Remove all tokens, and reset the counters."""
        self.truncate(0)
        self._clear_counts()

    def return_to_prompt(self, position: int, end: int) -> bool:
        """Roll back to the end of the last prompt, and restore its logits.

        Returns False, and changes nothing, if the last prompt did not end at `position`, or if
        something may be evicted before `end`: see repeatable_from().
        """
        return self._rollback.return_to_prompt(position, end)

    def return_to_checkpoint(
        self,
        tokens: Sequence[int],
        beyond: int = 0,
        *,
        repeatable: bool = False,
        reads_question: bool = False,
    ) -> bool:
        """Roll back to the checkpoint with the longest common beginning, if it exceeds `beyond`
        tokens.

        It may be a checkpoint of any session of its tenant in the pool, whatever was evicted since.
        If it covers the whole text, its logits are restored, too. Returns False, and changes
        nothing, if there is none; a session without a pool keeps none. If the pool has no room to
        cut the checkpoint, it returns False, too, and the session is empty. `repeatable`: only roll
        back to a position where a reading from 0 also starts a micro-batch, or to a checkpoint
        itself, so that asking again gives the same numbers. `reads_question`: not to a place within
        or behind a prompt that is asked again, which is then read again.
        """
        demand = Demand(is_cut=repeatable, reads_question=reads_question)
        return self._rollback.return_to_checkpoint(tokens, beyond, demand)

    def keep_checkpoint(self) -> None:
        """Keep a checkpoint of the current text, if the pool keeps checkpoints."""
        self._rollback.keep_checkpoint()

    def note_turn(self, *, writes: bool) -> None:
        """Keep a checkpoint if the text changes from reading to writing, or back."""
        self._rollback.note_turn(writes=writes)

    # --- files ------------------------------------------------------------------------------------

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        chat: bool | None = None,
        document: DocumentNote | None = None,
    ) -> SavedContents:
        """Write the whole state to a file, which appears complete or not at all.

        `chat`: whether the text is a chat by the model's template. `document`: what it has read, if
        it is a document, as read_document() of entropykv.session.document says it. Raises
        SessionFileError.
        """
        return self._saver.save(path, chat=chat, document=document)

    @property
    def saved_settings(self) -> SavedSettings:
        """Return the settings that its files have, to compare them with those of another file."""
        return self._saver.settings()

    def save_state(self) -> bytes:
        """Return the bytes that save() would write."""
        return self._saver.state()

    def load(self, path: str | os.PathLike[str]) -> SavedContents:
        """Load a saved session, which continues with the same numbers as if it had never ended.

        Model file, store, kv_type and policy must be those of the file. If the budget is too small
        for its entries, it evicts. The whole file is read and checked before anything changes.
        Raises SessionFileError, or FreezeError if cold storage has no room, and leaves the session
        unchanged.
        """
        contents = self._saver.load(path)
        self._clear_counts()
        return contents

    def load_state(self, data: bytes) -> SavedContents:
        """Load what save_state() returned, as load() does with a file."""
        contents = self._saver.load_state(data)
        self._clear_counts()
        return contents

    def open_document(self, path: str | os.PathLike[str], *more: str | os.PathLike[str]) -> None:
        """Continue from a document that read_document() or `entropykv read` has written.

        The first document is loaded, as load() does; the texts of the others are read behind it, in
        their order, as if the first had just been read. Then read the tokens of question().
        Raises SessionFileError and the errors of decode().
        """
        open_documents(self, [path, *more])

    def question(self, text: str) -> list[int]:
        """Return the tokens of a question about the document that was opened, and of the beginning
        of the answer; later questions are further turns: chat_turn().
        """
        return question_tokens(self, text)

    # --- in a pool --------------------------------------------------------------------------------

    @property
    def weight(self) -> float:
        """Return its weight in the pool, relative to the others."""
        return self._slot.weight

    @property
    def number(self) -> int:
        """Return how many sessions its pool had made before."""
        return self._slot.number

    @property
    def is_live(self) -> bool:
        """Tell whether it has a share of the pool, and is neither swapped out nor empty."""
        return self._slot.live

    def fork(self) -> Session:
        """Return another session of the pool that continues from the text of this one.

        Both use the same pages until one of them changes them. It is swapped out until it reads,
        and then gets a share of the pool. Raises PoolError if nothing more can be swapped out, and
        for a session without a pool.
        """
        self._runner.check_usable(self._slot)
        if self._pool is None:
            raise PoolError("a session alone cannot be forked; create it with a Pool")
        return Session.of_pool(
            self._pool,
            self._runner,
            self.recovery,
            self.on_climb,
            weight=self.weight,
            tenant=self.tenant,
            origin=self._rollback.fork(),
        )

    def swap_out(self) -> None:
        """Leave its share to the others of the pool until it is used again; raises PoolError."""
        self._runner.check_usable(self._slot)
        shared = self._runner.shared
        with self._runner.exclusively(self._slot):
            shared.swap_out(self._slot)
            shared.share()

    def pool_status(self) -> PoolStatus:
        """Return the session's status in its pool, at a moment between two steps.

        During a step, its pages may be given to another session.
        """
        with self._runner.scheduler.between_steps():
            return self._runner.shared.status_of(self._slot)

    # --- figures ----------------------------------------------------------------------------------

    def stats(self) -> SessionStats:
        """Return counts, bytes and times so far."""
        store = self._store
        counters = store.counters()
        counters["kv_bytes_scratch"] += self.snapshot_bytes
        drafts = self.drafting.counts if self.drafting else DraftCounts()
        draft_model = self._runner.draft_model
        return SessionStats(
            model=self._model.name,
            store=store.name,
            policy=self.policy.name,
            kv_budget=str(self._runner.budget),
            n_ctx=self.n_ctx,
            kv_bytes_full=self.position * store.facts.bytes_full_per_token,
            entries_full=self.position * store.facts.n_kv_heads,
            peak_rss_bytes=system.peak_rss_bytes(),
            freeze=self.freezing.where if self.freezing else None,
            drafted_tokens=drafts.drafted,
            accepted_drafts=drafts.accepted,
            draft_steps=drafts.steps,
            draft_kv_bytes=draft_model.kv_bytes if draft_model else 0,
            **self._counts.figures(),
            **counters,
        )

    def count_generated(self, n_tokens: int, seconds: float) -> None:
        """Add generated tokens, and the seconds they took, to the counts of stats()."""
        self._counts.add_generated(n_tokens, seconds)

    def count_prompt(self, n_tokens: int, seconds: float) -> None:
        """Add tokens of a prompt, and the seconds they took, to the counts of stats()."""
        self._counts.add_prompt(n_tokens, seconds)

    def note_climb(self, climb: Climb) -> None:
        """Record a climb of the recovery ladder, and call `on_climb`."""
        name = climb.rung.name.lower()
        self._counts.add_climb(name)
        if self.trajectory:
            self.trajectory.mark(climb.position, name)
        if self.on_climb:
            self.on_climb(climb)

    def _clear_counts(self) -> None:
        self._counts = SessionCounts()
        if self.trajectory:
            self.trajectory.clear()
