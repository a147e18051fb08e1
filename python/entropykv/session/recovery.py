"""Climb the recovery ladder when a model becomes uncertain: restore entries, or write tokens again.

Metinov et al., "Adaptive Soft Rolling KV Freeze with Entropy-Guided Recovery", section 3.6: soft
reset, window reset, full reset, rewalk. The paper does not define a spike. Here it is a value far
above its own running mean, and the ladder is a pure state machine over the logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from entropykv.settings.freezing import Recovery, Rung

LEAST_DEVIATION = 0.25
"""The deviation in bits that is assumed at least. If a text is nearly certain, all values are
within a hundredth of a bit of each other, and small changes must not count as spikes.
"""

_LEAST_LOGIT = -80.0
"""Lower logits, relative to the largest one, are raised to this: their exp() would not be a normal
float32, and its product with minus infinity would not be finite.
"""


@dataclass(frozen=True)
class Climb:
    """Hold one climb of the recovery ladder."""

    position: int
    """How many tokens the text had when the climb was decided."""
    rung: Rung
    """The rung that is climbed to."""
    entropy: float
    """The entropy of the distribution of the next token, in bits."""
    mean_entropy: float
    """The mean entropy of the earlier tokens, in bits."""
    top_probability: float
    """The probability of the most probable next token."""
    restored: int = 0
    """How many entries of all KV heads were restored."""


class _Cache(Protocol):
    def thaw(self, rung: Rung, window: int) -> int:
        """Restore frozen entries: see SessionCache.thaw()."""


class Recoverable(Protocol):
    """Define a session that can restore frozen entries."""

    @property
    def cache(self) -> _Cache:
        """Return the cache, which has the frozen entries."""

    def note_climb(self, climb: Climb) -> None:
        """Record a climb."""


class Ladder:
    """Decide after every generated token, by the logits behind it, to which rung of recovery to
    climb, if any.
    """

    def __init__(self, recovery: Recovery, n_vocab: int) -> None:
        """Start at the bottom; `n_vocab`: the number of logits."""
        self._recovery = recovery
        self._distribution = _Distribution(n_vocab)
        self._entropy = _Running(recovery)
        self._surprise = _Running(recovery)
        self._since_climb = recovery.refractory
        self._calm = 0
        self._rewalked = -recovery.rewalk  # No token was rewalked yet.
        self.rung = Rung.NONE
        """The current rung, from which the ladder is climbed."""

    def observe(self, logits: npt.NDArray[np.float32], position: int) -> Climb | None:
        """Examine the logits, (n_vocab,), after `position` tokens; returns a climb, or None.

        The caller restores the entries of the rung; `restored` of the climb is still 0.
        """
        entropy, top_probability = self._distribution.measure(logits)
        if not math.isfinite(entropy):
            # Such logits are no distribution, and the means would never recover from their entropy.
            return None
        mean = self._entropy.mean
        spikes = self._entropy.take(entropy), self._surprise.take(-math.log2(top_probability))
        rung = self._next_rung(any(spikes), position)
        if rung is Rung.NONE:
            return None
        return Climb(position, rung, entropy, mean, top_probability)

    def _next_rung(self, spike: bool, position: int) -> Rung:
        self._since_climb += 1
        self._calm = 0 if spike else self._calm + 1
        if self._calm == self._recovery.calm:
            self._calm = 0
            self.rung = Rung(max(self.rung - 1, Rung.NONE))
        if not spike or self._since_climb <= self._recovery.refractory:
            return Rung.NONE
        self._since_climb = 0
        rung = Rung(min(self.rung + 1, self._recovery.top))
        if rung is Rung.REWALK and position - self._recovery.rewalk < self._rewalked:
            rung = Rung.FULL  # Rewalking some of these tokens again would give the same tokens.
        if rung is Rung.REWALK:
            self._rewalked = position
        self.rung = Rung.NONE if rung is Rung.REWALK else rung
        return rung


class Watch:
    """Apply the ladder during a generation: its climbs restore entries of the session."""

    def __init__(self, session: Recoverable, recovery: Recovery, n_vocab: int) -> None:
        """Start at the bottom of the ladder."""
        self._session = session
        self._window = recovery.window
        self._ladder = Ladder(recovery, n_vocab)

    def wants_rewalk(self, logits: npt.NDArray[np.float32], position: int) -> bool:
        """Examine the logits after `position` tokens, (n_vocab,), and restore entries if the ladder
        is climbed; returns whether to rewalk.
        """
        climb = self._ladder.observe(logits, position)
        if climb is None:
            return False
        restored = self._session.cache.thaw(min(climb.rung, Rung.FULL), self._window)
        self._session.note_climb(replace(climb, restored=restored))
        return climb.rung is Rung.REWALK


class _Distribution:
    """Measure the softmax of logits, in reused buffers."""

    def __init__(self, n_vocab: int) -> None:
        self._logits = np.empty(n_vocab, np.float32)
        self._exponentials = np.empty(n_vocab, np.float32)

    def measure(self, logits: npt.NDArray[np.float32]) -> tuple[float, float]:
        """Return the entropy of the softmax in bits, and the largest probability; (NaN, NaN) for
        logits without a largest one.
        """
        z, exponentials = self._logits, self._exponentials
        with np.errstate(invalid="ignore"):
            np.subtract(logits, logits.max(), out=z)
        np.maximum(z, _LEAST_LOGIT, out=z)
        np.exp(z, out=exponentials)
        total = float(exponentials.sum())
        z *= exponentials  # np.dot would wake BLAS threads, which compete with those of llama.cpp.
        return (math.log(total) - float(z.sum()) / total) / math.log(2.0), 1.0 / total


class _Running:
    """Keep an exponentially decaying mean and deviation of earlier values; see Recovery."""

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery
        self._n = 0
        self._smoothed = 0.0
        self._variance = 0.0
        self.mean = 0.0

    def take(self, value: float) -> bool:
        """Add a value; returns whether it is a spike."""
        self._smoothed += (value - self._smoothed) / min(self._n + 1, self._recovery.smooth)
        value = self._smoothed
        spike = False
        if self._n >= self._recovery.warm_up:
            reach = self._recovery.deviations * max(math.sqrt(self._variance), LEAST_DEVIATION)
            spike = value > self.mean + reach
            value = min(max(value, self.mean - reach), self.mean + reach)
        self._n += 1
        share = 1.0 / min(self._n, self._recovery.memory)
        difference = value - self.mean
        self.mean += share * difference
        self._variance = (1.0 - share) * (self._variance + share * difference**2)
        return spike
