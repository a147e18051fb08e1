"""Write an answer to stdout while it is generated, and what the model thinks before it to stderr;
on a terminal, lines end between words.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shutil
import sys
import unicodedata
from collections.abc import Callable
from typing import NoReturn

from tqdm import tqdm

from entropykv import system
from entropykv.cli.options import integer, utf8
from entropykv.cli.terminal import InterruptionError, noted_interrupts, say
from entropykv.errors import SettingsError
from entropykv.generation.events import AnswerPiece, Ended, generate_events
from entropykv.generation.prompt import GenerationRequest
from entropykv.session.session import Session
from entropykv.settings import flags
from entropykv.thinking.tags import FORMATS, MOST_MESSAGE, ThinkingOptions, template_variables

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
    flags.REASONING.add(group, type=_switch, default="auto")
    flags.REASONING_BUDGET.add(group, type=integer(-1), default=-1)
    flags.REASONING_MESSAGE.add(group, type=utf8, default="")
    flags.REASONING_EFFORT.add(group)
    return group


def _switch(text: str) -> str:
    words = {"1": "on", "true": "on", "0": "off", "false": "off"}
    word = words.get(text.lower(), text.lower())
    if word not in ("on", "off", "auto"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither on, off nor auto")
    return word


def add_thinking_to_template(options: argparse.Namespace) -> None:
    """Add the options about thoughts to the variables of the chat template."""
    options.chat_template_kwargs = template_variables(
        options.chat_template_kwargs, options.reasoning, options.reasoning_effort
    )


def thinking_options_of(options: argparse.Namespace) -> ThinkingOptions:
    """Return the settings of thoughts in the options; raises SettingsError for a message too
    long.
    """
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
        """End the shown thought, which has `n_tokens` tokens; later calls do nothing."""
        if self._ended:
            return
        self._ended = True
        if self._folds and n_tokens and self._is_apart:
            self._write(f"[thought for {n_tokens} tokens]")
        if self._is_shown:
            self._is_shown = False
            sys.stderr.write("\n")
            sys.stderr.flush()


_CODE = "```"
"""What begins and ends a block of code, whose lines are left as they are."""


class Screen:
    """Hold back a word until its end, because it may not fit into the line.

    What is no terminal gets every piece at once, unchanged.
    """

    def __init__(self) -> None:
        """Find out whether stdout is a terminal, and how wide."""
        is_terminal = sys.stdout.isatty()
        self._columns = shutil.get_terminal_size().columns if is_terminal else 0
        self._column = 0
        self._line = self._word = ""
        self._in_code = False

    def write(self, text: str) -> None:
        """Write a piece of the answer."""
        if self._columns == 0:
            self._put(text)
            return
        shown = "".join(map(self._take, text))
        if shown:
            self._put(shown)

    def end(self) -> None:
        """Write what was held back, and end the line."""
        self._put(self._end_word() + "\n")
        self._column, self._line, self._in_code = 0, "", False

    def _put(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _take(self, character: str) -> str:
        """Return what is shown after one more character."""
        self._line += character
        if character == "\n":
            shown = self._end_word() + character
            self._in_code ^= self._line.startswith(_CODE)
            self._column, self._line = 0, ""
            return shown
        if self._in_code:
            return character
        if character.isspace():
            shown = self._end_word()
            if self._column >= self._columns:
                return shown  # The line is full: its end takes the place of the space.
            self._column += 1
            return shown + character
        if _width(character) > 1:  # Scripts with wide characters have no spaces between words.
            shown = self._end_word()
            self._word = character
            return shown + self._end_word()
        self._word += character
        return ""

    def _end_word(self) -> str:
        """Return the word that was held back, at the beginning of a new line if it fits only
        there.
        """
        word, self._word = self._word, ""
        width = sum(map(_width, word))
        breaks = self._column > 0 and self._column + width > self._columns
        self._column = width + (0 if breaks else self._column)
        if self._column > self._columns:
            self._column %= self._columns
        return "\n" * breaks + word


def _width(character: str) -> int:
    """Return how many columns a character takes."""
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


@dataclasses.dataclass
class Answer:
    """Hold the generated answer; write_answer() fills it step by step, so that it is complete even
    after an error.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    unread: list[int] | None = None
    """The last tokens, if the session has not read them; None if not even the prompt was read."""
    interrupted: bool = False
    text: str = ""
    """What was said, without what was thought before it."""
    n_thought: int = 0
    """How many of the tokens are thoughts."""


def write_answer(
    session: Session,
    request: GenerationRequest,
    answer: Answer,
    *,
    to_question: bool = False,
    when_read: Callable[[], object] | None = None,
    folds: bool = False,
) -> None:
    """Read a prompt and write the answer to stdout as it is generated; Ctrl-C ends it.

    With `to_question`, the answer does not continue a text. Therefore white space before its first
    word, which some tokenizers write, is left out. `when_read` is called once the prompt has been
    read. What the model thinks goes to stderr; with `folds`, only how long it is.
    """
    start, n_prompt = session.position, len(request.prompt.tokens)
    screen = Screen()
    thought = ShownThought(request.thinking, folds=folds)
    with noted_interrupts() as interrupts, _prompt_bar(n_prompt) as bar:

        def on_prompt(done: int) -> None:
            bar.update(done - bar.n)
            if done == n_prompt:
                bar.close()
                if when_read is not None:
                    when_read()
            interrupts.check()

        try:
            # Close the generator at once; otherwise it would read tokens that were never shown.
            with contextlib.closing(
                generate_events(session, request, on_prompt=on_prompt)
            ) as events:
                begun = not to_question
                for event in events:
                    if isinstance(event, Ended):
                        answer.n_thought = event.n_thought or 0
                    if not isinstance(event, AnswerPiece):
                        continue
                    if event.token is not None:
                        answer.tokens.append(event.token)
                    answer.n_thought = event.n_thought
                    answer.text += event.answer
                    text = thought.take(event)
                    shown = text if begun else text.lstrip(" ")
                    begun = begun or shown != ""
                    screen.write(shown)
                    interrupts.check()
        except InterruptionError:
            answer.interrupted = True
            n_read = session.position - start
            if n_read < n_prompt:
                bar.close()
                say(f"Ctrl-C: {n_read} of {n_prompt} tokens of the prompt were read")
        finally:
            n_read = session.position - start - n_prompt
            answer.unread = answer.tokens[n_read:] if n_read >= 0 else None
            thought.end(answer.n_thought)
            screen.end()


def _prompt_bar(n_tokens: int) -> tqdm[NoReturn]:
    return tqdm(
        total=n_tokens,
        desc="reading the prompt",
        unit=" tokens",
        leave=False,
        disable=not sys.stderr.isatty(),
    )


def read_rest(session: Session, tokens: list[int]) -> bool:
    """Read the tokens of an answer that have not been read yet; returns False if the context is
    full.
    """
    if session.position + len(tokens) > session.config.n_ctx:
        return False
    for _ in session.reader.read(tokens, all_logits=False) if tokens else ():
        pass
    return True
