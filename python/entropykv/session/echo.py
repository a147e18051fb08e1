"""Echo a chunk of text after a request to repeat it; the echo is read only for its queries.

While a text is read, nobody knows what will be asked about it. But to answer a question, a model
attends to much the same entries as to repeat the text. Therefore every chunk is followed, in the
same micro-batch, by a request and the chunk once more. Only these queries score the chunk's
entries, and nothing of the echo is kept. The chunk is complete only within the micro-batch, so that
the budget holds while the text is read. This is the measure `reconstruct`, after KVzip (Kim et al.
2025, arXiv:2505.23416), which reads a whole context again after it was read with a full cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from entropykv.llamacpp.model import Model
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.session.sequence import is_placeholder

REQUEST = "\n\nRepeat the previous context exactly:\n"
OVERLAP = 16
"""How many tokens before its chunk a repetition begins, so that the first tokens of the chunk get
attention, too.
"""
LEAST_TOKENS = 16
"""The least tokens for an echo: shorter texts, such as questions or single tokens, wait."""
LEAST_CHUNK = 32
"""The shortest chunk, in tokens. Budgets that follow the text change once in as many tokens
(policy/online.py).
"""

APART = 8
"""How many tokens are written between two echoes when the budget is nearly full."""


class Echo:
    """Make the echoes of texts of one model: a request to repeat a chunk of text, and the chunk
    once more.
    """

    def __init__(self, tokenize: Callable[[str], list[int]], n_ubatch: int) -> None:
        """Choose the chunk so that it fits with its echo into a micro-batch of `n_ubatch` tokens.

        If a chunk would be shorter than LEAST_CHUNK, micro-batches are larger.
        """
        self._request = tokenize(REQUEST)
        besides = len(self._request) + OVERLAP
        self.chunk = max(LEAST_CHUNK, (n_ubatch - besides) // 2)
        """How many tokens of text are read at once."""
        self.n_ubatch = besides + 2 * self.chunk
        """How many tokens a chunk and its echo have together, at most."""

    def least_pending(self, n_tokens: int, recent_window: int) -> int:
        """Return how many tokens without an echo there must be before an echo of them is read;
        `n_tokens`: how many tokens are read next.

        Where text is written token by token, an echo of each token would take long. Therefore an
        echo waits until there are as many such tokens as the recent window or a chunk holds.
        """
        if n_tokens >= LEAST_TOKENS:
            return LEAST_TOKENS
        return max(LEAST_TOKENS, min(recent_window, self.chunk))

    def tokens_ahead(self, n_pending: int) -> int:
        """Return how many tokens before the budget is full the echoes of written text must begin.

        `n_pending`: tokens of text without an echo. At most one chunk of these is repeated before
        each token, so that no token waits for more.
        """
        return APART * -(-n_pending // self.chunk)

    def of(self, text: Sequence[int], chunk: Sequence[int]) -> list[int]:
        """Return the echo of a chunk that follows `text`; none where the chunk is only images."""
        spoken = [token for token in chunk if not is_placeholder(token)]
        if not spoken:
            return []
        before = [token for token in text[-OVERLAP:] if not is_placeholder(token)]
        return [*self._request, *before, *spoken]


def echo_for(model: Model, config: ResolvedConfig) -> Echo | None:
    """Return the object that makes the echoes of a model's texts; None if no text is read twice."""
    return Echo(model.tokenize_within, config.n_ubatch) if config.reads_twice else None


def longest_part(model: Model, config: ResolvedConfig) -> int:
    """Return the most tokens that one sequence has in a micro-batch, with its echo."""
    echo = echo_for(model, config)
    return max(config.n_ubatch, echo.n_ubatch if echo else 0)
