"""Sample from the logits of one sequence of a shared context, and apply a constraint."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import _internals as internals

from entropykv.constraint.sampler import CANDIDATE, ConstraintSampler


class SamplerOfSequence:
    """Replace the chain of samplers of llama_cpp.Llama, without reading the context's logits."""

    def __init__(
        self,
        chain: internals.LlamaSampler,
        logits_at: Callable[[int], npt.NDArray[np.float32]],
        end: int,
        constraint: ConstraintSampler | None = None,
    ) -> None:
        """Use a chain; `logits_at` returns the logits of a row: -1 is the last one.

        `end` is the token that ends a text: it is chosen if a constraint, which is put into the
        chain after the penalties, allows no token.
        """
        self._chain = chain
        self._logits_at = logits_at
        self._end = end
        self._constraint = constraint
        self._data = np.zeros(0, CANDIDATE)
        """Reused for every token, because it is too large to be allocated quickly."""
        if constraint is not None:
            _insert(chain.sampler, len(chain.custom_samplers) + 1, constraint.handle())

    def sample(self, _: Any, row: int = -1) -> int:
        """Choose a token by the logits of a row, and report it to the chain.

        Raises the errors of ConstraintSampler.check().
        """
        return self.sample_from(self._logits_at(row))

    @property
    def has_processors(self) -> bool:
        """Tell whether functions of the user's take part, which may read the text."""
        return len(self._chain.custom_samplers) > 0

    def sample_from(self, logits: npt.NDArray[np.float32]) -> int:
        """Choose a token by logits, (n_vocab,), and tell the chain: see sample()."""
        if self._data.size != logits.size:
            self._data = np.zeros(logits.size, CANDIDATE)
            self._ids = np.arange(logits.size, dtype=np.int32)
        data = self._data
        data["id"] = self._ids  # Samplers sort them.
        data["logit"] = logits
        data["p"] = 0.0
        pointer = data.ctypes.data_as(llama_cpp.llama_token_data_p)
        array = llama_cpp.llama_token_data_array(pointer, data.size, -1, False)
        llama_cpp.llama_sampler_apply(self._chain.sampler, ctypes.byref(array))
        self._check()
        chosen = array.data[array.selected]
        if self._constraint is not None and chosen.logit == -math.inf:
            return self._end
        token = int(chosen.id)
        llama_cpp.llama_sampler_accept(self._chain.sampler, token)
        self._check()
        return token

    def _check(self) -> None:
        if self._constraint is not None:
            self._constraint.check()

    def close(self) -> None:
        """Free the chain."""
        self._chain.close()  # type: ignore[no-untyped-call]

    def __del__(self) -> None:
        """Free the chain before the constraint in it, which only the chain uses."""
        self.close()


def _insert(chain: Any, index: int, sampler: Any) -> None:
    """Insert a sampler into a chain before the one with this index."""
    after = []
    while llama_cpp.llama_sampler_chain_n(chain) > index:
        after.append(llama_cpp.llama_sampler_chain_remove(chain, index))
    for each in (sampler, *after):
        llama_cpp.llama_sampler_chain_add(chain, each)
