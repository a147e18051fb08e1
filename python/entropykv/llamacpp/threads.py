"""Compute steps with fewer threads while other processes use the cores.

The results do not depend on the number of threads, nor on who helps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import llama_cpp

from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.cores import FreeCores, OtherWork, allowed_cpus, threads_at_a_time

LOOK = 0.15
"""How many seconds of steps are measured, at least, before the current Way is judged."""
SHORTEST_TRIAL = 0.04
"""Seconds after which a way that is clearly slower is given up."""
CLEARLY_FASTER, CLEARLY_SLOWER = 0.96, 1.4
"""Ratios of the time per work to the time before: a way is kept below the first, and given up at
once above the second.
"""
SUDDENLY_SLOWER = 2.0
"""Ratio of the time per work to the time before at which somebody seems to have taken a core, so
that fewer threads are tried at once.
"""
FIRST_PAUSE, LONGEST_PAUSE = 4.0, 32.0
"""The shortest and the longest pause between two trials, in seconds of steps: the pause begins with
the shortest, and doubles after every trial without success.
"""
LOST = 0.02
"""The share of the time that trials may lose: a pause is at least what the trial before it lost,
divided by this share.
"""
SHORTEST_PAUSE = 0.5
"""Seconds of steps between trials if others have just begun or ended to use cores."""
SEARCH_PAUSE = 1.0
"""Seconds of steps after a search that found too few free cores for the expected Way, until the
next search.
"""
WANTED = 0.5
"""If other processes want at least this many cores, fewer threads are expected to be faster."""


class Way(NamedTuple):
    """Say how the threads of a step are divided."""

    threads: int
    """Threads that compute all nodes, and wait for each other after each."""
    helpers: int = 0
    """Threads that take pieces of products, for which nobody waits."""


@dataclass
class Steps:
    """Hold the sums of the work and the seconds of some steps."""

    work: float = 0.0
    seconds: float = 0.0

    def add(self, work: float, seconds: float) -> None:
        """Count one more step."""
        self.work += work
        self.seconds += seconds


def work_of(n_tokens: int) -> float:
    """Return about how much work a step of `n_tokens` tokens is; a single token has 1."""
    return 1.0 + 0.12 * (n_tokens - 1)


class ThreadChoice:
    """Choose how the threads are divided for steps of one kind, by what steps have cost lately.

    The threads of a graph wait for each other after every node. If another process takes the core
    of one of them, all stand still, and fewer threads are faster. The other threads can help then:
    they take pieces of products, and nobody waits for them. What others do changes at any time, so
    ways to divide the threads are tried, and one is kept only if it makes steps faster.

    A step cannot be left in the middle: with one thread too many, a single token of a model of 1.5B
    can take 2 s instead of 0.1. Therefore, without helpers, more threads are tried only if cores
    for them were found free.

    The class is told what steps cost, and how many cores other processes want, and knows no clock:
    the same calls make the same choices.
    """

    def __init__(self, most: int, cores: int, *, helps: bool = False) -> None:
        """Divide at most `most` threads; `helps` if there may be helpers.

        `cores`: how many threads are expected to be worth it. More are tried, because a quota of
        2.5 cores, for example, counts as 2.
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
        """The last `_hint` whose trial failed; None: none since another trial succeeded."""
        self._calm = False
        """Whether nobody else wants a core, as far as the system tells."""
        self._steps = Steps()
        self._before: tuple[Way, float] | None = None
        """During a trial: the way before, and its seconds per work."""
        self._asked: tuple[Way, float] | None = None
        """A way that is tried once cores are free for it, and the seconds per work of the current
        one.
        """
        self._usual: float | None = None
        """Seconds per work of the current way when it was measured last; None: never."""
        self._pause = FIRST_PAUSE
        self._waited = 0.0
        """Seconds of steps since the last trial."""
        self._next_way = 0
        self._hint_is_next = True
        """True if the next trial is of the expected way, as every second trial is."""
        self._fresh = True

    @property
    def tries(self) -> bool:
        """Tell whether the current way to divide the threads is on trial."""
        return self._before is not None

    @property
    def cores_asked(self) -> int:
        """Return how many more cores must be free before the next trial, as note_free() tells; 0 if
        no trial waits for that.
        """
        return self._asked[0].threads - self.way.threads if self._asked else 0

    def note_free(self, free: bool) -> None:
        """Begin the trial that waits for free cores if they are free, or else put it off.

        `free`: whether `cores_asked` cores were free beside the current threads. Steps that were
        computed meanwhile do not count, because looking for free cores disturbed them.
        """
        if self._asked is None:
            return
        (way, pace), self._asked, self._steps = self._asked, None, Steps()
        if free:
            self._before, self.way = (self.way, pace), way
        elif way == self._hint:
            self._waited, self._pause = 0.0, SEARCH_PAUSE
        else:
            self._reject(way, 0.0)

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
        """Count a step, and choose anew once the steps since the last choice took long enough."""
        self._fresh = False
        self._steps.add(work_of(n_tokens), seconds)
        steps, before = self._steps, self._before
        slower = before and steps.seconds > CLEARLY_SLOWER * before[1] * steps.work
        if steps.seconds < (SHORTEST_TRIAL if slower else LOOK):
            return
        self._steps, self._before = Steps(), None
        if before is not None:
            self._end_trial(steps, *before)
        elif self._asked is None:
            self._look(steps)

    def _end_trial(self, steps: Steps, way: Way, pace: float) -> None:
        expected = pace * steps.work
        if steps.seconds < CLEARLY_FASTER * expected:
            self._waited, self._pause = 0.0, FIRST_PAUSE
            self._rejected, self._usual = None, steps.seconds / steps.work
        else:
            tried, self.way = self.way, way
            self._reject(tried, steps.seconds - expected)

    def _reject(self, way: Way, lost: float) -> None:
        """Wait longer until the next trial, after a trial of `way` that was not worth it and lost
        `lost` seconds.
        """
        self._waited = 0.0
        if way == self._hint:
            self._rejected = way
        self._pause = max(min(2 * self._pause, LONGEST_PAUSE), lost / LOST)

    def _look(self, steps: Steps) -> None:
        """Begin a trial if the last one was long ago, or if steps have suddenly become slower."""
        self._waited += steps.seconds
        pace, before = steps.seconds / steps.work, self._usual
        self._usual = pace
        if before is not None and pace > SUDDENLY_SLOWER * before and not self._calm:
            self._try_fewer(pace)
        elif self._waited >= self._pause:
            self._begin_trial(pace)

    def _try_fewer(self, pace: float) -> None:
        """Try the way that is expected beside what others want now, or one thread less."""
        threads = self.way.threads
        if self._seen.threads < threads:
            self._hint = self._seen
            self._try(self._seen, pace)
        elif threads > 1:
            self._try(self._with(threads - 1), pace)

    def _begin_trial(self, pace: float) -> None:
        """Try another way, if any: in turns the expected one and a neighbour of the current one."""
        if self.way != self._hint and self._hint_is_next:
            self._hint_is_next = False
            self._try(self._hint, pace)
        elif ways := self._neighbours():
            self._hint_is_next = True
            self._try(ways[self._next_way % len(ways)], pace)
            self._next_way += 1

    def _try(self, way: Way, pace: float) -> None:
        """Try a way, but ask for free cores first if it has more threads and helpers are not
        allowed.

        Helpers would disturb the search for free cores, and with them, steps lose less by a thread
        too many.
        """
        if way.threads > self.way.threads and not self._helps:
            self._asked = way, pace
        else:
            self._before, self.way = (self.way, pace), way

    def _expected(self, wanted: float) -> Way:
        """Return the way that should be the fastest while others want `wanted` cores."""
        taken = 0 if wanted < WANTED else max(1, round(wanted))
        return self._with(max(1, min(self.most, self._cores - taken)))

    def _with(self, threads: int) -> Way:
        """Return the Way with this many threads that compute all nodes; the remaining ones are
        helpers, if helpers are allowed.
        """
        return Way(threads, min(self.most, self._cores) - threads if self._helps else 0)

    def _neighbours(self) -> list[Way]:
        """Return the ways with one thread more or less, or half of them, with and without
        helpers; only those with more threads while nobody else wants a core.
        """
        threads = self.way.threads
        found = [Way(threads - 1), Way(threads + 1), Way(threads), Way(threads // 2)]
        if self._helps:
            found += [self._with(n) for n in (threads - 1, threads, threads + 1)]
        return [
            way
            for way in dict.fromkeys(found)
            if (threads + 1 if self._calm else 1) <= way.threads <= self.most
            and way.helpers >= 0
            and way != self.way
        ]


FEWEST_HELPED = 32
"""Tokens of a step from which on helpers can be worth it: they compute pieces of several tokens."""


WORKING = 0.7
"""The share of the time of a search for free cores that steps must take for its result to count."""


class Search:
    """Hold a search for free cores that a ThreadChoice has asked for."""

    def __init__(self, choice: ThreadChoice) -> None:
        """Begin to search, in threads that use the cores."""
        self.choice = choice
        self.start = time.perf_counter()
        self.in_steps = 0.0
        """Seconds of the steps since the start."""
        self.cores = FreeCores(choice.cores_asked)


class Threads:
    """Set the threads of a context before every step, by the times of earlier steps."""

    def __init__(
        self,
        options: CacheOptions,
        *,
        let_help: Callable[[int], None] | None = None,
        only_embeds: bool = False,
        others: OtherWork | None = None,
    ) -> None:
        """Use the numbers of threads in `options`, one for single tokens and one for several.

        These are maxima; without `let_help`, or if the options say so, they are fixed.
        `let_help(n)` lets n more threads help until `let_help(0)`; None where llama.cpp or a device
        computes attention, because then results may depend on the number of threads.
        `only_embeds`: the CPU only looks up embeddings of tokens, and devices compute the rest;
        then it takes longer to wake threads than to look up a few. `others`: has watched other
        processes since it was made, for example while the model was loaded; None: begin to watch.
        """
        self._alone = only_embeds and not options.fixed_threads
        self._fixed = let_help is None or options.fixed_threads or options.most_threads == 1
        self._let_help = let_help
        cores, cpus = threads_at_a_time(), allowed_cpus()
        single, several = (min(n, cpus) for n in (options.threads, options.threads_batch))
        self._single = ThreadChoice(single, cores)
        self._few = ThreadChoice(several, cores)
        self._many = ThreadChoice(several, cores, helps=let_help is not None)
        self.tried = False
        """Whether the last step was a trial of other threads, or a search for free cores ran."""
        self._n_running = 0
        self._others = others or OtherWork()
        self._search: Search | None = None

    @contextlib.contextmanager
    def set_for_step(self, context: Any, n_tokens: int) -> Iterator[None]:
        """Choose the threads for a step of `n_tokens` tokens, and measure the step, which the
        caller performs within `with`; steps with fixed threads are not measured.
        """
        choices = (self._single, self._few, self._many)
        choice = choices[(n_tokens > 1) + (n_tokens >= FEWEST_HELPED)]
        if self._alone:
            many = self._many.most if n_tokens >= FEWEST_HELPED else 1
            llama_cpp.llama_set_n_threads(context, 1, many)
        if self._fixed:
            yield
            return
        self._look_at_others()
        self._look_for_cores(choice)
        self.tried = choice.tries or choice.cores_asked > 0
        threads, helpers = choice.way
        self._n_running = threads + helpers
        llama_cpp.llama_set_n_threads(context, threads, threads)
        if helpers and self._let_help is not None:
            self._let_help(helpers)
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            if helpers and self._let_help is not None:
                self._let_help(0)
        if self._search is not None:
            self._search.in_steps += seconds
        # Other processes may be the reason why a step took long.
        self._look_at_others()
        choice.add(n_tokens, seconds)

    def _look_at_others(self) -> None:
        wanted = self._others.wanted(self._n_running)
        if wanted is not None:
            for choice in (self._single, self._few, self._many):
                choice.note_others(wanted)

    def _look_for_cores(self, choice: ThreadChoice) -> None:
        """Begin or end the search for cores that a choice has asked for, one search at a time.

        Its result counts only if steps took most of the time meanwhile: see WORKING.
        """
        search = self._search
        if search is not None and (free := search.cores.found()) is not None:
            self._search = None
            if search.in_steps > WORKING * (time.perf_counter() - search.start):
                search.choice.note_free(free)
        if self._search is None and choice.cores_asked > 0:
            self._search = Search(choice)
