"""Fewer threads compute while other processes use the cores, and all of them afterwards."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from entropykv.llamacpp.threads import FIRST_PAUSE, LONGEST_PAUSE, ThreadChoice, Way, work_of

STEP = 0.008
"""Seconds of a step with a single token, by one thread with its own core."""
WAITING = 3.0
"""The factor by which a step takes longer if its threads wait for one that shares its core."""
HELP = 0.35
"""The speed of a helper that shares its core, relative to a thread with a core of its own."""


class Machine:
    """Simulate steps on `cores` cores, of which other processes use some."""

    def __init__(self, choice: ThreadChoice, cores: int, *, noise: float = 0.0) -> None:
        self.choice = choice
        self.cores = cores
        self.others = 0
        self.waiting = WAITING
        self.tells = True
        """Whether the system tells how many cores others use."""
        self._noise = np.random.default_rng(5), noise
        self._unread = 0.0, 0.0

    def seconds(self, n_tokens: int, way: Way) -> float:
        """Return the seconds that a step takes."""
        contended = way.threads + self.others > self.cores
        alone = STEP * work_of(n_tokens) / way.threads
        if contended and way.threads > 1:
            return alone * self.waiting
        if contended:
            return alone * 2.0
        spare = self.cores - self.others - way.threads
        return alone * way.threads / (way.threads + spare * (way.helpers > 0) + HELP * way.helpers)

    def free(self, threads: int) -> bool:
        """Tell whether each of `threads` threads would have a core; with `waiting` 1, others give
        way to them.
        """
        return threads + self.others <= self.cores or self.waiting == 1.0

    def wanted(self, way: Way) -> float:
        """Return the cores that others want, as OtherWork reports them: of shared cores, half."""
        shared = max(0, min(self.others, way.threads + way.helpers + self.others - self.cores))
        used = self.others - shared / 2
        return used + min(used, shared / 2)

    def run(self, seconds: float, n_tokens: int = 1) -> dict[Way, float]:
        """Run steps for `seconds`; return the seconds that each way took."""
        spent: dict[Way, float] = defaultdict(float)
        random, noise = self._noise
        while sum(spent.values()) < seconds:
            way = self.choice.way
            step = self.seconds(n_tokens, way) * float(np.exp(noise * random.normal()))
            elapsed, used = self._unread
            self._unread = elapsed + step, used + step * self.wanted(way)
            if self.tells and self._unread[0] >= 0.1:
                self.choice.note_others(self._unread[1] / self._unread[0])
                self._unread = 0.0, 0.0
            self.choice.add(n_tokens, step)
            spent[way] += step
            if self.choice.cores_asked:
                self.choice.note_free(self.free(way.threads + self.choice.cores_asked))
        return spent


def share(spent: dict[Way, float], *ways: Way) -> float:
    return sum(spent[way] for way in ways) / sum(spent.values())


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("n_tokens", [1, 512])
def test_all_threads_compute_while_nobody_else_wants_the_cores(n_tokens: int, noise: float) -> None:
    machine = Machine(ThreadChoice(2, 2, helps=n_tokens > 1), cores=2, noise=noise)
    assert machine.run(60.0, n_tokens).keys() == {Way(2)}


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(
    ("threads", "others", "best", "tells"),
    [(2, 1, 1, True), (4, 1, 3, True), (16, 2, 14, True), (2, 1, 1, False), (4, 1, 3, False)],
)
def test_as_many_threads_compute_as_have_cores(
    threads: int, others: int, best: int, tells: bool, noise: float
) -> None:
    machine = Machine(ThreadChoice(threads, threads), cores=threads, noise=noise)
    machine.others, machine.tells = others, tells
    machine.choice.way = Way(threads)
    machine.run(3.0 if tells else 60.0)
    assert share(machine.run(120.0), Way(best)) > 0.93


def test_threads_without_a_core_help_with_prompts() -> None:
    machine = Machine(ThreadChoice(2, 2, helps=True), cores=2, noise=0.05)
    machine.others = 1
    machine.run(5.0, 512)
    assert share(machine.run(60.0, 512), Way(1, 1)) > 0.93


def test_what_others_do_before_the_first_step_is_known_in_it() -> None:
    choice = ThreadChoice(4, 4, helps=True)
    assert choice.way == Way(4)
    choice.note_others(1.1)
    assert choice.way == Way(3, 1)
    choice.note_others(0.0)
    assert choice.way == Way(4)


def test_cores_that_nobody_uses_are_left_to_others() -> None:
    choice = ThreadChoice(4, 8, helps=True)
    for wanted, threads in ((4.0, 4), (5.0, 3), (20.0, 1)):
        choice.note_others(wanted)
        assert choice.way == Way(threads, 4 - threads)


def test_costs_decide_and_not_what_others_use() -> None:
    """Measured times decide, not what others use: here, others use only what threads leave."""
    machine = Machine(ThreadChoice(2, 2), cores=2)
    machine.others, machine.waiting = 1, 1.0
    machine.choice.note_others(1.0)
    assert machine.choice.way == Way(1)
    machine.run(20.0)
    assert share(machine.run(120.0), Way(2)) > 0.95


def test_work_of_others_that_comes_and_goes_is_not_followed_at_once() -> None:
    choice = ThreadChoice(2, 2)
    lost = 0.0
    for i in range(3000):
        choice.note_others(1.0 if i % 40 < 4 else 0.0)
        seconds = 0.02 if choice.way == Way(1) else 0.01
        lost += seconds - 0.01
        choice.add(1, seconds)
        if choice.cores_asked:
            choice.note_free(True)
    assert 0.0 < lost < 0.03 * 30.0


def test_trials_lose_little_where_no_other_way_is_faster() -> None:
    machine = Machine(ThreadChoice(2, 2, helps=True), cores=2)
    machine.others = 1
    machine.run(5.0, 512)
    spent = machine.run(200.0, 512)
    work = sum(seconds / machine.seconds(512, way) for way, seconds in spent.items())
    assert work * machine.seconds(512, Way(1, 1)) / sum(spent.values()) > 0.96


def test_all_threads_compute_again_soon_after_the_others_have_gone() -> None:
    machine = Machine(ThreadChoice(2, 2), cores=2)
    machine.others = 1
    machine.run(100.0)
    assert machine.choice.way == Way(1)
    machine.others = 0
    machine.run(2.5)
    assert machine.run(60.0).keys() == {Way(2)}


def test_they_do_so_later_where_the_system_says_nothing_of_others() -> None:
    machine = Machine(ThreadChoice(2, 2), cores=2)
    machine.others, machine.tells, machine.choice.way = 1, False, Way(2)
    machine.run(60.0)
    machine.others = 0
    machine.run(LONGEST_PAUSE + 1.0)
    assert share(machine.run(60.0), Way(2)) > 0.95


def test_more_threads_than_a_quota_counts_are_kept_if_they_are_faster() -> None:
    """More threads than a quota allows for are kept if they are faster: 2.5 cores count as 2."""
    machine = Machine(ThreadChoice(4, 2), cores=3)
    assert machine.choice.way == Way(2)
    machine.run(20.0)
    assert share(machine.run(120.0), Way(3)) > 0.95


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize(("threads", "others"), [(2, 1), (4, 1), (4, 2)])
def test_no_step_needs_a_core_that_others_use(threads: int, others: int, noise: float) -> None:
    """No step uses a core that others use, because it would take 20 times as long."""
    choice = ThreadChoice(threads, threads)
    choice.note_others(float(others))
    machine = Machine(choice, cores=threads, noise=noise)
    machine.others = others
    machine.waiting = 20.0
    spent = machine.run(120.0)
    assert max(way.threads for way in spent) == threads - others


@pytest.mark.parametrize("tells", [True, False])
def test_a_core_that_others_take_is_left_to_them_at_once(tells: bool) -> None:
    machine = Machine(ThreadChoice(2, 2), cores=2)
    machine.tells = tells
    machine.run(10.0)
    machine.others, machine.waiting = 1, 60.0
    spent = machine.run(10.0)
    assert spent[Way(2)] < 0.3 + 3 * STEP * machine.waiting / 2
    assert machine.choice.way == Way(1)


def test_cores_that_others_leave_are_searched_again_soon() -> None:
    """Cores that others leave are tried again soon: they may have been used only for a moment."""
    choice = ThreadChoice(2, 2)
    choice.note_others(1.0)
    choice.add(1, 0.2)
    seconds, searches = 0.0, 0
    while not choice.tries:
        choice.note_others(0.0)
        choice.add(1, 0.1)
        seconds += 0.1
        if choice.cores_asked:
            searches += 1
            choice.note_free(searches == 4)
    assert choice.way == Way(2)
    assert seconds < 6.0


def test_steps_during_a_search_for_cores_do_not_count() -> None:
    choice = ThreadChoice(2, 2)
    choice.note_others(1.0)
    while choice.cores_asked == 0:
        choice.add(1, 0.2)
    for _ in range(5):
        choice.add(1, 5.0)
    assert choice.cores_asked == 1
    choice.note_free(True)
    assert choice.tries
    choice.add(1, 0.17)
    assert choice.way == Way(2)


def test_a_trial_says_so() -> None:
    choice = ThreadChoice(2, 2)
    choice.add(1, 0.2)
    choice.note_others(0.5)
    choice.note_others(0.5)
    while not choice.tries:
        choice.add(1, FIRST_PAUSE / 4)
    assert choice.way == Way(1)
    choice.add(1, 10.0)
    assert not choice.tries
    assert choice.way == Way(2)


def test_one_thread_is_never_less_than_one() -> None:
    machine = Machine(ThreadChoice(1, 1), cores=1)
    machine.others = 3
    assert machine.run(10.0).keys() == {Way(1)}
