"""Estimate what a step costs by its number of tokens, from the steps that were made."""

from __future__ import annotations

_Sums = tuple[float, float, float, float, float]
_NOTHING: _Sums = (0.0, 0.0, 0.0, 0.0, 0.0)


class StepCosts:
    """Estimate the seconds of a step by its number of tokens.

    A step of a single token runs other kernels than one of several, so it has an estimate of its
    own. To steps of several tokens, a line is fitted: a constant and so much for each token. Older
    steps count less.
    """

    _DECAY = 0.97
    _FIRST, _SLOPE = 1.3, 0.12
    """In units of a single token's step: what a step of two tokens costs, and each token beyond,
    until that was measured.
    """
    _PRIOR = ((2, 0.5), (10, 0.25))
    """How many steps this guess counts for, at two numbers of tokens; it keeps the line defined."""
    _OUTLIER = 3.0
    """A step that takes longer than so many times what was expected is counted as so long: the
    thread was interrupted, or memory was allocated. If one takes less than what was expected
    divided by this, the earlier steps were the slow ones, and are forgotten.
    """

    def __init__(self) -> None:
        """Begin without a step."""
        self._single = (0.0, 0.0)
        """Weight and seconds of steps with a single token."""
        self._several = _NOTHING
        """Of steps with several: weight, tokens, seconds, tokens squared, tokens x seconds."""
        self._line = (self._FIRST, self._SLOPE)
        """In units of a single token's step: the cost of two tokens, and of each beyond."""

    def note(self, n_tokens: int, seconds: float) -> None:
        """Record a step that read nothing but written tokens and drafts."""
        single = self.single_seconds
        if single > 0.0:
            expected = single * self.relative(n_tokens)
            if seconds < expected / self._OUTLIER:
                self._single, self._several = (0.0, 0.0), _NOTHING
            else:
                seconds = min(seconds, self._OUTLIER * expected)
        self._several = _sum(_NOTHING, self._several, self._DECAY)
        if n_tokens == 1:
            weight, total = self._single
            self._single = (self._DECAY * weight + 1.0, self._DECAY * total + seconds)
        else:
            self._several = _sum(self._several, _row(n_tokens, seconds))
        self._line = self._fit(self.single_seconds)

    @property
    def single_seconds(self) -> float:
        """Return the estimated seconds of a step with a single token; 0.0 before the first step."""
        weight, seconds = self._single
        if weight > 0.0:
            return seconds / weight
        weight, tokens, seconds, *_ = self._several
        return seconds / (weight * self._expected(tokens / weight)) if weight > 0.0 else 0.0

    def relative(self, n_tokens: int) -> float:
        """Return the cost of a step in units of one with a single token; at least 1.0."""
        first, slope = self._line
        return 1.0 if n_tokens == 1 else max(first + slope * (n_tokens - 2), 1.0)

    def _fit(self, single: float) -> tuple[float, float]:
        if single <= 0.0:
            return self._FIRST, self._SLOPE
        sums = self._several
        for n, times in self._PRIOR:
            sums = _sum(sums, _row(n, single * self._expected(n)), times)
        weight, tokens, seconds, squares, products = sums
        mean_n, mean_s = tokens / weight, seconds / weight
        slope = (products / weight - mean_n * mean_s) / (squares / weight - mean_n * mean_n)
        slope = max(slope, 0.0)
        return (mean_s - slope * (mean_n - 2.0)) / single, slope / single

    @classmethod
    def _expected(cls, n_tokens: float) -> float:
        """Return the cost of a step, in units of a single token's, before any was measured."""
        return 1.0 if n_tokens == 1 else cls._FIRST + cls._SLOPE * (n_tokens - 2)


def _row(n_tokens: int, seconds: float) -> _Sums:
    """Return what a step adds to the sums of a line: 1, n, s, n squared, n x s."""
    return 1.0, n_tokens, seconds, n_tokens * n_tokens, n_tokens * seconds


def _sum(first: _Sums, second: _Sums, times: float = 1.0) -> _Sums:
    """Return first + times x second."""
    (a, b, c, d, e), (f, g, h, i, j) = first, second
    return a + times * f, b + times * g, c + times * h, d + times * i, e + times * j
