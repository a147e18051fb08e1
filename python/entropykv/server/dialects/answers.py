"""Read events for the writers of all dialects, and write OpenAI's completions and chats."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from entropykv import _version
from entropykv.generation.events import AnswerPiece, CompletionReader, Ended, Event, PromptRead
from entropykv.generation.prompt import GenerationRequest, Prompt, shown_prompt
from entropykv.llamacpp.foreign_text import without_marks
from entropykv.llamacpp.model import Model
from entropykv.server.chat.tool_calls import CallReader, ToolUse, as_deltas
from entropykv.server.engine.answering import Answering
from entropykv.session.logprobs import CompletionLogprobs, HeldValues, TokenLogprob, text_of
from entropykv.session.sequence import is_placeholder
from entropykv.thinking.tags import ThoughtFormat

Chunk = dict[str, Any]
FINGERPRINT = f"build-{_version.VERSION}"
"""The value of `system_fingerprint` in answers, which begins like llama-server's."""


class Writer(Protocol):
    """Write the events of an answer in the form of one API."""

    def whole(self, events: Iterator[Event]) -> dict[str, Any]:
        """Generate an answer to its end, and return it as one that is not streamed."""

    def chunks(self, events: Iterator[Event]) -> Iterator[Chunk]:
        """Generate an answer, and yield its chunks as they are written."""


def written(
    writer: Writer,
    job: Answering,
    request: GenerationRequest,
    *,
    streams: bool,
    constrained_by: str,
    n_passages: int = 0,
    tells_progress: bool = False,
) -> dict[str, Any] | Iterator[Chunk]:
    """Return the answer of a job: an iterator of its chunks if `streams`, else the whole.

    `tells_progress`: chunks tell how much of the prompt was read, if the writer has a method
    begin(), which returns a chunk without text. The other parameters are those of
    Answering.answer().
    """
    begin: Callable[[], Chunk] | None = getattr(writer, "begin", None)

    def tell(n_read: int) -> None:
        if begin is not None and job.tell is not None:
            progress = {"total": job.n_prompt, "cache": job.n_cached, "processed": n_read}
            told = {**progress, "time_ms": 1000.0 * job.prompt_seconds}  # llama-server's names.
            job.tell({**begin(), "prompt_progress": told})

    events = job.answer(
        request,
        constrained_by=constrained_by,
        n_passages=n_passages,
        on_prompt=tell if streams and tells_progress else None,
    )
    return writer.chunks(events) if streams else writer.whole(events)


def usage_of(job: Answering) -> dict[str, Any]:
    """Return the numbers of tokens of a job as OpenAI's `usage`: see usage()."""
    return usage(job.n_prompt, job.n_cached, job.n_written, job.n_thought)


def usage(n_prompt: int, n_cached: int, n_written: int, n_thought: int | None) -> dict[str, Any]:
    """Return OpenAI's `usage`: how many tokens a prompt has, how many of them were read before, how
    many an answer has, and how many of those are thoughts (None: the model does not think).
    """
    told: dict[str, Any] = {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_written,
        "total_tokens": n_prompt + n_written,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }
    if n_thought is not None:
        told["completion_tokens_details"] = {"reasoning_tokens": n_thought}
    return told


def timings_of(job: Answering) -> dict[str, Any]:
    """Return numbers of tokens and times of a job, so far, in llama-server's words; a rate is 0 if
    no token was read or written.

    Reading the prompt already yields the first token of the answer, so the answer's rates count one
    token less.
    """
    n_steps = max(0, job.n_written - 1)
    timings = {
        "cache_n": job.n_cached,
        "prompt_n": job.n_read,
        **_rates("prompt", job.n_read, job.prompt_seconds),
        "predicted_n": job.n_written,
        **_rates("predicted", n_steps, job.answer_seconds),
    }
    if job.n_drafted:
        timings |= {"draft_n": job.n_drafted, "draft_n_accepted": job.n_accepted}
    return timings


def _rates(name: str, n: int, seconds: float) -> dict[str, float]:
    ms = 1000.0 * seconds
    return {
        f"{name}_ms": ms,
        f"{name}_per_token_ms": ms / n if n else 0.0,
        f"{name}_per_second": 1000.0 * n / ms if ms else 0.0,
    }


def costs_of(job: Answering) -> dict[str, Any]:
    """Return the fields `usage` and `timings` of an answer: see usage_of() and timings_of()."""
    return {"usage": usage_of(job), "timings": timings_of(job)}


def with_times(chunk: Chunk, job: Answering) -> Chunk:
    """Return a chunk with the times so far in its field `timings`."""
    return {**chunk, "timings": timings_of(job)}


def _head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """Return what every part of an answer of a model begins with: `kind` is its field `object`, and
    `prefix` the beginning of its id.
    """
    return {
        "id": f"{prefix}-{uuid.uuid4()}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


def shown_token(model: Model, value: TokenLogprob, *, numbered: bool = False) -> dict[str, Any]:
    """Return a token with its text, bytes and log probability, and the most probable ones in its
    place, in OpenAI's form.

    `numbered`: as in llama-server, every token has its id, and `bytes` of a token without text is
    an empty list instead of null.
    """

    def named(token: int, logprob: float | None) -> dict[str, Any]:
        data = [] if is_placeholder(token) else [*model.token_bytes(token)]
        shown = {"token": text_of(model, token), "bytes": data or None, "logprob": logprob}
        return {"id": token, **shown, "bytes": data} if numbered else shown

    top = [named(token, logprob) for token, logprob in value.top]
    return {**named(value.token, value.logprob), "top_logprobs": top}


@dataclass(frozen=True)
class AnswerForm:
    """Hold what a writer must know about an answer, and read the events of the answer."""

    job: Answering
    prompt: Prompt
    name: str
    """The name of the model, as the answer shows it."""
    thoughts: ThoughtFormat = "none"
    """Where thoughts are shown."""
    use: ToolUse | None = None
    """The tools whose calls are read from the answer; None: all of it is text."""
    legacy_calls: bool = False
    """Whether the first call is also in OpenAI's older field function_call."""
    logprobs: bool = False
    timed: bool = False
    """Whether chunks have the times so far."""
    echoes: bool = False
    """Whether the text of the prompt is repeated before the answer."""
    verbose: bool = False
    """Whether an answer that is not streamed repeats the text of its prompt, in the field
    __verbose.
    """

    def parts(self, events: Iterator[Event], *, whole: bool = False) -> Iterator[SaidPart]:
        """Yield what each event adds to an answer; an empty part for PromptRead.

        A call is in the part in which its JSON has ended; if only one is allowed, `job.has_enough`
        becomes true with it, which ends the answer. Format deepseek-legacy leaves thoughts in the
        text, and also shows them apart if the answer is `whole`.
        """
        reader = None if self.use is None else CallReader(self.use)
        thought = self.prompt.thought
        form: ThoughtFormat = "none" if thought is None else self.thoughts
        is_apart, called = form in ("auto", "deepseek"), False
        twice = whole and form == "deepseek-legacy"
        begin = thought.tags.begin if twice and thought is not None and thought.opened else ""
        calls: Sequence[dict[str, Any]]
        for event in events:
            if isinstance(event, PromptRead):
                yield SaidPart()
                continue
            said, shown, calls = "", "", ()
            if isinstance(event, AnswerPiece):
                said, begin = begin + (event.answer if is_apart else event.text), ""
                shown = event.thought if is_apart or twice else ""
            if reader is not None:
                part = reader.finish() if isinstance(event, Ended) else reader.take(said)
                said, calls = part.text, part.calls
                called = called or bool(calls)
                self.job.has_enough = reader.is_over
            if isinstance(event, Ended):
                yield SaidPart("", said, calls, (), "tool_calls" if called else event.reason)
            else:
                yield SaidPart(shown, said, calls, event.logprobs)

    def whole(self, events: Iterator[Event]) -> SaidPart:
        """Return an answer as one part; raises SettingsError for too many log probabilities."""
        thought, text, reason, held = "", "", "stop", HeldValues()
        calls = list[dict[str, Any]]()
        for part in self.parts(events, whole=True):
            thought += part.thought
            text += part.text
            calls += part.calls
            held.add(part.values)
            reason = part.reason or reason
        return SaidPart(thought, text, calls, held.values, reason)


class SaidPart(NamedTuple):
    """Hold what a part of an answer says."""

    thought: str = ""
    text: str = ""
    calls: Sequence[dict[str, Any]] = ()
    """The calls of tools that were completed, in OpenAI's form."""
    values: Sequence[TokenLogprob] = ()
    """The log probabilities of the part's tokens."""
    reason: str | None = None
    """Why the answer ends here, in OpenAI's words; None: it goes on."""


class CompletionWriter:
    """Write answers to completion requests in OpenAI's form."""

    def __init__(self, form: AnswerForm) -> None:
        """Write the answer that `form` describes."""
        self._job, self._timed = form.job, form.timed
        self._head = _head("text_completion", "cmpl", form.name)
        model, shows_prompt = form.job.model.model, form.echoes or form.logprobs
        echo = shown_prompt(model, form.prompt) if shows_prompt else ""
        self._logprobs: CompletionLogprobs | None = None
        if form.logprobs:
            self._logprobs = CompletionLogprobs(model, 0 if form.echoes else len(echo))
        self._read = CompletionReader(echo if form.echoes else "", self._logprobs)

    def whole(self, events: Iterator[Event]) -> dict[str, Any]:
        """Generate the answer to its end; returns it whole, with the numbers of tokens."""
        said = self._read.whole(events)
        answer = self._chunk(said.text, said.values, said.reason or "stop")
        return {**answer, **costs_of(self._job)}

    def chunks(self, events: Iterator[Event]) -> Iterator[Chunk]:
        """Generate, and yield the answer in chunks, at last one with the numbers of tokens."""
        for part in self._read.parts(events):
            chunk = self._chunk(part.text, part.values, part.reason)
            yield with_times(chunk, self._job) if self._timed or part.ended else chunk
        yield {**self._head, "choices": [], **costs_of(self._job)}

    def begin(self) -> Chunk:
        """Return a chunk without text."""
        return self._chunk("", (), None)

    def _chunk(self, text: str, values: Sequence[TokenLogprob], reason: str | None) -> Chunk:
        logprobs = None if self._logprobs is None else self._logprobs.shown(values)
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}
        told = {} if reason is None else passages_of(self._job)
        return {**self._head, "choices": [{**choice, **told}]}


def passages_of(job: Answering) -> dict[str, Any]:
    """Return the field `passages` of a choice, with those that the answer looked at (None: nothing
    measured that); no field if none were asked for.
    """
    if not job.n_passages:
        return {}
    found = job.passages
    return {"passages": None if found is None else [asdict(each) for each in found]}


class ChatWriter:
    """Write an answer of a chat: its thought, its text, and the calls in it."""

    def __init__(self, form: AnswerForm) -> None:
        """Write the answer that `form` describes."""
        self._form, self._job = form, form.job
        self._head = _head("chat.completion.chunk", "chatcmpl", form.name)

    def whole(self, events: Iterator[Event]) -> dict[str, Any]:
        """Generate the answer to its end; returns it whole, with the numbers of tokens."""
        form = self._form
        said = form.whole(events)
        message: dict[str, Any] = {"role": "assistant", "content": said.text}
        if said.thought:
            message["reasoning_content"] = said.thought
        if said.calls:
            message |= {"content": said.text or None, "tool_calls": said.calls}
        if said.calls and form.legacy_calls:
            message["function_call"] = said.calls[0]["function"]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(said.values),
            "finish_reason": said.reason,
            **passages_of(self._job),
        }
        whole = {**self._head, "object": "chat.completion", "choices": [choice]}
        told = {}
        if form.verbose:
            shown = without_marks(shown_prompt(self._job.model.model, form.prompt))
            told = {"__verbose": {"prompt": shown}}
        return {**whole, **costs_of(self._job), **told}

    def chunks(self, events: Iterator[Event]) -> Iterator[Chunk]:
        """Generate, and yield the answer in chunks, at last one with the numbers of tokens."""
        n_calls, values, has_begun = 0, list[TokenLogprob](), False
        for part in self._form.parts(events):
            if not has_begun:
                yield self.begin()
                has_begun = True
            values += part.values
            if part.thought:
                yield self._chunk({"reasoning_content": part.thought}, values)
            if part.text:
                yield self._chunk({"content": part.text}, values)
            if part.calls:
                legacy = self._form.legacy_calls
                for delta in as_deltas(part.calls, first=n_calls, legacy=legacy):
                    yield self._chunk(delta, values)
                n_calls += len(part.calls)
            if part.reason is not None:
                yield with_times(self._chunk({}, values, part.reason), self._job)
        yield {**self._head, "choices": [], **costs_of(self._job)}

    def begin(self) -> Chunk:
        """Return the first chunk, which says who speaks."""
        return self._chunk({"role": "assistant"}, [])

    def _chunk(
        self, delta: dict[str, Any], values: list[TokenLogprob], reason: str | None = None
    ) -> Chunk:
        """Return a chunk with the log probabilities in `values`, and empty that list."""
        told = {} if reason is None else passages_of(self._job)
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": self._logprobs(values),
            "finish_reason": reason,
            **told,
        }
        values.clear()
        chunk = {**self._head, "choices": [choice]}
        is_timed = reason is None and self._form.timed and self._job.n_written
        return with_times(chunk, self._job) if is_timed else chunk

    def _logprobs(self, values: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._form.logprobs or not values:
            return None
        model = self._job.model.model
        return {"content": [shown_token(model, each) for each in values], "refusal": None}
