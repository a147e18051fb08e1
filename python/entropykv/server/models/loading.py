"""Load the model that the server's options name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from entropykv.errors import SettingsError, UnsupportedModelError
from entropykv.files import json_of, read_text
from entropykv.llamacpp.context import GGML_PAIRS, kv_type_of_numbers
from entropykv.llamacpp.model import NO_TEMPLATE, Model
from entropykv.llamacpp.model_options import (
    NUMA_STRATEGIES,
    SPLIT_MODES,
    LoadOptions,
    read_overrides,
)
from entropykv.model.geometry import read_chat_template
from entropykv.model.shipped import path_of_model
from entropykv.policy.resolved_config import cache_options_of
from entropykv.server.models.loaded_model import LoadedModel, say
from entropykv.server.options import ModelOptions
from entropykv.session.images import ImageLimits
from entropykv.session.pool import Pool
from entropykv.settings.cache_options import CHECKPOINTS, CacheOptions
from entropykv.settings.freezing import WITHOUT_REWALK
from entropykv.thinking.tags import tags_of

_CONTEXT_FIELDS = (
    *("rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor"),
    *("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx", "offload_kqv"),
)
"""Settings that are fields of llama_context_params."""
_FORMATS = {"llama-2": "llama2", "llama-3": "llama3", "mistral-instruct": "mistral-v1"}
"""Names of llama-cpp-python's chat formats that llama.cpp calls otherwise."""
_NOT_HERE = {
    "vocab_only": "a server generates text; use llama_cpp for a vocabulary alone",
    "embedding": "embeddings are not possible inside a KV budget; use llama_cpp.server for them",
    "rpc_servers": "devices of other machines are not used here; leave it out",
    "lora_base": "llama.cpp has no base of an adapter any more; leave it out",
    "hf_pretrained_model_name_or_path": "the tokenizer is the model file's; EntropyLlama takes "
    "another as tokenizer=",
    "cache": "conversations are kept anyway; leave it out, and give --checkpoints or --parallel "
    "for more of them",
}
"""Settings of llama_cpp.server that change nothing here, and what to do instead."""


def load_model(
    options: ModelOptions, images: ImageLimits | None = None, *, documents: bool = False
) -> LoadedModel:
    """Load the model, make its pool, and print notes about it. `images`: the limits for the images
    of requests. `documents`: whether documents are read, for which the pool has one more sequence.

    Raises the errors of path_of(), of Pool, and of opening the projector, and SettingsError for
    options that change nothing here or contradict each other.
    """
    _check(options)
    path, cache = path_of(options), cache_options(options, documents=documents)

    def opened(cache: CacheOptions) -> Pool:
        model = Model(
            path,
            n_gpu_layers=options.n_gpu_layers,
            verbose=options.verbose,
            options=_load_options(options),
        )
        make: Callable[[Model, CacheOptions], Pool] = Pool if cache.in_pool else Pool.of_one
        return make(model, cache)

    cache = _sized(cache, options)
    try:
        pool = opened(for_thoughts(cache, options, path).going_back())
    except UnsupportedModelError:  # The model can have no checkpoints.
        pool = opened(cache.going_back())
    try:
        return _prepared(pool, options, images)
    except BaseException:
        pool.close()
        raise


def _prepared(pool: Pool, options: ModelOptions, images: ImageLimits | None) -> LoadedModel:
    """Return a model that is ready for requests, and print notes about it."""
    model = LoadedModel(
        pool,
        options.served_name,
        request_defaults=options.request_defaults,
        template_arguments=options.template_arguments,
        thinking=options.thinking_options,
    )
    runner = pool.runner
    if options.verbose and runner.config.fallback:
        say(f"{runner.config.fallback}; going on with another store")
    if on_host := runner.factory.context.on_host:
        say(on_host)
    if runner.untaught:
        say(runner.untaught)
    if model.model.chat_template is None:
        say(NO_TEMPLATE)
    if options.projector is not None:
        on_device = bool(options.n_gpu_layers)
        runner.open_projector(options.projector, images, use_gpu=on_device)
    return model


def _check(options: ModelOptions) -> None:
    """Raise SettingsError for settings of llama_cpp.server that would change nothing."""
    for name, way_out in _NOT_HERE.items():
        if getattr(options, name):
            raise SettingsError(f"{name}: {way_out}")


def _load_options(options: ModelOptions) -> LoadOptions:
    """Return how the model is loaded; raises SettingsError for options that cannot be read."""
    given = options.model_fields_set
    modes = {number: name for name, number in SPLIT_MODES.items()}
    strategies = {number: name for name, number in NUMA_STRATEGIES.items()}
    numa = options.numa
    if isinstance(numa, bool):
        numa = llama_cpp.GGML_NUMA_STRATEGY_DISTRIBUTE if numa else 0
    return LoadOptions(
        use_mmap=options.use_mmap,
        use_mlock=options.use_mlock,
        numa=strategies.get(numa),
        adapters=[] if options.lora_path is None else [(options.lora_path, 1.0)],
        rope={name: getattr(options, name) for name in _CONTEXT_FIELDS if name in given},
        chat_template=_template_of(options),
        split_mode=modes.get(options.split_mode) if "split_mode" in given else None,
        main_gpu=options.main_gpu if "main_gpu" in given else None,
        tensor_split=options.tensor_split or (),
        overrides=read_overrides(options.kv_overrides) if options.kv_overrides else {},
        parse_special=options.parse_special,
    )


def _sized(cache: CacheOptions, options: ModelOptions) -> CacheOptions:
    """Return the options of the cache with the model's K/V type, sizes, threads and drafts; raises
    SettingsError for two ways to guess tokens.
    """
    n_ubatch = options.n_ubatch if "n_ubatch" in options.model_fields_set else cache.micro_batch
    most = min(options.n_batch, options.n_ctx or options.n_batch)
    drafts = cache.spec_draft_model
    if options.draft_model is not None:
        if drafts is not None:
            raise SettingsError(
                "draft_model and spec_draft_model both guess tokens ahead; leave one of them out"
            )
        drafts = LlamaPromptLookupDecoding(options.draft_model_num_pred_tokens)
    return replace(
        cache,
        kv_type=_kv_type_of(options),
        spec_draft_model=drafts,
        n_ctx=options.n_ctx,
        n_ubatch=min(n_ubatch, most),
        n_threads=options.n_threads,
        n_threads_batch=options.n_threads_batch,
    )


def _kv_type_of(options: ModelOptions) -> str:
    """Return --kv_type, or the type of type_k and type_v; raises SettingsError if they differ."""
    if options.type_k is None and options.type_v is None:
        return options.kv_type
    named = kv_type_of_numbers(options.type_k, options.type_v)
    if options.kv_type not in ("auto", named):
        raise SettingsError(
            f"type_k and type_v are {options.type_k} and {options.type_v}, but kv_type is "
            f"{options.kv_type!r}; give kv_type alone, as one of {', '.join(GGML_PAIRS)}"
        )
    return named


def _template_of(options: ModelOptions) -> str | None:
    """Return the chat template that the options give: Jinja, or the name of one of llama.cpp's."""
    form = options.chat_format
    if options.chat_template is not None or form is None:
        return options.chat_template
    if form == "hf-autotokenizer":
        raise SettingsError(
            "chat_format hf-autotokenizer is not possible here; give the template of that model "
            "with --chat-template-file"
        )
    if form != "hf-tokenizer-config":
        return _FORMATS.get(form, form)
    if options.hf_tokenizer_config_path is None:
        raise SettingsError("chat_format hf-tokenizer-config needs --hf_tokenizer_config_path")
    found = json_of(read_text(options.hf_tokenizer_config_path, SettingsError))
    template = found.get("chat_template") if isinstance(found, dict) else None
    if not isinstance(template, str):
        raise SettingsError(
            f"{options.hf_tokenizer_config_path}: it has no chat_template; give one with "
            "--chat-template-file"
        )
    return template


def path_of(options: ModelOptions) -> Path:
    """Return the path of the model's file, which is downloaded first if necessary.

    Raises HubError if that fails, and ModelFileError for a known name whose package is missing.
    """
    if options.hf_repo is None:
        return Path(path_of_model(options.model))
    from entropykv.hub import fetch_model  # noqa: PLC0415  # it needs the extra hub

    return fetch_model(options.hf_repo, options.hf_file, tell=say)


def cache_options(options: ModelOptions, *, documents: bool = False) -> CacheOptions:
    """Return the options of the cache; raises BudgetError or SettingsError.

    `documents`: whether documents are read, as a further sequence of the pool.
    """
    if options.parallel == 1 and options.checkpoints is None and not documents:
        return cache_options_of(options, rungs=WITHOUT_REWALK)
    return cache_options_of(
        options,
        rungs=WITHOUT_REWALK,
        n_sequences=options.parallel + documents,
        swap=options.swap,
        swap_limit=options.swap_limit,
        checkpoints=options.checkpoints,
    )


def for_thoughts(cache: CacheOptions, options: ModelOptions, path: Path) -> CacheOptions:
    """Return the options, with checkpoints if the model at `path` thinks, unless they are set or a
    pool, drafts, freezing or the flat store exclude them. Raises the errors of
    read_chat_template().

    The next turn continues from before the last thought; without a checkpoint there, its whole text
    would be read again.
    """
    other = options.draft_model is not None
    if cache.in_pool or cache.checkpoints is not None or cache.freeze is not None or other:
        return cache
    if cache.store == "flat" or tags_of(options.chat_template or read_chat_template(path)) is None:
        return cache
    return replace(cache, checkpoints=CHECKPOINTS)
