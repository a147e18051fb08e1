"""Echo a chunk of text behind a request to repeat it, which is read only to be observed.

Nothing tells, while a text is read, what it will be asked for; but to answer, a model looks up what
it would need to say the text again. So every chunk is followed, in the same micro-batch, by a
request and the chunk once more. Only these queries tell what the chunk's entries are worth, and
nothing of the echo is kept: the chunk is whole in the micro-batch alone, so that the budget holds
while the text is read. That is the measure `reconstruct`, after KVzip (Kim et al. 2025,
arXiv:2505.23416), which reads a whole context again after it was read with a full cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from entropykv.session.image_spans import is_placeholder

REQUEST = "\n\nRepeat the previous context exactly:\n"
OVERLAP = 16
"""Tokens before a chunk that its repetition begins with, so that its first ones are sought."""
LEAST_TOKENS = 16
"""The fewest tokens that get an echo: shorter pieces, as questions or single tokens, wait."""
LEAST_CHUNK = 32
"""The shortest chunk: budgets follow what so many tokens show, see policy/online.py."""

APART = 8
"""Tokens that are written from one echo to the next, where the bytes will soon be full."""


class Echo:
    """Make the echoes of one model's text."""

    def __init__(self, tokenize: Callable[[str], list[int]], n_ubatch: int) -> None:
        """Cut texts so that a chunk and its echo fit into a micro-batch of `n_ubatch` tokens.

        Where that is too small for LEAST_CHUNK, micro-batches are larger.
        """
        self._request = tokenize(REQUEST)
        besides = len(self._request) + OVERLAP
        self.chunk = max(LEAST_CHUNK, (n_ubatch - besides) // 2)
        """How many tokens of text are read at once."""
        self.n_ubatch = besides + 2 * self.chunk
        """How many tokens a chunk and its echo have."""

    def least_pending(self, n_tokens: int, recent_window: int) -> int:
        """Return how much text must be without an echo for one before `n_tokens` more are read.

        Where text is written token by token, echoes of single tokens would take long: they wait
        until they are as many as the recent window holds, or a chunk.
        """
        if n_tokens >= LEAST_TOKENS:
            return LEAST_TOKENS
        return max(LEAST_TOKENS, min(recent_window, self.chunk))

    def tokens_ahead(self, n_pending: int) -> int:
        """Return how many tokens before the bytes are full the echoes of written text begin.

        `n_pending`: tokens of text that have no echo yet. Every chunk of them is repeated before
        another token, so that no token waits for more than one.
        """
        return APART * -(-n_pending // self.chunk)

    def of(self, text: Sequence[int], chunk: Sequence[int]) -> list[int]:
        """Return the echo of a chunk that follows `text`; none where the chunk is only images."""
        spoken = [token for token in chunk if not is_placeholder(token)]
        if not spoken:
            return []
        before = [token for token in text[-OVERLAP:] if not is_placeholder(token)]
        return [*self._request, *before, *spoken]
