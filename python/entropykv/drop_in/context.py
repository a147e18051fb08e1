"""Replace the context and the model of a llama_cpp.Llama by ones inside a KV budget, and let one
call use it at a time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import llama_cpp
from llama_cpp import _internals as internals

from entropykv.errors import ContextError, EntropyKVError, ModelFileError, SettingsError
from entropykv.llamacpp.model import Model, Weights
from entropykv.llamacpp.model_options import LoadOptions, apply_adapters
from entropykv.model.geometry import ModelGeometry
from entropykv.session.session import Session

Answer = Generator[Any, None, None]


class CallGuard:
    """Refuse a call while another thread runs one, and end an unfinished answer before another
    call.
    """

    def __init__(self) -> None:
        """Make the lock; no call and no answer has begun."""
        self.lock = threading.RLock()
        self._answer: Answer | None = None
        """The current answer; an earlier one must not continue."""

    @contextmanager
    def call(self, context: BudgetContext) -> Iterator[None]:
        """Keep the model in memory in the `with` block; raises EntropyKVError if the model is
        closed, or if another thread is within a call.
        """
        if not self.lock.acquire(blocking=False):
            _ = context.session  # Raises if another thread closes the model.
            raise EntropyKVError(
                "another thread is using this EntropyLlama, which holds one sequence; let calls "
                "take turns with a lock, or give each thread a model of its own"
            )
        try:
            with context.weights:
                yield
        finally:
            self.lock.release()

    def begin(self, answer: Answer) -> None:
        """Note the answer that uses the sequence from now on."""
        self._answer = answer

    def leave(self) -> None:
        """Close the current answer, so that the session is free for another call; the caller holds
        the lock.
        """
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.close()

    def check_goes_on(self, answer: Answer, context: BudgetContext) -> None:
        """Raise EntropyKVError if the model was closed, or another call has used the sequence,
        since an answer began.
        """
        if self._answer is not answer:
            _ = context.session  # Raises if the model was closed.
            raise EntropyKVError(
                "another call has used this EntropyLlama, which holds one sequence, before this "
                "answer was complete; end one answer before the next, or use two models"
            )

    def end(self, answer: Answer) -> None:
        """Close an answer whose consumer has left it, unless another call has done so.

        It never waits, because the garbage collector may run it: if another thread is within a
        call, the next call closes the answer.
        """
        if self._answer is answer and self.lock.acquire(blocking=False):
            try:
                self.leave()
            finally:
                self.lock.release()


class SharedModel(internals.LlamaModel):
    """Make a LlamaModel safe to close in one thread while another one calls it.

    Its methods, which are those of LlamaModel, raise EntropyKVError once it is closed.
    """

    weights: Weights
    """Frees the model after its last user."""
    _is_closed: bool

    @staticmethod
    def of(model: internals.LlamaModel) -> SharedModel:
        """Convert a loaded LlamaModel, in place and permanently."""
        if isinstance(model, SharedModel):
            return model
        model.__class__ = SharedModel
        shared = cast(SharedModel, model)
        shared.weights = Weights(shared._exit_stack.close)
        shared._is_closed = False
        return shared

    def close(self) -> None:
        """Refuse further calls, and free the model when the last running call ends."""
        if not self._is_closed:
            self._is_closed = True
            self.weights.release()


def _keeping_weights(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: SharedModel, *arguments: Any, **options: Any) -> Any:
        with self.weights:
            return method(self, *arguments, **options)

    return call


for _name, _method in vars(internals.LlamaModel).items():
    if not _name.startswith("_") and _name not in vars(SharedModel) and callable(_method):
        setattr(SharedModel, _name, _keeping_weights(_method))


class BorrowedModel(Model):
    """Use the loaded model of a Llama, which also owns it; it is freed when neither needs it any
    more.

    Contexts made from it have the Llama's parameters (RoPE, YaRN, ...) and its LoRA adapter.
    """

    def __init__(
        self, llama: llama_cpp.Llama, geometry: ModelGeometry, *, parse_special: bool
    ) -> None:
        """Use the Llama's model, a SharedModel, without loading it again; `geometry` is that of its
        file. `parse_special`: see LoadOptions.
        """
        self.geometry = geometry
        self._weights = SharedModel.of(llama._model).weights.share()
        self.handle = llama.model
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.handle)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocabulary)
        self._parameters = llama.context_params
        self._adapter = llama._lora_adapter
        self._adapter_scale = llama.lora_scale
        self._options = LoadOptions(parse_special=parse_special)

    def context_defaults(self) -> Any:
        """Return a copy of the Llama's own parameters."""
        return type(self._parameters).from_buffer_copy(self._parameters)

    def new_context(self, parameters: Any) -> Any:
        """Make a llama_context with the Llama's LoRA adapter; raises the errors of
        Model.new_context().
        """
        context = super().new_context(parameters)
        try:
            if self._adapter:
                apply_adapters(context, [(self._adapter, self._adapter_scale)])
        except ModelFileError:
            llama_cpp.llama_free(context)
            raise
        return context


class BudgetContext(internals.LlamaContext):
    """Implement LlamaContext with a Session; copying, shifting and decoding cells is refused."""

    _is_closing = False

    def __init__(self, llama: llama_cpp.Llama, session: Session) -> None:
        """Replace the Llama's own context; the session is not owned."""
        self.model = llama._model
        self.params = llama.context_params
        self.verbose = llama.verbose
        self._session: Session | None = session

    @property
    def ctx(self) -> Any:
        """Return the llama_context whose logits samplers read; raises EntropyKVError once
        closed.
        """
        return self.session.cache.context

    @property
    def weights(self) -> Weights:
        """Return a context manager that keeps the model; entering it raises EntropyKVError once
        closed.
        """
        return SharedModel.of(self.model).weights

    @property
    def is_open(self) -> bool:
        """Tell whether the context was not closed."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """Return the session; raises EntropyKVError once closed."""
        session = self._session  # Read it once, because another thread may close it.
        if session is None or self._is_closing:
            raise EntropyKVError("the model is closed; make a new EntropyLlama")
        return session

    def refuse(self) -> None:
        """End a call of another thread with an error before it reads more."""
        self._is_closing = True
        session = self._session
        if session is not None:
            session.refuse()

    def rest(self) -> None:
        """Tell the pool not to wait for more tokens of this sequence."""
        session = self._session
        if session is not None:
            session.rest()

    def close_session(self) -> None:
        """Close the session, and drop the reference to it."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def close(self) -> None:
        """Drop the reference to the session."""
        self._session = None

    def n_ctx(self) -> int:
        """Return the most tokens of a sequence; the budget determines how many entries are kept."""
        return self.session.config.n_ctx

    def kv_cache_clear(self) -> None:
        """Remove all tokens."""
        self.session.text.truncate(0)

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:  # noqa: ARG002
        """Roll back to position p0 if that leaves exactly the entries that were held when the text
        ended there; returns whether the session has p0 tokens now.

        For a range that ends before the text does, it returns False, and nothing changes. `seq_id`
        is ignored.
        """
        first = max(p0, 0)
        ends = p1 < 0 or p1 >= self.session.position
        if not ends or not self.session.text.held().can_return_to(first):
            return False
        if first < self.session.position:
            try:
                self.session.text.truncate(first)
            # The session's pool has given the session a smaller share since it read the text.
            except ContextError:
                return False
        return True


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any) -> NoReturn:
        raise SettingsError(
            f"{name} is not possible inside a KV budget, which holds one sequence that eval() "
            "reads; use eval(), reset() or generate(), or detach() the model first"
        )

    return refuse


for _name in ("kv_cache_seq_cp", "kv_cache_seq_keep", "kv_cache_seq_shift", "decode"):
    setattr(BudgetContext, _name, _refusing(_name))
