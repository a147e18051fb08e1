"""Write an answer to stdout while it is generated."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

from tqdm import tqdm

from entropykv.cli.interrupts import InterruptionError, noted_interrupts
from entropykv.cli.notes import say
from entropykv.cli.screen import Screen
from entropykv.cli.shown_thought import ShownThought
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
    thought: ShownThought | None = None,
    keep_before: int = 0,
) -> None:
    """Read a prompt and write the answer to stdout as it is generated; Ctrl-C or one of `stops`
    ends it.

    With `to_question`, the answer does not continue a text. Therefore white space before its first
    word, which some tokenizers write, is left out. `when_read` is called once the prompt has been
    read. `thought` shows what the model thinks. A checkpoint is kept before the last `keep_before`
    tokens of the prompt, if the session can keep any.
    """
    start = session.position
    end_of_prompt = start + len(tokens)
    screen = Screen()
    bar = _prompt_bar(len(tokens))
    with noted_interrupts() as interrupts, bar:

        def on_prompt(done: int) -> None:
            bar.update(done - bar.n)
            if done == len(tokens):
                bar.close()
                if when_read is not None:
                    when_read()
            interrupts.check()

        try:
            n_first = _read_before(session, tokens, keep_before, on_prompt)
            stream = generate(
                session,
                tokens[n_first:],
                max_tokens,
                sampling if thought is None else thought.before_answer(sampling),
                lambda done: on_prompt(n_first + done),
                thought=None if thought is None else thought.counter,
            )
            # Close the generator at once; otherwise it would read tokens that were never shown.
            with contextlib.closing(stream):
                begun = not to_question
                bytes_of = session.token_bytes if thought is None else thought.piece
                pieces = until_stop(_text_pieces(bytes_of, stream, answer.tokens), stops)
                for piece in pieces if thought is None else _answer_of(thought, pieces):
                    shown = piece if begun else piece.lstrip(" ")
                    begun = begun or shown != ""
                    screen.write(shown)
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
            if thought is not None:
                thought.end()
            screen.end()


def _read_before(
    session: Session, tokens: list[int], last: int, on_prompt: Callable[[int], None]
) -> int:
    """Read a prompt except its last tokens, keep a checkpoint, and return how many were read."""
    n_first = len(tokens) - last
    if last == 0 or n_first <= 0:
        return 0
    start, before = time.perf_counter(), session.position
    for _ in session.decode_micro_batches(tokens[:n_first], all_logits=False):
        on_prompt(session.position - before)
    session.count_prompt(n_first, time.perf_counter() - start)
    session.keep_checkpoint()
    return n_first


def _answer_of(thought: ShownThought, pieces: Iterator[str]) -> Iterator[str]:
    """Yield the parts of a text that are not a thought."""
    for piece in pieces:
        yield thought.take(piece)
    yield thought.finish()


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
    if session.position + len(tokens) > session.n_ctx:
        return False
    for _ in session.decode_micro_batches(tokens, all_logits=False) if tokens else ():
        pass
    return True


def _text_pieces(
    bytes_of: Callable[[int], bytes], stream: Iterator[int], tokens: list[int]
) -> Iterator[str]:
    """Yield the text of every token, which may be empty, and append the token to `tokens`.

    A character that is spread over several tokens is yielded with the last of them.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in stream:
        tokens.append(token)
        yield decoder.decode(bytes_of(token))
    yield decoder.decode(b"", final=True)


def until_stop(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield the pieces of an answer up to the first stop text, which is left out.

    Every input piece yields one output piece, which may be empty: text that may be the beginning of
    a stop text is held back until the next pieces decide. Empty ones end nothing.
    """
    stops, held = [stop for stop in stops if stop], ""
    for piece in pieces:
        held += piece
        ends = [at for at in (held.find(stop) for stop in stops) if at >= 0]
        if ends:
            yield held[: min(ends)]
            return
        sure = len(held) - _unfinished(held, stops)
        yield held[:sure]
        held = held[sure:]
    yield held


def _unfinished(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of one of `stops`."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
