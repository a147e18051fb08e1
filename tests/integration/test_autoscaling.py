"""Replicas are started when requests wait and removed when fewer are enough; no request is lost.

The test takes minutes, and needs a machine on which a cluster of three nodes has cores to spare.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.ray_cluster import ThreeNodes
from tests.support.replicas import REPLICA, Served, two_replicas
from tests.support.waiting import wait_for

pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.skipif(
    "ENTROPYKV_TEST_AUTOSCALING" not in os.environ, reason="make test-autoscaling"
)

OPTIONS = {
    "--n_ctx": 1_000_000,
    "--replicas": 1,
    "--max-replicas": 2,
    "--parallel": 4,
    "--scale-up-seconds": 1,
    "--scale-down-seconds": 3,
}
TEXT = "the winding road to the land of the king is far from the sea and " * 12
RAYS_PATIENCE = 20
"""Seconds after which Ray Serve kills a replica that still has requests, by default."""


class Load:
    """Let `clients` clients send requests without a pause."""

    def __init__(self, served: Served, clients: int) -> None:
        self.replicas: set[str] = set()
        self._served = served
        self._end = threading.Event()
        self._threads = ThreadPoolExecutor(clients)
        self._asking = [self._threads.submit(self._ask, number) for number in range(clients)]

    def _ask(self, client: int) -> int:
        answered = 0
        while not self._end.is_set():
            answer, replica, _ = self._served.ask(f"{client} {answered} the king", max_tokens=60)
            assert answer
            self.replicas.add(replica)
            answered += 1
        return answered

    def end(self) -> list[int]:
        """Stop sending; return how many answers each client got, which is one for every request."""
        self._end.set()
        answered = [asking.result(120) for asking in self._asking]
        self._threads.shutdown()
        return answered


class LongAnswer:
    """Read an answer that does not end by itself, in a thread."""

    def __init__(self, served: Served, prompt: str) -> None:
        self.replica = ""
        self.lines = 0
        self._end = threading.Event()
        self._served = served
        self._thread = ThreadPoolExecutor(1)
        self._reading = self._thread.submit(self._read, prompt)

    def _read(self, prompt: str) -> None:
        many = 1_000_000
        body = {"prompt": prompt, "max_tokens": many, "min_tokens": many, "stream": True}
        with self._served.client.stream("POST", "/v1/completions", json=body) as answer:
            self.replica = answer.headers[REPLICA]
            for line in answer.iter_lines():
                assert "error" not in line, line
                self.lines += 1
                if self._end.is_set():
                    return
        raise AssertionError(f"an answer ended after {self.lines} lines")

    def goes_on(self, lines: int) -> bool:
        """Tell whether more than `lines` lines have come; raise an error that ended the answer."""
        if self._reading.done():
            self._reading.result()
        return self.lines > lines

    def end(self) -> None:
        self._end.set()
        self._reading.result(60)
        self._thread.shutdown()


def test_a_replica_is_started_for_waiting_requests_and_removed_without_a_loss(
    cluster: ThreeNodes, tmp_path: Path
) -> None:
    more = [word for option in OPTIONS.items() for word in option]
    long: list[LongAnswer] = []
    with two_replicas(cluster, tmp_path, *more) as served:
        one = {served.ask(f"{number} {TEXT}")[1] for number in range(6)}
        assert len(one) == 1
        load = Load(served, 10)
        try:
            wait_for(lambda: len(load.replicas) == 2, 240)
            assert one < load.replicas
            # Conversations and long answers are at both replicas.
            texts = {f"named {number}": f"{number} {TEXT}" for number in range(8)}
            where = {}
            for name, text in texts.items():
                answer, where[name], _ = served.ask(text, name)
                texts[name] = f"{text}{answer} and then the king said"
            assert set(where.values()) == load.replicas
            for number in range(20):
                long.append(LongAnswer(served, f"{number} queens"))
                wait_for(lambda: long[-1].lines > 0, 60)
                if sum(answer.replica == long[-1].replica for answer in long) > 1:
                    long.pop().end()
                if len(long) == 2:
                    break
            assert {answer.replica for answer in long} == load.replicas
        finally:
            answered = load.end()
        assert min(answered) > 0

        # One replica goes, whose conversations go on at the other one.
        wait_for(lambda: len({served.ask(t, name)[1] for name, t in texts.items()}) == 1, 120)
        for name, text in texts.items():
            answer, replica, read = served.ask(text, name)
            assert answer
            assert replica in load.replicas
            assert read < 20
        # Answers go on at the replica that was told to go.
        until = time.monotonic() + RAYS_PATIENCE + 5
        wait_for(lambda: time.monotonic() > until, RAYS_PATIENCE + 10)
        lines = [answer.lines for answer in long]
        wait_for(lambda: all(now.goes_on(n) for now, n in zip(long, lines, strict=True)), 30)
        for answer in long:
            answer.end()
