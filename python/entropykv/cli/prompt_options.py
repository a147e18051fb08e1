"""Declare options of the text that a model reads first: the prompt, and a system message
before it.
"""

from __future__ import annotations

import argparse
import re

from entropykv.cli.options import utf8
from entropykv.errors import ContextError, SettingsError
from entropykv.files import read_standard_input, read_text


def add_prompt_options(group: argparse._ActionsContainer, what: str) -> None:
    """Add -p, -f and -e; `what` describes their text: the prompt, or the first turn."""
    group.add_argument(
        *("-p", "--prompt"), type=utf8, metavar="TEXT", help=f"{what}; after -f's text if both"
    )
    group.add_argument(
        "-f", "--file", metavar="FILE", help=f"read {what} from a file (-: standard input)"
    )
    group.add_argument(
        "-e", "--escape", action="store_true", help=r"read \n, \t, \" and \\ in -p and -sys"
    )


def add_system_options(group: argparse._ActionsContainer, where: str) -> None:
    """Add -sys and -sysf; `where` names the text that the system message precedes."""
    group.add_argument(
        "-sys",
        "--system",
        "--system-prompt",
        type=utf8,
        metavar="TEXT",
        help=f"text before {where}, in the model's chat template",
    )
    group.add_argument(
        "-sysf",
        "--system-prompt-file",
        dest="system",
        type=_text_of_file,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="read it from a file",
    )


def _text_of_file(path: str) -> str:
    return read_text(path, SettingsError)


def read_prompt(options: argparse.Namespace) -> str:
    """Return the text of -f and -p, which may be empty; with -e, backslash escapes are replaced."""
    if options.escape:
        for name in ("prompt", "system"):
            if getattr(options, name) is not None:
                setattr(options, name, _unescaped(getattr(options, name)))
    parts = []
    if options.file == "-":
        parts.append(read_standard_input())
    elif options.file is not None:
        parts.append(read_text(options.file, ContextError))
    if options.prompt is not None:
        parts.append(options.prompt)
    return "\n".join(parts)


def _unescaped(text: str) -> str:
    """Replace backslash escapes as llama-cli does; unknown ones stay unchanged."""
    known = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'"}
    return re.sub(r"\\(.)", lambda found: known.get(found[1], found[0]), text)
