"""Handle a chat of a model that thinks: template arguments, the end of a thought, and where it is
shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from entropykv.constraint.constraint import Constraint
from entropykv.drop_in.entropy_llama import EntropyLlama
from entropykv.server.chat.template_traits import template_of
from entropykv.thinking.counter import ThoughtCounter
from entropykv.thinking.grammar import before_answer
from entropykv.thinking.options import ThinkingOptions
from entropykv.thinking.reader import Parts, read_whole, reader_of
from entropykv.thinking.tags import AnswerFrame, ThoughtTags, frame_of, tags_of

_LONGEST_KEY = 1_024
"""Characters of arguments whose frame is remembered."""
_MOST_FRAMES = 64
"""How many frames are cached, one for each set of template arguments in requests."""


class ThinkingTemplate:
    """Hold the chat template of a model that thinks."""

    def __init__(self, template: str, tags: ThoughtTags, llama: EntropyLlama) -> None:
        """Use a template's text and the tags in it."""
        self.tags = tags
        self._formatter: Any = Jinja2ChatFormatter(template, eos_token="", bos_token="")
        self._frames: dict[str, AnswerFrame] = {}
        self._ids = {text: _token_of(llama, text) for text in tags.control}
        self.control = {token: text for text, token in self._ids.items() if token is not None}
        """The control tokens that are tags, with their texts."""

    @classmethod
    def of(cls, llama: EntropyLlama) -> ThinkingTemplate | None:
        """Return the template of a model; None if the model does not think."""
        template = template_of(llama)
        tags = tags_of(template)
        return None if template is None or tags is None else cls(template, tags, llama)

    def token_of(self, text: str) -> int | None:
        """Return the token that a tag is; None if it is not exactly one."""
        return self._ids.get(text)

    def is_open_after(
        self, messages: Sequence[Any], tools: Any, arguments: Mapping[str, Any]
    ) -> bool:
        """Tell whether a prompt ends within a thought; raises the errors of the template."""
        prompt = self._formatter(messages=messages, tools=tools, **arguments).prompt
        return self.tags.is_open_after(prompt)

    def frame(self, arguments: Mapping[str, Any]) -> AnswerFrame:
        """Return what the template writes before an answer, with these arguments."""
        key = json.dumps(arguments, sort_keys=True, default=str)
        found = self._frames.get(key)
        if found is None:
            found = self._frame_of(arguments)
            if len(self._frames) >= _MOST_FRAMES:
                self._frames.clear()
            if len(key) <= _LONGEST_KEY:
                self._frames[key] = found
        return found

    def _frame_of(self, arguments: Mapping[str, Any]) -> AnswerFrame:
        try:
            return frame_of(lambda m: str(self._formatter(messages=m, **arguments).prompt))
        except Exception:  # A template is a program of its author, and may raise anything.
            return AnswerFrame()


def _token_of(llama: EntropyLlama, text: str) -> int | None:
    tokens = llama_cpp.Llama.tokenize(llama, text.encode(), add_bos=False, special=True)
    return tokens[0] if len(tokens) == 1 else None


@dataclass
class ChatThought:
    """Follow the thoughts of one chat, and separate them from its answer."""

    template: ThinkingTemplate
    options: ThinkingOptions
    counter: ThoughtCounter
    opened: bool
    """True if the prompt ends within the thought."""
    opening: str
    """The end of the prompt that later turns of the conversation will not contain."""

    @classmethod
    def begin(
        cls,
        llama: EntropyLlama,
        template: ThinkingTemplate | None,
        arguments: Mapping[str, Any],
        messages: Sequence[Any],
        tools: Any,
        options: ThinkingOptions,
    ) -> ChatThought | None:
        """Start a chat of a model that thinks; returns None for other models.

        `arguments` are the variables of the chat template besides `messages` and `tools`.
        """
        if template is None:
            return None
        opened = template.is_open_after(messages, tools, arguments)
        ending = (options.message + template.tags.end).encode()
        counter = ThoughtCounter(
            template.tags,
            lambda token: llama.detokenize([token]),
            opened=opened,
            budget=options.budget,
            ending=[] if options.budget < 0 else llama.tokenize(ending, False, special=True),
        )
        return cls(template, options, counter, opened, template.frame(arguments).opening)

    def force(self, _: Any, scores: Any) -> Any:
        """Allow only the token that ends the thought, when it has to end (a logits processor)."""
        token = self.counter.forced
        if token is not None:
            scores[:] = -float("inf")
            scores[token] = 0.0
        return scores

    def before_answer(self, constraint: Constraint) -> Constraint:
        """Return a constraint of the thought, followed by `constraint`."""
        return constraint.behind(before_answer(self.template.tags, opened=self.opened))

    def tokens_before_answer(self, tokens: Sequence[int], llama: EntropyLlama) -> int:
        """Return how many tokens at the end of a prompt its later turns will not contain."""
        opening, text, count = self.opening.encode(), b"", 0
        while len(text) < len(opening) and count < len(tokens):
            count += 1
            text = llama.detokenize(list(tokens[-count:]), special=True)
        return count if text.endswith(opening) else 0

    def in_whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return an answer whose thought is in a separate field."""
        if not self.options.separates:
            return answer
        choice = answer["choices"][0]
        text = choice["message"]["content"] or ""
        thought, said = read_whole(self.template.tags, text, opened=self.opened)
        if self.options.format == "deepseek-legacy":
            said = self.template.tags.begin + text if self.opened else text
        message = {**choice["message"], "content": said}
        if thought:
            message["reasoning_content"] = thought
        return {**answer, "choices": [{**choice, "message": message}]}

    def in_chunks(self, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of an answer whose thought is in separate fields.

        llama.cpp's format deepseek-legacy leaves thoughts in a streamed answer.
        """
        if self.options.format in ("none", "deepseek-legacy"):
            yield from chunks
            return
        reader = reader_of(self.template.tags, opened=self.opened)
        for chunk in chunks:
            choice = chunk["choices"][0]
            delta, reason = choice["delta"], choice["finish_reason"]
            parts = reader.take(delta.get("content") or "")
            if reason is not None:
                rest = reader.finish()
                parts = Parts(parts.thought + rest.thought, parts.answer + rest.answer)
            others = {name: value for name, value in delta.items() if name != "content"}
            texts = {"reasoning_content": parts.thought, "content": parts.answer}
            deltas = [{name: text} for name, text in texts.items() if text]
            if others or (not deltas and choice.get("logprobs")):
                deltas.insert(0, others)
            for each in deltas:
                yield {**chunk, "choices": [{**choice, "delta": each, "finish_reason": None}]}
                choice = {**choice, "logprobs": None}
            if reason is not None:
                yield {**chunk, "choices": [{**choice, "delta": {}}]}
