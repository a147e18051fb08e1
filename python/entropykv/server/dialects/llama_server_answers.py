"""Write the events of an answer in llama-server's own form, whole or in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from entropykv.generation.completion_parts import CompletionReader
from entropykv.generation.events import Ended, Event
from entropykv.generation.prompt import GenerationRequest, shown_prompt
from entropykv.server.dialects.answers import Chunk, TokenNames, timings_of
from entropykv.server.engine.answering import Answering
from entropykv.session.logprobs import TokenLogprob
from entropykv.settings.sampling import Sampling

_SAMPLERS_OFF = {"adaptive_target": -1.0, "adaptive_decay": 0.9, "min_keep": 0}
"""Samplers of llama-server that are not here, with values that switch them off."""


class LlamaServerWriter:
    """Write a text that was continued."""

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
        self._names = TokenNames(job.model.model)

    def whole(self, events: Iterator[Event]) -> dict[str, Any]:
        """Return the answer."""
        said = CompletionReader().whole(events)
        shown = said.tokens if self._returns_tokens else []
        answer = {**self._end(said.text, said.ended), "content": said.text, "tokens": shown}
        if self._request.n_logprobs is not None:
            answer["completion_probabilities"] = [
                self._names.shown(each, numbered=True) for each in said.values
            ]
        if not self._fields:
            return answer
        found = {path: _at(answer, path) for path in self._fields}
        return {path: value for path, value in found.items() if value is not None}

    def chunks(self, events: Iterator[Event]) -> Iterator[Chunk]:
        """Yield the chunks of the answer; the last one has all that a whole answer has, but its
        text.
        """
        text = ""
        for part in CompletionReader().parts(events):
            text += part.text
            if part.ended is None:
                yield self._part(part.text, part.tokens, part.values)
            else:
                yield {**self._end(text, part.ended), "content": "", "tokens": []}

    def begin(self) -> Chunk:
        """Return a chunk without text."""
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
            "id_slot": job.slot.number,
            "tokens_predicted": job.n_written,
            "tokens_evaluated": job.n_prompt,
        }
        if self._request.n_logprobs is not None and values:
            chunk["completion_probabilities"] = [
                self._names.shown(each, numbered=True) for each in values
            ]
        return {**chunk, "timings": timings_of(job)} if self._timed else chunk

    def _end(self, text: str, ended: Ended | None) -> dict[str, Any]:
        """Return what is known once an answer is complete."""
        job, request = self._job, self._request
        stop = None if ended is None else ended.stop
        is_cut = ended is not None and ended.reason == "length"
        kind = "word" if stop is not None else "limit" if is_cut else "eos"
        return {
            "index": 0,
            "id_slot": job.slot.number,
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
        numbered = [{**each, **_index(each, i)} for i, each in enumerate(answers)]
        return numbered if self._n > 1 else numbered[0]

    def chunk(self, index: int, chunk: Chunk) -> Chunk:
        """Return a chunk with the number of its answer."""
        return {**chunk, "index": index}

    def end(self) -> None:
        """Return nothing: the last chunk of each answer is its end."""


def _index(answer: dict[str, Any], number: int) -> dict[str, int]:
    return {"index": number} if "index" in answer else {}
