"""Show what a model thinks before it answers on stderr; only the answer is written to stdout."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from entropykv import system
from entropykv.cli.options import integer, utf8
from entropykv.constraint.constraint import Constraint
from entropykv.errors import SettingsError
from entropykv.session.sampling import Sampling
from entropykv.session.session import Session
from entropykv.thinking.counter import ThoughtCounter
from entropykv.thinking.grammar import before_answer
from entropykv.thinking.options import FORMATS, MOST_MESSAGE, ThinkingOptions, template_switch
from entropykv.thinking.reader import Parts, reader_of
from entropykv.thinking.tags import ThoughtTags

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
    """Show an answer and its thought, and count the tokens of the thought."""

    def __init__(
        self,
        session: Session,
        tags: ThoughtTags,
        options: ThinkingOptions,
        prompt: str,
        *,
        folded: bool = False,
    ) -> None:
        """Start after a prompt; `folded`: only the length of the thought is shown."""
        self._session = session
        self._tags = tags
        self._options = options
        self._folded = folded
        self.opened = tags.is_open_after(prompt)
        self.answer = ""
        """The text of the answer so far, without the thought."""
        tokens = {text: _only_token(session, text) for text in tags.control}
        self._control = {token: text for text, token in tokens.items() if token is not None}
        ending = session.tokenize(options.message + tags.end, add_bos=False)
        self.counter = ThoughtCounter(
            tags, self.piece, opened=self.opened, budget=options.budget, ending=ending
        )
        self._reader = reader_of(tags, opened=self.opened)
        self._is_apart = options.format in ("auto", "deepseek")
        self._is_shown = self._ended = False

    @classmethod
    def of(
        cls, session: Session, options: ThinkingOptions, prompt: str, *, folded: bool = False
    ) -> ShownThought | None:
        """Return an object for an answer to a prompt; None if the model does not think."""
        tags = session.thought_tags
        return None if tags is None else cls(session, tags, options, prompt, folded=folded)

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token, including those of a tag that is a control token."""
        text = self._control.get(token)
        return self._session.token_bytes(token) if text is None else text.encode()

    def before_answer(self, sampling: Sampling) -> Sampling:
        """Return the sampling; a constraint applies to the text after the thought."""
        if sampling.grammar is None:
            return sampling
        before = before_answer(self._tags, opened=self.opened)
        constraint = Constraint.of(sampling.grammar).behind(before)
        return dataclasses.replace(sampling, grammar=constraint)

    def take(self, text: str) -> str:
        """Add the next piece of the text, show its thought, and return the text for stdout."""
        return self._show(self._reader.take(text), text)

    def finish(self) -> str:
        """End the text: show what is left of the thought, and return the remaining text
        for stdout.
        """
        shown = self._show(self._reader.finish(), "")
        self.end()
        return shown

    def _show(self, parts: Parts, text: str) -> str:
        if not self._is_apart:
            self.answer += parts.answer
            return text
        if parts.thought and not self._folded:
            self._write(parts.thought)
        if parts.answer:
            self.end()
        self.answer += parts.answer
        return parts.answer

    def _write(self, text: str) -> None:
        """Write to stderr, in a dim colour if that is a terminal."""
        self._is_shown = True
        dim, plain = (_DIM, _PLAIN) if system.shows_escapes(sys.stderr) else ("", "")
        sys.stderr.write(f"{dim}{text}{plain}")
        sys.stderr.flush()

    def end(self) -> None:
        """End the shown thought, once; also when the answer was interrupted within it."""
        if self._ended:
            return
        self._ended = True
        n_tokens = self.counter.n_tokens
        if self._folded and n_tokens and self._is_apart:
            self._write(f"[thought for {n_tokens} tokens]")
        if self._is_shown:
            self._is_shown = False
            sys.stderr.write("\n")
            sys.stderr.flush()


def _only_token(session: Session, text: str) -> int | None:
    tokens = session.tokenize(text, add_bos=False)
    return tokens[0] if len(tokens) == 1 else None
