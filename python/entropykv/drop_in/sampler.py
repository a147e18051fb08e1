"""Sample for a llama_cpp.Llama as every other door does: from the logits of its sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv.session.generate import Chooser


class SamplerOfSequence:
    """Stand in for the chain of samplers of llama_cpp.Llama, whose context may be another's."""

    def __init__(
        self,
        chooser: Chooser,
        logits_at: Callable[[int], npt.NDArray[np.float32]],
        end: int,
        *,
        has_processors: bool,
    ) -> None:
        """Use a chooser; `logits_at` returns the logits of a row: -1 is the last one.

        `end` is the token that ends a text: it is returned if a constraint allows no token.
        `has_processors`: functions of the user's take part, which may read the text.
        """
        self._chooser = chooser
        self._logits_at = logits_at
        self._end = end
        self.has_processors = has_processors

    def sample(self, _: Any, row: int = -1) -> int:
        """Choose a token by the logits of a row; raises the errors of Chooser.choose()."""
        return self.sample_from(self._logits_at(row))

    def sample_from(self, logits: npt.NDArray[np.float32]) -> int:
        """Choose a token by logits, (n_vocab,): see sample()."""
        token = self._chooser.choose(logits)
        return self._end if token is None else token

    def close(self) -> None:
        """Free the samplers."""
        self._chooser.close()

    def __del__(self) -> None:
        """Free what was not closed."""
        self.close()
