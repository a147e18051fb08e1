"""The generation loop: read a prompt, sample with llama.cpp's samplers, decode, repeat."""

from __future__ import annotations

import ctypes
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import llama_cpp
import numpy as np
import numpy.typing as npt

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
    def tokens(self) -> list[int]:
        """Every token decoded so far."""

    @property
    def logits(self) -> npt.NDArray[np.float32] | None:
        """Of the last token, (n_vocab,); None where it has none."""

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
    if tokens or session.logits is None:
        start = time.perf_counter()
        before = session.position
        for _ in session.decode_micro_batches(tokens, all_logits=False):
            if on_prompt is not None:
                on_prompt(session.position - before)
        session.count_prompt(len(tokens), time.perf_counter() - start)

    chain = sampling.chain(session.n_vocab)
    try:
        if sampling.repeat_penalty != 1.0:  # or a long session would be copied for nothing
            for token in session.tokens[-PENALTY_WINDOW:]:
                llama_cpp.llama_sampler_accept(chain, token)
        yield from _sample(session, chain, max_tokens)
    finally:
        llama_cpp.llama_sampler_free(chain)


def _sample(session: Decoder, chain: Any, max_tokens: int) -> Iterator[int]:
    produced = 0
    candidates = _Candidates(session.n_vocab)
    while True:
        start = time.perf_counter()
        token = candidates.choose(chain, session.logits)
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


class _Candidates:
    """The vocabulary with logits, as samplers take it. llama_sampler_sample() takes the logits of
    the context, but those of a loaded session were never there.
    """

    _KIND = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])

    def __init__(self, n_vocab: int) -> None:
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._data = np.empty(n_vocab, self._KIND)
        self._pointer = self._data.ctypes.data_as(llama_cpp.llama_token_data_p)

    def choose(self, chain: Any, logits: npt.NDArray[np.float32] | None) -> int:
        """Sample a token, and tell the chain."""
        self._data["id"] = self._ids  # samplers sort them
        self._data["logit"] = logits
        self._data["p"] = 0.0
        array = llama_cpp.llama_token_data_array(self._pointer, self._data.size, -1, False)
        llama_cpp.llama_sampler_apply(chain, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        llama_cpp.llama_sampler_accept(chain, token)
        return token
