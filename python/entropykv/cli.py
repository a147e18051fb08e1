"""The command line: `entropykv run` and `entropykv plan`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from entropykv import _version
from entropykv.cli_options import add_budget_options
from entropykv.cli_run import EXIT_INTERRUPTED, add_run
from entropykv.errors import EntropyKVError
from entropykv.plan import format_plan, make_plan

EXIT_BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Bad input: one sentence on stderr, and 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        code: int = options.command(options)
    except EntropyKVError as error:
        print(f"entropykv: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone
        sys.stderr.close()
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="entropykv",
        description="Run GGUF models in stock llama.cpp inside a hard KV-cache budget.",
    )
    parser.add_argument("--version", action="version", version=f"entropykv {_version.VERSION}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_run(commands)
    _add_plan(commands)
    return parser


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="show what a budget means for a model, from its header alone",
        description="Show weights, KV cache, budget and savings; reads only the file's header.",
    )
    add_budget_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(command=_plan)


def _plan(options: argparse.Namespace) -> int:
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


if __name__ == "__main__":
    sys.exit(main())
