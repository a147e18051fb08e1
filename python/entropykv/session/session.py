"""Read and write one sequence of a model under a budget: Session."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import closing
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Unpack

from entropykv import system
from entropykv.errors import ContextError, PoolError
from entropykv.llamacpp.model import Model
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.session.draft_model import open_draft_model
from entropykv.session.drafting import DraftCounts
from entropykv.session.generate import generate_tokens
from entropykv.session.images import ImageLimits, Images
from entropykv.session.kept_texts import KeptText
from entropykv.session.model_runner import ModelRunner
from entropykv.session.reader import SequenceReader
from entropykv.session.recovery import Climb
from entropykv.session.sequence import is_placeholder
from entropykv.session.session_cache import SessionCache
from entropykv.session.session_files import SessionFiles
from entropykv.session.session_text import SessionText
from entropykv.session.stats import SessionCounts, SessionStats
from entropykv.settings.cache_options import CacheOptions, SessionArguments, shows
from entropykv.settings.freezing import Recovery
from entropykv.settings.sampling import Sampling
from entropykv.store.protocol import Store

QUESTION_MARK = "entropykv-question"
"""Text that stands for a question when the chat template is rendered to find out what comes before
and after one.
"""
_DEPRECATED = {
    **{name: f"cache.{name}" for name in ("budgets", "evicted", "importance", "predictor_fit")},
    **{name: f"files.{name}" for name in ("load", "load_state", "save", "save_state")},
    **{name: f"text.{name}" for name in ("return_to_checkpoint", "truncate")},
    "decode_drafts": "reader.read_drafts",
    "policy": "config.policy",
}
"""The deprecated attributes of version 0.1, and the path of each from a Session today."""


class Session:
    """Read and write one sequence of tokens with a model, inside a KV budget.

    Less common functions are in its parts: `model` (vocabulary, chat template), `config` (what the
    options mean for the model), `cache` (what is stored), `text` (going back in what was read),
    `files` (saving and loading), `reader` (micro-batches, drafts) and `counts`.

    `model`: the path of a GGUF file, or a Model, which the session closes. `options`, or keyword
    arguments of the same names, which take precedence: see CacheOptions. `n_ctx` may exceed the
    trained context: then positions are re-based as the sequence grows, or a ContextError says why
    the model cannot. `on_climb` is called with each Climb of the recovery ladder. `verbose`: print
    llama.cpp's own log.

    Raises ModelFileError for a file that cannot be loaded, UnsupportedModelError for a model that
    the store cannot serve, BudgetError for a budget that is too small or does not fit into memory,
    ProfileError for a profile that cannot be read or does not fit, SettingsError for impossible
    options, and FreezeError if cold storage cannot be made.
    """

    name: str | None = None
    """A name that callers may set, to find it among the sessions of a pool."""
    is_document: bool = False
    """Whether the session holds a document and nothing else, so that questions about it are asked
    to copies of the session. Callers may set it, to tell viewers of a pool.
    """
    _closed = True
    """True until __init__ has made everything, so that close() works even if __init__ raises."""

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
        """Make a store for the model. One that is given by its path is loaded after everything else
        has been checked.
        """
        asked = CacheOptions.of(options, arguments).alone()
        runner = ModelRunner(model, asked, verbose=verbose, ends_with_session=True)
        try:
            if runner.config.spec_type == "draft":
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
        to where; the other arguments are those of Session. Raises HubError if nothing can be
        downloaded, the errors of Session, and MissingExtraError without the extra `hub`.
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
        origin: KeptText | None = None,
    ) -> Session:
        """Make a session of a pool, which owns `runner` and lives at least as long as the session:
        see Pool.session().

        `origin`: a text that was kept for this session, which continues from it.
        """
        self = cls.__new__(cls)
        runner.config.check_recovery(recovery)
        self._begin(runner, recovery, on_climb, weight=weight, tenant=tenant, pool=pool)
        runner.sessions[self.number] = self
        if origin is not None:
            self.text.go_on_from(origin)
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
        """The tenant, whose texts the session may continue from: see Pool.session()."""
        self.model = runner.model
        """The model, with its vocabulary and chat template."""
        self.config: ResolvedConfig = runner.config
        """The options, and what they mean for the model."""
        self._slot = slot = runner.add_slot(weight)
        self.weight = weight
        """The weight of the session in its pool, relative to the others."""
        self.number = slot.number
        """The number of the session: how many sessions its pool had made before."""
        self.hook = slot.store.context.hook
        """The hook that changes the context's graphs and can time them: see
        entropykv.evaluation.bench.
        """
        self.counts = SessionCounts()
        """The counts that stats() shows; code that reads or writes tokens adds to them."""
        self.text = SessionText(runner, slot, tenant)
        """The part that goes back in what was read, and keeps checkpoints."""
        self.reader = SequenceReader(runner, slot, self.text, runner.drafter())
        """The part that reads tokens in micro-batches, and with drafts."""
        self.cache = SessionCache(runner, slot)
        """The part that tells what is stored, and changes how much may be stored."""
        self.files = SessionFiles(runner, slot, self.reader, self.counts)
        """The part that saves and loads the session, and opens documents."""
        self.snapshot_bytes = 0
        """The bytes of the copy of the entries' importance that session/passages.py holds."""
        self._closed = False

    if not TYPE_CHECKING:  # So a type checker reports deprecated names.

        def __getattr__(self, name: str) -> Any:
            """Return what a deprecated name stands for, with a DeprecationWarning."""
            if name not in _DEPRECATED:
                raise AttributeError(f"a Session has no attribute {name!r}")
            message = f"Session.{name} is deprecated; use Session.{_DEPRECATED[name]}"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return attrgetter(_DEPRECATED[name])(self)

    def __enter__(self) -> Session:
        """Return the session itself; leaving the `with` block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the session."""
        self.close()

    def __del__(self) -> None:
        """Free what was not closed, without waiting, because this may happen in any thread."""
        self.close_later()

    def close_later(self) -> None:
        """Close the session without waiting: its sequence is freed before the next step."""
        if not self._closed:
            self._closed = True
            self.reader.close()
            self._runner.remove_slot_later(self._slot)

    def let_go(self) -> None:
        """Give back what the session holds at once, and close it. The pool calls this, between two
        steps or for a session that is swapped out.
        """
        self._runner.shared.forget(self._slot)
        self.close_later()

    def close(self) -> None:
        """Free the sequence, and leave its share to the others of its Pool; without a Pool, also
        free the model.

        close() waits for the running micro-batch. The session cannot be used any more: a thread
        that reads or writes it gets an EntropyKVError.
        """
        if not self._closed:
            self._closed = True
            self.reader.close()
            self._runner.remove_slot(self._slot)

    def decode(self, tokens: Sequence[int], all_logits: bool = False) -> npt.NDArray[np.float32]:
        """Read tokens inside the budget; returns their logits.

        Shape (len(tokens), n_vocab) with `all_logits`, else (1, n_vocab) of the last token. Raises
        ContextError for no tokens, unknown tokens, or more than the context holds, EntropyKVError
        for a session that is closed or whose last decode failed, PoolError if the pool has no room,
        FreezeError if frozen entries cannot be written or read, ImageError for placeholders of an
        image that is not held, UnsupportedModelError if the graph is not as the store expects,
        StepError if a step could not be computed, and SessionFileError if a loaded file was
        changed.
        """
        start = time.perf_counter()
        parts = [p for p in self.reader.read(tokens, all_logits) if p is not None]
        self.counts.add_prompt(len(tokens), time.perf_counter() - start)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def generate(
        self, tokens: Sequence[int], max_tokens: int = -1, **sampling: Any
    ) -> Generator[int, None, None]:
        """Read `tokens`, then yield generated ones one by one.

        Without tokens, it continues after the last token read; `logits` must not be None. A token
        is read when the next one is requested, so the last one that was yielded is not read yet.
        With recovery, tokens are read before they are yielded: if you stop early, close() the
        generator (contextlib.closing) before you use the session.

        Ends at an end-of-generation token (not yielded), after `max_tokens` (-1: no limit), or when
        the context is full. `sampling`: the fields of entropykv.settings.sampling.Sampling; with
        temperature 0, sampling is greedy and does not depend on `seed`. Raises SettingsError for
        impossible sampling, ContextError for `max_tokens` 0, and the errors of decode().
        """
        return self._resting(generate_tokens(self, tokens, max_tokens, Sampling(**sampling)))

    def _resting(self, stream: Generator[int, None, None]) -> Generator[int, None, None]:
        """Yield tokens unchanged; at the end, tell the pool not to wait for more.

        The vocabulary, which samplers read, is kept while a token is chosen.
        """
        try:
            with closing(stream):
                while True:
                    self._runner.check_open(self._slot)
                    with self.model.in_use():
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
            self._slot.rests = True
            self._runner.scheduler.rest(self._slot)

    def interrupt(self) -> None:
        """Cancel a decode of this session that waits for its turn in another thread; that thread
        gets a PoolError.
        """
        self._runner.scheduler.cancel(self._slot)

    def refuse(self) -> None:
        """Refuse further tokens: a decode in another thread ends with its next micro-batch.

        That thread gets an EntropyKVError. The text can still be examined until close().
        """
        self._runner.refuse(self._slot)

    @property
    def is_closed(self) -> bool:
        """Tell whether the session or its pool was closed."""
        return self._closed or self._runner.closed

    @property
    def _store(self) -> Store:
        return self._slot.store

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

        Returns None before the first token, and after truncate() to an earlier position.
        """
        return self._slot.text.logits

    def reset(self) -> None:
        """Remove all tokens, and reset the counters."""
        self.text.truncate(0)
        self.counts.clear()
        if self._slot.trajectory:
            self._slot.trajectory.clear()

    def tokenize(
        self, text: str | None, add_bos: bool | None = None, special: bool = True
    ) -> list[int]:
        """Return the tokens of a text; `add_bos` None adds BOS if the model wants it.

        `special`: recognise names of control tokens. Raises ContextError for None, which
        `model.chat_prompt()` and `model.chat_turn()` return if the model has no chat template.
        """
        if text is None:
            raise ContextError(
                "there is no text to read: the model has no chat template, so chat_prompt() and "
                "chat_turn() return None; tokenize the text itself"
            )
        add = self.model.adds_bos if add_bos is None else add_bos
        return self.model.tokenize(text, add_bos=add, special=special)

    def detokenize(self, tokens: Sequence[int], special: bool = False) -> str:
        """Return the text of tokens, without images; `special`: with control tokens."""
        text = [token for token in tokens if not is_placeholder(token)]
        return self.model.detokenize(text, special=special)

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of a token, which may end within a character; none for a control token
        unless `special`.

        Placeholders of images have no bytes.
        """
        if is_placeholder(token):
            return b""
        return self.model.token_bytes(token, special=special)

    def question_text(self, text: str, *, chat: bool = True) -> str:
        """Return what follows a document: the question, the end of the user's turn if it is a chat,
        and the beginning of the answer. It is for tokenize(). Raises as Model.chat_prompt().
        """
        prompt = self.model.chat_prompt(QUESTION_MARK) if chat else None
        said: str = self.model.said(text if prompt is None else text.strip())
        return said if prompt is None else said + prompt.rpartition(QUESTION_MARK)[2]

    def question(self, text: str) -> list[int]:
        """Return the tokens of a question about the document that was opened, and of the beginning
        of the answer; later questions are further turns: see Model.chat_turn().
        """
        return self.tokenize(self.question_text(text), add_bos=False)

    def open_projector(
        self,
        path: str | os.PathLike[str],
        limits: ImageLimits | None = None,
        *,
        use_gpu: bool = False,
    ) -> Images:
        """Open the model's projector (mmproj file), and return what reads prompts with images.

        The projector serves all sessions of the model, until the model is closed or another
        projector is opened. `limits`: for the images of one prompt; None: the defaults of
        ImageLimits. `use_gpu`: let the projector run on a GPU. Raises ModelFileError and
        UnsupportedModelError: see Projector.
        """
        self._runner.check_open(self._slot)
        return self._runner.open_projector(path, limits, use_gpu=use_gpu)

    @property
    def images(self) -> Images | None:
        """Return the object that reads prompts with images; None before open_projector()."""
        return self._runner.images

    def fork(self) -> Session:
        """Return another session of the pool that continues from the text of this one.

        Both sessions use the same pages until one of them changes a page. The new session is
        swapped out until it reads, and then gets a share of the pool. Raises PoolError if nothing
        more can be swapped out, and for a session without a pool.
        """
        self._runner.check_usable(self._slot)
        if self._pool is None:
            raise PoolError("a session without a Pool cannot be forked; create it with a Pool")
        return Session.of_pool(
            self._pool,
            self._runner,
            self.recovery,
            self.on_climb,
            weight=self.weight,
            tenant=self.tenant,
            origin=self.text.fork(),
        )

    def stats(self) -> SessionStats:
        """Return the counts, bytes and times of the session so far."""
        store = self._store
        counters = store.counters()
        counters["kv_bytes_scratch"] += self.snapshot_bytes
        drafting = self.reader.drafting
        drafts = drafting.counts if drafting else DraftCounts()
        draft_model = self._runner.draft_model
        return SessionStats(
            model=self.model.name,
            store=store.name,
            policy=self.config.policy.name,
            kv_budget=str(self._runner.budget),
            n_ctx=self.config.n_ctx,
            kv_bytes_full=self.position * store.facts.bytes_full_per_token,
            entries_full=self.position * store.facts.n_kv_heads,
            peak_rss_bytes=system.peak_rss_bytes(),
            freeze=self.config.freezing.where if self.config.freezing else None,
            drafted_tokens=drafts.drafted,
            accepted_drafts=drafts.accepted,
            draft_steps=drafts.steps,
            draft_kv_bytes=draft_model.kv_bytes if draft_model else 0,
            **self.counts.figures(),
            **counters,
        )

    def note_climb(self, climb: Climb) -> None:
        """Record a climb of the recovery ladder, and call `on_climb`."""
        name = climb.rung.name.lower()
        self.counts.add_climb(name)
        if self._slot.trajectory:
            self._slot.trajectory.mark(climb.position, name)
        if self.on_climb:
            self.on_climb(climb)
