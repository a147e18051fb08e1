"""Choose how many threads compute a step, by what steps have cost lately.

The threads of a graph wait for each other after every node. If another process takes the core of
one of them, all stand still, and fewer threads are faster. The other threads can help then: they
take pieces of products, and nobody waits for them. What others do changes at any time, so ways to
divide the threads are tried, and one is kept only if it makes steps faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LOOK = 0.15
"""The least seconds of steps after which the way that they were computed in is judged."""
SHORTEST_TRIAL = 0.04
"""Seconds after which a way that is clearly slower is given up."""
CLEARLY_FASTER, CLEARLY_SLOWER = 0.96, 1.4
"""Ratios of the time per work to the time before: a way is kept below the first, and given up at
once above the second.
"""
FIRST_PAUSE, LONGEST_PAUSE = 4.0, 32.0
"""Seconds of steps between trials: at first, doubled after every trial without success, and at
most.
"""
LOST = 0.02
"""The share of the time that trials may lose; it makes pauses longer after those that lost much."""
SHORTEST_PAUSE = 0.5
"""Seconds of steps between trials if others have just begun or ended to use cores."""
WANTED = 0.5
"""Cores that other processes want, from which on fewer threads are tried."""


class Way(NamedTuple):
    """Say how threads are divided."""

    threads: int
    """Threads that compute all nodes, and wait for each other after each."""
    helpers: int = 0
    """Threads that take pieces of products, for which nobody waits."""


@dataclass
class Steps:
    """Sum up some steps."""

    work: float = 0.0
    seconds: float = 0.0

    def add(self, work: float, seconds: float) -> None:
        """Count one more step."""
        self.work += work
        self.seconds += seconds


def work_of(n_tokens: int) -> float:
    """Return about how much work a step of so many tokens is, in units of one of a single token."""
    return 1.0 + 0.12 * (n_tokens - 1)


class ThreadChoice:
    """Choose how the threads are divided for steps of one kind.

    It is told what steps cost, and how many cores others want, and knows no clock: the same calls
    make the same choices.
    """

    def __init__(self, most: int, cores: int, *, helps: bool = False) -> None:
        """Divide at most `most` threads; `helps` if there may be helpers.

        `cores`: how many threads can run at the same time. More are tried, but not expected to be
        worth it.
        """
        self.most = most
        self._cores = max(1, cores)
        self._helps = helps
        self.way = self._expected(0.0)
        self._hint = self.way
        """The way that is expected to be fastest beside what other processes want."""
        self._seen = self.way
        """The way that was expected when other processes were looked at last."""
        self._rejected: Way | None = None
        """The expected way whose trial has failed last."""
        self._calm = False
        """Whether nobody else wants a core, as far as the system tells."""
        self._steps = Steps()
        self._before: tuple[Way, float] | None = None
        """During a trial: the way before, and its seconds per work."""
        self._pause = FIRST_PAUSE
        self._waited = 0.0
        """Seconds of steps since the last trial."""
        self._next_way = 0
        self._hint_is_next = True
        """Whether the next trial is of the expected way; every other one is."""
        self._fresh = True

    @property
    def tries(self) -> bool:
        """Tell whether the current way is only tried."""
        return self._before is not None

    def note_others(self, wanted: float) -> None:
        """Record how many cores other processes wanted lately."""
        self._calm = wanted < WANTED
        hint, before = self._expected(wanted), self._seen
        self._seen = hint
        if self._fresh:
            self.way = self._hint = hint
        # A hint that was given only once may be out of date.
        elif hint == before and hint != self._hint:
            self._hint = hint
            if hint != self._rejected:
                self._hint_is_next = True
                self._pause = FIRST_PAUSE
                self._waited = max(self._waited, FIRST_PAUSE - SHORTEST_PAUSE)

    def add(self, n_tokens: int, seconds: float) -> None:
        """Count a step, and choose again if enough was seen."""
        self._fresh = False
        self._steps.add(work_of(n_tokens), seconds)
        steps, before = self._steps, self._before
        slower = before and steps.seconds > CLEARLY_SLOWER * before[1] * steps.work
        if steps.seconds < (SHORTEST_TRIAL if slower else LOOK):
            return
        self._steps, self._before = Steps(), None
        if before is not None:
            self._end_trial(steps, *before)
        else:
            self._waited += steps.seconds
            self._begin_trial(steps)

    def _end_trial(self, steps: Steps, way: Way, pace: float) -> None:
        self._waited = 0.0
        expected = pace * steps.work
        if steps.seconds < CLEARLY_FASTER * expected:
            self._pause = FIRST_PAUSE
            self._rejected = None
        else:
            if self.way == self._hint:
                self._rejected = self.way
            self.way = way
            pause = max(2 * self._pause, (steps.seconds - expected) / LOST)
            self._pause = min(pause, LONGEST_PAUSE)

    def _begin_trial(self, steps: Steps) -> None:
        """Try another way, unless all threads compute and are known to have their cores."""
        if self._waited < self._pause or (self._calm and self.way == Way(self.most)):
            return
        ways = self._neighbours()
        if not ways:
            return
        self._before = self.way, steps.seconds / steps.work
        if self.way != self._hint and self._hint_is_next:
            self.way, self._hint_is_next = self._hint, False
        else:
            self.way, self._hint_is_next = ways[self._next_way % len(ways)], True
            self._next_way += 1

    def _expected(self, wanted: float) -> Way:
        """Return the way that should be the fastest while others want so many cores."""
        taken = 0 if wanted < WANTED else max(1, round(wanted))
        threads = max(1, min(self.most, self._cores - taken))
        return Way(threads, self._others_than(threads) if self._helps else 0)

    def _others_than(self, threads: int) -> int:
        """Return how many threads are left to help."""
        return min(self.most, self._cores) - threads

    def _neighbours(self) -> list[Way]:
        """Return the ways with one thread more or less, or half of them, with and without
        helpers.
        """
        threads = self.way.threads
        found = [Way(threads - 1), Way(threads + 1), Way(threads), Way(threads // 2)]
        if self._helps:
            found += [Way(n, self._others_than(n)) for n in (threads - 1, threads, threads + 1)]
        return [
            way
            for way in dict.fromkeys(found)
            if 1 <= way.threads <= self.most and way.helpers >= 0 and way != self.way
        ]
