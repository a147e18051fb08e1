"""Write the events of an answer as OpenAI's completions and chats, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from entropykv import _version
from entropykv.generation.events import AnswerPiece, Ended, Event, PromptRead
from entropykv.generation.prompt import Prompt
from entropykv.generation.request import GenerationRequest
from entropykv.llamacpp.foreign_text import without_marks
from entropykv.llamacpp.model import Model
from entropykv.server.chat.tool_calls import AnswerPart, CallReader, ToolUse, as_deltas
from entropykv.server.dialects.timings import timings_of
from entropykv.server.engine.answering import Answering
from entropykv.session.image_spans import is_placeholder
from entropykv.session.logprobs import CompletionLogprobs, HeldValues, TokenLogprob
from entropykv.thinking.options import ThoughtFormat

Chunk = dict[str, Any]
FINGERPRINT = f"build-{_version.VERSION}"
"""Names what answers, as OpenAI's answers do; llama-server's begins with the same letter."""


class Writer(Protocol):
    """Write the events of an answer in the form of one API."""

    def whole(self, events: Iterator[Event]) -> dict[str, Any]:
        """Return the answer."""

    def chunks(self, events: Iterator[Event]) -> Iterator[Chunk]:
        """Yield the chunks of the answer."""

    def tell_progress(self, n_read: int) -> None:
        """Send a chunk that tells how many tokens of the prompt were read."""


def written(
    writer: Writer,
    job: Answering,
    request: GenerationRequest,
    *,
    streams: bool,
    tells_progress: bool,
    constrained_by: str,
    n_passages: int = 0,
) -> dict[str, Any] | Iterator[Chunk]:
    """Return the answer of a job as a client wants it: its chunks if it `streams`, else whole.

    The other parameters are those of Answering.answer().
    """
    events = job.answer(
        request,
        constrained_by=constrained_by,
        n_passages=n_passages,
        on_prompt=writer.tell_progress if streams and tells_progress else None,
    )
    return writer.chunks(events) if streams else writer.whole(events)


def usage_of(job: Answering) -> dict[str, Any]:
    """Return OpenAI's numbers of tokens: of the prompt, of the answer, and what they were."""
    usage: dict[str, Any] = {
        "prompt_tokens": job.n_prompt,
        "completion_tokens": job.n_written,
        "total_tokens": job.n_prompt + job.n_written,
        "prompt_tokens_details": {"cached_tokens": job.n_cached},
    }
    if job.n_thought is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": job.n_thought}
    return usage


def costs_of(job: Answering) -> dict[str, Any]:
    """Return the numbers of tokens of an answer, and how long it took."""
    return {"usage": usage_of(job), "timings": timings_of(job)}


def with_times(chunk: Chunk, job: Answering) -> Chunk:
    """Return a chunk with the times so far."""
    return {**chunk, "timings": timings_of(job)}


def progress_of(job: Answering, n_read: int) -> dict[str, Any]:
    """Return how many tokens of a prompt were read, in llama-server's words."""
    progress = {"total": job.n_prompt, "cache": job.n_cached, "processed": n_read}
    return {"prompt_progress": {**progress, "time_ms": 1000.0 * job.prompt_seconds}}


@dataclass
class AnswerHead:
    """Hold what every part of one answer begins with."""

    kind: str
    """The value of the answer's field `object`."""
    prefix: str
    """The beginning of the answer's id."""
    model: str
    _fields: dict[str, Any] = field(default_factory=dict)

    def with_choice(self, **choice: Any) -> dict[str, Any]:
        """Return a part with one choice."""
        return {**self.fields, "choices": [{"index": 0, **choice}]}

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields that all parts have."""
        if not self._fields:
            name = f"{self.prefix}-{uuid.uuid4()}"
            now = int(time.time())
            self._fields = {
                "id": name,
                "object": self.kind,
                "created": now,
                "model": self.model,
                "system_fingerprint": FINGERPRINT,
            }
        return self._fields


class TokenNames:
    """Return the texts by which answers with log probabilities name tokens."""

    def __init__(self, model: Model) -> None:
        """Use a model's vocabulary."""
        self._model = model

    def of(self, token: int) -> str:
        """Return the text of a token; bytes that are only a part of a character are left out."""
        if is_placeholder(token):
            return ""
        return self._model.token_bytes(token).decode("utf-8", errors="ignore")

    def bytes_of(self, token: int) -> list[int] | None:
        """Return the bytes of a token; None for a control token, which has no text."""
        data = b"" if is_placeholder(token) else self._model.token_bytes(token)
        return list(data) or None


# --- completions ----------------------------------------------------------------------------------


class CompletionWriter:
    """Write a text that was continued."""

    def __init__(
        self,
        job: Answering,
        prompt: Prompt,
        *,
        name: str,
        echoes: bool,
        logprobs: bool,
        timed: bool = False,
    ) -> None:
        """Write the answer to a prompt, which is repeated before it if it `echoes`.

        `timed`: every chunk has the times so far.
        """
        self._job, self._timed = job, timed
        self._head = AnswerHead("text_completion", "cmpl", name)
        self._echo = shown_prompt(job.model.model, prompt) if echoes or logprobs else ""
        self._echoes = echoes
        self._logprobs: CompletionLogprobs | None = None
        if logprobs:
            names = TokenNames(job.model.model)
            self._logprobs = CompletionLogprobs(names.of, 0 if echoes else len(self._echo))

    def whole(self, events: Iterator[Event]) -> dict[str, Any]:
        """Return the answer."""
        text, reason, held = self._echo if self._echoes else "", "stop", HeldValues()
        for event in events:
            if isinstance(event, Ended):
                reason = event.reason
            elif isinstance(event, PromptRead):
                held.add(self._of_prompt(event))
            else:
                text += event.text
                held.add(event.logprobs)
        choice = self._choice(text, held.values, reason)
        return {**self._head.with_choice(**choice), **costs_of(self._job)}

    def chunks(self, events: Iterator[Event]) -> Iterator[Chunk]:
        """Yield the chunks of the answer, and one with the numbers of tokens."""
        text = self._echo if self._echoes else ""
        values: list[TokenLogprob] = []
        for event in events:
            if isinstance(event, PromptRead):
                values += self._of_prompt(event)
            elif isinstance(event, AnswerPiece):
                text += event.text
                values += event.logprobs
                if text:
                    chunk = self._head.with_choice(**self._choice(text, values, None))
                    yield with_times(chunk, self._job) if self._timed else chunk
                    text, values = "", []
            else:
                chunk = self._head.with_choice(**self._choice(text, values, event.reason))
                yield with_times(chunk, self._job)
        yield {**self._head.fields, "choices": [], **costs_of(self._job)}

    def tell_progress(self, n_read: int) -> None:
        """Send a chunk that tells how many tokens of the prompt were read."""
        if self._job.tell is not None:
            chunk = self._head.with_choice(**self._choice("", (), None))
            self._job.tell({**chunk, **progress_of(self._job, n_read)})

    def _of_prompt(self, event: PromptRead) -> Sequence[TokenLogprob]:
        return () if self._logprobs is None else self._logprobs.of_prompt(event.logprobs)

    def _choice(
        self, text: str, values: Sequence[TokenLogprob], reason: str | None
    ) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._logprobs.shown(values)
        choice = {"text": text, "logprobs": logprobs, "finish_reason": reason}
        return choice if reason is None else with_passages(choice, self._job)


def shown_prompt(model: Model, prompt: Prompt) -> str:
    """Return the text of a prompt, without a token that only begins it."""
    if prompt.text:
        return prompt.text
    tokens = [each for each in prompt.tokens if not is_placeholder(each)]
    begins = tokens[:1] == [model.bos]
    return model.detokenize(tokens[1:] if begins else tokens, special=True)


def with_passages(choice: dict[str, Any], job: Answering) -> dict[str, Any]:
    """Return a choice with the passages that the answer looked at, if they were asked for."""
    if not job.n_passages:
        return choice
    found = job.passages
    return {**choice, "passages": None if found is None else [asdict(each) for each in found]}


# --- chats ----------------------------------------------------------------------------------------


class ChatWriter:
    """Write an answer of a chat: its thought, its text, and the calls in it."""

    def __init__(
        self,
        job: Answering,
        prompt: Prompt,
        *,
        name: str,
        form: ThoughtFormat = "auto",
        use: ToolUse | None = None,
        legacy_calls: bool = False,
        logprobs: bool = False,
        timed: bool = False,
        verbose: bool = False,
    ) -> None:
        """Write the answer to a prompt.

        `form`: where thoughts are shown. `use`: the tools whose calls are read from it.
        `legacy_calls`: the first call also has OpenAI's older name. `timed`: every chunk has the
        times so far. `verbose`: a whole answer has the text of its prompt.
        """
        self._job, self._timed = job, timed
        self._chunk_head = AnswerHead("chat.completion.chunk", "chatcmpl", name)
        self._name = name
        self._shown = without_marks(shown_prompt(job.model.model, prompt)) if verbose else None
        self._thought = prompt.thought
        self._form: ThoughtFormat = form if prompt.thought is not None else "none"
        self._use, self._legacy = use, legacy_calls
        self._names = TokenNames(job.model.model)
        self._has_logprobs = logprobs

    def whole(self, events: Iterator[Event]) -> dict[str, Any]:
        """Return the answer."""
        head = AnswerHead("chat.completion", "chatcmpl", self._name)
        text, thought, answer, reason, held = "", "", "", "stop", HeldValues()
        for event in events:
            if isinstance(event, AnswerPiece):
                text += event.text
                thought += event.thought
                answer += event.answer
                held.add(event.logprobs)
            elif isinstance(event, Ended):
                reason = event.reason
        message: dict[str, Any] = {"role": "assistant", "content": self._said(text, answer)}
        if thought and self._form != "none":
            message["reasoning_content"] = thought
        if self._use is not None:
            said, calls = self._use.read(message["content"])
            if calls:
                message |= {"content": said or None, "tool_calls": calls}
                reason = "tool_calls"
            if calls and self._legacy:
                message["function_call"] = calls[0]["function"]
        choice = {
            "message": message,
            "logprobs": self._logprobs(held.values),
            "finish_reason": reason,
        }
        whole = head.with_choice(**with_passages(choice, self._job))
        told = {} if self._shown is None else {"__verbose": {"prompt": self._shown}}
        return {**whole, **costs_of(self._job), **told}

    def _said(self, text: str, answer: str) -> str:
        """Return the content of a whole message; deepseek-legacy shows thoughts twice."""
        if self._form == "none":
            return text
        if self._form == "deepseek-legacy" and self._thought is not None:
            return self._thought.tags.begin + text if self._thought.opened else text
        return answer

    def chunks(self, events: Iterator[Event]) -> Iterator[Chunk]:
        """Yield the chunks of the answer, and one with the numbers of tokens.

        A call is sent once its JSON has ended. deepseek-legacy leaves thoughts in a stream.
        """
        head = self._chunk_head
        reader = None if self._use is None else CallReader(self._use)
        n_calls, values = 0, list[TokenLogprob]()
        for event in events:
            if isinstance(event, PromptRead):
                yield self._begin()
                continue
            values += event.logprobs if isinstance(event, AnswerPiece) else ()
            thought, part = self._parts(event, reader)
            if thought:
                yield self._chunk(head, {"reasoning_content": thought}, values)
            if part.text:
                yield self._chunk(head, {"content": part.text}, values)
            for delta in as_deltas(part.calls, first=n_calls, legacy=self._legacy):
                yield self._chunk(head, delta, values)
            n_calls += len(part.calls)
            if isinstance(event, Ended):
                reason = "tool_calls" if n_calls else event.reason
                yield with_times(self._chunk(head, {}, values, reason), self._job)
        yield {**head.fields, "choices": [], **costs_of(self._job)}

    def _begin(self) -> Chunk:
        """Return the first chunk, which says who speaks."""
        return self._chunk(self._chunk_head, {"role": "assistant"}, [])

    def tell_progress(self, n_read: int) -> None:
        """Send a chunk that tells how many tokens of the prompt were read."""
        if self._job.tell is not None:
            self._job.tell({**self._begin(), **progress_of(self._job, n_read)})

    def _parts(
        self, event: AnswerPiece | Ended, reader: CallReader | None
    ) -> tuple[str, AnswerPart]:
        """Return what an event adds to a stream: of the thought, and of the text and its calls."""
        is_apart = self._form in ("auto", "deepseek")
        if isinstance(event, Ended):
            return "", AnswerPart() if reader is None else reader.finish()
        said = event.answer if is_apart else event.text
        part = AnswerPart(said) if reader is None else reader.take(said)
        return event.thought if is_apart else "", part

    def _chunk(
        self,
        head: AnswerHead,
        delta: dict[str, Any],
        values: list[TokenLogprob],
        reason: str | None = None,
    ) -> Chunk:
        """Return a chunk with the log probabilities of the tokens since the last one."""
        choice = {"delta": delta, "logprobs": self._logprobs(values), "finish_reason": reason}
        values.clear()
        if reason is not None:
            return head.with_choice(**with_passages(choice, self._job))
        chunk = head.with_choice(**choice)
        return with_times(chunk, self._job) if self._timed and self._job.n_written else chunk

    def _logprobs(self, values: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._has_logprobs or not values:
            return None
        return {"content": [self._value(each) for each in values], "refusal": None}

    def _value(self, value: TokenLogprob) -> dict[str, Any]:
        top = [self._named(token, logprob) for token, logprob in value.top]
        return {**self._named(value.token, value.logprob), "top_logprobs": top}

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        data = self._names.bytes_of(token)
        return {"token": self._names.of(token), "bytes": data, "logprob": logprob}
