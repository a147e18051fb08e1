"""Declare the options of how a model is loaded and run, with llama-cli's names, and open a session
from them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from typing import Any

import llama_cpp

from entropykv.cli.options import (
    CONTEXT,
    add_fixed_threads_option,
    add_freeze_options,
    add_learn_option,
    add_option,
    add_recovery_options,
    add_store_options,
    add_threads_option,
    fetch_named,
    integer,
    utf8,
)
from entropykv.cli.terminal import say
from entropykv.errors import SettingsError, UnsupportedModelError
from entropykv.files import json_of, read_text
from entropykv.llamacpp.foreign_text import PARSE_SPECIAL
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.model_options import (
    LOAD_MODES,
    MOST_DEVICES,
    NUMA_STRATEGIES,
    ROPE_SCALINGS,
    SPLIT_MODES,
    LoadOptions,
    read_overrides,
)
from entropykv.policy.resolved_config import cache_options_of
from entropykv.session.file import check_model
from entropykv.session.memory_plan import budget_warnings, mean_of
from entropykv.session.pool import Pool
from entropykv.session.session import Session
from entropykv.settings.cache_options import CHECKPOINTS, CacheOptions
from entropykv.settings.cores import too_many_threads
from entropykv.settings.options import joint_kv_type

_ROPE = {
    "--rope-freq-base": ("rope_freq_base", "base frequency of RoPE"),
    "--rope-freq-scale": ("rope_freq_scale", "its frequencies are multiplied by this"),
    "--yarn-ext-factor": ("yarn_ext_factor", "YaRN: how much is extrapolated"),
    "--yarn-attn-factor": ("yarn_attn_factor", "YaRN: scale of the attention"),
    "--yarn-beta-fast": ("yarn_beta_fast", "YaRN: low correction"),
    "--yarn-beta-slow": ("yarn_beta_slow", "YaRN: high correction"),
}


def add_model_tuning(parser: argparse.ArgumentParser) -> None:
    """Add options of memory, LoRA, RoPE and chat template; model_options_of() reads them."""
    group = parser.add_argument_group("model")
    group.add_argument("--no-mmap", action="store_true", help="read the weights into memory")
    group.add_argument("--mmap", dest="no_mmap", action="store_false", help=argparse.SUPPRESS)
    group.add_argument("--mlock", action="store_true", help="keep the weights in memory")
    group.add_argument(
        "-lm",
        "--load-mode",
        choices=LOAD_MODES,
        metavar="MODE",
        help="both by one name: " + ", ".join(LOAD_MODES),
    )
    group.add_argument("--numa", choices=NUMA_STRATEGIES, help="llama.cpp's strategy for NUMA")
    group.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="FILE",
        help="a LoRA adapter (GGUF), or several",
    )
    group.add_argument(
        "--lora-scaled",
        action="append",
        default=[],
        nargs="+",
        metavar="FILE:SCALE",
        help="a LoRA adapter with a scale, or several separated by commas",
    )
    group.add_argument(
        "--override-kv",
        action="append",
        default=[],
        metavar="KEY=TYPE:VALUE",
        help="what llama.cpp takes in the place of the file's metadata, such as "
        "tokenizer.ggml.add_bos_token=bool:false; budget and context go by the file",
    )
    group.add_argument(
        "--rope-scaling", choices=ROPE_SCALINGS, help="how RoPE is scaled (default: the model's)"
    )
    group.add_argument(
        "--rope-scale", type=float, metavar="N", help="the context is N times as long for RoPE"
    )
    group.add_argument(
        "--yarn-orig-ctx", type=int, metavar="N", help="YaRN: context that it was trained for"
    )
    for flag, (field, text) in _ROPE.items():
        group.add_argument(flag, dest=field, type=float, metavar="X", help=text)
    group.add_argument(
        "--chat-template",
        type=utf8,
        metavar="TEXT",
        help="Jinja, or a name such as chatml (default: its own)",
    )
    group.add_argument("--chat-template-file", metavar="FILE", help="read the template from a file")
    group.add_argument("--parse-special", action="store_true", help=PARSE_SPECIAL)
    add_template_arguments(group)


def add_template_arguments(group: argparse._ActionsContainer) -> None:
    """Add --chat-template-kwargs."""
    group.add_argument(
        "--chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help="what the chat template is told besides the messages, such as "
        """'{"enable_thinking": false}'""",
    )


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object, as an argparse type."""
    found = json_of(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(
            "it is not a JSON object; give one such as '{\"name\": 1}'"
        )
    return found


def add_split_options(group: argparse._ActionsContainer) -> None:
    """Add options of how several devices share a model."""
    group.add_argument(
        "-sm",
        "--split-mode",
        choices=SPLIT_MODES,
        metavar="MODE",
        help="how several GPUs share the model: " + ", ".join(SPLIT_MODES),
    )
    group.add_argument(
        "-ts",
        "--tensor-split",
        type=device_parts,
        default=(),
        metavar="N0,N1,...",
        help="the part of the model for each GPU, such as 3,1",
    )
    group.add_argument(
        "-mg",
        "--main-gpu",
        type=integer(0, MOST_DEVICES - 1),
        metavar="N",
        help="the GPU of the model with -sm none",
    )


def device_parts(text: str) -> tuple[float, ...]:
    """Read numbers such as 3,1 or 3/1, one for each device, as an argparse type."""
    try:
        parts = tuple(float(part) for part in text.replace("/", ",").split(","))
    except ValueError:
        parts = ()
    if not parts or not all(0.0 <= part < 1e9 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of parts such as 3,1")
    if len(parts) > MOST_DEVICES:
        raise argparse.ArgumentTypeError(f"there are at most {MOST_DEVICES} devices")
    return parts


def model_options_of(options: argparse.Namespace) -> LoadOptions:
    """Return the LoadOptions that options ask for; raises SettingsError for invalid ones, and for
    those that contradict each other.
    """
    template = options.chat_template
    if options.chat_template_file is not None:
        if template is not None:
            raise SettingsError("give --chat-template or --chat-template-file, not both")
        template = read_text(options.chat_template_file, SettingsError)
    adapters = [(path, 1.0) for text in options.lora for path in text.split(",")]
    adapters += [scaled for words in options.lora_scaled for scaled in _scaled(words)]
    use_mmap, use_mlock = not options.no_mmap, options.mlock
    if options.load_mode is not None:
        use_mmap, use_mlock = LOAD_MODES[options.load_mode]
    return LoadOptions(
        use_mmap=use_mmap,
        use_mlock=use_mlock,
        split_mode=options.split_mode,
        main_gpu=options.main_gpu,
        tensor_split=options.tensor_split,
        overrides=read_overrides(options.override_kv),
        template_arguments=options.chat_template_kwargs or {},
        numa=options.numa,
        adapters=adapters,
        rope=_rope_of(options),
        chat_template=template,
        parse_special=options.parse_special,
    )


def _scaled(words: list[str]) -> list[tuple[str, float]]:
    """Read FILE:SCALE, several separated by commas, or FILE SCALE as in earlier versions of
    llama.cpp.
    """
    pairs = [text.rpartition(":")[::2] for word in words for text in word.split(",")]
    if len(words) == 2 and not pairs[0][0]:
        pairs = [(words[0], words[1])]
    try:
        scaled = [(path, float(scale)) for path, scale in pairs]
    except ValueError:
        scaled = []
    if not scaled or not all(path for path, _ in scaled):
        raise SettingsError(f"--lora-scaled: {' '.join(words)!r} has no scale; give FILE:SCALE")
    return scaled


def _rope_of(options: argparse.Namespace) -> dict[str, float]:
    """Return the given fields of llama_context_params; raises SettingsError for two scales."""
    given = {field: getattr(options, field) for field, _ in _ROPE.values()}
    if options.rope_scale is not None:
        if given["rope_freq_scale"] is not None or options.rope_scale <= 0.0:
            raise SettingsError("--rope-scale is a number above 0, and 1 / --rope-freq-scale")
        given["rope_freq_scale"] = 1.0 / options.rope_scale
    given["yarn_orig_ctx"] = options.yarn_orig_ctx
    if options.rope_scaling is not None:
        given["rope_scaling_type"] = ROPE_SCALINGS[options.rope_scaling]
    return {name: value for name, value in given.items() if value is not None}


def add_engine_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options that say how the model runs and what is frozen; open_engine() reads them."""
    add_freeze_options(parser)
    add_recovery_options(parser)
    add_learn_option(parser.add_argument_group("profile"))
    group = parser.add_argument_group("engine")
    add_store_options(group)
    group.add_argument(
        "-b",
        "--batch-size",
        type=integer(1),
        default=2048,
        metavar="N",
        help="a micro-batch is never larger (default: %(default)s)",
    )
    add_threads_option(group, "n_threads_batch")
    add_fixed_threads_option(group)
    for flag, name in (("-ctk", "K"), ("-ctv", "V")):
        group.add_argument(
            flag,
            f"--cache-type-{name.lower()}",
            metavar="TYPE",
            help=f"--kv-type by llama-cli's name for {name}",
        )
    _add_device_options(group)
    add_model_tuning(parser)
    group.add_argument(
        "-v", "--verbose", "--log-verbose", action="store_true", help="llama.cpp's own log"
    )
    return group


def _add_device_options(group: argparse._ArgumentGroup) -> None:
    add_option(
        group,
        CacheOptions,
        "n_gpu_layers",
        type=_gpu_layers,
        help="layers on the GPU, or all; K and V follow them if --store allows it",
    )
    add_split_options(group)
    group.add_argument(
        "-fa",
        "--flash-attn",
        nargs="?",
        choices=("on", "off", "auto"),
        default="auto",
        help="on and auto change nothing: attention is entropykv's own, or flash attention",
    )


def _gpu_layers(text: str) -> int:
    """Read a number of layers; llama-cli's `all` and `auto` become -1."""
    return -1 if text in ("all", "auto") else integer(-1, 2**31 - 1)(text)


def kv_type_of(options: argparse.Namespace) -> str:
    """Return --kv-type, or the type with K and V of llama-cli's -ctk and -ctv.

    Raises SettingsError if both are given and differ, or no store has such a type.
    """
    of_keys, of_values = options.cache_type_k, options.cache_type_v
    if of_keys is None and of_values is None:
        return str(options.kv_type)
    kind = joint_kv_type(of_keys, of_values)
    if options.kv_type not in ("auto", kind):
        raise SettingsError(
            f"-ctk and -ctv, {kind}, and --kv-type {options.kv_type} disagree; give one"
        )
    return kind


def _check_flash(options: argparse.Namespace) -> None:
    if options.flash_attn == "off":
        raise SettingsError(
            "-fa off: attention is entropykv's own, in one pass as flash attention is; leave it out"
        )


def _say_what_changes_nothing(options: argparse.Namespace) -> None:
    given = {"-ngl": options.n_gpu_layers, "-sm": options.split_mode, "-ts": options.tensor_split}
    useless = [flag for flag, value in (given | {"-mg": options.main_gpu}).items() if value]
    if useless and not llama_cpp.llama_supports_gpu_offload():
        what = f"{', '.join(useless)} change{'s' * (len(useless) == 1)} nothing"
        say(f"this llama-cpp-python is built without a GPU: {what}")


def _session_with_checkpoints(model: Model, cache: CacheOptions) -> Session:
    """Return the only session of a pool, or a session without checkpoints if no pool serves the
    options and the model.
    """
    if cache.freeze is None and cache.recovery is None and cache.store != "flat":
        pooled = dataclasses.replace(cache, n_sequences=1, checkpoints=CHECKPOINTS)
        with contextlib.suppress(UnsupportedModelError):
            return Pool(model, pooled).session()
    return Session(model, cache)


def open_engine(options: argparse.Namespace, *, goes_back: bool = False) -> Session:
    """Fetch and load the model, open a session, and print notes for the user.

    `goes_back`: if the model thinks, the session keeps checkpoints, to which a conversation rolls
    back at the end of a thought; it keeps none with freezing, recovery or the flat store, or if no
    pool serves the model. Raises SettingsError for contradicting options and -fa off, and the
    errors of fetch_named(), Model, Session and check_model().
    """
    _check_flash(options)
    kv_type = kv_type_of(options)
    _say_what_changes_nothing(options)
    if warning := too_many_threads(options.threads, "-t"):
        say(warning)
    cache = cache_options_of(
        options,
        kv_type=kv_type,
        # Only chat and read have no context without -c: see `endless` in add_budget_options().
        n_ctx=CONTEXT if options.ctx_size is None else options.ctx_size,
        n_ubatch=min(options.ubatch_size, options.batch_size),
        n_threads=options.threads,
        n_threads_batch=options.threads_batch,
    )
    tuning = model_options_of(options)
    fetch_named(options)
    model = Model(
        options.model,
        n_gpu_layers=options.n_gpu_layers,
        verbose=options.verbose,
        options=tuning,
    )
    # The policy that was taken from a document of another model may be impossible with this one.
    for header in getattr(options, "document_headers", ()):
        check_model(header.settings, model.identity, model.name, str(header.path))
    trained = model.geometry.n_ctx_train
    if options.ctx_size is None:
        cache = dataclasses.replace(cache, kv_budget=cache.budget.of_context(trained))
    thinks = goes_back and model.thought_tags is not None
    session = _session_with_checkpoints(model, cache) if thinks else Session(model, cache)
    for warning in budget_warnings(session.config, session.stats().kv_bytes_budget):
        say(warning)
    if session.config.fallback:
        say(f"using the {session.cache.store} store instead: {session.config.fallback}")
    if session.cache.on_host:
        say(session.cache.on_host)
    if session.cache.untaught:
        say(session.cache.untaught)
    if note := session.config.other_file():
        say(note)
    return session


def say_reading_twice(session: Session, n_tokens: int) -> bool:
    """Print a note, before a text is read, if some of it will be read twice, which takes longer.

    `n_tokens`: how many tokens are read. Returns whether it was printed.
    """
    fit = session.cache.predictor_fit
    if fit is None or fit.predicts:
        return False
    end = session.position + n_tokens
    is_read_twice = mean_of(session.cache.budgets()) < end <= session.config.n_ctx
    if is_read_twice:
        later = "and fewer of later texts" if session.config.options.learns else "for this text"
        say(
            "nothing is known yet of what this model looks up: at least "
            f"{fit.n_needed} tokens are read twice to learn it, {later}; --policy fast reads every "
            "text once"
        )
    return is_read_twice


def what_is_kept(session: Session) -> str:
    """Return in a few words how much of its text a session holds."""
    stats, n_tokens = session.stats(), session.position
    if stats.entries_kept >= stats.entries_full:
        return f"{n_tokens:,} tokens, nothing was dropped"
    kept = stats.entries_kept / stats.entries_full
    done = "frozen" if stats.freeze is not None else "dropped"
    return (
        f"of {n_tokens:,} tokens, a KV head holds {kept * n_tokens:,.0f} on average ({kept:.0%}); "
        f"the others were {done}"
    )


def dropped_row(session: Session) -> tuple[str, str]:
    """Return the row of the final table that says what the budget has dropped of the text, or that
    it held everything.
    """
    stats, n_tokens = session.stats(), session.position
    budget = session.config.options.budget
    if stats.entries_kept < stats.entries_full:
        return "text", f"{what_is_kept(session)} (--kv-budget {budget})"
    text = (
        f"nothing was dropped: the text has {n_tokens:,} tokens, and the budget holds "
        f"{mean_of(session.cache.budgets()):,}"
    )
    if budget.kind == "fraction" and budget.value < 1.0:
        text += f"; --kv-budget {max(n_tokens // 5, 2)} would keep a fifth of it"
    return "text", text


def say_learnt(session: Session) -> None:
    """Print at the end what was read twice, if anything, and what of it is kept."""
    fit = session.cache.predictor_fit
    if fit is not None and (report := fit.report()):
        say(report)
