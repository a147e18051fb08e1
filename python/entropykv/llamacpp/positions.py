"""Map positions of a text to those that RoPE sees, for sessions beyond the trained context.

A store counts positions of the text; RoPE sees them moved back by `shift`, so that they stay below
the positions that the model was trained for. Sinks keep their place, and what would come before the
first position after them is taken to be there (rope_position in cpp/decide/rope_params.hpp).
"""

from __future__ import annotations

from dataclasses import dataclass

from entropykv.errors import ContextError

STEPS = 4
"""A shift is a multiple of limit / STEPS.

So the newest 3/4 of the limit always keep their exact distances, and no stored key is rotated more
than STEPS times before it is clamped, however long the session: what rounding a rotated key costs
does not add up beyond that.
"""


@dataclass(frozen=True)
class RopeRange:
    """Bound the positions that RoPE may see to [0, limit); the first `n_sinks` never move."""

    limit: int
    n_sinks: int

    @property
    def step(self) -> int:
        """Return what the shift grows by, a number of positions."""
        return max(1, self.limit // STEPS)

    def shift_for(self, shift: int, position: int, n_tokens: int) -> int:
        """Return the shift to read `n_tokens` at `position` with, where `shift` was in force.

        It stays as long as the tokens come below the limit, and not below half of it either: after
        going far back in the text, distances become exact again.
        """
        end = position + n_tokens
        if end - shift <= self.limit and position - shift >= self.limit // 2:
            return shift
        return -(-max(0, end - self.limit) // self.step) * self.step


def largest_micro_batch(n_ubatch: int, n_ctx: int, n_ctx_train: int) -> int:
    """Return the most tokens of a micro-batch: one step of the shift beyond the trained context."""
    if n_ctx <= n_ctx_train:
        return min(n_ubatch, n_ctx)
    return min(n_ubatch, RopeRange(n_ctx_train, 0).step)


def check_sinks(n_sinks: int, n_ctx: int, n_ctx_train: int) -> None:
    """Raise ContextError where sinks leave too little of the trained context to move in."""
    if n_ctx > n_ctx_train and n_sinks > n_ctx_train // STEPS:
        raise ContextError(
            f"{n_sinks} sinks are too many for a context of {n_ctx} tokens with a model that was "
            f"trained for {n_ctx_train}; use at most {n_ctx_train // STEPS} (n_sinks, --sinks)"
        )
