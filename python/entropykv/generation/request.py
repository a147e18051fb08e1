"""Say what is generated: a prompt, and how its answer is chosen and where it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from entropykv.generation.prompt import Prompt
from entropykv.session.sampling import Sampling
from entropykv.thinking.options import ThinkingOptions


@dataclass(frozen=True)
class GenerationRequest:
    """Hold one answer that is asked for. Nothing of it changes while the answer is written."""

    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    """How tokens are chosen; its grammar says what the answer behind a thought must be."""
    max_tokens: int = -1
    """The most tokens of the answer; -1: until the model or the context ends, 0: the prompt is only
    read.
    """
    stops: tuple[str, ...] = ()
    """Texts that end the answer, and are left out."""
    thinking: ThinkingOptions = field(default_factory=ThinkingOptions)
    """How long a thought may be, and where writers show it."""
    n_logprobs: int | None = None
    """How many of the most probable tokens are returned with their log probabilities at each token;
    None: no log probabilities at all.
    """
    prompt_logprobs: bool = False
    """Whether the log probabilities of the prompt's tokens are returned, too; then all of it must
    be read.
    """
    penalizes_prompt: bool = True
    """Whether penalties consider the tokens of the prompt, too."""
    errors: Literal["replace", "ignore"] = "replace"
    """What becomes of bytes that are no character, as in bytes.decode()."""
    reads_anew: bool = False
    """Whether all of the prompt is read, whatever of it was read before."""
