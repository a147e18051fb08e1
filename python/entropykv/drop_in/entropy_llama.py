"""Run a llama_cpp.Llama inside a KV budget: EntropyLlama, attach() and detach()."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NoReturn

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama import LlamaState
from llama_cpp.llama_grammar import LlamaGrammar
from llama_cpp.llama_tokenizer import LlamaTokenizer
from typing_extensions import Self

from entropykv.constraint.constraint import Constraint
from entropykv.drop_in.arguments import (
    BudgetArguments,
    EvictionEvent,
    sampling_of,
    split_arguments,
    with_draft_model,
)
from entropykv.drop_in.call_guard import CallGuard
from entropykv.drop_in.chat_constraints import makes_grammars, with_constraint
from entropykv.drop_in.completion_logprobs import CompletionLogprobs
from entropykv.drop_in.context import BorrowedModel, BudgetContext, SharedModel
from entropykv.drop_in.image_handlers import BudgetImageHandler
from entropykv.drop_in.reading import PromptReader
from entropykv.drop_in.sampler import SamplerOfSequence
from entropykv.errors import (
    ContextError,
    EntropyKVError,
    ModelFileError,
    SessionFileError,
    SettingsError,
)
from entropykv.generation.spelling import continuing, control_symbol, spelling
from entropykv.llamacpp.foreign_text import MARK, without_names
from entropykv.llamacpp.model import captured_log, last_error
from entropykv.llamacpp.products import reads_blocks
from entropykv.model.geometry import ModelGeometry, read_loadable
from entropykv.model.header import way_out_of
from entropykv.session.file import SavedContents
from entropykv.session.generate import Chooser, Companions
from entropykv.session.image_spans import is_placeholder
from entropykv.session.images import ImageLimits, ImagePrompt, Images
from entropykv.session.logprobs import LogprobRecorder
from entropykv.session.pool import Pool
from entropykv.session.recovery import Climb
from entropykv.session.reuse import Demand, reuse_of
from entropykv.session.sampling import is_random_seed, new_seed
from entropykv.session.session import Session
from entropykv.session.session_files import document_header
from entropykv.session.stats import SessionStats
from entropykv.settings.cache_options import CacheOptions, PoolArguments, shows
from entropykv.thinking.tags import tags_of

_GENERATE = inspect.signature(llama_cpp.Llama.generate)
_SAMPLE = inspect.signature(llama_cpp.Llama._init_sampler)
_COMPLETE = inspect.signature(llama_cpp.Llama._create_completion)


class EntropyLlama(llama_cpp.Llama):
    """Run a llama_cpp.Llama whose KV cache never exceeds a budget.

    It accepts every argument of llama_cpp.Llama, and the fields of CacheOptions: as keyword
    arguments, or together as `options`, over which keyword arguments take precedence. n_ctx is the
    most tokens of a sequence (0: the trained context); the memory depends only on the budget.
    `recovery` has no rewalks here; `on_climb` is called with each of its Climbs. `on_evict` is
    called with an EvictionEvent after a decode call that evicted something; an exception that it
    raises is passed to the caller, and the model can continue. flash_attn has an effect only with
    the flat store and kv_type f16: otherwise attention is ours, or must be flash attention.

    A prompt that begins with the text that was read is not read again, even if its tokens differ. A
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

    Raises ModelFileError, UnsupportedModelError, BudgetError, ProfileError, SettingsError,
    FreezeError, SessionFileError.
    """

    _ctx: BudgetContext
    """Replaces the stock context; it uses the session."""
    _budget: BudgetArguments
    _guard: CallGuard
    """Allows one call at a time."""
    _reader: PromptReader
    """Reads prompts into the session."""
    _pieces: dict[int, bytes] | None = None
    """Cached texts of tokens, shared by all objects with the same vocabulary; None while the model
    loads.
    """
    _pool: Pool | None = None
    _document: Sequence[int] = ()
    """The tokens of the document that was opened."""
    _document_path: str | os.PathLike[str] = ""
    _draws_seeds: bool = True
    """Whether an answer without a seed gets a random one: the model was given none, or -1."""
    _logprobs: LogprobRecorder | None = None
    """Collects the log probabilities of the current answer's tokens, if they were requested."""
    _of_tools: Mapping[str, Constraint] = MappingProxyType({})
    """The constraints of the tools of a chat, by the grammars that llama-cpp-python makes."""
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
        # It is made first, so that close() works even if the rest raises.
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
        if self.lora_path and not self._lora_adapter:  # Llama itself does not report this.
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
        return self.__dict__["model_params"]  # attach() takes the one of a loaded Llama.

    @model_params.setter
    def model_params(self, parameters: Any) -> None:
        # Llama has no argument for it: what llama.cpp repacks while it loads, nobody else can read.
        # Sums of one token would differ from those of several, and from those of a Session.
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

    # --- into a budget, and out of it -------------------------------------------------------------

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
        self._pieces = {}
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
        self._reader = PromptReader(self._ctx, self._budget)
        start_over(self, session.config.n_ctx, session.config.n_ctx if self._logits_all else 1)

    @property
    def _parse_special(self) -> bool:
        return self._budget.parse_special

    @property
    def pool(self) -> Pool | None:
        """Return the pool that it shares with the results of another(); None without
        `n_sequences`.
        """
        return self._pool

    def another(self) -> Self:
        """Return another object with the same weights and the same pool, which has read nothing.

        Another thread can use it at the same time. Each object is closed separately: weights and
        pool are freed with the last one. Raises SettingsError without `n_sequences`, EntropyKVError
        if this object is closed.
        """
        _ = self._session  # Raises if it is closed.
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
        if not isinstance(context, BudgetContext):  # It was never inside a budget.
            super().close()
            return
        context.refuse()
        with self._guard.lock:
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

    # --- read and write ---------------------------------------------------------------------------

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """Keep the model; raises EntropyKVError if it is closed, or if another thread calls it."""
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
        """Return what reads prompts with images; None while no projector is open."""
        return self._session.images

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Return a text's tokens, as llama_cpp.Llama does; raises EntropyKVError once closed.

        Names of control tokens in the messages of a chat are plain text: see said().
        """
        session = self._session  # raises once closed, where llama-cpp-python would crash
        if not special or MARK.encode() not in text:
            return super().tokenize(text, add_bos, special)
        # Other tokenizers find names of control tokens anywhere.
        if not isinstance(self.tokenizer_, LlamaTokenizer):
            plain = without_names(text.decode("utf-8")).encode("utf-8")
            return super().tokenize(plain, add_bos, special)
        tokens: list[int] = []
        for number, run in enumerate(session.model.control_names.runs(text.decode("utf-8"))):
            begins = add_bos and number == 0
            tokens += super().tokenize(run.text.encode("utf-8"), begins, run.special)
        return tokens

    def said(self, value: Any, *, tags: bool = False) -> Any:
        """Return what others say, a text or texts within lists and objects, with marks by which
        tokenize() reads names of control tokens in it as plain text.

        `tags`: those of thoughts stay control tokens, as in the answers of a model. Nothing changes
        with `parse_special`.
        """
        if self._parse_special:
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
        """Return the text of tokens, as llama_cpp.Llama does.

        Texts of tokens are kept: Llama asks for all of an answer with every token of it, and each
        call of llama.cpp would let the threads of a pool take turns.
        """
        tokens = [token for token in tokens if not is_placeholder(token)]
        pieces = self._pieces
        if special or pieces is None or not isinstance(self.tokenizer_, LlamaTokenizer):
            return super().detokenize(tokens, prev_tokens, special)
        for token in tokens:
            if token not in pieces:
                pieces[token] = self._model.detokenize([token])
        text = b"".join([pieces[token] for token in tokens])
        begins = len(tokens) > 0 and tokens[0] == self.token_bos()
        return text[1:] if begins and text.startswith(b" ") else text

    def eval(self, tokens: Sequence[int]) -> None:
        """Read tokens after the first n_tokens of input_ids, which are read again if necessary.

        Raises ContextError for more than n_ctx tokens.
        """
        with self._alone():
            self._reader.eval(self, [int(token) for token in tokens])

    def reset(self) -> None:
        """Remove all tokens; kv_stats() continues to count."""
        with self._alone():
            self.n_tokens = 0
            self._requires_eval = True
            self._session.text.truncate(0)

    def sample(self, *arguments: Any, **options: Any) -> int:
        """Sample a token from the logits of the last one read; see llama_cpp.Llama.sample()."""
        start = time.perf_counter()
        with self._alone():
            ahead = self._reader.sampled_ahead()
            token: int = super().sample(*arguments, **options) if ahead is None else ahead
            if self._logprobs is not None:
                known = self._logits_all or ahead is None
                row = self._reader.logits_at(self, -1) if known else self.scores[0]
                self._logprobs.write(token, row)
            self._reader.note_sampled(token, time.perf_counter() - start)
        return token

    def generate(self, tokens: Sequence[int], *arguments: Any, **options: Any) -> Any:
        """Yield tokens that follow `tokens`; see llama_cpp.Llama.generate().

        If `tokens` begin with the text that was read, in other tokens, that text is not read again.
        This does not apply with logits_all, because the rows of `scores` belong to `tokens`.
        """
        bound = _GENERATE.bind(self, tokens, *arguments, **options)
        with self._alone():
            answer = self._guard.begin_answer()
            resets = bound.arguments.get("reset", True)
            prompt = self._prepared(list(tokens), resets=resets)
            if resets and self._has_logits_of(prompt):
                # Llama before 0.3.32 would go back by one token, and read all of the prompt again
                # because entries were evicted since.
                prompt, bound.arguments["reset"] = [], False
        bound.arguments["tokens"] = prompt
        stream: Generator[int, Any, None] = super().generate(*bound.args[1:], **bound.kwargs)
        sent = None
        with closing(stream), self._resting():
            while True:
                _check_attached(self)
                with self._alone():
                    _ = self._session  # Raises if it is closed.
                    self._guard.check_goes_on(answer)
                    try:
                        token = stream.send(sent)
                    except StopIteration:
                        return
                sent = yield token

    @contextmanager
    def _resting(self) -> Iterator[None]:
        """At the end, tell the pool not to wait for more tokens of this sequence."""
        try:
            yield
        finally:
            if isinstance(self._ctx, BudgetContext):
                self._ctx.rest()

    def _prepared(self, prompt: list[int], *, resets: bool) -> list[int]:
        """Return the tokens that must be read for a prompt, after removing the text that it does
        not continue.
        """
        self._reader.begin_answer(self)
        if self._logprobs is not None and self._logprobs.of_prompt:
            self.reset()
            return prompt
        if resets and not self._logits_all:
            prompt = self._continuing(prompt) or prompt
        if resets:
            self._return_to_document(prompt)
        if resets and self._budget.repeatable:
            self._reader.go_back_for(self, prompt)
        return prompt

    def _return_to_document(self, prompt: list[int]) -> None:
        """Load the document again for a prompt about it, if its text would be read instead.

        That is so after an eviction; in a pool, a checkpoint leads back.
        """
        n_document = len(self._document)
        if not n_document or self._pool is not None or prompt[:n_document] != [*self._document]:
            return
        end = self._n_ctx if self._budget.repeatable else None
        demand = Demand(is_cut=self._budget.repeatable, end=end, needs_logits=False)
        held = self._session.text.held().until(self.n_tokens)
        if reuse_of(held, prompt, demand).position >= n_document:
            return
        with contextlib.suppress(SessionFileError):  # The text is read if the file is gone.
            self._go_on_from(self._session.files.load(self._document_path))

    def _has_logits_of(self, prompt: list[int]) -> bool:
        """Tell whether a prompt is the text that was read, and can be sampled from at once."""
        is_text = self.n_tokens > 0 and np.array_equal(self._input_ids, prompt)
        return is_text and not self._requires_eval

    def _continuing(self, prompt: list[int]) -> list[int] | None:
        """Return the prompt as tokens that begin with those read; None if it already begins with
        them.
        """
        cached = self._input_ids
        if len(cached) == 0 or np.array_equal(cached, prompt[: len(cached)]):
            return None
        found = continuing(cached.tolist(), prompt, self._spell, self._tokenize_text)
        return found if found and len(found) < self._n_ctx else None

    def _spell(self, token: int) -> str:
        piece = self._session.token_bytes(token)
        return spelling(piece) if piece else control_symbol(token)

    def _tokenize_text(self, text: bytes) -> list[int]:
        return self.tokenize(text, add_bos=False, special=False)

    # --- complete ---------------------------------------------------------------------------------

    def _create_completion(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        """Complete as Llama does; the objects in use are kept meanwhile."""
        with closing(self._completion(*arguments, **options)) as stream:
            while True:
                with self._ctx.weights:
                    response = next(stream, None)
                if response is None:
                    return
                yield response

    def _completion(self, *given: Any, **named: Any) -> Generator[Any, None, None]:
        """Complete as Llama does, and pass tokens instead of text if the tokens already read can be
        kept.

        Then usage, positions of logprobs and the limit of n_ctx refer to the tokens that are read.
        What is echoed, and the log probabilities of tokens, are added here: Llama would need the
        logits of all tokens, and echoes only texts.
        """
        options = dict(_COMPLETE.bind(self, *given, **named).arguments)
        del options["self"]
        prompt, suffix = options["prompt"], options.get("suffix")
        echoes, n_top = bool(options.pop("echo", False)), options.pop("logprobs", None)
        options["stop"] = stops_of(options.get("stop"))
        seed = options.get("seed")
        if (self._draws_seeds and seed is None) or (seed is not None and is_random_seed(seed)):
            options["seed"] = new_seed()
        limit = options.get("max_tokens")
        reader = self._reader
        reader.max_tokens = limit if limit and limit > 0 else None
        recorder = None if n_top is None else LogprobRecorder(n_top, of_prompt=echoes)
        self._logprobs = recorder
        text = "" if recorder is None and not echoes else self._prompt_text(prompt)
        # With logits_all, rows of `scores` belong to the prompt's own tokens.
        as_given = recorder is not None and (echoes or self._logits_all)
        if suffix is None and not as_given:
            options["prompt"] = self._continuing(self._tokens_of(prompt)) or prompt
        values = None if recorder is None else self._values_of(recorder, text)
        echo = text if echoes else ""
        try:
            for response in super()._create_completion(**options):
                choice: Any = response["choices"][0]
                if values is not None:
                    choice["logprobs"] = values.take(choice["text"], choice["finish_reason"])
                choice["text"], echo = echo + choice["text"], ""
                yield response
        except ValueError as error:
            if "exceed context window" not in str(error):
                raise
            text = re.sub(r"window of \d+", f"window of {self._n_ctx}", str(error))
            raise ContextError(f"{text}; shorten the prompt or raise n_ctx") from None
        finally:
            reader.max_tokens = self._logprobs = None

    def _prompt_text(self, prompt: str | list[int]) -> str:
        """Return the text of a prompt, without a token that only begins it."""
        if isinstance(prompt, str):
            return prompt
        shown = prompt[1:] if prompt[:1] == [self.token_bos()] else prompt
        return self.detokenize(shown, special=True).decode("utf-8", errors="replace")

    def _values_of(self, recorder: LogprobRecorder, prompt: str) -> CompletionLogprobs:
        """Return what puts log probabilities into an answer; `prompt` is the text of the prompt."""
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        return CompletionLogprobs(
            recorder,
            lambda token: self.detokenize([token]),
            lambda token: bool(llama_cpp.llama_vocab_is_eog(vocabulary, token)),
            bos=self.token_bos(),
            offset=len(prompt),
        )

    def _tokens_of(self, prompt: str | list[int]) -> list[int]:
        """Return the tokens that Llama makes from a prompt; [] if it appends to them."""
        model = self._model
        if not isinstance(prompt, str):
            return prompt
        if model.add_eos_token() or model.token_sep() != -1 or not prompt:
            return []
        begins = [self.token_bos()] if model.add_bos_token() and self.token_bos() != -1 else []
        return begins + self.tokenize(prompt.encode("utf-8"), add_bos=False, special=True)

    def _init_sampler(self, *arguments: Any, **options: Any) -> Any:
        """Make what samples, from the logits of this sequence.

        Penalties consider the tokens of the answer alone, as in llama_cpp.Llama.
        """
        given = _SAMPLE.bind(self, *arguments, **options)
        given.apply_defaults()
        sampling = sampling_of(given.arguments, self._seed, self.last_n_tokens_size)
        itself = weakref.ref(self)  # The sampler is a part of this object.

        def llama() -> EntropyLlama:
            found = itself()
            if found is None:
                raise EntropyKVError("the model is closed; make a new one")
            return found

        def changed_by(process: Callable[[Any, Any], Any]) -> Callable[[Any], object]:
            def change(logits: npt.NDArray[np.float32]) -> None:
                logits[:] = process(llama()._input_ids, logits)

            return change

        processors = [changed_by(each) for each in given.arguments["logits_processor"] or ()]
        chooser = Chooser(sampling, self._session, Companions(processors=processors))

        def logits_at(row: int) -> npt.NDArray[np.float32]:
            return llama()._reader.logits_at(llama(), row)

        has_processors = bool(processors)
        return SamplerOfSequence(
            chooser, logits_at, self.token_eos(), has_processors=has_processors
        )

    def create_completion(self, *arguments: Any, **options: Any) -> Any:
        """Complete as llama_cpp.Llama does; `grammar` may also be a Constraint."""
        grammar = options.get("grammar")
        if isinstance(grammar, LlamaGrammar):
            options["grammar"] = self._of_tools.get(grammar._grammar, grammar)
        return super().create_completion(*arguments, **options)

    def create_chat_completion(self, *arguments: Any, **options: Any) -> Any:
        """Answer a chat as llama_cpp.Llama does; `grammar` may also be a Constraint.

        With one of llama-cpp-python's image handlers, images are read inside the budget. Raises
        ImageError for an image that cannot be read, SettingsError for a JSON schema that cannot be
        enforced. Content that is null is empty. Control tokens are those of the chat template:
        names of such tokens in messages and tools are plain text, unless the model was made with
        `parse_special`.
        """
        self.chat_handler = BudgetImageHandler.of(self.chat_handler)
        given, self._of_tools = with_constraint(self, self.said, *arguments, **options)
        given["messages"] = [
            self.said(with_content(each), tags=each.get("role") == "assistant")
            for each in given["messages"]
        ]
        for name in ("tools", "functions"):
            if given.get(name):
                given[name] = self.said(given[name])
        try:
            return super().create_chat_completion(**given)
        finally:
            if not makes_grammars(self):  # Such a format may ask for texts later, in a stream.
                self._of_tools = {}

    def embed(self, *_: Any, **__: Any) -> NoReturn:
        """Raise an error, because embeddings need no KV cache."""
        raise SettingsError(
            "embed() and create_embedding() are not possible inside a KV budget; use "
            "llama_cpp.Llama(embedding=True)"
        )

    # --- state ------------------------------------------------------------------------------------

    def kv_stats(self) -> SessionStats:
        """Return counts, bytes and times since the model was made, attached, or loaded a state."""
        return self._session.stats()

    def save_state(self) -> LlamaState:
        """Return the current state with the entries of the budget, for load_state() and
        LlamaRAMCache.
        """
        self.eval([])
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
        """Load a state that save_state() of an EntropyLlama with this model has returned."""
        self._session.files.load_state(state.llama_state)
        self._requires_eval = True
        self.n_tokens = state.n_tokens
        self.input_ids[: state.n_tokens] = state.input_ids[: state.n_tokens]
        if self._logits_all:
            self.scores[: len(state.scores)] = state.scores
        self._seed = state.seed

    # --- sessions on disk -------------------------------------------------------------------------

    def save_session(self, path: str | os.PathLike[str]) -> SavedContents:
        """Write the current state to a file, as SessionFiles.save(); raises SessionFileError."""
        self.eval([])
        return self._session.files.save(path)

    def load_session(self, path: str | os.PathLike[str]) -> SavedContents:
        """Load a file of save_session() or Session.files.save(); its text is not read again.

        Raises SessionFileError, and leaves the state unchanged; raises SettingsError with
        logits_all, because files have no rows of logits.
        """
        if self._logits_all:
            raise SettingsError(
                "a saved session has the logits of its last token only; use logits_all=False, or "
                "save_state() and load_state()"
            )
        return self._go_on_from(self._session.files.load(path))

    def open_document(self, path: str | os.PathLike[str]) -> SavedContents:
        """Continue from a document that `entropykv read` has written: see question().

        Later questions about it do not read its text again, whatever was evicted since: with
        `checkpoints` they go back to one, and otherwise its file is loaded again. Raises
        SessionFileError, and leaves the state unchanged.
        """
        document_header(path)
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

    def _go_on_from(self, contents: SavedContents) -> SavedContents:
        """Let Llama know the text of a session that was loaded."""
        self._requires_eval = True
        self._reader.forget_sampled()
        self.n_tokens = contents.position
        self.input_ids[: contents.position] = self._session.tokens[: contents.position]
        return contents

    def __getstate__(self) -> dict[str, Any]:
        """Return arguments that make an equal object that has read nothing."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        del state["type_k"], state["type_v"]
        return {**state, **self._budget.keywords()}


def _check_attached(llm: llama_cpp.Llama) -> None:
    if not isinstance(llm, EntropyLlama):
        raise EntropyKVError("the model was detached before this answer was complete; ask again")


def start_over(llm: llama_cpp.Llama, n_ctx: int, score_rows: int) -> None:
    """Discard the text, and make room for n_ctx tokens."""
    llm._n_ctx = n_ctx
    llm.n_tokens = 0
    llm._requires_eval = True
    llm.input_ids = np.zeros(n_ctx, dtype=np.intc)
    llm.scores = np.empty((score_rows, llm._n_vocab), dtype=np.single)


def with_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is empty if it is null, unless there are calls beside it."""
    calls = message.get("tool_calls") or message.get("function_call")
    if message.get("content") is None and not calls:
        return {**message, "content": ""}
    return dict(message)


def stops_of(stop: str | Sequence[str] | None) -> list[str]:
    """Return the texts that end an answer; an empty text would end every answer before it
    begins.
    """
    given = [stop] if isinstance(stop, str) else stop or ()
    return [each for each in given if each]
