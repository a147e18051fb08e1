"""The generation loop: read a prompt, sample with llama.cpp's samplers, decode, repeat."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import llama_cpp

from entropykv.errors import ContextError, SettingsError

PENALTY_WINDOW = 64
"""Tokens that the repeat penalty looks back at, as in llama-cli."""


class Decoder(Protocol):
    """What the loop needs of a session."""

    n_ctx: int

    @property
    def position(self) -> int:
        """Tokens decoded so far."""

    @property
    def n_vocab(self) -> int:
        """Size of the vocabulary."""

    @property
    def context(self) -> Any:
        """The llama_context to sample from."""

    def decode_micro_batches(self, tokens: Sequence[int], all_logits: bool) -> Iterator[Any]:
        """Decode as it is iterated."""

    def is_end(self, token: int) -> bool:
        """Whether a token ends the generation."""

    def count_prompt(self, n_tokens: int, seconds: float) -> None:
        """Take down what was read."""

    def count_generated(self, n_tokens: int, seconds: float) -> None:
        """Take down what was written."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; llama-cli's names and defaults, but greedy unless asked.

    temperature 0 or less: the most probable token. top_k 0, top_p 1 and min_p 0 are off.
    repeat_penalty 1 is off. seed None: another one every time.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raise SettingsError for values outside of their range."""
        for name, low, high in (("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0)):
            if not low <= getattr(self, name) <= high:
                raise SettingsError(
                    f"{name} cannot be {getattr(self, name)}; use a value from {low:g} to {high:g}"
                )
        if self.repeat_penalty <= 0.0:
            raise SettingsError("repeat_penalty must be above 0; 1 switches it off")

    def chain(self, n_vocab: int) -> Any:
        """A llama_sampler chain in llama-cli's order; the caller frees it."""
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())

        def add(sampler: Any) -> None:
            llama_cpp.llama_sampler_chain_add(chain, sampler)

        if self.repeat_penalty != 1.0:
            add(
                llama_cpp.llama_sampler_init_penalties(
                    n_vocab, PENALTY_WINDOW, self.repeat_penalty, 0.0, 0.0
                )
            )
        if self.temperature <= 0.0:
            add(llama_cpp.llama_sampler_init_greedy())
            return chain
        add(llama_cpp.llama_sampler_init_top_k(self.top_k))
        add(llama_cpp.llama_sampler_init_top_p(self.top_p, 1))
        add(llama_cpp.llama_sampler_init_min_p(self.min_p, 1))
        add(llama_cpp.llama_sampler_init_temp(self.temperature))
        seed = secrets.randbits(32) if self.seed is None else self.seed & 0xFFFFFFFF
        add(llama_cpp.llama_sampler_init_dist(seed))
        return chain


def generate(
    session: Decoder,
    tokens: Sequence[int],
    max_tokens: int,
    sampling: Sampling,
    on_prompt: Callable[[int], None] | None = None,
) -> Iterator[int]:
    """Read a prompt, then yield generated tokens; see Session.generate.

    `on_prompt` is called with the number of tokens read after every micro-batch.
    """
    if max_tokens == 0:
        raise ContextError("there is nothing to generate; use max_tokens of 1 or more, or -1")
    start = time.perf_counter()
    before = session.position
    for _ in session.decode_micro_batches(tokens, all_logits=False):
        if on_prompt is not None:
            on_prompt(session.position - before)
    session.count_prompt(len(tokens), time.perf_counter() - start)

    chain = sampling.chain(session.n_vocab)
    try:
        for token in tokens[-PENALTY_WINDOW:]:
            llama_cpp.llama_sampler_accept(chain, token)
        yield from _sample(session, chain, max_tokens)
    finally:
        llama_cpp.llama_sampler_free(chain)


def _sample(session: Decoder, chain: Any, max_tokens: int) -> Iterator[int]:
    produced = 0
    while True:
        start = time.perf_counter()
        token = llama_cpp.llama_sampler_sample(chain, session.context, -1)
        if session.is_end(token):
            return
        produced += 1
        session.count_generated(1, time.perf_counter() - start)
        yield token
        if produced == max_tokens or session.position >= session.n_ctx:
            return
        start = time.perf_counter()
        for _ in session.decode_micro_batches([token], all_logits=False):
            pass
        session.count_generated(0, time.perf_counter() - start)
