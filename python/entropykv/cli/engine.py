"""Options of the commands that generate text, and the session and sampling made of them."""

from __future__ import annotations

import argparse

from entropykv.cli.freeze_options import (
    add_freeze_options,
    add_recovery_options,
    recovery_of,
)
from entropykv.cli.options import add_store_options, integer
from entropykv.cli.saved import say
from entropykv.errors import SettingsError
from entropykv.session.asked import freezing_of
from entropykv.session.generate import Sampling
from entropykv.session.session import Session
from entropykv.settings.cores import too_many_threads


def add_sampling_options(parser: argparse.ArgumentParser, *, n_predict: int) -> None:
    """How tokens are chosen, and how many at most: see sampling_of."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "-n",
        "--n-predict",
        type=integer(-1),
        default=n_predict,
        metavar="N",
        help="tokens of an answer at most (-1: until the model or the context ends; default: "
        "%(default)s)",
    )
    group.add_argument("--temp", type=float, default=0.8, help="0: greedy (default: %(default)s)")
    group.add_argument("--top-k", type=integer(0), default=40, help="0: off (default: %(default)s)")
    group.add_argument("--top-p", type=float, default=0.95, help="1: off (default: %(default)s)")
    group.add_argument("--min-p", type=float, default=0.05, help="0: off (default: %(default)s)")
    group.add_argument(
        "--repeat-penalty", type=float, default=1.0, help="1: off (default: %(default)s)"
    )
    group.add_argument(
        "-s",
        "--seed",
        type=integer(-1, 2**32 - 1),
        default=-1,
        help="-1, the default: another every time",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """How the model is run, and what is frozen: see open_engine."""
    add_freeze_options(parser)
    add_recovery_options(parser)
    group = parser.add_argument_group("engine")
    add_store_options(group)
    group.add_argument(
        "-b",
        "--batch-size",
        type=integer(1),
        default=2048,
        help="accepted for llama-cli's sake: a micro-batch is never larger (default: %(default)s)",
    )
    group.add_argument(
        "-ngl", "--n-gpu-layers", type=integer(0), default=0, help="layers on the GPU (flat store)"
    )
    group.add_argument("-v", "--verbose", action="store_true", help="llama.cpp's own log")
    return group


def sampling_of(options: argparse.Namespace) -> Sampling:
    """Raise SettingsError for values outside of their range."""
    if options.n_predict == 0:
        raise SettingsError("-n 0 generates nothing; use -1 or a number of tokens")
    return Sampling(
        temperature=options.temp,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repeat_penalty=options.repeat_penalty,
        seed=None if options.seed < 0 else options.seed,
    )


def open_engine(options: argparse.Namespace) -> Session:
    """Load the model; says what the user should know of it."""
    if warning := too_many_threads(options.threads, "-t"):
        say(warning)
    session = Session(
        options.model,
        n_ctx=options.ctx_size,
        kv_budget=options.kv_budget,
        policy=options.policy,
        kv_type=options.kv_type,
        store=options.store,
        entropy_config=options.entropy_config,
        n_ubatch=min(options.ubatch_size, options.batch_size),
        n_threads=options.threads,
        n_gpu_layers=options.n_gpu_layers,
        n_sinks=options.sinks,
        recent_window=options.recent_window,
        freeze=freezing_of(options),
        recovery=recovery_of(options),
        verbose=options.verbose,
    )
    if session.fallback:
        say(f"going on with the flat store: {session.fallback}")
    if note := session.other_file():
        say(note)
    return session
