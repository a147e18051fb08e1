"""The scheduler chooses which sequence is read next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from entropykv.errors import PoolError
from entropykv.session.scheduler import Scheduler, Work, choose
from entropykv.store.step import Part
from tests.support.waiting import wait_for

NO_STORE: Any = None


def part_of(n_tokens: int) -> Part:
    return Part(NO_STORE, [0] * n_tokens, 0, 1)


def work_of(name: str, n_tokens: int, arrival: int) -> Work:
    return Work(name, part_of(n_tokens), arrival)


WAITING = [
    work_of("late prompt", 64, 7),
    work_of("writer", 1, 1),
    work_of("early prompt", 30, 4),
    work_of("other writer", 1, 9),
]


@pytest.mark.parametrize(
    ("together", "singles_turn", "chosen"),
    [
        (True, True, ["writer", "other writer", "early prompt"]),
        (True, False, ["writer", "other writer", "early prompt"]),
        (False, True, ["writer", "other writer"]),
        (False, False, ["early prompt"]),
    ],
)
def test_single_tokens_of_all_and_the_first_prompt(
    together: bool, singles_turn: bool, chosen: list[str]
) -> None:
    step = choose(WAITING, together=together, singles_turn=singles_turn)
    assert [work.owner for work in step] == chosen


@pytest.mark.parametrize("singles_turn", [True, False])
def test_works_of_one_kind_do_not_wait_for_the_turn_of_the_other(singles_turn: bool) -> None:
    for waiting in (WAITING[:1], WAITING[1:2]):
        assert choose(waiting, together=False, singles_turn=singles_turn) == waiting
    assert choose([], together=True, singles_turn=singles_turn) == []


PATIENT = 60.0
"""Seconds for which a step waits for the sessions of the last step to come or to rest."""


class Recorded:
    """Hold a scheduler whose steps are recorded."""

    def __init__(
        self, least_patience: float = 0.0, admit: Callable[[Work], bool] = lambda _: True
    ) -> None:
        self.steps: list[list[Any]] = []
        self.scheduler = Scheduler(admit, self.run, together=True, least_patience=least_patience)

    def run(self, step: list[Work]) -> None:
        self.steps.append([work.owner for work in step])

    def submit(self, owner: str, n_tokens: int, arrival: int) -> Part:
        part = part_of(n_tokens)
        self.scheduler.submit(owner, part, arrival)
        return part

    def submit_side_by_side(self, sizes: dict[str, int], many: int) -> None:
        """Let every owner submit `many` parts of its size, beginning when all of them wait."""

        def submit(owner: str, arrival: int) -> None:
            for _ in range(many):
                self.submit(owner, sizes[owner], arrival)
            self.scheduler.rest(owner)

        with ThreadPoolExecutor(len(sizes)) as threads:
            with self.scheduler.between_steps():
                running = [threads.submit(submit, *each) for each in zip(sizes, count())]
                wait_for(lambda: self.scheduler.n_waiting == len(sizes))
            for each in running:
                each.result()


def test_writers_come_into_one_step() -> None:
    recorded = Recorded(PATIENT)
    recorded.submit_side_by_side(dict.fromkeys("abcd", 1), 20)
    assert [sorted(step) for step in recorded.steps] == [[*"abcd"]] * 20


def test_prompts_are_read_in_the_order_of_their_arrival_among_tokens() -> None:
    recorded = Recorded(PATIENT)
    recorded.submit_side_by_side({"first": 8, "second": 8, "writer": 1}, 4)
    pieces = [owner for step in recorded.steps for owner in step if owner != "writer"]
    assert pieces[:2] == ["first", "first"]
    assert pieces == sorted(pieces)
    assert sum("writer" in step for step in recorded.steps) == 4


def test_an_error_of_a_step_is_everybodys_and_the_next_one_goes_on() -> None:
    recorded = Recorded()

    def fail(_: list[Work]) -> None:
        raise OSError("gone")

    recorded.scheduler._run = fail
    part = part_of(1)
    with pytest.raises(OSError, match="gone"):
        recorded.scheduler.submit("a", part, 1)
    assert isinstance(part.error, PoolError)
    assert not part.untouched
    recorded.scheduler._run = recorded.run
    assert recorded.submit("b", 1, 2).error is None


def test_a_sequence_that_is_not_admitted_waits_without_delaying_others() -> None:
    open_doors = threading.Event()
    recorded = Recorded(admit=lambda work: work.owner != "late" or open_doors.is_set())
    late = threading.Thread(target=recorded.submit, args=("late", 1, 1))
    late.start()
    for _ in range(3):
        recorded.submit("early", 1, 2)
    assert late.is_alive()
    open_doors.set()
    late.join(20)
    assert recorded.steps == [["early"]] * 3 + [["late"]]


def test_what_waits_can_be_called_off() -> None:
    recorded = Recorded()
    parts = {name: part_of(1) for name in ("a", "b")}
    with recorded.scheduler.between_steps():
        with recorded.scheduler.between_steps():  # between_steps() may be nested.
            pass
        threads = [
            threading.Thread(target=recorded.scheduler.submit, args=(name, part, 1))
            for name, part in parts.items()
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: recorded.scheduler.n_waiting == 2)
        recorded.scheduler.cancel("a")
        threads[0].join(20)
        assert isinstance(parts["a"].error, PoolError)
        recorded.scheduler.close("closed")
    threads[1].join(20)
    assert "closed" in str(parts["b"].error)
    assert recorded.steps == []
