"""Find out from a chat template how a model marks its thoughts.

The tags are facts of the models' makers; llama.cpp has the same ones (common/chat, common/parsers).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ANSWER = "entropykv-answer"
_LONGEST = 256
"""The most characters that can be a frame: more of them are a template that shows other texts."""
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ThoughtTags:
    """Hold what stands before a thought and after it, in the text that a model writes."""

    begin: str
    end: str
    around: tuple[str, ...] = ()
    """Tags around the answer, which are no part of it."""
    channels: bool = False
    """True for harmony, the form of gpt-oss: every message names the channel that it is of."""

    @property
    def control(self) -> tuple[str, ...]:
        """Return the texts that may be control tokens, and must be seen to tell the parts."""
        if self.channels:
            return ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
        return (self.begin, self.end, *self.around)

    def is_open_after(self, prompt: str) -> bool:
        """Tell whether a prompt ends within a thought: some templates write the first tag."""
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
"""What a template's text has, and the tags that its model then writes; the first one counts."""


def tags_of(template: str | None) -> ThoughtTags | None:
    """Return the tags that a chat template's text names; None: its model does not think."""
    if template is None:
        return None
    return next((tags for text, tags in _TAGS if text in template), None)


@dataclass(frozen=True)
class AnswerFrame:
    """Hold what a template writes before an answer: at first, and once there are later turns."""

    opening: str = ""
    """The end of a prompt that later turns leave out, such as <think> and a line end."""
    lead: str = ""
    """What later turns have in its place, before the text of the answer."""


def frame_of(render: Callable[[Messages], str]) -> AnswerFrame:
    """Return the frame of a template's answers; `render` makes a prompt of messages.

    The frame is empty where the template leaves out former answers.
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
    """Return the length of a text without a tag that has no end in it."""
    begins = [
        text.rfind(left) for left, right in ("<>", "[]") if text.rfind(left) > text.rfind(right)
    ]
    return min(begins, default=len(text))
