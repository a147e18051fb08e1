"""Count the cores that this process or container may use, to choose the number of threads.

llama.cpp's threads wait for each other after every operation, so that one thread without a core
stops all. Therefore one thread too many is slower than one too few.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """Hold the paths where Linux describes what a process may use; any of them may be missing."""

    cgroups: Path = Path("/sys/fs/cgroup")
    own_cgroups: Path = Path("/proc/self/cgroup")
    cpus: Path = Path("/sys/devices/system/cpu")

    def cores(self) -> int:
        """Return how many threads can compute at the same time: 1 or more.

        This is the number of physical cores that the affinity allows, at most the CPU quota of the
        cgroup, rounded down: a thread that exceeds the quota is stopped for the rest of the period,
        and the others wait.
        """
        cores = len({self._siblings(cpu) for cpu in _allowed_cpus()})
        return max(1, int(min([cores, *self._quotas()])))

    def _siblings(self, cpu: int) -> str:
        """Return the CPUs that share a core with this one, in Linux's notation."""
        topology = self.cpus / f"cpu{cpu}" / "topology"
        shared = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
        return shared or str(cpu)

    def _quotas(self) -> Iterator[float]:
        """Yield the limits, in CPUs, of this process's cgroup and of its parents."""
        for line in _read(self.own_cgroups).splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # Only version 2 of cgroups, or both versions.
                for root in (self.cgroups, self.cgroups / "unified"):
                    for folder in _folders(root, path):
                        yield from _quota(*_read(folder / "cpu.max").split())
            elif "cpu" in controllers.split(","):
                for root in {self.cgroups / "cpu", self.cgroups / controllers}:
                    for folder in _folders(root, path):
                        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                        yield from _quota(*(_read(folder / name) for name in names))


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


def too_many_threads(asked: int, option: str) -> str | None:
    """Return a note for a user whose `option` requests more threads than can compute at the same
    time.
    """
    cores = usable_cores()
    if asked <= cores:
        return None
    there = "1 core is" if cores == 1 else f"{cores} cores are"
    return (
        f"{asked} threads were asked for, but {there} there for this process: they will wait for "
        f"each other; use {option} {cores}, or leave it out"
    )
