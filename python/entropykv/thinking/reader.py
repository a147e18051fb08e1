"""Separate thoughts from the answer while a text is written, count their tokens, and end them when
their budget is used up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from entropykv.thinking.tags import ThoughtTags

_REMEMBERED = 128
"""Bytes at the end of the text that are searched for tags: more than the longest tag has."""


class ThoughtCounter:
    """Follow one text token by token, as llama.cpp's reasoning budget does.

    The budget counts the tokens after the opening tag. Once it is used up, and no character is
    incomplete, `forced` is the next token of `ending`, which closes the thought. A further thought
    in the same text has the whole budget again.
    """

    def __init__(
        self,
        tags: ThoughtTags,
        piece: Callable[[int], bytes],
        *,
        opened: bool,
        budget: int = -1,
        ending: Sequence[int] = (),
    ) -> None:
        """Start a text; `piece` returns the bytes of a token, including tags.

        `opened`: the prompt ends within a thought. `budget`: the most tokens of a thought; -1: no
        limit.
        """
        self._begin, self._end = tags.begin.encode(), tags.end.encode()
        self._piece = piece
        self._budget = budget
        self._ending = list(ending)
        self._tail = b""
        self._thinks = opened
        self._left = budget
        self._n_forced: int | None = 0 if opened and budget == 0 else None
        self.n_tokens = 0
        """How many tokens of thoughts were written so far, including their closing tags."""

    @property
    def is_bounded(self) -> bool:
        """Tell whether thoughts have a budget."""
        return self._budget >= 0

    @property
    def thinks(self) -> bool:
        """Tell whether the text is within a thought."""
        return self._thinks

    @property
    def forced(self) -> int | None:
        """Return the token that must follow; None if any token may."""
        if self._n_forced is None or self._n_forced >= len(self._ending):
            return None
        return self._ending[self._n_forced]

    def accept(self, token: int) -> None:
        """Record the next token of the text."""
        self._tail = (self._tail + self._piece(token))[-_REMEMBERED:]
        if not self._thinks:
            if self._begin in self._tail:
                self._start()
            return
        self.n_tokens += 1
        if self._n_forced is not None:
            self._n_forced += 1
            if self._n_forced >= len(self._ending):
                self._stop()
        elif self._end in self._tail:
            self._stop()
        elif self._budget >= 0:
            self._left -= 1
            if self._left <= 0 and _is_complete(self._tail):
                self._n_forced = 0

    def _start(self) -> None:
        self._thinks, self._tail, self._left = True, b"", self._budget
        self._n_forced = 0 if self._budget == 0 else None

    def _stop(self) -> None:
        self._thinks, self._tail, self._n_forced = False, b"", None


def _is_complete(text: bytes) -> bool:
    """Tell whether a text ends with a whole character."""
    for size in range(1, min(4, len(text)) + 1):
        byte = text[-size]
        if byte < 0x80:
            return True
        if byte >= 0xC0:
            return size >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return True


_BLANKS = r"/[ \n]{1,2}/"
_ANY = "/(?s:.+)/"


def before_answer(
    tags: ThoughtTags, *, opened: bool
) -> Callable[[Callable[[str], int | None]], str]:
    """Return a function for Constraint.behind(), whose rules say: a thought, then the answer.

    The function gets a TokenOf, which returns the token of the vocabulary that a text is, or None
    if the text is not exactly one token; it returns rules in Lark. `opened`: the prompt ends within
    the thought, which must then be closed; otherwise a thought is optional.
    """

    def rules(token_of: Callable[[str], int | None]) -> str:
        def written(text: str) -> str:
            token = token_of(text)
            return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"

        if tags.channels:
            channel, message = written("<|channel|>"), written("<|message|>")
            begin = f'{channel} "analysis" {message}'
            thought = f'({begin} within {written("<|start|>")} "assistant")?'
            start = f'{thought} {channel} "final" {message} @answer'
        else:
            first = f"blanks? {written(tags.begin)}"
            thought = f"({first})? within" if opened else f"({first} within)?"
            start = f"{thought} blanks? @answer"
        return f"start: {start}\nblanks: {_BLANKS}\n{_up_to(tags.end, token_of(tags.end))}\n"

    return rules


def _up_to(end: str, token: int | None) -> str:
    """Return the rule `within`: any text up to the first tag `end`, and that tag; `token`: the
    tag's token, or None.
    """
    if token is not None:
        return f"within: ANY? <[{token}]>\nANY: {_ANY}"
    return f"within[lazy]: ANY {json.dumps(end, ensure_ascii=False)}\nANY: /(?s:.*)/"


class Parts(NamedTuple):
    """Hold what a piece of text adds to the thought, and to the answer."""

    thought: str = ""
    answer: str = ""


class ThoughtReader(Protocol):
    """Split a text that arrives in pieces into its thought and its answer, without their tags."""

    def take(self, text: str) -> Parts:
        """Add the next piece; returns the parts that are certain now."""

    def finish(self) -> Parts:
        """Return the parts of what was held back, once the text has ended."""


def reader_of(tags: ThoughtTags, *, opened: bool) -> ThoughtReader:
    """Return a reader of one text; `opened`: its prompt ends within a thought."""
    return _ChannelReader() if tags.channels else _TagReader(tags, opened)


def read_whole(tags: ThoughtTags, text: str, *, opened: bool) -> Parts:
    """Return the thought and the answer of a complete text."""
    reader = reader_of(tags, opened=opened)
    some, rest = reader.take(text), reader.finish()
    return Parts(some.thought + rest.thought, some.answer + rest.answer)


class _TagReader:
    """Read a text that may begin with a thought between two tags.

    White space around them is left out. Later tags of thoughts are a part of the answer, which may
    be about tags.
    """

    def __init__(self, tags: ThoughtTags, opened: bool) -> None:
        self._tags = tags
        self._opened = opened
        self._step = self._begin
        self._held = ""
        self._has_thought = False

    def take(self, text: str) -> Parts:
        self._held += text
        thought = answer = ""
        while True:
            step = self._step
            more, said = step()
            thought += more
            answer += said
            if self._step == step:
                return Parts(thought, answer)

    def finish(self) -> Parts:
        held, self._held = self._held, ""
        if self._step == self._think or (self._step == self._begin and self._opened):
            return Parts(thought=held.strip() if not self._has_thought else held.rstrip())
        return Parts(answer="" if self._step == self._begin_answer else held)

    def _begin(self) -> Parts:
        text = self._held.lstrip()
        if text.startswith(self._tags.begin):
            self._held = text[len(self._tags.begin) :]
            self._step = self._think
        elif not self._tags.begin.startswith(text):
            self._step = self._think if self._opened else self._answer
        return Parts()

    def _think(self) -> Parts:
        if not self._has_thought:
            self._held = self._held.lstrip()
        body, found, rest = self._held.partition(self._tags.end)
        if found:
            self._held = rest
            self._step = self._begin_answer
            return Parts(thought=body.rstrip())
        end = len(self._held) - begun(self._held, (self._tags.end,))
        body = self._held[:end].rstrip()
        self._held = self._held[len(body) :]
        self._has_thought = self._has_thought or bool(body)
        return Parts(thought=body)

    def _begin_answer(self) -> Parts:
        self._held = self._held.lstrip()
        if self._held:
            self._step = self._answer
        return Parts()

    def _answer(self) -> Parts:
        around = self._tags.around
        for tag in around:
            self._held = self._held.replace(tag, "")
        end = len(self._held) - begun(self._held, around)
        text, self._held = self._held[:end], self._held[end:]
        return Parts(answer=text)


def begun(text: str, tags: tuple[str, ...]) -> int:
    """Return how many characters at the end of a text may be the beginning of a tag."""
    most = max((len(tag) for tag in tags), default=1) - 1
    sizes = range(min(most, len(text)), 0, -1)
    return next((size for size in sizes if any(tag.startswith(text[-size:]) for tag in tags)), 0)


class _ChannelReader:
    """Read messages of gpt-oss: channel `analysis` is a thought, a message to a function is a call.

    A call is written as other models write calls, between <tool_call> and </tool_call>.
    """

    _ENDS = ("<|end|>", "<|start|>", "<|channel|>")
    _FUNCTION = re.compile(r"to=functions\.([\w.-]+)")
    _CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

    def __init__(self) -> None:
        self._held = ""
        self._header: str | None = ""
        """The header of the current message; None while its body is read."""
        self._channel = "final"
        self._function: str | None = None
        self._call = ""
        self._has_thought = False

    def take(self, text: str) -> Parts:
        self._held += text
        thought = answer = ""
        while True:
            more = self._next()
            if more is None:
                return Parts(thought, answer)
            thought += more.thought
            answer += more.answer

    def _next(self) -> Parts | None:
        """Return what the next part of the text adds; None if more text is needed first."""
        if self._header is not None:
            return self._read_header(self._header)
        ends = [(self._held.find(tag), tag) for tag in self._ENDS if tag in self._held]
        if ends:
            place, tag = min(ends)
            body = self._held[:place]
            self._held = self._held[place + len(tag) if tag == "<|end|>" else place :]
            self._header = ""
            return self._said(body, is_end=True)
        size = len(self._held) - begun(self._held, self._ENDS)
        body, self._held = self._held[:size], self._held[size:]
        return self._said(body, is_end=False) if body else None

    def _read_header(self, header: str) -> Parts | None:
        begins = "<|start|>", "<|channel|>"
        text = self._held.lstrip() if not header else self._held
        is_tag = not text or any(text.startswith(tag) or tag.startswith(text) for tag in begins)
        if not is_tag and "<|message|>" not in text:  # A text without any header is an answer.
            self._header, self._channel, self._function = None, "final", None
            return Parts()
        before, found, rest = text.partition("<|message|>")
        if not found:
            return None
        channel = self._CHANNEL.search(before)
        function = self._FUNCTION.search(before)
        self._channel = channel[1] if channel else "final"
        self._function = function[1] if function else None
        self._held, self._header = rest, None
        return Parts()

    def _said(self, body: str, *, is_end: bool) -> Parts:
        if self._function is not None:
            self._call += body
            return Parts(answer=self._written_call()) if is_end else Parts()
        if self._channel != "analysis":
            return Parts(answer=body)
        between = "\n" if self._has_thought and body and self._ended_before else ""
        self._has_thought = self._has_thought or bool(body)
        self._ended_before = is_end
        return Parts(thought=between + body)

    _ended_before = False

    def _written_call(self) -> str:
        name, text = self._function, self._call
        self._function, self._call = None, ""
        try:
            arguments = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError):
            arguments = text
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"

    def finish(self) -> Parts:
        held, self._held = self._held, ""
        if self._header is not None:
            return Parts()
        return self._said(held, is_end=True)
