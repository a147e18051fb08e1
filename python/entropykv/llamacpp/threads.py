"""Compute with fewer threads while other processes have the cores.

The threads of a graph wait for each other after every node. On a machine that is busy otherwise,
one of them is always without a core, and the others wait for it: fewer threads are faster then.
Which is faster is tried, since nobody says how long the others will stay. The numbers that are
computed do not depend on how many threads compute them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import llama_cpp

from entropykv.settings.cache_options import CacheOptions

try:
    import resource
except ImportError:  # Windows does not count how often threads lose their cores
    resource = None  # type: ignore[assignment]

SHORTEST_LOOK = 0.2
"""Seconds of steps that are looked at together."""
SHORTEST_TRIAL = 0.05
"""Seconds after which another number of threads is given up that is clearly slower."""
PREEMPTIONS = 120.0
"""A second, of all threads; more say that others want the cores.

Two threads on two cores: 20 to 55 alone, 180 to 370 beside one to three busy loops.
"""
CALM = 60.0
"""Preemptions a second; fewer say that the others have gone."""
CLEARLY_FASTER, CLEARLY_SLOWER = 0.95, 1.5
"""A number of threads is taken, or given up, by what a token takes, to what it took before."""
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 16.0
"""Seconds until another number is tried; they double every time that it was no better.

A quarter of them, where the others seem to have gone.
"""


@dataclass
class Steps:
    """Sum up what some steps took."""

    tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Processor time of all threads; less than theirs where they had to wait for a core."""
    preemptions: int = 0

    def add(self, tokens: int, seconds: float, cpu_seconds: float, preemptions: int) -> None:
        """Count one more step."""
        self.tokens += tokens
        self.seconds += seconds
        self.cpu_seconds += cpu_seconds
        self.preemptions += preemptions


class ThreadChoice:
    """Choose how many of the threads that were asked for compute."""

    def __init__(self, most: int) -> None:
        """Begin with all of them."""
        self.most = most
        self.n = most
        self._steps = Steps()
        self._before: tuple[int, float] | None = None
        """While another number is tried: the one before, and the seconds of a token with it."""
        self._pause = FIRST_PAUSE
        self._waited = FIRST_PAUSE
        """Seconds since another number was tried; the first is tried at once."""
        self._upward = False

    def add(self, tokens: int, seconds: float, cpu_seconds: float, preemptions: int) -> None:
        """Count a step, and choose again where enough was seen."""
        self._steps.add(tokens, seconds, cpu_seconds, preemptions)
        steps, before = self._steps, self._before
        slower = before and steps.seconds > CLEARLY_SLOWER * before[1] * steps.tokens
        if steps.seconds < (SHORTEST_TRIAL if slower else SHORTEST_LOOK):
            return
        self._steps, self._before = Steps(), None
        if before is not None:
            self._end_trial(steps, *before)
        else:
            self._consider(steps)

    def _end_trial(self, steps: Steps, n_before: int, pace_before: float) -> None:
        if steps.seconds / steps.tokens < CLEARLY_FASTER * pace_before:
            self._pause = FIRST_PAUSE
        else:
            self.n = n_before
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._upward = not self._upward
        self._waited = 0.0

    def _consider(self, steps: Steps) -> None:
        """Try another number of threads where others want the cores, or have wanted them."""
        self._waited += steps.seconds
        contended = steps.preemptions > PREEMPTIONS * steps.seconds
        calm = steps.preemptions < CALM * steps.seconds
        if self.n == self.most and not contended:
            return
        if self._waited < (self._pause / 4 if calm else self._pause):
            return
        upward = self.n < self.most and (self._upward or not contended or self.n == 1)
        self._before = self.n, steps.seconds / steps.tokens
        running = int(steps.cpu_seconds / steps.seconds)
        self.n = self.most if upward else max(1, min(running, self.n - 1))


class Threads:
    """Set the threads of a context before every step, by what the steps before it took."""

    def __init__(self, options: CacheOptions, *, fixed: bool = False) -> None:
        """Take how many threads compute one token, and several: at most, or always if `fixed`.

        llama.cpp's own attention may add up otherwise with another number; ours does not.
        """
        self._fixed = fixed or resource is None
        self._single = ThreadChoice(options.threads)
        self._batch = ThreadChoice(options.threads_batch)

    @contextlib.contextmanager
    def step(self, context: Any, n_tokens: int) -> Iterator[None]:
        """Do a step of `n_tokens` tokens in a context of llama.cpp."""
        choice = self._single if n_tokens == 1 else self._batch
        if self._fixed or choice.most == 1:
            yield
            return
        llama_cpp.llama_set_n_threads(context, self._single.n, self._batch.n)
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        cpu, start = time.process_time(), time.perf_counter()
        yield
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches
        choice.add(n_tokens, seconds, cpu_seconds, switches)
