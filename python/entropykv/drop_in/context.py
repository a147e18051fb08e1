"""Stand in for the context and the model of a llama_cpp.Llama, inside a KV budget."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, cast

import llama_cpp
from llama_cpp import _internals as internals

from entropykv.errors import EntropyKVError, ModelFileError, SettingsError
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.model_options import apply_adapters
from entropykv.llamacpp.weights import Weights
from entropykv.model.geometry import ModelGeometry
from entropykv.session.session import Session


class SharedModel(internals.LlamaModel):
    """Be the LlamaModel of Llamas whose threads may close it while others call it.

    Its methods, which are those of LlamaModel, raise EntropyKVError once it is closed.
    """

    weights: Weights
    """What frees the model once nobody reads it any more."""
    _is_closed: bool

    @staticmethod
    def of(model: internals.LlamaModel) -> SharedModel:
        """Make a loaded LlamaModel one of these, in place, for good."""
        if isinstance(model, SharedModel):
            return model
        model.__class__ = SharedModel
        shared = cast(SharedModel, model)
        shared.weights = Weights(shared._exit_stack.close)
        shared._is_closed = False
        return shared

    def close(self) -> None:
        """Free the model when the last call that reads it ends; later ones are refused."""
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
    """Use the loaded model of a Llama, which owns it as well: it is freed with the last of both.

    Contexts made from it have the Llama's parameters (RoPE, YaRN, ...) and its LoRA adapter.
    """

    def __init__(self, llama: llama_cpp.Llama, geometry: ModelGeometry) -> None:
        """Load nothing; `geometry` is that of the Llama's file, whose model is a SharedModel."""
        self.geometry = geometry
        self._weights = SharedModel.of(llama._model).weights.share()
        self.handle = llama.model
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.handle)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocabulary)
        self._parameters = llama.context_params
        self._adapter = llama._lora_adapter
        self._adapter_scale = llama.lora_scale

    def context_defaults(self) -> Any:
        """Return a copy of the Llama's own parameters."""
        return type(self._parameters).from_buffer_copy(self._parameters)

    def new_context(self, parameters: Any) -> Any:
        """Make a llama_context with the Llama's LoRA adapter; raises as Model.new_context does."""
        context = super().new_context(parameters)
        try:
            if self._adapter:
                apply_adapters(context, [(self._adapter, self._adapter_scale)])
        except ModelFileError:
            llama_cpp.llama_free(context)
            raise
        return context


class BudgetContext(internals.LlamaContext):
    """Be a LlamaContext over a Session: what is decoded and removed goes through the session."""

    _is_closing = False

    def __init__(self, llama: llama_cpp.Llama, session: Session) -> None:
        """Stand in for the Llama's own context; the session is not owned."""
        self.model = llama._model
        self.params = llama.context_params
        self.verbose = llama.verbose
        self._session: Session | None = session

    @property
    def ctx(self) -> Any:
        """Return the llama_context that samplers read logits of; EntropyKVError once closed."""
        return self.session.context

    @property
    def weights(self) -> Weights:
        """Return what keeps the model within `with`; entering raises EntropyKVError once closed."""
        return SharedModel.of(self.model).weights

    @property
    def is_open(self) -> bool:
        """Tell whether there is a session."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """Return the session; raises EntropyKVError once closed."""
        session = self._session  # another thread may close it meanwhile
        if session is None or self._is_closing:
            raise EntropyKVError("the model is closed; make a new EntropyLlama")
        return session

    def refuse(self) -> None:
        """Let the call that another thread is within end with an error before it reads more."""
        self._is_closing = True
        session = self._session
        if session is not None:
            session.refuse()

    def rest(self) -> None:
        """Let no other sequence of a pool wait for more of this one."""
        session = self._session
        if session is not None:
            session.rest()

    def close_session(self) -> None:
        """Close the session, and let go of it."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def close(self) -> None:
        """Let go of the session."""
        self._session = None

    def n_ctx(self) -> int:
        """Return the tokens that a sequence may have; the budget says how many entries stay."""
        return self.session.n_ctx

    def kv_cache_clear(self) -> None:
        """Forget every token."""
        self.session.truncate(0)

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:  # noqa: ARG002
        """Go back to position p0, if nothing was evicted since; returns whether it did.

        For a range in the middle it returns False, too, and nothing changes.
        """
        first = max(p0, 0)
        ends = p1 < 0 or p1 >= self.session.position
        if not ends or not self.session.can_return_to(first):
            return False
        if first < self.session.position:
            self.session.truncate(first)
        return True

    def kv_cache_seq_cp(self, *_: Any) -> NoReturn:
        """Refuse: a budget holds one sequence."""
        raise _one_sequence("kv_cache_seq_cp")

    def kv_cache_seq_keep(self, *_: Any) -> NoReturn:
        """Refuse: a budget holds one sequence."""
        raise _one_sequence("kv_cache_seq_keep")

    def kv_cache_seq_shift(self, *_: Any) -> NoReturn:
        """Refuse, since the session says what positions are."""
        raise _one_sequence("kv_cache_seq_shift")

    def decode(self, batch: Any) -> NoReturn:  # noqa: ARG002
        """Refuse: tokens are read by Llama.eval()."""
        raise _one_sequence("decode")


def _one_sequence(name: str) -> SettingsError:
    return SettingsError(
        f"{name} is not possible inside a KV budget, which holds one sequence that eval() reads; "
        "use eval(), reset() or generate(), or detach() the model first"
    )
