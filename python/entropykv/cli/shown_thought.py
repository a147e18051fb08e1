"""Show what a model thinks before it answers on stderr; only the answer is written to stdout."""

from __future__ import annotations

import argparse
import sys

from entropykv import system
from entropykv.cli.options import integer, utf8
from entropykv.errors import SettingsError
from entropykv.generation.events import AnswerPiece
from entropykv.thinking.options import FORMATS, MOST_MESSAGE, ThinkingOptions, template_switch

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def add_thinking_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add llama.cpp's options of thoughts; thinking_options_of() reads them."""
    group = parser.add_argument_group("thoughts (of models whose chat template has them)")
    group.add_argument(
        "--reasoning-format",
        choices=FORMATS,
        default="auto",
        help="where thoughts are shown: none and deepseek-legacy leave them in the answer, auto "
        "and deepseek take them out of it (default: %(default)s)",
    )
    group.add_argument(
        "-rea",
        "--reasoning",
        type=_switch,
        default="auto",
        metavar="on|off|auto",
        help="whether the chat template is told to let the model think (default: auto, nothing)",
    )
    group.add_argument(
        "--reasoning-budget",
        type=integer(-1),
        default=-1,
        metavar="N",
        help="tokens of a thought at most: 0 ends it at once, -1 never (default: %(default)s)",
    )
    group.add_argument(
        "--reasoning-budget-message",
        type=utf8,
        default="",
        metavar="TEXT",
        help="text that ends a thought whose tokens are used up",
    )
    group.add_argument(
        "--reasoning-effort",
        metavar="LEVEL",
        help="what the chat template is told as reasoning_effort, such as low",
    )
    return group


def _switch(text: str) -> str:
    words = {"1": "on", "true": "on", "0": "off", "false": "off"}
    word = words.get(text.lower(), text.lower())
    if word not in ("on", "off", "auto"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither on, off nor auto")
    return word


def use_in_template(options: argparse.Namespace) -> None:
    """Add the options about thoughts to the variables of the chat template."""
    arguments = dict(options.chat_template_kwargs or {})
    if options.reasoning != "auto":
        arguments.update(template_switch(thinks=options.reasoning == "on"))
    if options.reasoning_effort not in (None, "default"):
        arguments["reasoning_effort"] = options.reasoning_effort
    options.chat_template_kwargs = arguments or None


def thinking_options_of(options: argparse.Namespace) -> ThinkingOptions:
    """Return the settings of thoughts in the options; raises SettingsError."""
    message = options.reasoning_budget_message
    if len(message) > MOST_MESSAGE:
        raise SettingsError(
            f"--reasoning-budget-message has more than {MOST_MESSAGE} characters; shorten it"
        )
    return ThinkingOptions(options.reasoning_format, options.reasoning_budget, message)


class ShownThought:
    """Show what a model thinks before its answer."""

    def __init__(self, options: ThinkingOptions, *, folds: bool = False) -> None:
        """Begin an answer; `folds`: only the length of the thought is shown."""
        self._is_apart = options.format in ("auto", "deepseek")
        self._folds = folds
        self._is_shown = self._ended = False

    def take(self, piece: AnswerPiece) -> str:
        """Show the thought in the next piece of the answer, and return the text for stdout."""
        if not self._is_apart:
            return piece.text
        if piece.thought and not self._folds:
            self._write(piece.thought)
        if piece.answer:
            self.end(piece.n_thought)
        return piece.answer

    def _write(self, text: str) -> None:
        """Write to stderr, in a dim colour if that is a terminal."""
        self._is_shown = True
        dim, plain = (_DIM, _PLAIN) if system.shows_escapes(sys.stderr) else ("", "")
        sys.stderr.write(f"{dim}{text}{plain}")
        sys.stderr.flush()

    def end(self, n_tokens: int) -> None:
        """End the shown thought of so many tokens, once; also when it was interrupted."""
        if self._ended:
            return
        self._ended = True
        if self._folds and n_tokens and self._is_apart:
            self._write(f"[thought for {n_tokens} tokens]")
        if self._is_shown:
            self._is_shown = False
            sys.stderr.write("\n")
            sys.stderr.flush()
