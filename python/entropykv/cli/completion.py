"""`entropykv completion`: write a script with which a shell completes commands and options."""

from __future__ import annotations

import argparse
import contextlib

from entropykv.cli.parser import CommandParser
from entropykv.errors import MissingExtraError

_SHELLS = ("bash", "zsh", "tcsh")


def add_completion(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the parser of `entropykv completion`."""
    parser = commands.add_parser(
        "completion",
        description="Write a script with which a shell completes commands, options and file names; "
        "for bash: entropykv completion bash > ~/.local/share/bash-completion/completions/"
        "entropykv (needs the extra completion).",
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Run `entropykv completion`; returns the exit code. Raises MissingExtraError without shtab."""
    try:
        import shtab  # noqa: PLC0415  (an extra)
    except ModuleNotFoundError:
        raise MissingExtraError(
            "completion needs shtab, which is not installed; run "
            'pip install "entropykv[completion]"'
        ) from None
    from entropykv.cli import COMMANDS, parser_with  # noqa: PLC0415  (they load this module)

    parser, commands = parser_with(COMMANDS)
    for command in commands.values():
        with contextlib.suppress(MissingExtraError):  # Some options exist only with an extra.
            command.add_now()
        for action in command._actions:  # noqa: SLF001  (argparse has no public list)
            kinds = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY}
            words = str(action.metavar).replace("ram|disk:", "").split("[")[0].split(",")
            if words[0] in kinds:
                action.complete = kinds[words[0]]  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell=options.shell).rstrip())
    return 0
