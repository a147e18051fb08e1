"""`entropykv plan`: what a budget means for a model."""

from __future__ import annotations

import argparse
import json

from entropykv.cli.options import add_budget_options, demo_of
from entropykv.session.memory_plan import format_plan, make_plan


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "plan",
        help="show what a budget means for a model, from its header alone",
        description="Show weights, KV cache, budget and savings; reads only the file's header.",
    )
    add_budget_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(command=_plan)


def _plan(options: argparse.Namespace) -> int:
    demo_of(options)
    plan = make_plan(
        options.model,
        n_ctx=options.ctx_size,
        kv_budget=options.kv_budget,
        policy=options.policy,
        kv_type=options.kv_type,
        entropy_config=options.entropy_config,
        n_sinks=options.sinks,
        recent_window=options.recent_window,
    )
    print(json.dumps(plan.to_dict(), indent=2) if options.json else format_plan(plan))
    return 0
