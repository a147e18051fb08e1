"""Compute steps with fewer threads while other processes use the cores.

The results do not depend on the number of threads, nor on who helps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import llama_cpp

from entropykv.llamacpp.thread_choice import ThreadChoice
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.cores import FreeCores, OtherWork, allowed_cpus, threads_at_a_time

FEWEST_HELPED = 32
"""Tokens of a step from which on helpers can be worth it: they compute pieces of several tokens."""


WORKING = 0.7
"""The share of a search for free cores that must have been within steps."""


class Search:
    """Hold a search for cores that a choice has asked for."""

    def __init__(self, choice: ThreadChoice) -> None:
        """Begin to search."""
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
        others: OtherWork | None = None,
    ) -> None:
        """Use `options`' numbers of threads for one token and for several: as maxima, or always
        without `let_help`, or if the options say so.

        `let_help(n)` lets n more threads help until `let_help(0)`; None where llama.cpp or a device
        attends, because numbers may depend on how many threads do; ours do not. `others` has looked
        at what other processes do, such as while the model was loaded.
        """
        self._fixed = let_help is None or options.fixed_threads or options.most_threads == 1
        self._let_help = let_help
        cores, cpus = threads_at_a_time(), allowed_cpus()
        single, several = (min(n, cpus) for n in (options.threads, options.threads_batch))
        self._single = ThreadChoice(single, cores)
        self._few = ThreadChoice(several, cores)
        self._many = ThreadChoice(several, cores, helps=let_help is not None)
        self.tried = False
        """Whether the last step was to find out how fast it is with other threads."""
        self._n_running = 0
        self._others = others or OtherWork()
        self._search: Search | None = None

    @contextlib.contextmanager
    def step(self, context: Any, n_tokens: int) -> Iterator[None]:
        """Set the threads for a step of `n_tokens` tokens, and measure the step, which the caller
        performs within `with`.
        """
        choices = (self._single, self._few, self._many)
        choice = choices[(n_tokens > 1) + (n_tokens >= FEWEST_HELPED)]
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
        # A step that took long may have done so because of others.
        self._look_at_others()
        choice.add(n_tokens, seconds)

    def _look_at_others(self) -> None:
        wanted = self._others.wanted(self._n_running)
        if wanted is not None:
            for choice in (self._single, self._few, self._many):
                choice.note_others(wanted)

    def _look_for_cores(self, choice: ThreadChoice) -> None:
        """Begin or end the search for cores that a choice has asked for, one search at a time.

        It says nothing if the threads of steps did not work meanwhile.
        """
        search = self._search
        if search is not None and (free := search.cores.found()) is not None:
            self._search = None
            if search.in_steps > WORKING * (time.perf_counter() - search.start):
                search.choice.note_free(free)
        if self._search is None and choice.cores_asked > 0:
            self._search = Search(choice)
