"""Fewer threads compute while other processes use the cores, and all of them again afterwards."""

from __future__ import annotations

from collections import defaultdict

import pytest

from entropykv.llamacpp.threads import LONGEST_PAUSE, PREEMPTIONS, ThreadChoice

STEP = 0.01
"""Seconds of work for one token by one thread with its own core."""
WAITING = 4.0
"""By what factor a step takes longer if its threads wait for one without a core."""


class Machine:
    """Simulate steps on a number of cores, some of which other processes use."""

    def __init__(self, choice: ThreadChoice, cores: int) -> None:
        self.choice = choice
        self.cores = cores
        self.others = 0
        self.waiting = WAITING

    def run(self, seconds: float) -> dict[int, float]:
        """Run steps for `seconds`; returns the seconds by number of threads."""
        spent: dict[int, float] = defaultdict(float)
        while sum(spent.values()) < seconds:
            n = self.choice.n
            share = min(1.0, self.cores / (n + self.others))
            slowed = self.waiting if share < 1.0 and n > 1 else 1.0 / share
            step = STEP / n * slowed
            preemptions = round(2 * PREEMPTIONS * step) + 1 if share < 1.0 else 0
            self.choice.add(1, step, n * step * share, preemptions)
            spent[n] += step
        return spent


def test_all_threads_compute_while_nobody_else_wants_the_cores() -> None:
    assert Machine(ThreadChoice(2), cores=2).run(60.0).keys() == {2}


@pytest.mark.parametrize(("threads", "others", "best"), [(2, 2, 1), (16, 2, 14), (16, 1, 15)])
def test_fewer_threads_compute_where_they_are_faster(threads: int, others: int, best: int) -> None:
    machine = Machine(ThreadChoice(threads), cores=threads)
    machine.others = others
    machine.run(3.0)
    spent = machine.run(60.0)
    assert spent[best] > 0.85 * sum(spent.values())


def test_all_threads_compute_where_fewer_are_no_faster() -> None:
    machine = Machine(ThreadChoice(2), cores=2)
    machine.others, machine.waiting = 2, 2.0
    machine.run(10.0)
    spent = machine.run(60.0)
    assert spent[2] > 0.9 * sum(spent.values())


def test_all_threads_compute_again_soon_after_the_others_have_gone() -> None:
    machine = Machine(ThreadChoice(2), cores=2)
    machine.others = 2
    machine.run(30.0)
    assert machine.choice.n == 1
    machine.others = 0
    machine.run(LONGEST_PAUSE + 1.0)
    assert machine.run(10.0).keys() == {2}


def test_one_thread_is_never_less_than_one() -> None:
    machine = Machine(ThreadChoice(1), cores=1)
    machine.others = 3
    assert machine.run(10.0).keys() == {1}
