"""`entropykv plan`: print what a budget means for a model."""

from __future__ import annotations

import argparse
import json

from entropykv.cli.options import (
    add_budget_options,
    add_freeze_options,
    add_option,
    add_recovery_options,
    add_store_options,
    demo_of,
    fetch_named,
)
from entropykv.cli.parser import CommandParser
from entropykv.cli.terminal import say
from entropykv.policy.resolved_config import cache_options_of
from entropykv.session.memory_plan import budget_warnings, format_plan, make_plan
from entropykv.settings.cache_options import CacheOptions


def add_plan(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the parser of `entropykv plan`."""
    parser = commands.add_parser(
        "plan",
        usage="%(prog)s (-m MODEL | -hf USER/MODEL | --demo NAME) [options]",
        description="Show weights, KV cache, budget and savings; reads only the file's header.",
    )
    add_budget_options(parser)
    add_freeze_options(parser)
    add_recovery_options(parser)
    engine = parser.add_argument_group("engine")
    add_store_options(engine)
    add_option(
        engine,
        CacheOptions,
        "n_sequences",
        help="plan for `entropykv serve -np N`: what all conversations share, and each gets",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.show_first(
        *("-m", "-hf", "--demo", "-c", "--kv-budget", "--policy", "--kv-type", "--store", "-np"),
        *("--freeze", "-ub", "--json"),
        example="entropykv plan -m model.gguf -c 32768 --kv-budget 20%",
    )
    # None lets the default depend on -np: a pool reads fewer tokens at a time than one session.
    parser.set_defaults(command=_plan, ubatch_size=None)


def _plan(options: argparse.Namespace) -> int:
    demo_of(options)
    cache = cache_options_of(
        options,
        n_ctx=options.ctx_size,
        n_ubatch=options.ubatch_size,
        n_threads=options.threads,
        n_sequences=options.parallel,
    )
    fetch_named(options)
    plan = make_plan(options.model, cache)
    for warning in budget_warnings(plan.config, plan.budget_bytes):
        say(warning)
    print(json.dumps(plan.to_dict(), indent=2) if options.json else format_plan(plan))
    return 0
