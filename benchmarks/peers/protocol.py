"""What all frameworks are given, and what they give back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

AGREEMENT = "agreement"
"""Teacher-forced continuation against the framework's own full cache (evaluation.metrics)."""
GREEDY = "greedy"
"""Share of greedy tokens that are those of the framework's own full cache."""
SPEED = "speed"
"""Tokens a second of reading the prompt, and of writing greedy tokens after it."""
FACTS = "facts"
"""Share of the facts planted into a text that are known after it was read."""
RULER = "ruler"
"""RULER's score of the answer to a question that follows the context."""


@dataclass(frozen=True)
class Question:
    """What is asked after a prompt was read, of which it was not known before."""

    tokens: tuple[int, ...]
    n_answer: int
    """How many tokens an answer may have."""
    score: Callable[[str], float]
    """Gives an answer's text a score from 0 to 1."""


@dataclass(frozen=True)
class Passage:
    """A text cut into llama.cpp's tokens: a prompt, and what follows it."""

    name: str
    prompt: tuple[int, ...]
    continuation: tuple[int, ...] = ()
    questions: tuple[Question, ...] = ()
    """What is asked about the prompt; each question follows it alone."""
    is_chat: bool = False
    """The prompt begins as the model's chat template does."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and continuation."""
        return self.prompt + self.continuation


@dataclass(frozen=True)
class Method:
    """One row of the table: what a framework does with its cache, at one keep ratio."""

    measure: str
    framework: str
    name: str
    kv_type: str
    keep: float


@dataclass(frozen=True)
class Result:
    """A method's figures for one text. `protocol` tells results of other runs apart."""

    method: Method
    text: str
    protocol: str
    figures: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """One flat object, as the file of results has it."""
        return asdict(self.method) | {
            "text": self.text,
            "protocol": self.protocol,
            "figures": self.figures,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Result:
        """The inverse of as_json(); KeyError or TypeError for anything else."""
        rest = dict(fields)
        text, protocol, figures = (rest.pop(name) for name in ("text", "protocol", "figures"))
        return cls(Method(**rest), text, protocol, figures)


class Framework(Protocol):
    """Something that evicts; measures are added by further methods in `methods`."""

    name: str
    methods: Sequence[Method]

    def measure(
        self, passage: Passage, wanted: Sequence[Method]
    ) -> Iterator[tuple[Method, dict[str, float]]]:
        """Figures of the wanted methods for one text, as they are ready."""


def passage_of(name: str, tokens: Sequence[int], n_prompt: int, n_continuation: int) -> Passage:
    """Cut a text; ValueError where it is too short."""
    if len(tokens) < n_prompt + n_continuation:
        raise ValueError(
            f"{name}: {len(tokens)} tokens are fewer than {n_prompt} and {n_continuation}; "
            "give lower --prompt and --continuation, or leave the text out with --texts"
        )
    return Passage(
        name,
        tuple(tokens[:n_prompt]),
        tuple(tokens[n_prompt : n_prompt + n_continuation]),
    )
