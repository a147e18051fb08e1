"""Write an answer to stdout while it is generated."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import NoReturn

from tqdm import tqdm

from entropykv.cli.interrupts import InterruptionError, noted_interrupts
from entropykv.cli.notes import say
from entropykv.cli.screen import Screen
from entropykv.cli.shown_thought import ShownThought
from entropykv.generation.events import AnswerPiece, Ended, generate
from entropykv.generation.request import GenerationRequest
from entropykv.session.session import Session


@dataclasses.dataclass
class Answer:
    """Hold the generated answer; write_answer() fills it step by step, so that it is complete even
    after an error.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    unread: list[int] | None = None
    """The last token if the session has not read it yet; None if not even the prompt was read."""
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
            with contextlib.closing(generate(session, request, on_prompt=on_prompt)) as events:
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
