"""Count the cores that this process or container may use, to choose the number of threads.

llama.cpp's threads wait for each other after every operation, so that one thread without a core
stops all. Therefore one thread too many is slower than one too few.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """Hold the paths where Linux describes what a process may use; any of them may be missing."""

    cgroups: Path = Path("/sys/fs/cgroup")
    own_cgroups: Path = Path("/proc/self/cgroup")
    cpus: Path = Path("/sys/devices/system/cpu")
    times: Path = Path("/proc/stat")

    def cores(self) -> int:
        """Return how many threads can compute at the same time: 1 or more.

        This is the number of physical cores that the affinity allows, at most the CPU quota of the
        cgroup, rounded down: a thread that exceeds the quota is stopped for the rest of the period,
        and the others wait.
        """
        cores = len({self._siblings(cpu) for cpu in _allowed_cpus()})
        return max(1, int(min([cores, *self._quotas()])))

    def threads(self) -> int:
        """Return how many threads can run at the same time, those of one core included: what the
        affinity and the quota allow, 1 or more.
        """
        return max(1, int(min([len(_allowed_cpus()), *self._quotas()])))

    def allowed(self) -> int:
        """Return how many CPUs the affinity allows, whatever the quota; more threads than that
        would share CPUs.
        """
        return len(_allowed_cpus())

    def busy_seconds(self) -> float | None:
        """Return for how long the CPUs that the affinity allows have worked for anybody, summed up
        since the machine was started; None if the system does not say.

        Linux counts in steps of 10 ms. For a virtual machine, what the host took counts, too.
        """
        allowed = {f"cpu{cpu}" for cpu in _allowed_cpus()}
        ticks = found = 0
        for line in _read(self.times).splitlines():
            name, *counts = line.split()
            if name in allowed and len(counts) >= _N_TIMES and all(map(str.isdecimal, counts)):
                found += 1
                ticks += sum(int(counts[i]) for i in range(_N_TIMES) if i not in _IDLE)
        return ticks / os.sysconf("SC_CLK_TCK") if found else None

    def _siblings(self, cpu: int) -> str:
        """Return the CPUs that share a core with this one, in Linux's notation."""
        topology = self.cpus / f"cpu{cpu}" / "topology"
        shared = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
        return shared or str(cpu)

    def _quotas(self) -> Iterator[float]:
        """Yield the limits, in CPUs, of this process's cgroup and of its parents."""
        for line in _read(self.own_cgroups).splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # The line is of version 2, which may run beside version 1.
                for root in (self.cgroups, self.cgroups / "unified"):
                    for folder in _folders(root, path):
                        yield from _quota(*_read(folder / "cpu.max").split())
            elif "cpu" in controllers.split(","):
                for root in {self.cgroups / "cpu", self.cgroups / controllers}:
                    for folder in _folders(root, path):
                        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                        yield from _quota(*(_read(folder / name) for name in names))


_N_TIMES = 8
"""How many times of a CPU in /proc/stat are read: user, nice, system, idle, iowait, irq, softirq
and steal; user and nice contain the times after these.
"""
_IDLE = (3, 4)


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _folders(root: Path, path: str) -> Iterator[Path]:
    """Yield the folders of a cgroup and of its parents, up to the root.

    In a container, the path may be that of the host, and the root that of the container's cgroup.
    """
    folder = root / path.strip().lstrip("/")
    yield folder
    while folder != root:
        folder = folder.parent
        yield folder


def _quota(*fields: str) -> Iterator[float]:
    """Yield quota / period; nothing without a limit: `max`, -1, or a missing file."""
    if len(fields) == 2 and all(field.isdecimal() for field in fields) and int(fields[1]):
        yield int(fields[0]) / int(fields[1])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def usable_cores() -> int:
    """Return how many threads can compute at the same time on this machine."""
    return Machine().cores()


def allowed_cpus() -> int:
    """Return how many CPUs the threads of this process may use."""
    return Machine().allowed()


def threads_at_a_time() -> int:
    """Return how many threads can run at the same time on this machine."""
    return Machine().threads()


class FreeCores:
    """Find out whether `n` cores are free beside the threads that work now, by using them.

    This takes some hundredths of a second. The system's figures of other processes are not used:
    they may be missing, and do not show which processes give way to all others.
    """

    _SECONDS = 0.05
    _FREE = 0.85
    """The share of a core's time from which on a thread has it for itself; of two threads, each
    gets a half.
    """

    def __init__(self, n: int) -> None:
        """Begin to use `n` cores, with a thread each."""
        self._shares: list[float] = []
        self._began = 0.0
        self._together = threading.Barrier(n, action=self._begin)
        self._threads = [threading.Thread(target=self._use) for _ in range(n)]
        for thread in self._threads:
            thread.start()

    def found(self) -> bool | None:
        """Return whether all of the cores are free; None if that is not known yet."""
        if any(thread.is_alive() for thread in self._threads):
            return None
        n_free = sum(share >= self._FREE for share in self._shares)
        return n_free == len(self._threads)

    def _begin(self) -> None:
        self._began = time.perf_counter()

    def _use(self) -> None:
        """Record which share of the time this thread got, in work that releases the GIL.

        Time is counted from one moment for all threads: if each thread counted from its own start,
        threads that run on one core in turn would all seem to have had it alone.
        """
        rounds = 2000
        own = max(_hashing(rounds), 1e-6)
        self._together.wait()
        own = _hashing(int(rounds * min(100.0, self._SECONDS / own)))
        self._shares.append(own / (time.perf_counter() - self._began))


def _hashing(rounds: int) -> float:
    """Hash `rounds` times; returns this thread's CPU time in seconds."""
    own = time.thread_time()
    hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
    return time.thread_time() - own


class OtherWork:
    """Tell how many cores other processes want of those that this process may use."""

    _LOOK = 0.2
    """Seconds between two readings, at least: the system counts times in steps of 10 ms."""
    _COST = 1 / 500
    """The largest share of the time that may go into reading the system's times of all CPUs, which
    takes long where there are many.
    """

    def __init__(self, machine: Machine | None = None) -> None:
        """Begin to count; `machine` None: this machine."""
        self._machine = machine or Machine()
        self._pause = self._LOOK
        self._at = self._now()

    def wanted(self, n_threads: int) -> float | None:
        """Return how many cores other processes wanted on average since the last answer (at first:
        since the creation); None if that was just now, or if the system does not say.

        `n_threads`: how many threads of this process would have computed all the time on cores of
        their own. Other processes got the time that these threads missed, and wanted as much again,
        because two that share a core get a half each.
        """
        elapsed = time.perf_counter() - self._at[0]
        if elapsed < self._pause:
            return None
        before, self._at = self._at, self._now()
        if before[1] is None or self._at[1] is None:
            return None
        own = self._at[2] - before[2]
        others = max(0.0, self._at[1] - before[1] - own)
        missed = max(0.0, n_threads * elapsed - own)
        return (others + min(others, missed)) / elapsed

    def _now(self) -> tuple[float, float | None, float]:
        """Return the time, the time of all CPUs (None if the system does not say), and the time of
        this process, in seconds.
        """
        start = time.perf_counter()
        busy, own = self._machine.busy_seconds(), time.process_time()
        now = time.perf_counter()
        self._pause = max(self._LOOK, (now - start) / self._COST)
        return now, busy, own


def too_many_threads(asked: int, option: str) -> str | None:
    """Return a note for a user whose `option` requests `asked` threads, if fewer can compute at the
    same time; else None.
    """
    cores = usable_cores()
    if asked <= cores:
        return None
    there = "1 core is" if cores == 1 else f"{cores} cores are"
    return (
        f"{asked} threads were asked for, but {there} there for this process: they will wait for "
        f"each other; use {option} {cores}, or leave it out"
    )
