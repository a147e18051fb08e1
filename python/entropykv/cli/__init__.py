"""Implement the command line; each command has a module here, which is loaded when it is used."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Collection, Sequence
from typing import Any

from entropykv import _version, system
from entropykv.cli.parser import HELP, CommandParser, did_you_mean
from entropykv.cli.terminal import EXIT_INTERRUPTED, orderly_termination, say
from entropykv.errors import EntropyKVError, SettingsError

EXIT_BAD_INPUT = 2
EXIT_NO_READER = 141
"""What a shell reports for a command that ended because nobody reads its output (SIGPIPE)."""

COMMANDS = {
    "run": ("run", "generate text with a model inside a KV budget"),
    "chat": ("chat", "talk with a model in fixed memory"),
    "serve": ("serve", "serve a model to OpenAI's clients inside a KV budget"),
    "read": ("read", "read a document once, to ask it later"),
    "plan": ("plan", "show what a budget means for a model, from its header alone"),
    "models": (
        "models",
        "list models that need no download, public 1.58-bit models, or architectures",
    ),
    "convert": ("convert", "convert a 1.58-bit model for stock llama.cpp"),
    "calibrate": (
        "calibrate",
        "measure once what each head of a model needs, so that budgets lose less",
    ),
    "profile": ("profile", "show an entropy profile, or compare two"),
    "eval": ("evaluate", "measure what a budget costs in quality"),
    "bench": ("bench", "measure speed against stock llama.cpp"),
    "report": ("report", "make a page of what was measured"),
    "completion": ("completion", "write a script with which a shell completes commands"),
}
"""Every command, in the order of --help, with its module in this folder and a summary."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 2 for bad input, 1 if the output cannot be written,
    each with one sentence on stderr.
    """
    system.prepare_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _show_first_options(given)
        parser, _ = parser_with(_commands_in(given))
        if not given:
            parser.print_help()
            return EXIT_BAD_INPUT
        options = parser.parse_args(given)
        with orderly_termination():
            code: int = options.command(options)
        # Errors of writing are reported here; at the exit of Python, they would be a traceback.
        sys.stdout.flush()
    except EntropyKVError as error:
        say(str(error))
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # The reader of our output has closed it, as `head` does.
        _drop_output()
        return EXIT_NO_READER
    except OSError as error:  # The disk is full, for example.
        with contextlib.suppress(OSError):
            say(f"{error.strerror or error}: the output cannot be written")
        _drop_output()
        return 1
    return code


def _drop_output() -> None:
    """Prevent Python from writing the rest of the output when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)


def _show_first_options(given: Sequence[str]) -> None:
    """Print the first options of a command and exit, if they are asked for, and its module takes
    long to load.
    """
    if any(word in HELP for word in given[1:]):
        from entropykv.cli.options import FIRST  # noqa: PLC0415  (only here)

        if given[0] in FIRST:
            FIRST[given[0]].parser(f"entropykv {given[0]}").parse_args(["--help"])


def _commands_in(given: Sequence[str]) -> list[str]:
    """Return the command of a command line, if there is one; raises SettingsError for another
    word.
    """
    if not given or given[0] in (*HELP, "--version"):
        return []
    if given[0].startswith("-"):
        raise SettingsError(
            f"{given[0]} comes after a command, as in `entropykv run {given[0]}`; see entropykv "
            "--help"
        )
    if given[0] not in COMMANDS:
        raise SettingsError(
            f"{given[0]} is not a command of entropykv"
            f"{did_you_mean(given[0], COMMANDS) or '; see entropykv --help'}"
        )
    return [given[0]]


class _Commands(argparse._SubParsersAction):  # type: ignore[type-arg]  # noqa: SLF001
    """Hold the parsers of the commands; each has its summary."""

    def add_parser(self, name: str, **options: Any) -> CommandParser:
        """Add the parser of a command."""
        parser: CommandParser = super().add_parser(name, help=COMMANDS[name][1], **options)
        return parser


def parser_with(names: Collection[str]) -> tuple[CommandParser, dict[str, CommandParser]]:
    """Return the parser, and those of the commands in `names`, which alone have their options.
    Raises VersionError if the extension was built against another llama.cpp.
    """
    parser = CommandParser(
        prog="entropykv",
        usage="%(prog)s [-h] [--version] COMMAND ...",
        description="Run GGUF models in stock llama.cpp inside a hard KV-cache budget.",
        epilog="`entropykv COMMAND --help` shows the options of a command.",
    )
    # argparse counts no indentation of commands: a wide heading makes room for the longest one.
    heading = "COMMAND".ljust(max(map(len, COMMANDS)) + 2)
    commands = parser.add_subparsers(
        action=_Commands, prog="entropykv", title="commands", required=True, metavar=heading
    )
    for name, (module, _) in COMMANDS.items():
        if name in names:
            _version.check_llama_cpp()
            add = getattr(importlib.import_module(f"{__name__}.{module}"), f"add_{module}")
            add(commands)
        else:
            commands.add_parser(name)
    return parser, {name: commands.choices[name] for name in names}


def parsers_of(names: Collection[str]) -> dict[str, CommandParser]:
    """Return the parsers of some commands by name, with all of their options. Raises VersionError
    if the extension was built against another llama.cpp, and MissingExtraError for `serve` without
    its extra.
    """
    parsers = parser_with(names)[1]
    for parser in parsers.values():
        parser.add_now()
    return parsers
