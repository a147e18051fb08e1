"""Declare the options of `entropykv eval`, and build an evaluation request from them."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from entropykv._version import VERSION
from entropykv.cli.options import (
    add_freeze_options,
    add_option,
    add_protection_options,
    add_recovery_options,
    add_store_options,
    fraction,
    integer,
    list_of,
    utf8,
)
from entropykv.errors import ProfileError
from entropykv.evaluation.combination import EngineSettings
from entropykv.evaluation.continuation import DEFAULT_PROMPT
from entropykv.evaluation.dataset import DEFAULT_TEMPLATE, read_dataset
from entropykv.evaluation.request import EvalRequest
from entropykv.evaluation.ruler.suite import QUESTIONS, TASKS, Suite
from entropykv.evaluation.texts import PARTS, digest_of, part_of, read_texts
from entropykv.files import read_text
from entropykv.model.geometry import read_geometry
from entropykv.policy.names import AUTO
from entropykv.policy.resolved_config import freezing_of, recovery_of
from entropykv.profile.find import given_profile, profile_path
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.options import KV_TYPES
from entropykv.settings.recovery import WITHOUT_REWALK

_DEFAULTS = EvalRequest


def add_eval_options(parser: argparse.ArgumentParser) -> None:
    """Add options of what is compared, on which texts, and by which measures."""
    _add_combination_options(parser)
    _add_text_options(parser)
    _add_passkey_options(parser)
    _add_dataset_options(parser)
    _add_suite_options(parser)


def _add_combination_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is compared, in every combination")
    group.add_argument(
        "--kv-budget",
        type=list_of(str),
        default=["0.2"],
        metavar="B,...",
        help="fractions of each prompt in (0, 1], tokens per KV head, or bytes such as 64MiB "
        "(default: 0.2)",
    )
    group.add_argument(
        "--equal-bytes",
        action="store_true",
        help="fractions are those of the bytes of the prompt's full f16 cache, for every type, and "
        "not of its entries",
    )
    group.add_argument(
        "--policy",
        type=list_of(str),
        default=[AUTO],
        metavar="P,...",
        help=f"as --policy of `entropykv run` (default: {AUTO})",
    )
    group.add_argument(
        "--kv-type",
        type=list_of(str),
        default=list(KV_TYPES),
        metavar="T,...",
        help=f"of {', '.join(KV_TYPES)} (default: all)",
    )
    add_option(group, CacheOptions, "entropy_config")
    add_protection_options(group)
    add_store_options(parser.add_argument_group("engine"))
    add_freeze_options(parser)
    add_recovery_options(parser, rewalks=False)


def _add_text_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("texts")
    group.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="texts to read")
    group.add_argument(
        "--part",
        choices=PARTS,
        default="all",
        help="which texts: tuning and held-out never share one (default: %(default)s)",
    )
    group.add_argument(
        "--tuning-share",
        type=fraction,
        default=0.3,
        metavar="F",
        help="texts of the tuning part, by a hash of their content (default: %(default)s)",
    )
    group.add_argument(
        "--prompt",
        type=integer(1),
        metavar="N",
        help=f"tokens read inside the budget (default: {DEFAULT_PROMPT}, or what texts and context "
        "allow)",
    )
    group.add_argument(
        "--continuation",
        type=integer(0),
        default=_DEFAULTS.continuation,
        metavar="N",
        help="tokens of each text that follow and are predicted (0: none, and no greedy texts; "
        "default: %(default)s)",
    )
    group.add_argument(
        "--greedy",
        type=integer(0),
        default=_DEFAULTS.greedy,
        metavar="N",
        help="tokens written greedily after each prompt (0: none; default: %(default)s)",
    )
    group.add_argument(
        "--inside",
        action="store_true",
        help="the budget does not grow for what follows a prompt, here and with --dataset or "
        "--suite",
    )


def _add_passkey_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("recall of facts that are planted into the texts")
    for name, least, default, what in (
        ("--passkeys", 0, _DEFAULTS.passkeys, "passages to read"),
        ("--passkey-tokens", 16, _DEFAULTS.passkey_tokens, "tokens of a passage"),
        ("--facts-per-text", 1, _DEFAULTS.facts_per_text, "facts in a passage"),
        ("--seed", 0, _DEFAULTS.seed, "choice of passages, facts and places"),
    ):
        group.add_argument(
            name, type=integer(least), default=default, metavar="N", help=f"{what} (%(default)s)"
        )


def _add_dataset_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("answers to a data set, scored by ROUGE (extra eval)")
    group.add_argument(
        "--dataset", metavar="FILE", help="JSON lines with context, input, answers (LongBench)"
    )
    group.add_argument(
        "--prompt-template",
        type=utf8,
        default=DEFAULT_TEMPLATE,
        metavar="TEXT",
        help="with {context} and {input} (default: one after the other)",
    )
    group.add_argument(
        "--max-tokens",
        type=integer(1),
        default=_DEFAULTS.max_tokens,
        metavar="N",
        help="of an answer (default: %(default)s)",
    )
    group.add_argument(
        "-c",
        "--ctx-size",
        type=integer(0),
        default=_DEFAULTS.n_ctx,
        metavar="N",
        help="longest prompt with its answer; of longer ones the middle is left out (0, the "
        "default: what the model was trained for)",
    )


def _add_suite_options(parser: argparse.ArgumentParser) -> None:
    defaults = Suite()
    group = parser.add_argument_group("RULER, measured in place of all else (extra eval)")
    group.add_argument(
        "--suite",
        choices=("ruler",),
        help="RULER's synthetic tasks by their published definition; its essays are replaced by "
        "--text, or by English prose that comes with entropykv",
    )
    group.add_argument(
        "--tasks",
        type=list_of(str),
        default=list(TASKS),
        metavar="T,...",
        help=f"of {', '.join(TASKS)} (default: all)",
    )
    group.add_argument(
        "--lengths",
        type=list_of(integer(1)),
        default=list(defaults.lengths),
        metavar="N,...",
        help="tokens of a prompt with its answer, by the model's tokenizer; a table for each "
        f"(default: {','.join(map(str, defaults.lengths))})",
    )
    group.add_argument(
        "--samples",
        type=integer(1),
        default=defaults.n_samples,
        metavar="N",
        help="of each task at each length, by --seed (default: %(default)s)",
    )
    group.add_argument(
        "--question",
        choices=(*QUESTIONS, "both"),
        default=QUESTIONS[0],
        help="unknown: the context is read before the question is known; known: both are one "
        "prompt; both: a table for each (default: %(default)s)",
    )


def _suite_of(options: argparse.Namespace) -> Suite | None:
    if options.suite is None:
        return None
    questions = QUESTIONS if options.question == "both" else [options.question]
    return Suite(options.lengths, options.tasks, options.samples, questions)


def request_of(options: argparse.Namespace) -> EvalRequest:
    """Read the texts and questions that the options name; raises the errors of their readers."""
    texts = read_texts(options.text or [])
    return EvalRequest(
        texts=part_of(texts, options.part, options.tuning_share) if texts else texts,
        prompt=options.prompt,
        continuation=options.continuation,
        greedy=options.greedy,
        inside=options.inside,
        passkeys=options.passkeys,
        passkey_tokens=options.passkey_tokens,
        facts_per_text=options.facts_per_text,
        seed=options.seed,
        questions=read_dataset(options.dataset) if options.dataset else [],
        prompt_template=options.prompt_template,
        max_tokens=options.max_tokens,
        n_ctx=options.ctx_size,
        suite=_suite_of(options),
    )


def engine_of(options: argparse.Namespace) -> EngineSettings:
    """Return the settings of all sessions, without policy, budget and types, which are compared."""
    cache = CacheOptions(
        store=options.store,
        entropy_config=given_profile(options.entropy_config),
        learn=False,  # Figures must not depend on what earlier processes have read.
        n_ubatch=options.ubatch_size,
        n_threads=options.threads,
        fixed_threads=True,
        n_sinks=options.sinks,
        recent_window=options.recent_window,
        freeze=freezing_of(options),
        recovery=recovery_of(options, WITHOUT_REWALK),
    )
    return EngineSettings(str(options.model), cache, options.equal_bytes)


def log_settings(options: argparse.Namespace, engine: EngineSettings) -> dict[str, object]:
    """Return the settings that figures depend on, in addition to the request."""
    cache = engine.options
    path = options.entropy_config or profile_path(read_geometry(options.model))
    return {
        "store": cache.store,
        "n_ubatch": cache.micro_batch,
        "n_threads": cache.threads,
        "n_sinks": cache.n_sinks,
        "recent_window": cache.recent_window,
        "equal_bytes": engine.equal_bytes,
        "freezing": None if cache.freezing is None else dataclasses.asdict(cache.freezing),
        "recovery": None if cache.recovery is None else dataclasses.asdict(cache.recovery),
        "entropy_config": None if path is None else digest_of(read_text(path, ProfileError)),
        "entropykv": VERSION,
    }
