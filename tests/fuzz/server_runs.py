"""Send valid and hostile requests to a live server, and check that valid ones are not affected.

A run starts the installed `entropykv serve` without sanitizers, which would make it too slow to
distinguish a blocked server from a busy one. Whatever is sent, /health must answer within a second,
valid requests must be answered, and at the end the server must have no more pages than before, and
hardly more threads, files and memory.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from tests.fuzz.hostile import ATTACKS, Outcome, Refused, Unanswered, body_of, get, post
from tests.fuzz.promises import Broken, require
from tests.fuzz.session_runs import say
from tests.support.running_server import Server

SECONDS = 20.0
"""Seconds of attacks in one run, half of them before memory is measured the first time."""
N_CLIENTS = 6
VALID_SHARE = 0.5
MOST_REQUESTS = 200
"""The most requests that each client sends in half of a run."""
MOST_HEALTH_SECONDS = 1.0
IDLE_SECONDS = 30.0
"""Seconds after the last request in which everything must have ended."""
SPARE_SECONDS = 20.0
"""Seconds until spare threads and closed connections are gone; the event loop keeps a few."""
MORE_BYTES = 64 << 20
"""How many bytes the process may grow in the second half of the requests."""
_ANY = 10**6
N_CTX = 512
CONVERSATIONS = 4
OPTIONS = (
    *("-c", N_CTX, "-t", 1, "-np", 3, "--kv-budget", 1 / 3),
    *("--conversations", CONVERSATIONS, "--checkpoints", "0"),
    *("--max-waiting", 32, "--request-seconds", 15, "--log-requests", "false"),
)
CLEAN = {"LD_PRELOAD": "", "PYTHONPATH": "", "PYTHONMALLOC": "default"}
"""Environment variables of processes that run without the sanitizers."""
FREED_AT_ONCE = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_MMAP_THRESHOLD_": "65536",
}
"""Environment variables by which the C library returns freed memory at once, so that leaks show."""

WATCH = r"""
import http.client, sys, time
port, pid, most = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

def starved():
    "Seconds for which the machine had no core for the thread of the server's event loop."
    try:
        with open(f"/proc/{pid}/task/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0

while True:
    begin = time.monotonic()
    time.sleep(0.05)
    late = time.monotonic() - begin - 0.05  # it had none for this process either
    begin, before = time.monotonic(), starved()
    try:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        client.request("GET", "/health")
        client.getresponse().read()
        client.close()
    except OSError as error:
        print(f"no answer: {error!r}", flush=True)
        continue
    seconds = time.monotonic() - begin - (starved() - before)
    if seconds > most and late < most / 4:
        print(f"an answer after {seconds:.2f} s", flush=True)
"""
"""Requests /health in a process of its own, and writes a line for each late answer.

Seconds in which other processes had the cores do not count.
"""


@dataclass(frozen=True)
class _Footprint:
    """Hold the resources that an idle server uses."""

    threads: int
    files: int
    rss: int
    pool_bytes: int


def run_live(seed: int, _folder: Path) -> str:
    """Execute one run; returns a one-line description. Raises if a promise is broken."""
    server = Server(usual=OPTIONS, **CLEAN, **FREED_AT_ONCE)
    say(f"server on {server.url}")
    try:
        outcomes = _attacked(seed, server)
    except BaseException:
        server.process.kill()
        server.process.wait()
        raise
    code, log = server.end()
    require(code == 0, f"the server ends with code {code}: {log[-2000:]}")
    require("Traceback" not in log, f"the server's log: {log[-3000:]}")
    shown = ", ".join(f"{n} {what}" for what, n in outcomes.most_common(8))
    return f"{sum(outcomes.values())} requests: {shown}"


def _attacked(seed: int, server: Server) -> Counter[str]:
    port = int(server.url.rpartition(":")[2])
    clients = [_Client(f"server {seed}, client {i}", port) for i in range(N_CLIENTS)]
    _together([client.warm_up for client in clients])
    before = _footprint(server, port, 8, 32)
    broken: list[str] = []
    with watched(port, server.process.pid) as late:
        try:
            _attack(clients)
            half = _footprint(server, port, _ANY, _ANY)  # Memory has reached its final size by now.
            _attack(clients)
            after = _footprint(server, port, before.threads + 2, before.files + 2)
            broken += _more(replace(before, rss=half.rss), after)
        except Broken as error:
            broken.append(str(error))
    broken += [error for client in clients for error in client.errors]
    broken += [f"/health, {len(late)} times late: {text}" for text in late[:3]]
    require(not broken, f"{len(broken)} promises are broken:\n  " + "\n  ".join(broken[:20]))
    return sum((client.outcomes for client in clients), Counter[str]())


def _attack(clients: list[_Client]) -> None:
    """Let all clients send requests for half of the time."""
    ends = time.monotonic() + SECONDS / 2
    _together([lambda client=client: client.attack(ends) for client in clients])


def _more(before: _Footprint, after: _Footprint) -> list[str]:
    """Return a line for each resource of which the server uses clearly more than before."""
    allowed = {"threads": 8, "files": 2, "rss": MORE_BYTES, "pool_bytes": 0}
    return [
        f"{name}: {getattr(before, name)} before, {getattr(after, name)} in the end"
        for name, more in allowed.items()
        if getattr(after, name) > getattr(before, name) + more
    ]


class _Client:
    """Send requests one after the other, all determined by one seed."""

    def __init__(self, seed: str, port: int) -> None:
        self._seed = seed
        self._chance = random.Random(seed)
        self._port = port
        self.outcomes: Counter[str] = Counter()
        self.errors: list[str] = []

    def warm_up(self) -> None:
        """Send a few valid requests, so that lazily created objects exist."""
        for _ in range(3):
            self._valid()

    def attack(self, ends: float) -> None:
        """Send requests until the time `ends`."""
        for _ in range(MOST_REQUESTS):
            if time.monotonic() > ends:
                return
            if self._chance.random() < VALID_SHARE:
                self._valid()
            else:
                attack = self._chance.choice(ATTACKS)
                chance = random.Random(self._chance.random())
                self._note(attack.__name__, lambda: attack(chance, self._port))  # noqa: B023

    def _valid(self) -> None:
        chance = self._chance
        fields: dict[str, Any] = {
            "prompt": "Simon " * chance.randrange(1, 60),
            "max_tokens": chance.randrange(1, 12),
            "stream": chance.random() < 0.5,
        }
        if chance.random() < 0.3:
            fields["user"] = f"{self._seed} {chance.randrange(3)}"
        if chance.random() < 0.1:
            fields["grammar"] = "root ::= [a-z ]+"

        def ask() -> Outcome:
            code = post(self._port, "/v1/completions", body_of(**fields))
            if code not in (200, 429, 503, 504):
                raise Refused(f"a valid request gets {code}: {fields}")
            return code

        self._note("valid", ask)

    def _note(self, name: str, ask: Any) -> None:
        try:
            outcome = ask()
        except (Unanswered, Refused) as error:
            self.errors.append(f"{name}: {error}")
        except OSError as error:
            self.errors.append(f"{name}: {error!r}")
        else:
            self.outcomes[f"{outcome}" if name == "valid" else f"hostile {outcome}"] += 1


def _together(calls: list[Any]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def watched(port: int, pid: int) -> Iterator[list[str]]:
    """Watch /health of a process; yields a list that contains the late answers at the end."""
    late: list[str] = []
    command = [sys.executable, "-c", WATCH, f"{port}", f"{pid}", f"{MOST_HEALTH_SECONDS}"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **CLEAN}
    ) as watcher:
        assert watcher.stdout
        reader = threading.Thread(target=late.extend, args=(watcher.stdout,))
        reader.start()
        try:
            yield late
        finally:
            watcher.kill()
            reader.join()
            late[:] = [line.strip() for line in late]


def _figures(server: Server) -> Any:
    try:
        return server.kv()
    except httpx.HTTPError as error:
        raise Broken(f"/v1/kv is not answered: {error!r}") from None


def _footprint(server: Server, port: int, most_threads: int = 0, most_files: int = 0) -> _Footprint:
    """Return what the server uses once everything has ended, and it keeps only short conversations.

    Waits up to SPARE_SECONDS for threads and files beyond the given numbers to go.
    """
    ends = time.monotonic() + IDLE_SECONDS
    while (waiting := _figures(server)["requests"]["waiting"]) > 0:
        if time.monotonic() > ends:
            raise Broken(f"{waiting} requests have not ended {IDLE_SECONDS} s after the last one")
        time.sleep(0.1)
    for _ in range(CONVERSATIONS):
        name = f"{random.SystemRandom().randrange(2**40)}"
        code = post(port, "/v1/completions", body_of(prompt="The old garden", user=name))
        require(code == 200, f"a request of one who is alone gets {code}")
    folder = Path(f"/proc/{server.process.pid}")
    ends = time.monotonic() + SPARE_SECONDS
    while True:
        threads, files = (len(list((folder / name).iterdir())) for name in ("task", "fd"))
        if (threads <= most_threads and files <= most_files) or time.monotonic() > ends:
            return _Footprint(threads, files, server.rss(), _figures(server)["kv_bytes_now"])
        get(port, "/v1/kv")  # Another request lets the server release spare threads.
        time.sleep(0.5)
