"""Find out from a chat template how a model marks its thoughts.

The tags are defined by the models' makers; llama.cpp has the same ones (common/chat,
common/parsers).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

ThoughtFormat = Literal["auto", "none", "deepseek", "deepseek-legacy"]
FORMATS: tuple[ThoughtFormat, ...] = get_args(ThoughtFormat)
"""llama.cpp's names: `none` leaves thoughts in the answer, `deepseek` and `auto` show them apart,
and `deepseek-legacy` does both, but only the first in streams.
"""
MOST_MESSAGE = 4_096
"""The most characters of the message that ends a thought."""


@dataclass(frozen=True)
class ThinkingOptions:
    """Hold where thoughts are shown, and how many tokens a thought may have (-1: no limit).

    `message` is written when the budget is used up, before the tag that ends the thought.
    """

    format: ThoughtFormat = "auto"
    budget: int = -1
    message: str = ""


def template_switch(*, thinks: bool) -> dict[str, Any]:
    """Return the template variables that switch thinking on or off, under all names in use."""
    return {"enable_thinking": thinks, "thinking": thinks}


def template_variables(
    given: dict[str, Any] | None, reasoning: str, effort: str | None
) -> dict[str, Any]:
    """Return the variables of the chat template, by `given` and the options about thoughts.

    `reasoning`: auto, on or off; `effort`: low, for example; None and "default" say nothing.
    """
    switch = {} if reasoning == "auto" else template_switch(thinks=reasoning == "on")
    degree = {} if effort in (None, "default") else {"reasoning_effort": effort}
    return {**(given or {}), **switch, **degree}


_ANSWER = "entropykv-answer"
_LONGEST = 256
"""The most characters of a frame; a longer difference is not due to the answer alone."""
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ThoughtTags:
    """Hold the tags before and after a thought in the text that a model writes."""

    begin: str
    end: str
    around: tuple[str, ...] = ()
    """Tags around the answer, which do not belong to it."""
    channels: bool = False
    """True for harmony, the format of gpt-oss: every message names its channel."""

    @property
    def control(self) -> tuple[str, ...]:
        """Return the texts that may be control tokens, and by which thought and answer are told
        apart.
        """
        if self.channels:
            return ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
        return (self.begin, self.end, *self.around)

    def is_open_after(self, prompt: str) -> bool:
        """Tell whether a prompt ends within a thought: some templates write the opening tag."""
        return prompt.rstrip().endswith(self.begin)


_HARMONY = ThoughtTags("<|channel|>analysis<|message|>", "<|end|>", channels=True)
_THINK = ThoughtTags("<think>", "</think>")
_TAGS = (
    ("<|channel|>", _HARMONY),
    ("[THINK]", ThoughtTags("[THINK]", "[/THINK]")),
    ("<seed:think>", ThoughtTags("<seed:think>", "</seed:think>")),
    ("<mm:think>", ThoughtTags("<mm:think>", "</mm:think>")),
    (
        "<|START_TEXT|>",
        ThoughtTags("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_TEXT|>", "<|END_TEXT|>")),
    ),
    (
        "<|START_THINKING|>",
        ThoughtTags(
            "<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
        ),
    ),
    ("<|inner_prefix|>", ThoughtTags("<|inner_prefix|>", "<|inner_suffix|>")),
    ("<|channel>thought", ThoughtTags("<|channel>thought", "<channel|>")),
    ("◁think▷", ThoughtTags("◁think▷", "◁/think▷")),
    (
        "<response></response>",
        ThoughtTags("<think>", "</think>", ("<response>", "</response>")),
    ),
    ("<think>", _THINK),
    ("</think>", _THINK),
)
"""A text in a template, and the tags that its model then writes; the first match counts."""


def tags_of(template: str | None) -> ThoughtTags | None:
    """Return the tags that a chat template's text indicates; None if its model does not think."""
    if template is None:
        return None
    return next((tags for text, tags in _TAGS if text in template), None)


@dataclass(frozen=True)
class AnswerFrame:
    """Hold what a template writes before an answer: in the prompt, and once there are
    later turns.
    """

    opening: str = ""
    """The end of a prompt that later turns leave out, such as <think> and a line end."""
    lead: str = ""
    """The text that later turns have instead of `opening`, before the text of the answer."""


def frame_of(render: Callable[[Messages], str]) -> AnswerFrame:
    """Return the frame of a template's answers; `render` makes a prompt from messages.

    The frame is empty if the template leaves out former answers, or changes other texts, too.
    """
    question = {"role": "user", "content": "Hi"}
    first = render([question])
    later, found, _ = render(
        [question, {"role": "assistant", "content": _ANSWER}, question]
    ).partition(_ANSWER)
    pairs = zip(first, later, strict=False)
    alike = "".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    shared = _before_tag(alike)
    frame = AnswerFrame(first[shared:], later[shared:])
    fits = found and max(len(frame.opening), len(frame.lead)) <= _LONGEST
    return frame if fits else AnswerFrame()


def _before_tag(text: str) -> int:
    """Return the length of a text before an incomplete tag at its end."""
    begins = [
        text.rfind(left) for left, right in ("<>", "[]") if text.rfind(left) > text.rfind(right)
    ]
    return min(begins, default=len(text))
