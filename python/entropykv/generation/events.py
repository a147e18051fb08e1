"""Generate: read a prompt, and tell piece by piece what the model answers."""

from __future__ import annotations

import codecs
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from entropykv.constraint.constraint import Constraint
from entropykv.generation.prompt import GenerationRequest
from entropykv.session.generate import Chooser, Companions, StepHooks, read_prompt, write_tokens
from entropykv.session.logprobs import CompletionLogprobs, HeldValues, LogprobRecorder, TokenLogprob
from entropykv.session.session import Session
from entropykv.settings.sampling import Sampling
from entropykv.store.protocol import Logits
from entropykv.thinking.reader import Parts, ThoughtCounter, ThoughtReader, before_answer, reader_of

Reason = Literal["stop", "length"]
"""Why an answer ends, in OpenAI's words."""
GO_ON = StepHooks()


@dataclass(frozen=True)
class PromptRead:
    """Tell that the prompt was read, so that the answer follows."""

    n_tokens: int
    """How many tokens the prompt has."""
    n_cached: int
    """How many tokens of the prompt had been read before."""
    seconds: float
    """How many seconds it took to read the tokens of the prompt that had not been read before."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """The log probabilities of the prompt's tokens, if they were requested."""


@dataclass(frozen=True)
class AnswerPiece:
    """Tell what a token adds to the answer: maybe nothing yet."""

    token: int | None
    """The token; None for what was held back at the end of the text."""
    text: str
    """The text as it was written, with thoughts and their tags."""
    thought: str = ""
    """The part of the text that is a thought."""
    answer: str = ""
    """The part of the text that is the answer."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """The log probabilities of the tokens whose texts begin in `text`, if they were requested."""
    n_thought: int = 0
    """How many tokens of thoughts there are so far."""


@dataclass(frozen=True)
class Ended:
    """Tell that the answer is complete."""

    reason: Reason
    """Why the answer ends, in OpenAI's words."""
    n_tokens: int
    """How many tokens were written, without one that ends a text."""
    n_thought: int | None
    """How many of the written tokens are thoughts; None if the model does not think."""
    seconds: float
    """How many seconds writing took."""
    stop: str | None = None
    """The one of the request's `stops` that has ended the answer; None: something else has."""
    token: int | None = None
    """The token that has ended the answer; None: something else has."""


Event = PromptRead | AnswerPiece | Ended


def generate_events(
    session: Session,
    request: GenerationRequest,
    *,
    n_cached: int = 0,
    hooks: StepHooks = GO_ON,
    on_prompt: Callable[[int], None] | None = None,
    processors: Sequence[Callable[[Logits], object]] = (),
    has_enough: Callable[[], bool] = lambda: False,
) -> Generator[Event, None, None]:
    """Read a prompt in a session, and yield the events of its answer.

    The session has read the first `n_cached` tokens of the prompt already. `hooks` are called
    before every step, and `on_prompt` with the number of tokens of the prompt that were read;
    `processors` change the logits, (n_vocab,), before each token is chosen. `has_enough` is asked
    after every piece whether the answer ends there. The session has not read the last token of the
    answer; a consumer that stops early must close() the generator before it uses the session.
    Raises the errors of Session.generate().
    """
    answer = _Answer(session, request, hooks, processors)
    try:
        # What cannot be sampled is refused before the prompt is read.
        with answer.chooser() as chooser:
            yield from answer.read(n_cached, on_prompt)
            if request.max_tokens == 0:
                yield Ended("length", 0, answer.n_thought, 0.0)
            else:
                yield from answer.write(chooser, has_enough)
    finally:
        session.rest()


class _Answer:
    """Hold what changes while one request is answered."""

    def __init__(
        self,
        session: Session,
        request: GenerationRequest,
        hooks: StepHooks,
        processors: Sequence[Callable[[Logits], object]],
    ) -> None:
        self._session = session
        self._request = request
        thought = request.prompt.thought
        self._counter: ThoughtCounter | None = None
        self._reader: ThoughtReader | None = None
        self._tags: dict[int, bytes] = {}
        if thought is not None:
            options, tags = request.thinking, thought.tags
            self._tags = session.model.tag_tokens
            ending = session.tokenize(options.message + tags.end, add_bos=False)
            self._counter = ThoughtCounter(
                tags, self._bytes_of, opened=thought.opened, budget=options.budget, ending=ending
            )
            self._reader = reader_of(tags, opened=thought.opened)
        self._recorder: LogprobRecorder | None = None
        if request.n_logprobs is not None:
            self._recorder = LogprobRecorder(request.n_logprobs, request.prompt_logprobs)
        self._with = Companions(self._counter, self._recorder, hooks, processors)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors=request.errors)
        self._stops = StopFinder(request.stops)
        self._values: deque[tuple[int, TokenLogprob]] = deque()
        """The log probabilities that were not yielded yet, each with the byte where its token
        begins.
        """
        self._n_bytes = 0
        """How many bytes all tokens so far have."""
        self._n_shown = 0
        """How many bytes of the text were yielded."""
        self._n_tokens = 0

    @property
    def n_thought(self) -> int | None:
        """Return how many tokens were thoughts; None if the model does not think."""
        return None if self._counter is None else self._counter.n_tokens

    def read(self, n_cached: int, on_prompt: Callable[[int], None] | None) -> Iterator[Event]:
        """Read the prompt; a checkpoint is kept before the part that later turns lack."""
        session, prompt = self._session, self._request.prompt
        start = time.perf_counter()
        end = len(prompt.tokens)
        place = end - (0 if prompt.thought is None else prompt.thought.n_left_out)
        done = n_cached

        def told(n_read: int) -> None:
            if on_prompt is not None:
                on_prompt(done + n_read)

        if done < place < end:
            read_prompt(session, prompt.tokens[done:place], told, companions=self._with)
            session.text.keep_checkpoint()
            done = place
        if done < end or session.logits is None:
            read_prompt(session, prompt.tokens[done:], told, companions=self._with)
        if self._request.prompt.tokens:
            session.text.checkpoint_at_turn(writes=True)
        values = () if self._recorder is None else tuple(self._recorder.take(0))
        yield PromptRead(end, n_cached, time.perf_counter() - start, values)

    def chooser(self) -> Chooser:
        """Return what chooses the tokens; raises the SettingsErrors of Chooser."""
        return Chooser(self._sampling(), self._session, self._with)

    def write(self, chooser: Chooser, has_enough: Callable[[], bool]) -> Iterator[Event]:
        """Yield the pieces of the answer, and its end."""
        session, request, start = self._session, self._request, time.perf_counter()
        first = 0 if request.penalizes_prompt else session.position
        ends = self._with.hooks.ends
        # Close the generator at once; otherwise it would read tokens that nobody saw.
        with closing(
            write_tokens(session, chooser, request.max_tokens, penalised_from=first)
        ) as tokens:
            for token in tokens:
                if ends():
                    break
                yield self._piece_of(token)
                if self._stops.found is not None or has_enough():
                    break
        stopped = self._stops.found is not None
        is_cut = (
            not stopped
            and (self._n_tokens == request.max_tokens or session.position >= session.config.n_ctx)
            and not ends()
            and not has_enough()
        )
        if (rest := self._rest(stopped=stopped)) is not None:
            yield rest
        seconds = time.perf_counter() - start
        reason: Reason = "length" if is_cut else "stop"
        yield Ended(reason, self._n_tokens, self.n_thought, seconds, self._stops.found, chooser.end)

    def _sampling(self) -> Sampling:
        """Return the sampling of the request; its grammar describes what comes behind a thought."""
        sampling, thought = self._request.sampling, self._request.prompt.thought
        if sampling.grammar is None or thought is None:
            return sampling
        before = before_answer(thought.tags, opened=thought.opened)
        return replace(sampling, grammar=Constraint.of(sampling.grammar).behind(before))

    def _bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token, including those of a tag that is a control token."""
        tag = self._tags.get(token)
        return self._session.token_bytes(token) if tag is None else tag

    def _piece_of(self, token: int) -> AnswerPiece:
        data = self._bytes_of(token)
        self._n_tokens += 1
        if self._recorder is not None:
            (value,) = self._recorder.take(1)
            self._values.append((self._n_bytes, value))
        self._n_bytes += len(data)
        text = self._stops.take(self._decoder.decode(data))
        return self._told(token, text, self._parts_of(text))

    def _parts_of(self, text: str) -> Parts:
        return Parts(answer=text) if self._reader is None else self._reader.take(text)

    def _told(self, token: int | None, text: str, parts: Parts) -> AnswerPiece:
        self._n_shown += len(text.encode("utf-8", "replace"))
        values = []
        while self._values and self._values[0][0] < self._n_shown:
            values.append(self._values.popleft()[1])
        told = (parts.thought, parts.answer, tuple(values))
        return AnswerPiece(token, text, *told, self.n_thought or 0)

    def _rest(self, *, stopped: bool) -> AnswerPiece | None:
        """Return what was held back until the answer ended; None if that is nothing."""
        text = ""
        if not stopped:
            text = self._stops.take(self._decoder.decode(b"", final=True)) + self._stops.finish()
        parts = self._parts_of(text)
        if self._reader is not None:
            last = self._reader.finish()
            parts = Parts(parts.thought + last.thought, parts.answer + last.answer)
        if not stopped:
            self._n_shown = self._n_bytes + 1  # So the values of all tokens are yielded.
        piece = self._told(None, text, parts)
        is_something = piece.text or piece.thought or piece.answer or piece.logprobs
        return piece if is_something else None


class StopFinder:
    """Find the first of some texts in an answer that comes in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Look for `stops`, but not for empty texts, which every answer contains."""
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None
        """The stop text that was found, and ends the answer; None until then."""

    def take(self, text: str) -> str:
        """Add the next piece; returns what can be shown now: nothing of a text that ends the
        answer, nor of what may be the beginning of one.
        """
        held = self._held + text
        if not self._stops:
            return held
        places = [(held.find(stop), stop) for stop in self._stops if stop in held]
        if places:
            end, self.found = min(places, key=lambda place: place[0])
            self._held = ""
            return held[:end]
        sure = len(held) - self._unfinished(held)
        self._held = held[sure:]
        return held[:sure]

    def finish(self) -> str:
        """Return the text that was held back because it may begin a stop text."""
        held, self._held = self._held, ""
        return held

    def _unfinished(self, text: str) -> int:
        """Return the length of the longest end of a text that begins a stop text."""
        longest = max(map(len, self._stops)) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


class CompletionPart(NamedTuple):
    """Hold what a part of a completion adds, or all of it."""

    text: str
    values: Sequence[TokenLogprob]
    """The log probabilities that belong to the text."""
    tokens: Sequence[int]
    ended: Ended | None = None
    """Why the completion ends here; None: it goes on."""

    @property
    def reason(self) -> str | None:
        """Return why the completion ends here, in OpenAI's words; None: it goes on."""
        return None if self.ended is None else self.ended.reason


class CompletionReader:
    """Read the events of one completion."""

    def __init__(self, echo: str = "", logprobs: CompletionLogprobs | None = None) -> None:
        """Begin with the text `echo`, which is that of the prompt if the answer repeats it.

        `logprobs` shows the values of the prompt's tokens; None: they were not asked for.
        """
        self._echo, self._logprobs = echo, logprobs
        self.n_prompt = 0
        """How many tokens the prompt has, once it was read."""

    def parts(self, events: Iterator[Event]) -> Iterator[CompletionPart]:
        """Yield a part for every piece of text, with the tokens and values since the part before,
        and a last part, which says why the completion has ended.
        """
        text, values, tokens = self._echo, list[TokenLogprob](), list[int]()
        for event in events:
            if isinstance(event, PromptRead):
                self.n_prompt = event.n_tokens
                if self._logprobs is not None:
                    values += self._logprobs.of_prompt(event.logprobs)
            elif isinstance(event, AnswerPiece):
                text += event.text
                values += event.logprobs
                tokens += [] if event.token is None else [event.token]
                if text:
                    yield CompletionPart(text, values, tokens)
                    text, values, tokens = "", [], []
            else:
                yield CompletionPart(text, values, tokens, event)

    def whole(self, events: Iterator[Event]) -> CompletionPart:
        """Return all of a completion; raises SettingsError for too many log probabilities."""
        text, held, tokens, ended = "", HeldValues(), list[int](), None
        for part in self.parts(events):
            text += part.text
            held.add(part.values)
            tokens += part.tokens
            ended = part.ended
        return CompletionPart(text, held.values, tokens, ended)
