"""Declare the options of how a model is run, with llama-cli's names, and open a session
from them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses

import llama_cpp

from entropykv.cli.model_options import add_model_tuning, add_split_options, model_options_of
from entropykv.cli.notes import say
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
)
from entropykv.errors import SettingsError, UnsupportedModelError
from entropykv.llamacpp.model import Model
from entropykv.policy.resolved_config import cache_options_of
from entropykv.session.memory_plan import memory_warning
from entropykv.session.pool import Pool
from entropykv.session.session import Session
from entropykv.settings.cache_options import CHECKPOINTS, CacheOptions
from entropykv.settings.cores import too_many_threads
from entropykv.settings.options import KV_TYPES


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
    """Return --kv-type, or the type in llama-cli's -ctk and -ctv.

    Raises SettingsError if they differ.
    """
    kinds = {
        options.cache_type_k or options.cache_type_v,
        options.cache_type_v or options.cache_type_k,
    }
    if kinds == {None}:
        return str(options.kv_type)
    kind = kinds.pop()
    if kinds or kind not in KV_TYPES:
        raise SettingsError(
            "-ctk and -ctv: K and V are of one type, f16 or q8_0; give --kv-type f16 or q8_0"
        )
    if options.kv_type not in ("auto", kind):
        raise SettingsError(f"-ctk {kind} and --kv-type {options.kv_type} disagree; give one")
    return str(kind)


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
    """Return the only session of a pool, or a session without checkpoints if no pool is needed."""
    if cache.freeze is None and cache.recovery is None and cache.store != "flat":
        pooled = dataclasses.replace(cache, n_sequences=1, checkpoints=CHECKPOINTS)
        with contextlib.suppress(UnsupportedModelError):
            return Pool(model, pooled).session()
    return Session(model, cache)


def open_engine(options: argparse.Namespace, *, goes_back: bool = False) -> Session:
    """Load the model and open a session, and print notes for the user.

    `goes_back`: if the model thinks, the session keeps checkpoints, to which a conversation rolls
    back at the end of a thought.
    """
    _check_flash(options)
    kv_type = kv_type_of(options)
    _say_what_changes_nothing(options)
    if warning := too_many_threads(options.threads, "-t"):
        say(warning)
    cache = cache_options_of(
        options,
        kv_type=kv_type,
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
    trained = model.geometry.n_ctx_train
    if options.ctx_size is None:
        cache = dataclasses.replace(cache, kv_budget=cache.budget.of_context(trained))
    thinks = goes_back and model.thought_tags is not None
    session = _session_with_checkpoints(model, cache) if thinks else Session(model, cache)
    mean = _mean_budget(session)
    if session.config.n_ctx > trained and 4 * mean > 3 * trained:
        say(
            f"a KV head may keep {mean} entries, more than 3/4 of the {trained} tokens that the "
            "model was trained for: beyond them, distances are no longer told apart; give "
            f"--kv-budget {3 * trained // 4} or less"
        )
    if warning := memory_warning(session.config, session.stats().kv_bytes_budget):
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


def _mean_budget(session: Session) -> int:
    """Return the entries that a KV head may keep, on average."""
    budgets = [entries for layer in session.cache.budgets() for entries in layer]
    return sum(budgets) // max(len(budgets), 1)


def say_reading_twice(session: Session, n_tokens: int) -> bool:
    """Print, before a text is read, that some of it will be read twice, because that takes longer.

    `n_tokens`: how many tokens are read. Returns whether it was printed.
    """
    fit = session.cache.predictor_fit
    if fit is None or fit.predicts:
        return False
    is_read_twice = _mean_budget(session) < session.position + n_tokens <= session.config.n_ctx
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
        f"{_mean_budget(session):,}"
    )
    if budget.kind == "fraction" and budget.value < 1.0:
        text += f"; --kv-budget {max(n_tokens // 5, 2)} would keep a fifth of it"
    return "text", text


def say_learnt(session: Session) -> None:
    """Print at the end what was read twice, and what of it is kept."""
    fit = session.cache.predictor_fit
    if fit is not None and (report := fit.report()):
        say(report)
