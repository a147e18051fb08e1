"""Put a loaded llama_cpp.Llama inside a KV budget, in place, and remove the budget again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import cast

import llama_cpp
import numpy as np
from llama_cpp import _internals as internals
from llama_cpp.llama_speculative import LlamaDraftModel
from typing_extensions import Unpack

from entropykv.drop_in.arguments import (
    BudgetArguments,
    EvictionEvent,
    attached_options,
    check_kind,
)
from entropykv.drop_in.context import BudgetContext
from entropykv.drop_in.entropy_llama import EntropyLlama
from entropykv.drop_in.image_handlers import BudgetImageHandler
from entropykv.errors import EntropyKVError, SettingsError
from entropykv.llamacpp.model_options import apply_adapters
from entropykv.model.geometry import read_geometry
from entropykv.session.recovery import Climb
from entropykv.settings.cache_options import CacheArguments, shows
from entropykv.settings.options import Budget

_OURS = ("_image_prompt", "_draws_seeds", "_tags", "_n_kept", "_scored", "_sampled", "_watch")
"""The attributes of an EntropyLlama that a stock Llama does not have."""


@shows(CacheArguments)
def attach(
    llm: llama_cpp.Llama,
    kv_budget: Budget | str | float = 1.0,
    *,
    on_evict: Callable[[EvictionEvent], object] | None = None,
    repeatable: bool = True,
    on_climb: Callable[[Climb], object] | None = None,
    **arguments: Unpack[CacheArguments],
) -> EntropyLlama:
    """Put a loaded llama_cpp.Llama inside a KV budget, in place, and return it as EntropyLlama.

    The model is not loaded again; the stock context and its KV cache are freed. The next prompt is
    read from its start. The errors are those of EntropyLlama, and EntropyKVError if `llm` is
    closed; `llm` then goes on as before. Its type_k, type_v and flash_attn have no effect any more.
    No thread may be within a call of `llm`: a stock Llama does not detect this, and its context is
    freed.
    """
    cache = attached_options(kv_budget, arguments)
    budget = BudgetArguments(cache, on_evict, repeatable, on_climb)
    _check_stock(llm)
    check_kind(
        embedding=llm.context_params.embeddings,
        vocab_only=llm.model_params.vocab_only,
        attention_type=llm.context_params.attention_type,
    )
    geometry = read_geometry(llm.model_path)
    llm.__class__ = EntropyLlama
    attached = cast(EntropyLlama, llm)
    try:
        attached._begin(geometry, budget)
    except BaseException:
        llm.__class__ = llama_cpp.Llama
        raise
    return attached


def detach(llm: EntropyLlama) -> llama_cpp.Llama:
    """Turn an EntropyLlama into a stock llama_cpp.Llama again, in place; its text is discarded.

    Its new context has n_ctx cells, as its arguments say. Raises SettingsError for a Llama without
    a budget, or with a cache, and EntropyKVError if it is closed, if another thread is within a
    call of it, or if there is no memory for the context.
    """
    if not isinstance(llm, EntropyLlama):
        raise SettingsError("this model is not inside a KV budget; attach() it first")
    _check_idle(llm)
    if llm.pool is not None:
        raise SettingsError("a model of a pool cannot be detached; load a llama_cpp.Llama")
    with llm._alone():
        context, batch = _stock_context(llm)
        llm._guard.leave()
        llm._ctx.close_session()
        if isinstance(llm.chat_handler, BudgetImageHandler):
            llm.chat_handler = llm.chat_handler.handler
        for name in _OURS:
            llm.__dict__.pop(name, None)
        drafts = llm._budget.cache.spec_draft_model
        if callable(drafts):
            llm.draft_model = cast(LlamaDraftModel, drafts)
            llm._logits_all = True  # Llama.generate() checks drafts by all logits.
        del llm._budget, llm._guard, llm._alike
        stock = cast(llama_cpp.Llama, llm)
        stock.__class__ = llama_cpp.Llama
    stock._ctx = stock._stack.enter_context(contextlib.closing(context))
    stock._batch = stock._stack.enter_context(contextlib.closing(batch))
    n_ctx = stock.context_params.n_ctx
    stock.n_tokens, stock._requires_eval = 0, True
    stock.input_ids = np.zeros(n_ctx, np.intc)
    rows = n_ctx if stock._logits_all else stock.n_batch
    stock.scores = np.empty((rows, stock._n_vocab), np.single)
    stock._n_ctx = context.n_ctx()
    return stock


def _stock_context(llm: llama_cpp.Llama) -> tuple[internals.LlamaContext, internals.LlamaBatch]:
    """Make a context and a batch as llama_cpp.Llama.__init__ does."""
    parameters, verbose = llm.context_params, llm.verbose
    try:
        context = internals.LlamaContext(model=llm._model, params=parameters, verbose=verbose)
    except ValueError as error:
        raise EntropyKVError(
            f"llama.cpp cannot make a stock context of {parameters.n_ctx} cells ({error}); go on "
            "inside the budget, or load the model again with a smaller n_ctx"
        ) from None
    if llm._lora_adapter:
        apply_adapters(context.ctx, [(llm._lora_adapter, llm.lora_scale)])
    batch = internals.LlamaBatch(
        n_tokens=llm.n_batch, embd=0, n_seq_max=parameters.n_ctx, verbose=verbose
    )
    return context, batch


def _check_stock(llm: object) -> None:
    if isinstance(llm, EntropyLlama):
        raise SettingsError("this model is inside a KV budget already; detach() it first")
    if type(llm) is not llama_cpp.Llama:
        raise SettingsError(
            f"attach() takes a llama_cpp.Llama, not {type(llm).__name__}; make an EntropyLlama"
        )
    _check_idle(llm)


def _check_idle(llm: llama_cpp.Llama) -> None:
    """Raise EntropyKVError if the model is closed, and SettingsError if it has a cache, whose
    states would not fit the new context.
    """
    context = llm._ctx
    if not context.is_open if isinstance(context, BudgetContext) else context.ctx is None:
        raise EntropyKVError("the model is closed; load it again")
    if llm.cache is not None:
        raise SettingsError(
            "the states in the model's cache would not fit any more; call set_cache(None) first, "
            "and give it a new cache afterwards"
        )
