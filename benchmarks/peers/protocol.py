"""Define the measures, inputs and results that all frameworks have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

AGREEMENT = "agreement"
"""The measure of how close a teacher-forced continuation is to the framework's own full cache."""
GREEDY = "greedy"
"""The measure of how many greedy tokens equal those of the framework's own full cache."""
SPEED = "speed"
"""The measure of speed: tokens per second of reading the prompt, and of greedy writing after it."""
FACTS = "facts"
"""The measure of how many planted facts are known after the text was read."""
RULER = "ruler"
"""The measure of RULER's score for the answer to a question after the context."""


@dataclass(frozen=True)
class Question:
    """Hold a question that is asked after a prompt, and was not known when that was read."""

    tokens: tuple[int, ...]
    n_answer: int
    """The most tokens that an answer may have."""
    score: Callable[[str], float]
    """Returns the score of an answer's text, from 0 to 1."""


@dataclass(frozen=True)
class Passage:
    """Hold a text in llama.cpp's tokens: a prompt, with its continuation or with questions."""

    name: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...] = ()
    questions: tuple[Question, ...] = ()
    """The questions about the prompt; each follows the prompt directly."""
    is_chat: bool = False
    """True if the prompt begins with the model's chat template."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the tokens of prompt and continuation."""
        return self.prompt + self.continuation


@dataclass(frozen=True)
class Method:
    """Hold one row of the table: a framework's eviction method at one keep ratio."""

    measure: str
    framework: str
    name: str
    kv_type: str
    keep: float


@dataclass(frozen=True)
class Result:
    """Hold a method's figures for one text; `protocol` tells them from those of other settings."""

    method: Method
    text: str
    protocol: str
    figures: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """Return the result as one flat JSON object, for the file of results."""
        return asdict(self.method) | {
            "text": self.text,
            "protocol": self.protocol,
            "figures": self.figures,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Result:
        """Read an object of as_json(); raises KeyError or TypeError if its fields are others."""
        rest = dict(fields)
        text, protocol, figures = (rest.pop(name) for name in ("text", "protocol", "figures"))
        return cls(Method(**rest), text, protocol, figures)


class Framework(Protocol):
    """Define a framework that evicts: its name, and the methods that it measures."""

    name: str
    methods: Sequence[Method]

    def measure(
        self, passage: Passage, wanted: Sequence[Method]
    ) -> Iterator[tuple[Method, dict[str, float]]]:
        """Yield the figures of the wanted methods for one text, each as soon as it is measured."""


def passage_of(name: str, tokens: Sequence[int], n_prompt: int, n_continuation: int) -> Passage:
    """Cut a text into prompt and continuation; raises ValueError if it is too short."""
    if len(tokens) < n_prompt + n_continuation:
        raise ValueError(
            f"{name}: {len(tokens)} tokens are fewer than {n_prompt} and {n_continuation}; "
            "give lower --prompt and --continuation, or leave the text out with --texts"
        )
    return Passage(
        name, tuple(tokens[:n_prompt]), tuple(tokens[n_prompt : n_prompt + n_continuation])
    )
