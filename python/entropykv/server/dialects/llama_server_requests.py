"""Define completions in llama-server's own form: /completion, /completions and /infill."""

from __future__ import annotations

import base64
import binascii
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, Field

from entropykv.errors import ImageError
from entropykv.generation.events import CompletionReader, Ended, Event
from entropykv.generation.prompt import (
    GenerationRequest,
    Prompt,
    ShownImages,
    infill_prompt,
    shown_prompt,
    text_prompt,
)
from entropykv.server.chat.constraints import single
from entropykv.server.dialects.answers import Chunk, shown_token, timings_of, written
from entropykv.server.dialects.fields import (
    FIRST_ERROR,
    MOST_LOGPROBS,
    MOST_MESSAGES,
    MOST_TOKENS,
    Name,
    PromptField,
    RepeatPenalty,
    Seed,
    Stop,
    TokenLimit,
    sampler,
)
from entropykv.server.dialects.requests import (
    MOST_CHOICES,
    GeneratingRequest,
    mixed_tokens,
    most_tokens,
    parted,
    sampling_of,
    stops_of,
)
from entropykv.server.engine.answering import Answering
from entropykv.server.http.errors import RequestError
from entropykv.server.models.loaded_model import LoadedModel
from entropykv.session.logprobs import TokenLogprob
from entropykv.settings.sampling import TEMPERATURE, Sampling, is_random_seed, new_seed

_SAMPLERS_OFF = {"adaptive_target": -1.0, "adaptive_decay": 0.9, "min_keep": 0}
"""Samplers of llama-server that are not here, with values that switch them off."""


class LlamaServerWriter:
    """Write answers to completion requests in llama-server's own form."""

    def __init__(
        self,
        job: Answering,
        request: GenerationRequest,
        *,
        name: str,
        returns_tokens: bool,
        timed: bool,
        fields: Sequence[str] | None,
    ) -> None:
        """Write the answer to a request.

        `returns_tokens`: a whole answer has its tokens. `timed`: every chunk has the times so far.
        `fields`: what a whole answer has, by paths such as generation_settings/n_predict; all of it
        if there are none.
        """
        self._job, self._request, self._name = job, request, name
        self._returns_tokens, self._timed, self._fields = returns_tokens, timed, fields

    def whole(self, events: Iterator[Event]) -> dict[str, Any]:
        """Generate the answer to its end; returns it, or only the fields that the request chose."""
        said = CompletionReader().whole(events)
        shown = said.tokens if self._returns_tokens else []
        answer = {**self._end(said.text, said.ended), "content": said.text, "tokens": shown}
        if self._request.n_logprobs is not None:
            answer["completion_probabilities"] = self._shown(said.values)
        if not self._fields:
            return answer
        found = {path: _at(answer, path) for path in self._fields}
        return {path: value for path, value in found.items() if value is not None}

    def chunks(self, events: Iterator[Event]) -> Iterator[Chunk]:
        """Yield the chunks of the answer; the last one has no text, and says why and how the answer
        has ended.
        """
        text = ""
        for part in CompletionReader().parts(events):
            text += part.text
            if part.ended is None:
                yield self._part(part.text, part.tokens, part.values)
            else:
                yield {**self._end(text, part.ended), "content": "", "tokens": []}

    def begin(self) -> Chunk:
        """Return a chunk without text, to which written() adds how much of the prompt was read."""
        return self._part("", [], [])

    def _part(
        self, text: str, tokens: Sequence[int], values: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        job = self._job
        chunk: Chunk = {
            "index": 0,
            "content": text,
            "tokens": [*tokens],
            "stop": False,
            "id_slot": job.lane.number,
            "tokens_predicted": job.n_written,
            "tokens_evaluated": job.n_prompt,
        }
        if self._request.n_logprobs is not None and values:
            chunk["completion_probabilities"] = self._shown(values)
        return {**chunk, "timings": timings_of(job)} if self._timed else chunk

    def _shown(self, values: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return [shown_token(self._job.model.model, each, numbered=True) for each in values]

    def _end(self, text: str, ended: Ended | None) -> dict[str, Any]:
        """Return the fields that are known only once an answer is complete."""
        job, request = self._job, self._request
        stop = None if ended is None else ended.stop
        is_cut = ended is not None and ended.reason == "length"
        kind = "word" if stop is not None else "limit" if is_cut else "eos"
        return {
            "index": 0,
            "id_slot": job.lane.number,
            "stop": True,
            "model": self._name,
            "tokens_predicted": job.n_written,
            "tokens_evaluated": job.n_prompt,
            "generation_settings": self._settings(),
            "prompt": shown_prompt(job.model.model, request.prompt),
            "has_new_line": "\n" in text,
            "truncated": is_cut and job.n_written != request.max_tokens,
            "stop_type": kind,
            "stopping_word": stop or "",
            "tokens_cached": job.n_prompt + job.n_written,
            "timings": timings_of(job),
        }

    def _settings(self) -> dict[str, Any]:
        """Return how the tokens were chosen, by llama-server's names."""
        request = self._request
        sampling = {each.name: getattr(request.sampling, each.name) for each in fields(Sampling)}
        grammar = sampling.pop("grammar")
        biases = [
            {"token": token, "bias": bias if math.isfinite(bias) else None}
            for token, bias in sampling.pop("logit_bias")
        ]
        return {
            **{n: [*v] if isinstance(v, tuple) else v for n, v in sampling.items()},
            **_SAMPLERS_OFF,
            "n_predict": request.max_tokens,
            "max_tokens": request.max_tokens,
            "n_ctx": self._job.model.n_ctx,
            "stop": [*request.stops],
            "n_probs": request.n_logprobs or 0,
            "logit_bias": biases,
            "has_grammar": grammar is not None,
        }


def _at(answer: Any, path: str) -> Any:
    """Return the member of an answer at a path; None if there is none."""
    for name in path.split("/"):
        answer = answer.get(name) if isinstance(answer, dict) else None
    return answer


@dataclass
class AnswersInList:
    """Join the answers to several prompts, or several choices, as llama-server does."""

    _n: int = field(default=1)

    def whole(self, answers: Sequence[dict[str, Any]]) -> Any:
        """Return the only answer, or a list of them."""
        numbered = [
            {**each, "index": i} if "index" in each else each for i, each in enumerate(answers)
        ]
        return numbered if self._n > 1 else numbered[0]

    def chunk(self, index: int, chunk: Chunk) -> Chunk:
        """Return a chunk with the number of its answer."""
        return {**chunk, "index": index}

    def end(self) -> None:
        """Return nothing: the last chunk of each answer is its end."""


MOST_RESPONSE_FIELDS = 64
"""The most fields of an answer that a request may choose."""
MOST_EXTRA = 256
"""The most texts in the field `input_extra` of a request to /infill."""
_MARKER = "<__media__>"
"""The text by which llama-server's clients mark where an image stands."""
_DEFAULTS = Sampling()


class TextWithImages(BaseModel):
    """Hold a text with markers, and the files that they stand for."""

    prompt_string: str
    multimodal_data: (
        str | Annotated[list[str], Field(max_length=MOST_MESSAGES), FIRST_ERROR] | None
    ) = None

    def prompt(self, job: Answering) -> Prompt:
        """Return the prompt; raises RequestError for files that are too many, cannot be read, or
        have no projector, and for a text that takes too long to tokenise; ContextError for images
        of too many tokens.
        """
        data = self.multimodal_data or []
        files = [_decoded(each) for each in ([data] if isinstance(data, str) else data)]
        if not files:
            tokens = mixed_tokens(self.prompt_string, job.model, begins=True)
            return Prompt(tokens, self.prompt_string)
        images = job.model.images
        if images is None or len(files) > images.limits.number:
            why = (
                "no images are read here; start the server with --mmproj FILE"
                if images is None
                else f"more than {images.limits.number} images (--max-images)"
            )
            raise RequestError(400, f"prompt.multimodal_data: {why}", param="prompt")
        text = self.prompt_string.replace(_MARKER, images.marker)
        job.model.control_tokens.check(text.encode("utf-8", "replace"))
        owner = job.caller.tenant(shared_prefixes=job.model.shared_prefixes)
        shown = ShownImages(images, files, job.model.n_ctx, owner, job.check)
        try:
            return text_prompt(job.model.model, text, shown=shown)
        except ImageError as error:
            raise RequestError(400, f"prompt: {error}", param="prompt") from None


_Prompts = (
    PromptField
    | TextWithImages
    | Annotated[list[str | TextWithImages | Annotated[list[int | str], FIRST_ERROR]], FIRST_ERROR]
)


class LlamaServerRequest(GeneratingRequest):
    """Hold what all completions in llama-server's form have in common."""

    model: Name | None = None
    n_predict: TokenLimit | None = Field(
        default=None,
        validation_alias=AliasChoices("n_predict", "max_tokens", "max_completion_tokens"),
    )
    n_cmpl: int = Field(
        default=1, ge=1, le=MOST_CHOICES, validation_alias=AliasChoices("n_cmpl", "n")
    )
    stream: bool = False
    stop: Stop | None = None
    temperature: float = sampler("temperature", TEMPERATURE)
    top_k: int = sampler("top_k", _DEFAULTS.top_k)
    top_p: float = sampler("top_p", _DEFAULTS.top_p)
    min_p: float = sampler("min_p", _DEFAULTS.min_p)
    repeat_penalty: RepeatPenalty = 1.0
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    mirostat: int = sampler("mirostat", _DEFAULTS.mirostat)
    mirostat_tau: float = sampler("mirostat_tau", _DEFAULTS.mirostat_tau)
    mirostat_eta: float = Field(default=_DEFAULTS.mirostat_eta, ge=0, le=1)
    seed: Seed | None = None
    n_probs: int = Field(
        default=0,
        ge=0,
        le=MOST_LOGPROBS,
        validation_alias=AliasChoices("n_probs", "logprobs"),
        description="How many of the most probable tokens are told for each token.",
    )
    return_tokens: bool = False
    response_fields: (
        Annotated[list[Name], Field(max_length=MOST_RESPONSE_FIELDS), FIRST_ERROR] | None
    ) = None
    n_keep: int = Field(
        default=0,
        ge=-1,
        le=MOST_TOKENS,
        description="Changes nothing: the budget decides what is kept of a text.",
    )
    n_discard: int = Field(default=0, ge=0, le=MOST_TOKENS, description="Changes nothing.")
    n_cache_reuse: int = Field(default=0, ge=0, le=MOST_TOKENS, description="Changes nothing.")
    user: Name | None = None

    def most_written(self) -> int | None:
        """Return the most tokens of the answer: see TokenLimit."""
        return self.n_predict

    @property
    def mirostat_mode(self) -> int:
        """Return the field `mirostat` by its name in other requests, as llama_cpp.server has it."""
        return self.mirostat

    @property
    def max_tokens(self) -> int:
        """Return -1, no limit: the most tokens of the answer if neither the request nor the server
        names a limit.
        """
        return -1

    @property
    def n_jobs(self) -> int:
        """Return how many choices all prompts of the request have together."""
        return self.n_cmpl

    @abstractmethod
    def own_prompt(self, job: Answering) -> Prompt:
        """Return the prompt of one choice; raises RequestError if it cannot be read, and
        ContextError for images of too many tokens.
        """

    def call(self, job: Answering) -> Any:
        """Generate one choice of one prompt; returns a response, or with `stream` an iterator of
        its chunks. Raises RequestError for an empty prompt, and the errors of own_prompt(),
        constraints(), single(), sampling_of() and Answering.answer().
        """
        model, prompt = job.model, self.own_prompt(job)
        if not prompt.tokens:
            raise RequestError(400, "prompt: it is empty", param="prompt")
        field, constraint = single(self.constraints()) or ("grammar", None)
        sampling = sampling_of(self, model, constraint)
        if is_random_seed(sampling.seed):  # The answer shows the seed that was drawn.
            sampling = replace(sampling, seed=new_seed())
        request = GenerationRequest(
            prompt,
            sampling,
            most_tokens(self, model),
            stops_of(self, model),
            n_logprobs=self.n_probs or None,
            reads_anew=not self.cache_prompt,
        )
        writer = LlamaServerWriter(
            job,
            request,
            name=model.name,
            returns_tokens=self.return_tokens,
            timed=self.timings_per_token,
            fields=self.response_fields,
        )
        return written(
            writer,
            job,
            request,
            streams=bool(self.stream),
            tells_progress=self.return_progress,
            constrained_by=field,
        )


class LlamaServerCompletion(LlamaServerRequest):
    """Define a request of /completion and /completions."""

    prompt: _Prompts = Field(description="A text, its tokens, or a list of those.")

    @property
    def n_jobs(self) -> int:
        """Return how many choices all prompts of the request have together."""
        return self.n_cmpl * len(self._prompts())

    def parts(self) -> list[LlamaServerCompletion]:
        """Return a request for each choice of each prompt; raises RequestError without prompts."""
        if not self._prompts():
            raise RequestError(400, "prompt: the list is empty", param="prompt")
        return [
            parted(self, number, n_cmpl=1, prompt=prompt)
            for prompt in self._prompts()
            for number in range(self.n_cmpl)
        ]

    def _prompts(self) -> Sequence[Any]:
        """Return the prompts; as in llama-server, a list that contains a token is one prompt."""
        prompt: Any = self.prompt
        is_one = not isinstance(prompt, list) or any(isinstance(each, int) for each in prompt)
        return [prompt] if is_one else prompt

    def own_prompt(self, job: Answering) -> Prompt:
        """Return the prompt, behind the document if the request names one; raises RequestError for
        images with a document, and the errors of TextWithImages.prompt(), mixed_tokens() and
        Answering.document_tokens().
        """
        prompt: Any = self.prompt
        if isinstance(prompt, TextWithImages):
            if job.document is not None:
                raise RequestError(400, "prompt: send text with a document", param="prompt")
            return prompt.prompt(job)
        document = job.document_tokens()
        tokens = mixed_tokens(prompt, job.model, begins=not document)
        text = prompt if isinstance(prompt, str) else ""
        return Prompt([*document, *tokens], text, n_document=len(document))


class ExtraText(BaseModel):
    """Hold a text of the same project, which stands before the one that is filled in."""

    filename: Name = "tmp"
    text: str


class InfillRequest(LlamaServerRequest):
    """Define a request of /infill: the text between a prefix and a suffix."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[ExtraText], FIRST_ERROR] = Field(
        default_factory=list, max_length=MOST_EXTRA
    )
    prompt: str = Field(default="", description="What follows the prefix already.")

    def parts(self) -> list[InfillRequest]:
        """Return a request for every choice."""
        return [parted(self, number, n_cmpl=1) for number in range(self.n_cmpl)]

    def own_prompt(self, job: Answering) -> Prompt:
        """Return the prompt in the form that the model was trained on; raises RequestError for a
        model that was not trained for it, and if the request names a document.
        """
        if job.document is not None:
            raise RequestError(400, "document: texts are filled in alone", param="document")
        model = job.model
        prompt = infill_prompt(
            model.model,
            model.tokenize(self.input_prefix + self.prompt, special=False),
            model.tokenize(self.input_suffix, special=False),
            [*self._extra_tokens(model)],
        )
        if prompt is None:
            raise RequestError(
                400,
                "the model was not trained to write a text between two others; use a model for "
                "code, such as Qwen2.5-Coder",
                param="input_prefix",
            )
        return prompt

    def _extra_tokens(self, model: LoadedModel) -> Iterator[int]:
        """Yield the tokens of the further texts, each behind its name if the model has a token for
        that.
        """
        if not self.input_extra:
            return
        marks = model.model.file_marks
        if marks is not None:
            yield marks[0]
            yield from model.tokenize("project\n", special=False)
        for extra in self.input_extra:
            if marks is not None:
                yield marks[1]
                yield from model.tokenize(f"{extra.filename}\n{extra.text}", special=False)
            else:
                yield from model.tokenize(f"{extra.text}\n\n", special=False)
        if marks is not None:
            yield marks[1]
            yield from model.tokenize("this\n", special=False)


def _decoded(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(
            400, "prompt.multimodal_data: its base64 is damaged", param="prompt"
        ) from None
