"""Stand in for the context and the model of a llama_cpp.Llama, inside a KV budget."""

from __future__ import annotations

from typing import Any, NoReturn

import llama_cpp
from llama_cpp import _internals as internals

from entropykv.errors import EntropyKVError, ModelFileError, SettingsError
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.model_options import apply_adapters
from entropykv.model.geometry import ModelGeometry
from entropykv.session.session import Session


class BorrowedModel(Model):
    """Use the loaded model of a Llama, which goes on owning it.

    Contexts made from it have the Llama's parameters (RoPE, YaRN, ...) and its LoRA adapter.
    """

    def __init__(self, llama: llama_cpp.Llama, geometry: ModelGeometry) -> None:
        """Load nothing; `geometry` is that of the Llama's file."""
        self.geometry = geometry
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

    def close(self) -> None:
        """Forget the model; the Llama frees it."""
        self.handle = None


class BudgetContext(internals.LlamaContext):
    """Be a LlamaContext over a Session: what is decoded and removed goes through the session."""

    def __init__(self, llama: llama_cpp.Llama, session: Session) -> None:
        """Stand in for the Llama's own context; the session is not owned."""
        self.model = llama._model
        self.params = llama.context_params
        self.verbose = llama.verbose
        self._session: Session | None = session

    @property
    def ctx(self) -> Any:
        """Return the llama_context that samplers read logits of; None once closed."""
        return self._session.context if self._session else None

    @property
    def is_open(self) -> bool:
        """Tell whether there is a session."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """Return the session; raises EntropyKVError once closed."""
        if self._session is None:
            raise EntropyKVError("the model is closed; make a new EntropyLlama")
        return self._session

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
