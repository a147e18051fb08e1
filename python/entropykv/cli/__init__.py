"""Implement the command line; each command has a module in this folder."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from entropykv import system
from entropykv.cli.bench import add_bench
from entropykv.cli.calibrate import add_calibrate
from entropykv.cli.chat import add_chat
from entropykv.cli.convert import add_convert
from entropykv.cli.evaluate import add_evaluate
from entropykv.cli.interrupts import orderly_termination
from entropykv.cli.models import add_models
from entropykv.cli.notes import deprecations_as_notes, say
from entropykv.cli.parser import CommandParser
from entropykv.cli.plan import add_plan
from entropykv.cli.profile import add_profile
from entropykv.cli.read import add_read
from entropykv.cli.report import add_report
from entropykv.cli.run import EXIT_INTERRUPTED, add_run
from entropykv.cli.serve import add_serve
from entropykv.errors import EntropyKVError

EXIT_BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 2, and one sentence on stderr, for bad input."""
    system.prepare_streams()
    given = sys.argv[1:] if arguments is None else arguments
    try:
        with deprecations_as_notes():
            options = _parser(serving=list(given[:1]) == ["serve"]).parse_args(given)
            with orderly_termination():
                code: int = options.command(options)
    except EntropyKVError as error:
        say(str(error))
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # The reader of our output has closed it.
        return _without_output("the reader of the output is gone")
    except OSError as error:  # For example, the disk is full.
        return _without_output(f"{error.strerror or error}: the output cannot be written")
    return code


def _without_output(why: str) -> int:
    """Print one sentence about why the output ended, and prevent Python from flushing the rest at
    exit.
    """
    with contextlib.suppress(OSError):
        say(why)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
    return 1


def _parser(*, serving: bool) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = CommandParser(
        prog="entropykv",
        description="Run GGUF models in stock llama.cpp inside a hard KV-cache budget.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_run(commands)
    add_chat(commands)
    add_read(commands)
    add_plan(commands)
    add_bench(commands)
    add_evaluate(commands)
    add_models(commands)
    add_convert(commands)
    add_calibrate(commands)
    add_profile(commands)
    add_report(commands)
    add_serve(commands, chosen=serving)
    return parser
