"""Write an answer to stdout while it is generated."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from tqdm import tqdm

from entropykv.cli.interrupts import InterruptionError, noted_interrupts
from entropykv.cli.notes import say
from entropykv.cli.stop_texts import until_stop
from entropykv.session.generate import generate
from entropykv.session.sampling import Sampling
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


def write_answer(
    session: Session,
    tokens: list[int],
    max_tokens: int,
    sampling: Sampling,
    answer: Answer,
    *,
    stops: Sequence[str] = (),
    to_question: bool = False,
    when_read: Callable[[], object] | None = None,
) -> None:
    """Read a prompt and write the answer to stdout as it is generated; Ctrl-C or one of `stops`
    ends it.

    With `to_question`, the answer does not continue a text. Therefore white space before its first
    word, which some tokenizers write, is left out. `when_read` is called once the prompt has been
    read.
    """
    start = session.position
    end_of_prompt = start + len(tokens)
    bar = _prompt_bar(len(tokens))
    with noted_interrupts() as interrupts, bar:

        def on_prompt(done: int) -> None:
            bar.update(done - bar.n)
            if done == len(tokens):
                bar.close()
                if when_read is not None:
                    when_read()
            interrupts.check()

        stream = generate(session, tokens, max_tokens, sampling, on_prompt)
        try:
            # Close the generator at once; otherwise it would read tokens that were never shown.
            with contextlib.closing(stream):
                begun = not to_question
                for piece in until_stop(_text_pieces(session, stream, answer.tokens), stops):
                    shown = piece if begun else piece.lstrip(" ")
                    begun = begun or shown != ""
                    sys.stdout.write(shown)
                    sys.stdout.flush()
                    interrupts.check()
        except InterruptionError:
            answer.interrupted = True
            n_read = session.position - start
            if n_read < len(tokens):
                bar.close()
                say(f"Ctrl-C: {n_read} of {len(tokens)} tokens of the prompt were read")
        finally:
            n_read = session.position - end_of_prompt
            answer.unread = answer.tokens[n_read:] if n_read >= 0 else None
            sys.stdout.write("\n")
            sys.stdout.flush()


def _prompt_bar(n_tokens: int) -> tqdm[NoReturn]:
    return tqdm(
        total=n_tokens,
        desc="reading the prompt",
        unit=" tokens",
        leave=False,
        delay=0.5,
        disable=not sys.stderr.isatty(),
    )


def read_rest(session: Session, tokens: list[int]) -> bool:
    """Read the tokens of an answer that have not been read yet; returns False if the context is
    full.
    """
    if session.position + len(tokens) > session.n_ctx:
        return False
    for _ in session.decode_micro_batches(tokens, all_logits=False) if tokens else ():
        pass
    return True


def _text_pieces(session: Session, stream: Iterator[int], tokens: list[int]) -> Iterator[str]:
    """Yield the text of every token, which may be empty, and append the token to `tokens`.

    A character that is spread over several tokens is yielded with the last of them.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in stream:
        tokens.append(token)
        yield decoder.decode(session.token_bytes(token))
    yield decoder.decode(b"", final=True)
