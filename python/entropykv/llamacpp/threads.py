"""Compute with fewer threads while other processes use the cores.

The threads of a graph wait for each other after every node. On a busy machine, one of them often
has no core, and the others wait for it; then fewer threads are faster. Nobody knows how long the
other processes will run, so numbers of threads are tried. The results do not depend on the number
of threads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import llama_cpp

from entropykv import system
from entropykv.settings.cache_options import CacheOptions

SHORTEST_LOOK = 0.2
"""The shortest measurement, in seconds of steps."""
SHORTEST_TRIAL = 0.05
"""Seconds after which a number of threads that is clearly slower is given up."""
PREEMPTIONS = 120.0
"""Preemptions per second, of all threads; more mean that other processes want the cores.

Measured with two threads on two cores: 20 to 55 alone, 180 to 370 beside one to three busy loops.
"""
CALM = 60.0
"""Preemptions per second; fewer mean that the other processes are gone."""
CLEARLY_FASTER, CLEARLY_SLOWER = 0.95, 1.5
"""Ratios of the time per token to the time before: a number of threads is kept below the first, and
given up above the second.
"""
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 16.0
"""Seconds between trials: the first pause, doubled after every trial without success, and the
longest.

If other processes seem to be gone, a quarter of the pause is enough.
"""


@dataclass
class Steps:
    """Sum up tokens, times and preemptions of some steps."""

    tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Processor time of all threads; it is less than their elapsed time if they waited for
    a core.
    """
    preemptions: int = 0

    def add(self, tokens: int, seconds: float, cpu_seconds: float, preemptions: int) -> None:
        """Count one more step."""
        self.tokens += tokens
        self.seconds += seconds
        self.cpu_seconds += cpu_seconds
        self.preemptions += preemptions


class ThreadChoice:
    """Choose how many of the requested threads compute."""

    def __init__(self, most: int) -> None:
        """Start with all threads."""
        self.most = most
        self.n = most
        self._steps = Steps()
        self._before: tuple[int, float] | None = None
        """During a trial: the previous number of threads, and its seconds per token."""
        self._pause = FIRST_PAUSE
        self._waited = FIRST_PAUSE
        """Seconds since the last trial; the initial value starts the first trial at once."""
        self._upward = False

    def add(self, tokens: int, seconds: float, cpu_seconds: float, preemptions: int) -> None:
        """Count a step, and choose the number of threads again if enough was measured."""
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
        """Start a trial with another number if other processes want the cores, or no longer want
        them.
        """
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
    """Set the number of threads of a context before every step, based on the times of earlier
    steps.
    """

    def __init__(self, options: CacheOptions, *, fixed: bool = False) -> None:
        """Use `options`' numbers of threads for one token and for several: as maxima, or always if
        `fixed`.

        The result of llama.cpp's own attention may depend on the number of threads; ours does not.
        """
        self._fixed = fixed or system.preemptions() is None
        self._single = ThreadChoice(options.threads)
        self._batch = ThreadChoice(options.threads_batch)

    @contextlib.contextmanager
    def step(self, context: Any, n_tokens: int) -> Iterator[None]:
        """Set the threads for a step of `n_tokens` tokens, and measure the step, which the caller
        performs within `with`.
        """
        choice = self._single if n_tokens == 1 else self._batch
        if self._fixed or choice.most == 1:
            yield
            return
        llama_cpp.llama_set_n_threads(context, self._single.n, self._batch.n)
        before = system.preemptions() or 0
        cpu, start = time.process_time(), time.perf_counter()
        yield
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        choice.add(n_tokens, seconds, cpu_seconds, (system.preemptions() or 0) - before)
