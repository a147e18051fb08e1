"""Run a llama_cpp.Llama inside a KV budget: EntropyLlama."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, NoReturn, TypeVar, cast

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama import LlamaState
from llama_cpp.llama_tokenizer import LlamaTokenizer
from typing_extensions import Self

from entropykv.drop_in.arguments import (
    BudgetArguments,
    EvictionEvent,
    sampling_of,
    split_arguments,
    with_draft_model,
)
from entropykv.drop_in.chats import (
    LlamaCppWriter,
    answer_chat,
    formatter_of,
    stops_of,
    with_constraint,
    with_content,
)
from entropykv.drop_in.context import BorrowedModel, BudgetContext, CallGuard, SharedModel
from entropykv.drop_in.image_handlers import BudgetImageHandler
from entropykv.errors import (
    ContextError,
    EntropyKVError,
    ModelFileError,
    SessionFileError,
    SettingsError,
)
from entropykv.generation.events import AnswerPiece, Ended, Event, generate_events
from entropykv.generation.prompt import GenerationRequest, Prompt, infill_prompt, shown_prompt
from entropykv.generation.resuming import as_held, resume
from entropykv.llamacpp.foreign_text import MARK, without_names
from entropykv.llamacpp.model import captured_log, last_error, reads_blocks
from entropykv.model.geometry import ModelGeometry, read_loadable
from entropykv.model.header import way_out_of
from entropykv.session.file import SavedContents
from entropykv.session.generate import Chooser, Companions, StepHooks
from entropykv.session.images import ImageLimits, ImagePrompt, Images
from entropykv.session.logprobs import CompletionLogprobs
from entropykv.session.pool import Pool
from entropykv.session.recovery import Climb, Watch
from entropykv.session.reuse import LEAST_SPARED
from entropykv.session.sequence import is_placeholder
from entropykv.session.session import Session
from entropykv.session.session_files import check_template, document_header
from entropykv.session.stats import SessionStats
from entropykv.settings.cache_options import CacheOptions, PoolArguments, shows
from entropykv.settings.sampling import Sampling, is_random_seed, new_seed
from entropykv.store.protocol import Logits
from entropykv.thinking.tags import tags_of

_Method = TypeVar("_Method", bound=Callable[..., Any])


@functools.cache
def _signature_of(name: str) -> inspect.Signature:
    """Return the signature of a method of llama_cpp.Llama."""
    return inspect.signature(getattr(llama_cpp.Llama, name))


def _as_in_llama(method: _Method) -> _Method:
    """Give a method the signature of llama_cpp.Llama's method of the same name."""
    cast(Any, method).__signature__ = _signature_of(method.__name__)
    return method


class EntropyLlama(llama_cpp.Llama):
    """Run a llama_cpp.Llama whose KV cache never exceeds a budget.

    It takes the arguments of llama_cpp.Llama, and the fields of CacheOptions: as keyword
    arguments, or together as `options`, over which keyword arguments take precedence. n_ctx is the
    most tokens of a sequence (0: the trained context); the cache takes what the budget says.
    `recovery` has no rewalks here; `on_climb` is called with each of its Climbs. `on_evict` is
    called with an EvictionEvent after a decode call that evicted something; an exception that it
    raises is passed to the caller, and the model can continue. flash_attn has an effect only with
    the flat store and kv_type f16: otherwise attention is ours, or must be flash attention.

    If a prompt begins with the text that was read, that is not read again, even in other tokens. A
    prompt that differs later is read again from the beginning of the micro-batch with the first
    difference, so that the same request gives the same answer. It is read from the start if entries
    were evicted since, or may be evicted before its end (including max_tokens). The last prompt
    itself is not read again. With `repeatable` False, nothing is read again unnecessarily, and
    answers to the same request may differ.

    It holds one sequence, so only one call can run at a time: EntropyKVError is raised if another
    thread is within a call, and if an answer continues after another call. With `n_sequences`, the
    budget belongs to a Pool (`swap`, `swap_limit`: see there), and another() makes further objects
    for other threads, whose tokens are read together. `checkpoints` without `n_sequences` makes a
    pool of one, in which a turn that is edited or asked again continues from the nearest
    checkpoint, whatever was evicted since.

    `logprobs` need no `logits_all`, which keeps the logits of every token beside the budget, up to
    n_ctx times the vocabulary in float32, as llama_cpp.Llama does.

    `document` is the file of a document, which open_document() opens. `parse_special`: whether
    names of control tokens in messages, such as <|im_end|>, become control tokens, with which
    whoever wrote them can end a turn and begin another one.

    Raises ModelFileError and UnsupportedModelError for the model, BudgetError, ProfileError and
    SettingsError for the arguments, FreezeError if cold storage cannot be made, and
    SessionFileError for the document.
    """

    _ctx: BudgetContext
    """Replaces the stock context; it uses the session."""
    _budget: BudgetArguments
    _guard: CallGuard
    """Allows one call at a time."""
    _pool: Pool | None = None
    _document: Sequence[int] = ()
    """The tokens of the document that was opened."""
    _document_path: str | os.PathLike[str] = ""
    _draws_seeds: bool = True
    """Whether an answer without a seed gets a random one: the model was given none, or -1."""
    _n_kept: int | None = None
    """The n_tokens that the caller has set; None: all tokens of the session."""
    _scored: Sequence[int] = ()
    """The tokens whose logits `scores` has, with logits_all."""
    _sampled: int | None = None
    """The last token of sample(), until it is read."""
    _watch: Watch | None = None
    """The recovery ladder of tokens that the caller samples and reads one by one."""
    _image_prompt: ImagePrompt | None = None
    """The last prompt with images; it keeps the images alive until they are read."""
    _alike: weakref.WeakSet[EntropyLlama]
    """The objects with the same weights and the same pool; the last one that is closed
    frees both.
    """

    @shows(PoolArguments)
    def __init__(
        self,
        model_path: str | os.PathLike[str],
        options: CacheOptions | None = None,
        *,
        on_evict: Callable[[EvictionEvent], object] | None = None,
        repeatable: bool = True,
        on_climb: Callable[[Climb], object] | None = None,
        document: str | os.PathLike[str] | None = None,
        parse_special: bool = False,
        **llama: Any,
    ) -> None:
        """Load the model; its stock context is a stub, which the context of the budget replaces."""
        # The stack is made first, so that close() works even if loading raises.
        self._stack = contextlib.ExitStack()
        cache, arguments = split_arguments(options, llama)
        budget = BudgetArguments(cache, on_evict, repeatable, on_climb, parse_special)
        geometry = read_loadable(model_path)
        stub = {"n_ctx": 1, "type_k": None, "type_v": None}
        log: list[tuple[int, str]] = []
        with contextlib.ExitStack() as stack:
            if not arguments["verbose"]:
                log = stack.enter_context(captured_log())
            try:
                super().__init__(os.fspath(model_path), **{**arguments, **stub})
            except (ValueError, RuntimeError) as error:
                reason = last_error(log) if log else str(error)
                way_out = way_out_of(
                    reason, "check the file, and the arguments for llama_cpp.Llama"
                )
                raise ModelFileError(f"{model_path}: {reason}; {way_out}") from error
        if self.lora_path and not self._lora_adapter:  # Llama reports no adapter that fails.
            raise ModelFileError(
                f"{self.lora_path}: llama.cpp cannot load it; give a LoRA adapter of this model"
            )
        self._set_sizes(arguments)
        self._begin(geometry, budget)
        if document is not None:
            try:
                self.open_document(document)
            except BaseException:
                self.close()
                raise

    @property
    def model_params(self) -> Any:
        """Return llama.cpp's llama_model_params, with which Llama loads the model."""
        return self.__dict__["model_params"]  # Those of the loaded Llama after attach().

    @model_params.setter
    def model_params(self, parameters: Any) -> None:
        # Llama has no argument for use_extra_bufts, with which llama.cpp repacks weights. Then only
        # llama.cpp could read the weights: sums of one token would differ from those of several
        # tokens, and from those of a Session.
        parameters.use_extra_bufts = not reads_blocks()
        self.__dict__["model_params"] = parameters

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None = None,
        additional_files: Sequence[str] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        local_dir_use_symlinks: bool | str = "auto",  # noqa: ARG003  # of llama_cpp.Llama's
        cache_dir: str | os.PathLike[str] | None = None,
        **arguments: Any,
    ) -> Self:
        """Make an EntropyLlama with a model of the Hugging Face Hub, which is downloaded only once.

        The arguments are those of llama_cpp.Llama.from_pretrained(), but `filename` may be left
        out, and `repo_id` may be user/model:quant; see fetch_model() of entropykv.hub.
        `local_dir_use_symlinks` has no effect, as in huggingface_hub. Raises HubError, the errors
        of EntropyLlama, and MissingExtraError without the extra `hub`.
        """
        from entropykv.hub import fetch_model  # noqa: PLC0415  # it needs the extra hub

        path = fetch_model(
            repo_id,
            filename,
            additional_files=additional_files or (),
            local_dir=local_dir,
            cache_dir=cache_dir,
        )
        return cls(model_path=path, **arguments)

    def _set_sizes(self, arguments: Mapping[str, Any]) -> None:
        """Set the sizes that Llama.__init__ would have set without the stub."""
        parameters = self.context_params
        parameters.n_ctx = arguments["n_ctx"] or self._model.n_ctx_train()
        self.n_batch = parameters.n_batch = min(parameters.n_ctx, arguments["n_batch"])
        parameters.n_ubatch = min(self.n_batch, arguments["n_ubatch"])
        for name in ("type_k", "type_v"):
            if arguments[name] is not None:
                setattr(parameters, name, arguments[name])

    def _begin(self, geometry: ModelGeometry, budget: BudgetArguments) -> None:
        """Replace the stock context, which is freed, by a session."""
        budget = with_draft_model(budget, self.draft_model)
        self._alike = weakref.WeakSet([self])
        SharedModel.of(self._model)
        model = BorrowedModel(self, geometry, parse_special=budget.parse_special)
        try:
            session = self._session_of(model, budget)
        except BaseException:
            model.close()
            raise
        if self.verbose and session.config.fallback:
            sys.stderr.write(
                f"EntropyLlama: {session.config.fallback}; going on with "
                f"store='{session.cache.store}'\n"
            )
        if self.verbose and session.cache.on_host:
            sys.stderr.write(f"EntropyLlama: {session.cache.on_host}\n")
        self._ctx.close()
        self._batch.close()  # type: ignore[no-untyped-call]
        self._budget = budget
        self._draws_seeds = is_random_seed(self._seed)
        if self.draft_model is not None:
            # The session drafts, and Llama.generate() does not. Llama keeps the logits of all
            # tokens because of a draft model, whether that was asked for or not.
            self.draft_model = None
            self._logits_all = self._logits_all and self.scores.shape[0] == session.config.n_ctx
        self._take(session)

    def _session_of(self, model: BorrowedModel, budget: BudgetArguments) -> Session:
        parameters = self.context_params
        cache = replace(
            budget.cache,
            n_ctx=parameters.n_ctx,
            n_ubatch=parameters.n_ubatch,
            n_threads=self.n_threads,
            n_threads_batch=self.n_threads_batch,
            n_gpu_layers=self.model_params.n_gpu_layers,
        ).going_back()
        if not cache.in_pool:
            return Session(model, cache, on_climb=budget.on_climb)
        self._pool = Pool(model, cache)
        return self._pool.session(on_climb=budget.on_climb)

    def _take(self, session: Session) -> None:
        """Use a session that has read nothing."""
        self._guard = CallGuard()
        self._ctx = BudgetContext(self, session)
        self._n_ctx = session.config.n_ctx
        self._n_kept, self._scored, self._sampled, self._watch = None, (), None, None
        self.scores = np.empty(
            (session.config.n_ctx if self._logits_all else 1, self._n_vocab), np.single
        )

    @property
    def pool(self) -> Pool | None:
        """Return the pool that this object shares with the results of another(); None without
        `n_sequences` and `checkpoints`.
        """
        return self._pool

    def another(self) -> Self:
        """Return another object with the same weights and the same pool, which has read nothing.

        Another thread can use it at the same time. Each object is closed separately: weights and
        pool are freed with the last one. Raises SettingsError without a pool, EntropyKVError if
        this object is closed.
        """
        _ = self._session  # Raises if this object is closed.
        if self._pool is None:
            raise SettingsError(
                "one budget for several conversations is a pool; make the EntropyLlama with "
                "n_sequences, how many of them it holds at a time"
            )
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._sampler = other.cache = None
        other._take(self._pool.session(on_climb=self._budget.on_climb))
        self._alike.add(other)
        return other

    def close(self) -> None:
        """Free the sequence; the last object of a pool also frees the pool, the context and the
        model.

        It waits for a running call of another thread, which ends with an EntropyKVError before it
        reads more.
        """
        context = getattr(self, "_ctx", None)
        if not isinstance(context, BudgetContext):  # This Llama was never inside a budget.
            super().close()
            return
        context.refuse()
        with self._guard.lock:
            self._guard.leave()
            context.close_session()
            self._alike.discard(self)
            if not self._alike:
                if self._pool is not None:
                    self._pool.close()
                super().close()

    def __del__(self) -> None:
        """Free what was not closed, without waiting, because this may happen in any thread.

        The session, and a pool without other users, are garbage as well, and close themselves.
        """
        context = getattr(self, "_ctx", None)
        if isinstance(context, BudgetContext):
            context.close()
            self._pool = None
        self.close()

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """Keep the model in memory in the `with` block: see CallGuard.call()."""
        return self._guard.call(self._ctx)

    @property
    def _session(self) -> Session:
        return self._ctx.session

    def open_projector(
        self, path: str | os.PathLike[str], limits: ImageLimits | None = None
    ) -> Images:
        """Open the model's projector: see Session.open_projector()."""
        on_device = bool(self.model_params.n_gpu_layers)
        return self._session.open_projector(path, limits, use_gpu=on_device)

    @property
    def images(self) -> Images | None:
        """Return the object that reads images in prompts; None while no projector is open."""
        return self._session.images

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Return a text's tokens, as llama_cpp.Llama does; raises EntropyKVError once closed.

        Names of control tokens in the messages of a chat are plain text: see said().
        """
        # Raises EntropyKVError once the object is closed.
        session = self._session
        if not special or MARK.encode() not in text:
            return super().tokenize(text, add_bos, special)
        # A tokenizer of the user's reads names of control tokens anywhere, so they are changed.
        if not isinstance(self.tokenizer_, LlamaTokenizer):
            plain = without_names(text.decode("utf-8")).encode("utf-8")
            return super().tokenize(plain, add_bos, special)
        tokens: list[int] = []
        for number, run in enumerate(session.model.control_names.runs(text.decode("utf-8"))):
            begins = add_bos and number == 0
            tokens += super().tokenize(run.text.encode("utf-8"), begins, run.special)
        return tokens

    def said(self, value: Any, *, tags: bool = False) -> Any:
        """Return a text that others have written, or lists and objects with such texts, with marks
        by which tokenize() reads names of control tokens in them as plain text.

        `tags`: names of the tags of thoughts stay control tokens, as in answers of a model. With
        `parse_special`, the value is returned unchanged.
        """
        if self._budget.parse_special:
            return value
        return self._session.model.control_names.marked(value, self._tags if tags else ())

    @functools.cached_property
    def _tags(self) -> frozenset[str]:
        """Return the tags of thoughts that are control tokens."""
        tags = tags_of(self.metadata.get("tokenizer.chat_template"))
        return frozenset() if tags is None else frozenset(tags.control)

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        """Return the text of tokens, as llama_cpp.Llama does; placeholders of images have none."""
        tokens = [token for token in tokens if not is_placeholder(token)]
        return super().detokenize(tokens, prev_tokens, special)

    @property
    def n_tokens(self) -> int:
        """Return how many tokens were read.

        Setting a smaller number goes back: later calls read behind that many tokens.
        """
        position = self._session.position
        return position if self._n_kept is None else min(self._n_kept, position)

    @n_tokens.setter
    def n_tokens(self, n_tokens: int) -> None:
        self._n_kept = n_tokens

    @property
    def input_ids(self) -> npt.NDArray[np.intc]:
        """Return the tokens that were read, and zeros behind them, n_ctx in all: a copy."""
        ids, read = np.zeros(self._n_ctx, np.intc), self._input_ids
        ids[: len(read)] = read
        return ids

    @input_ids.setter
    def input_ids(self, _: Any) -> None:
        """Do nothing: llama_cpp.Llama makes an array, but here the session has the tokens."""

    @property
    def _input_ids(self) -> npt.NDArray[np.intc]:
        return np.array(self._session.tokens[: self.n_tokens], np.intc)

    def eval(self, tokens: Sequence[int]) -> None:
        """Read tokens after the first n_tokens of input_ids, which are read again if necessary.

        Raises ContextError for more than n_ctx tokens.
        """
        with self._alone():
            self._guard.leave()
            self._read([int(token) for token in tokens])

    def _read(self, ids: list[int]) -> None:
        """Read tokens of a prompt, or the one that was sampled last, and keep their logits."""
        session, written = self._session, ids == [self._sampled]
        self._sampled = None
        ids = [*self._back(), *ids]
        if not ids:
            return
        start, written = time.perf_counter(), written and len(ids) == 1
        with self._telling():
            for logits in session.reader.read(ids, self._logits_all, writes=written):
                if self._logits_all and logits is not None:
                    self._scored = session.tokens
                    self.scores[session.position - len(logits) : session.position] = logits
                elif logits is not None:
                    self.scores[:1] = logits[-1:]
            count = session.counts.add_generated if written else session.counts.add_prompt
            count(0 if written else len(ids), time.perf_counter() - start)
            self._recover(written=written)

    def _recover(self, *, written: bool) -> None:
        """Let the recovery ladder see the logits behind a token that the caller has sampled."""
        session = self._session
        if not written or session.recovery is None or session.logits is None:
            self._watch = None
            return
        if self._watch is None:
            self._watch = Watch(session, session.recovery, self._n_vocab)
        self._watch.wants_rewalk(session.logits, session.position)

    def _back(self) -> list[int]:
        """Go back to n_tokens; returns the tokens before that must be read again.

        There are none if the session can return to n_tokens; otherwise these are all of them, or
        those behind a checkpoint.
        """
        session, kept = self._session, self.n_tokens
        self._n_kept = None
        if session.text.held().can_return_to(kept):
            if session.position == kept > 0:
                return []
            # truncate() raises if the session's pool gives it a smaller share now.
            with contextlib.suppress(ContextError):
                session.text.truncate(kept)
                return []
        tokens, beyond = session.tokens[:kept], LEAST_SPARED - 1
        if self._logits_all or not session.text.return_to_checkpoint(
            tokens[:-1], beyond, repeatable=self._budget.repeatable
        ):
            session.text.truncate(0)
        return tokens[session.position :]

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Call on_evict if entries are evicted in the `with` block."""
        session, on_evict = self._session, self._budget.on_evict
        before = session.cache.evicted
        yield
        if on_evict is not None and session.cache.evicted != before:
            kept = session.stats().entries_kept
            on_evict(EvictionEvent(session.cache.evicted - before, kept, session.position))

    def reset(self) -> None:
        """Remove all tokens; kv_stats() continues to count."""
        with self._alone():
            self._guard.leave()
            self._n_kept = None
            self._session.text.truncate(0)

    @_as_in_llama
    def sample(self, *arguments: Any, **options: Any) -> int:
        """Sample a token from the logits of a token that was read: of the last one by default, and
        always without logits_all. See llama_cpp.Llama.sample(). Raises EntropyKVError if no token
        was read.
        """
        given, start = self._given("sample", arguments, options), time.perf_counter()
        with self._alone():
            session, row = self._session, given["idx"]
            companions = Companions(processors=self._processors(given))
            with Chooser(self._sampling(given), session, companions) as chooser:
                chosen = chooser.choose(self._logits_at(-1 if row is None else row - self.n_tokens))
            # Where a constraint allows no further token, the text ends.
            token = self.token_eos() if chosen is None else chosen
            self._sampled = token
            if not session.model.is_end(token):
                session.counts.add_generated(1, time.perf_counter() - start)
        return int(token)

    def _logits_at(self, row: int) -> Logits:
        """Return the logits of a token, (n_vocab,): row -1 is the last one."""
        logits = self.scores[self.n_tokens + row] if self._logits_all else self._session.logits
        if logits is None or not self.n_tokens:
            raise EntropyKVError("there are no logits to sample from; eval() a token first")
        return cast(Logits, logits)

    def _given(
        self, name: str, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of a method of llama_cpp.Llama by name, with its defaults."""
        bound = _signature_of(name).bind(self, *arguments, **options)
        bound.apply_defaults()
        return {name: value for name, value in bound.arguments.items() if name != "self"}

    def _sampling(self, given: Mapping[str, Any]) -> Sampling:
        return sampling_of(given, self._seed, self.last_n_tokens_size)

    def _processors(self, given: Mapping[str, Any]) -> list[Callable[[Logits], object]]:
        """Return the functions that get the logits before a token is chosen: with logits_all, one
        that keeps them in `scores`, then the caller's logits_processor.

        The functions refer to this object weakly, because it holds an unfinished answer, which
        holds the functions.
        """
        itself = weakref.ref(self)

        def changed_by(process: Callable[[Any, Any], Any]) -> Callable[[Logits], object]:
            def change(logits: Logits) -> None:
                logits[:] = process(_living(itself)._input_ids, logits)

            return change

        def keep(logits: Logits) -> None:
            llama = _living(itself)
            llama._scored = llama._session.tokens
            llama.scores[len(llama._scored) - 1] = logits

        changing = [changed_by(each) for each in given["logits_processor"] or ()]
        return [keep, *changing] if self._logits_all else changing

    def _hooks(self, given: Mapping[str, Any]) -> StepHooks:
        """Return the StepHooks that ask the caller's stopping_criteria before every token."""
        criteria, itself = given["stopping_criteria"], weakref.ref(self)
        if criteria is None:
            return StepHooks()

        def ends() -> bool:
            llama = _living(itself)
            return bool(criteria(llama._input_ids, llama._session.logits))

        return StepHooks(ends=ends)

    def _begun(self, tokens: list[int], *, resets: bool) -> list[int]:
        """Return the tokens of a prompt for _events(), after going back to n_tokens.

        With `resets`, they are those in which the session has read the prompt's text, if it has;
        but with logits_all the prompt's own, because rows of `scores` belong to them. Without
        `resets`, the tokens that must be read again come first.
        """
        with self._alone():
            self._guard.leave()
            again = self._back()
            if not resets:
                return [*again, *tokens]
            return tokens if self._logits_all else as_held(self._session, Prompt(tokens))

    def _events(
        self, request: GenerationRequest, given: Mapping[str, Any], *, resets: bool = True
    ) -> Generator[Event, None, None]:
        """Yield the events of an answer; between two events, another call may end the answer.

        With `resets`, the prompt goes on from what was read of it; without, it follows the text
        that was read.
        """
        guard = self._guard
        with self._alone():
            guard.leave()
            self._back()
            n_cached = self._resumed(request) if resets else 0
            if self._logits_all:
                self._read(request.prompt.tokens[n_cached:])
                n_cached = len(request.prompt.tokens)
            # generate_events() records log probabilities of the prompt only while it reads it.
            if self._logits_all and request.prompt_logprobs:
                self._session.text.truncate(0)
                n_cached = 0
            answer = generate_events(
                self._session,
                request,
                n_cached=n_cached,
                hooks=self._hooks(given),
                processors=self._processors(given),
            )
            guard.begin(answer)
        try:
            while True:
                _check_attached(self)
                with self._alone():
                    guard.check_goes_on(answer, self._ctx)
                    with self._telling():
                        event = next(answer, None)
                if event is None:
                    return
                yield event
        finally:
            guard.end(answer)

    def _resumed(self, request: GenerationRequest) -> int:
        """Go back to where a prompt can continue; returns how many of its tokens are read then."""
        session, tokens, document = self._session, request.prompt.tokens, self._document
        n_cached = resume(session, request, repeatable=self._budget.repeatable)
        if self._logits_all and [*self._scored[:n_cached]] != tokens[:n_cached]:
            session.text.truncate(0)  # Otherwise `scores` would lack rows.
            return 0
        is_about = tokens[: len(document)] == [*document] and not request.prompt_logprobs
        if n_cached < len(document) and is_about:
            # Otherwise all of the document would be read, as it is if its file is gone.
            with contextlib.suppress(SessionFileError):
                n_cached = session.files.load(self._document_path).position
        return n_cached

    @_as_in_llama
    def generate(self, *arguments: Any, **options: Any) -> Generator[int, Any, None]:
        """Yield tokens that follow `tokens`, also behind one that ends a text, until the context is
        full; see llama_cpp.Llama.generate(). Tokens that are sent to the generator are read next.

        If `tokens` begin with the text that was read, in other tokens, that text is not read again.
        This does not apply with logits_all, because the rows of `scores` belong to `tokens`.
        """
        given = self._given("generate", arguments, options)
        resets, sampling, count = given["reset"], self._sampling(given), 0
        tokens = self._begun([int(token) for token in given["tokens"]], resets=resets)
        while True:
            # The same seed would give the same random numbers again.
            seed = None if sampling.seed is None else sampling.seed + count
            request = GenerationRequest(
                Prompt(tokens), replace(sampling, seed=seed), penalizes_prompt=False
            )
            tokens = []
            with closing(self._events(request, given, resets=resets)) as events:
                for event in events:
                    token = event.token if isinstance(event, AnswerPiece | Ended) else None
                    if token is None:
                        continue
                    count += 1
                    sent = yield token
                    if sent is not None or isinstance(event, Ended):
                        tokens = [token, *map(int, sent or ())]
                        break
            resets = False
            if not tokens:
                return

    @_as_in_llama
    def create_completion(self, *arguments: Any, **options: Any) -> Any:
        """Complete as llama_cpp.Llama does; `grammar` may also be a Constraint.

        If the prompt begins with the text that was read, in other tokens, usage and the limit of
        n_ctx refer to the tokens that were read. `logprobs` need no logits_all. `suffix` is what
        follows the text that is asked for; for a model that was not trained for that, SettingsError
        is raised. Raises ContextError for a prompt that is empty, or that fills the context.
        """
        given = self._given("create_completion", arguments, options)
        parts = self._completed(given)
        if given["stream"]:
            return parts
        with closing(parts):
            return next(parts)

    def _completed(self, given: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the chunks of a completion, or all of it at once."""
        echoes, n_logprobs, limit = given["echo"], given["logprobs"], given["max_tokens"] or 0
        tells_prompt = bool(echoes) and n_logprobs is not None
        asked, model = given["prompt"], self._session.model
        tokens = self._tokens_of(asked, given["suffix"])
        text = shown_prompt(model, Prompt(tokens, asked if isinstance(asked, str) else ""))
        self._load_cached(tokens)
        if not tells_prompt:
            tokens = self._begun(tokens, resets=True)
        room = self._n_ctx - len(tokens)
        if room <= 0:
            raise ContextError(
                f"Requested tokens ({len(tokens)}) exceed context window of {self._n_ctx}; shorten "
                "the prompt or raise n_ctx"
            )
        self._draw_seed(given["seed"])
        request = GenerationRequest(
            Prompt(tokens),
            self._sampling(given),
            min(limit, room) if limit > 0 else room,
            tuple(stops_of(given["stop"])),
            n_logprobs=n_logprobs,
            prompt_logprobs=tells_prompt,
            penalizes_prompt=False,
            errors="ignore",
        )
        shown = None
        if n_logprobs is not None:
            shown = CompletionLogprobs(model, 0 if echoes else len(text))
        writer = LlamaCppWriter(given["model"] or self.model_path, text if echoes else "", shown)
        with closing(self._events(request, given)) as events:
            if given["stream"]:
                yield from writer.chunks(events)
                self._store_cached([*tokens, *writer.tokens])
            else:
                whole = writer.whole(events)
                self._store_cached([*tokens, *writer.tokens])
                yield whole

    def _tokens_of(self, prompt: str | Sequence[int], suffix: str | None) -> list[int]:
        """Return the tokens of a prompt; if it is a text, with the tokens that texts of the model
        begin and end with. With a `suffix`, they are the prompt for what stands between the prompt
        and the suffix. Raises SettingsError for a suffix that the model cannot use, and
        ContextError for an empty prompt.
        """
        model, is_text = self._model, isinstance(prompt, str)
        if isinstance(prompt, str):
            tokens = self.tokenize(prompt.encode("utf-8"), add_bos=False, special=not suffix)
        else:
            tokens = [int(token) for token in prompt]
        if suffix:
            after = self.tokenize(suffix.encode("utf-8"), add_bos=False, special=False)
            found = infill_prompt(self._session.model, tokens, after)
            if found is None:
                raise SettingsError(
                    "suffix: the model was not trained to write a text between two others; leave "
                    "it out, or use a model for code, such as Qwen2.5-Coder"
                )
            return found.tokens
        if is_text:
            separator = model.token_sep()
            begins = model.token_cls() if model.token_cls() != -1 else self.token_bos()
            if model.add_bos_token() and begins != -1:
                tokens.insert(0, begins)
            if model.add_eos_token() or separator != -1:
                tokens.append(separator if separator != -1 else self.token_eos())
        if not tokens:
            raise ContextError("the prompt is empty; give a text, or tokens")
        if tokens[:2] == [self.token_bos()] * 2:
            warnings.warn(
                "the prompt begins with two tokens that begin a text, which may make answers "
                "worse; leave the one in its text out",
                RuntimeWarning,
                stacklevel=4,
            )
        return tokens

    def _draw_seed(self, seed: int | None) -> None:
        """Set the seed of an answer, as llama_cpp.Llama does; a random one if the answer, or the
        model, was given none or -1.
        """
        if self._draws_seeds if seed is None else is_random_seed(seed):
            seed = new_seed()
        # llama_cpp.Llama draws the seeds of answers from the model's seed in this way; so equal
        # seeds give equal answers.
        if seed is None:
            seed = random.Random(self._seed).randint(0, 2**32)  # noqa: S311
        self.set_seed(seed)

    def _load_cached(self, tokens: list[int]) -> None:
        """Load the state in the cache if it has more of a prompt than the text that was read."""
        if self.cache is None:
            return
        with contextlib.suppress(KeyError):
            found = self.cache[tokens]
            texts = (found.input_ids, self._input_ids)
            saved, read = (self.longest_token_prefix(ids.tolist(), tokens) for ids in texts)
            if saved > read:
                self.load_state(found)

    def _store_cached(self, tokens: list[int]) -> None:
        """Save the state behind an answer in the cache."""
        if self.cache is not None:
            self.cache[tokens] = self.save_state()

    @_as_in_llama
    def create_chat_completion(self, *arguments: Any, **options: Any) -> Any:
        """Answer a chat as llama_cpp.Llama does; `grammar` may also be a Constraint.

        The prompt is that of the model's chat template, or of the `chat_format` or `chat_handler`
        that was chosen instead. With one of llama-cpp-python's image handlers, images are read
        inside the budget. Raises ImageError for an image that cannot be read, SettingsError for a
        JSON schema that cannot be enforced. Content that is null is empty. Control tokens are those
        of the chat template: names of such tokens in messages and tools are plain text, unless the
        model was made with `parse_special`.
        """
        self.chat_handler = BudgetImageHandler.of(self.chat_handler)
        given = with_constraint(self._given("create_chat_completion", arguments, options))
        given["messages"] = [
            self.said(with_content(each), tags=each.get("role") == "assistant")
            for each in given["messages"]
        ]
        formatter = formatter_of(self, self._session.model)
        if formatter is not None:
            return answer_chat(self, formatter, given)
        for name in ("tools", "functions"):
            if given[name]:
                given[name] = self.said(given[name])
        return super().create_chat_completion(**given)

    def embed(self, *_: Any, **__: Any) -> NoReturn:
        """Raise SettingsError, because embeddings need no KV cache."""
        raise SettingsError(
            "embed() and create_embedding() are not possible inside a KV budget; use "
            "llama_cpp.Llama(embedding=True)"
        )

    def kv_stats(self) -> SessionStats:
        """Return counts, bytes and times since the model was made, attached, or loaded a state."""
        return self._session.stats()

    def save_state(self) -> LlamaState:
        """Return the current state with the entries of the budget, for load_state() and
        LlamaRAMCache.
        """
        self._settle()
        data = self._session.files.save_state()
        return LlamaState(
            input_ids=self._input_ids.copy(),
            scores=(self._scores if self._logits_all else self.scores[:0]).copy(),
            n_tokens=self.n_tokens,
            llama_state=data,
            llama_state_size=len(data),
            seed=self._seed,
        )

    def load_state(self, state: LlamaState) -> None:
        """Load a state that save_state() of an EntropyLlama with this model has returned; raises
        SessionFileError for any other.
        """
        self._load(lambda: self._session.files.load_state(state.llama_state))
        if self._logits_all:
            self.scores[: len(state.scores)] = state.scores
            self._scored = self._session.tokens[: len(state.scores)]
        self._seed = state.seed

    def _load(self, load: Callable[[], SavedContents]) -> SavedContents:
        """Continue from the text that `load` gives to the session."""
        with self._alone():
            self._guard.leave()
            contents = load()
            self._n_kept = self._sampled = None
        return contents

    def _settle(self) -> None:
        """Go back to the n_tokens that the caller has set."""
        if self._n_kept is not None:
            self.eval([])

    def save_session(self, path: str | os.PathLike[str]) -> SavedContents:
        """Write the current state to a file, as SessionFiles.save(); raises SessionFileError if
        that fails.
        """
        self._settle()
        return self._session.files.save(path)

    def load_session(self, path: str | os.PathLike[str]) -> SavedContents:
        """Load a file of save_session() or Session.files.save(); its text is not read again.

        Raises SessionFileError for any other file, which leaves the state unchanged, and
        SettingsError with logits_all, because files have no rows of logits.
        """
        if self._logits_all:
            raise SettingsError(
                "a saved session has the logits of its last token only; use logits_all=False, or "
                "save_state() and load_state()"
            )
        return self._load(lambda: self._session.files.load(path))

    def open_document(self, path: str | os.PathLike[str]) -> SavedContents:
        """Continue from a document that `entropykv read` has written: see question().

        Later questions about it do not read its text again, whatever was evicted since: with
        `checkpoints` they go back to one, and otherwise its file, if it still exists, is loaded
        again. Raises the errors of load_session(), and SessionFileError if the document was read
        with another chat template.
        """
        check_template(self._session.model, document_header(path))
        contents = self.load_session(path)
        self._session.text.keep_checkpoint()
        self._document, self._document_path = self._session.tokens, path
        return contents

    def question(self, text: str) -> list[int]:
        """Return a prompt for create_completion(): the tokens of the document and of a question.

        The document is not read again: see open_document(). Raises ContextError if no document was
        opened.
        """
        if not self._document:
            raise ContextError("there is no document to ask about; call open_document() first")
        return [*self._document, *self._session.question(text)]

    def __getstate__(self) -> dict[str, Any]:
        """Return arguments that make an equal object that has read nothing."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        del state["type_k"], state["type_v"]
        return {**state, **self._budget.keywords()}


def _check_attached(llm: llama_cpp.Llama) -> None:
    if not isinstance(llm, EntropyLlama):
        raise EntropyKVError("the model was detached before this answer was complete; ask again")


def _living(itself: weakref.ref[EntropyLlama]) -> EntropyLlama:
    found = itself()
    if found is None:
        raise EntropyKVError("the model is closed; make a new one")
    return found
