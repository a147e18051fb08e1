"""Run a llama_cpp.Llama inside a KV budget: EntropyLlama, attach() and detach()."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import llama_cpp
import numpy as np
from llama_cpp.llama import LlamaState
from typing_extensions import Self

from entropykv.drop_in.arguments import (
    BudgetArguments,
    EvictionEvent,
    check_draft_model,
    split_arguments,
)
from entropykv.drop_in.chat_schemas import checked_schemas
from entropykv.drop_in.completing import CompletingLlama
from entropykv.drop_in.context import BorrowedModel, BudgetContext, SharedModel
from entropykv.drop_in.image_handlers import BudgetImageHandler
from entropykv.errors import ModelFileError, SettingsError
from entropykv.model.geometry import ModelGeometry, read_loadable
from entropykv.session.file import SavedContents
from entropykv.session.images import ImagePrompt
from entropykv.session.pool import Pool
from entropykv.session.recovery import Climb
from entropykv.session.session import Session
from entropykv.session.stats import SessionStats
from entropykv.settings.cache_options import CacheOptions, PoolArguments, shows


class EntropyLlama(CompletingLlama):
    """A llama_cpp.Llama whose KV cache never exceeds a budget.

    Takes every argument of llama_cpp.Llama, and those of CacheOptions: as keyword arguments, or
    together as `options`, which keyword arguments precede. n_ctx is how long a sequence may get (0:
    what the model was trained for), the memory is the budget's. `recovery` has no rewalks here;
    `on_climb` is called with each Climb of it.
    `on_evict` is called with an EvictionEvent after a decode call that evicted something; what it
    raises comes out of that call, and the model goes on from where it is. flash_attn counts only
    for the flat store with kv_type f16: elsewhere attention is ours, or must be flash attention.

    A prompt that begins with the text of what was read is not read again, whatever the tokens that
    it is spelled with. One that departs from it is read again from the beginning of the micro-batch
    where it departs, so that the same request gives the same answer; and from the start where
    entries may be evicted before its end (max_tokens counts), or were since. The last prompt itself
    is not read again. `repeatable` False: nothing is read again that need not be, and answers to
    the same request may differ.

    It holds one sequence, so calls take turns: EntropyKVError where another thread is within one,
    and where an answer goes on after another call. With `n_sequences`, the budget is that of a Pool
    (`swap`, `swap_limit`: see there), and another() makes more of them, for threads of their own:
    their tokens are read together. `checkpoints`, without `n_sequences`: a pool of one, in which a
    turn that is edited or asked for again goes on from the nearest, whatever was evicted since.

    Raises ModelFileError, UnsupportedModelError, BudgetError, ProfileError, SettingsError,
    FreezeError.
    """

    _pool: Pool | None = None
    _image_prompt: ImagePrompt | None = None
    """The last prompt with images, which are held for it."""
    _alike: weakref.WeakSet[EntropyLlama]
    """Those that use the same weights and the same pool; the last that is closed frees both."""

    @shows(PoolArguments)
    def __init__(
        self,
        model_path: str | os.PathLike[str],
        options: CacheOptions | None = None,
        *,
        on_evict: Callable[[EvictionEvent], object] | None = None,
        repeatable: bool = True,
        on_climb: Callable[[Climb], object] | None = None,
        **llama: Any,
    ) -> None:
        """Load the model; its stock context is a stub, which the budget's replaces."""
        # Made first, so that close() works even where what follows raises.
        self._stack = contextlib.ExitStack()
        cache, arguments = split_arguments(options, llama)
        budget = BudgetArguments(cache, on_evict, repeatable, on_climb)
        geometry = read_loadable(model_path)
        stub = {"n_ctx": 1, "type_k": None, "type_v": None}
        try:
            super().__init__(os.fspath(model_path), **{**arguments, **stub})
        except (ValueError, RuntimeError) as error:
            raise ModelFileError(
                f"{model_path}: {error}; check the file, and the arguments for llama_cpp.Llama"
            ) from error
        if self.lora_path and not self._lora_adapter:  # Llama does not notice
            raise ModelFileError(
                f"{self.lora_path}: llama.cpp cannot load it; give a LoRA adapter of this model"
            )
        self._set_sizes(arguments)
        self._begin(geometry, budget)

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
        """Make one with a model of the Hugging Face Hub, which is fetched once.

        The arguments are those of llama_cpp.Llama.from_pretrained(), but `filename` may be left
        out, and `repo_id` may be user/model:quant; see fetch_model() of entropykv.hub.
        `local_dir_use_symlinks` changes nothing, as in huggingface_hub. Raises HubError and what
        EntropyLlama raises, and MissingExtraError without the extra `hub`.
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
        """Put a session in the place of the stock context, which is freed."""
        self._alike = weakref.WeakSet([self])
        SharedModel.of(self._model)
        model = BorrowedModel(self, geometry)
        try:
            session = self._session_of(model, budget)
        except BaseException:
            model.close()
            raise
        try:
            least = min(entries for layer in session.budgets() for entries in layer)
            may_evict = self._pool is not None or least < session.n_ctx
            check_draft_model(self.draft_model, may_evict=may_evict)
        except SettingsError:
            session.close()
            if self._pool is not None:
                self._pool.close()
            raise
        if self.verbose and session.fallback:
            sys.stderr.write(f"EntropyLlama: {session.fallback}; going on with store='flat'\n")
        self._ctx.close()
        self._batch.close()  # type: ignore[no-untyped-call]
        self._budget = budget
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
        """Hold a session's sequence, which has read nothing."""
        self._lock = threading.RLock()
        self._sampled = self._generation = self._watch = None
        self._ctx = BudgetContext(self, session)
        start_over(self, session.n_ctx, session.n_ctx if self._logits_all else 1)

    def _hold(self, session: Session) -> None:
        """Hold another sequence, and go on from what was read of it."""
        self._sampled = self._generation = self._watch = None
        self._ctx = BudgetContext(self, session)
        self.n_tokens = session.position
        self.input_ids[: session.position] = session.tokens
        self._requires_eval = session.logits is None

    @property
    def pool(self) -> Pool | None:
        """Return the pool that it shares with those of another(); None without `n_sequences`."""
        return self._pool

    def another(self) -> Self:
        """Return another one with the same weights and in the same pool, which has read nothing.

        A thread of its own can use it at the same time. Each is closed by itself: weights and pool
        are freed with the last. Raises SettingsError without `n_sequences`, EntropyKVError once
        this one is closed.
        """
        _ = self._session  # raises once closed
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
        """Free the sequence; with the last of another()'s, also the pool, the context, the model.

        It waits for the call that another thread is within, which ends with an EntropyKVError
        before it reads more.
        """
        context = getattr(self, "_ctx", None)
        if not isinstance(context, BudgetContext):  # it was never inside a budget
            super().close()
            return
        context.refuse()
        with self._lock:
            context.close_session()
            self._alike.discard(self)
            if not self._alike:
                if self._pool is not None:
                    self._pool.close()
                super().close()

    def __del__(self) -> None:
        """Free what nobody has closed; never wait, since this may happen in any thread.

        The session, and a pool that nobody else uses, are garbage as well, and close themselves.
        """
        context = getattr(self, "_ctx", None)
        if isinstance(context, BudgetContext):
            context.close()
            self._pool = None
        self.close()

    def create_chat_completion(self, *arguments: Any, **options: Any) -> Any:
        """Answer a chat as llama_cpp.Llama does.

        With a handler of images of llama-cpp-python's, they are read inside the budget. Raises
        ImageError for one that cannot be read, SettingsError for a JSON schema that is too much.
        """
        self.chat_handler = BudgetImageHandler.of(self.chat_handler)
        return super().create_chat_completion(**checked_schemas(self, *arguments, **options))

    def embed(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: embeddings need no KV cache."""
        raise SettingsError(
            "embed() and create_embedding() are not possible inside a KV budget; use "
            "llama_cpp.Llama(embedding=True)"
        )

    # --- state ------------------------------------------------------------------------------------

    def kv_stats(self) -> SessionStats:
        """Return counts, bytes and times since the model was made, attached, or loaded a state."""
        return self._session.stats()

    def save_state(self) -> LlamaState:
        """Return what was read, as entries of the budget, for load_state() and LlamaRAMCache."""
        self.eval([])
        data = self._session.save_state()
        return LlamaState(
            input_ids=self._input_ids.copy(),
            scores=(self._scores if self._logits_all else self.scores[:0]).copy(),
            n_tokens=self.n_tokens,
            llama_state=data,
            llama_state_size=len(data),
            seed=self._seed,
        )

    def load_state(self, state: LlamaState) -> None:
        """Go on from what save_state() of an EntropyLlama of this model returned."""
        self._session.load_state(state.llama_state)
        self._requires_eval = True
        self.n_tokens = state.n_tokens
        self.input_ids[: state.n_tokens] = state.input_ids[: state.n_tokens]
        if self._logits_all:
            self.scores[: len(state.scores)] = state.scores
        self._seed = state.seed

    # --- sessions on disk -------------------------------------------------------------------------

    def save_session(self, path: str | os.PathLike[str]) -> SavedContents:
        """Write what was read to a file, as Session.save() does. Raises SessionFileError."""
        self.eval([])
        return self._session.save(path)

    def load_session(self, path: str | os.PathLike[str]) -> SavedContents:
        """Go on with a file of save_session() or Session.save(); its text is not read again.

        Raises SessionFileError, and then holds what it held; SettingsError with logits_all, whose
        rows no file has.
        """
        if self._logits_all:
            raise SettingsError(
                "a saved session has the logits of its last token only; use logits_all=False, or "
                "save_state() and load_state()"
            )
        contents = self._session.load(path)
        self._requires_eval = True
        self._sampled = None
        self.n_tokens = contents.position
        self.input_ids[: contents.position] = self._session.tokens[: contents.position]
        return contents

    def __getstate__(self) -> dict[str, Any]:
        """Return arguments that make another one like it, which has read nothing."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        del state["type_k"], state["type_v"]
        return {**state, **self._budget.keywords()}


def start_over(llm: llama_cpp.Llama, n_ctx: int, score_rows: int) -> None:
    """Forget what was read, and make room for n_ctx tokens."""
    llm._n_ctx = n_ctx
    llm.n_tokens = 0
    llm._requires_eval = True
    llm.input_ids = np.zeros(n_ctx, dtype=np.intc)
    llm.scores = np.empty((score_rows, llm._n_vocab), dtype=np.single)
