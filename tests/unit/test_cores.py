"""The cores that are usable, and those that other processes want, are counted."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from entropykv.settings import cores
from entropykv.settings.cores import FreeCores, Machine, OtherWork, too_many_threads


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="ascii")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a machine of twelve CPUs, two per core, without limits."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    for cpu in range(12):
        pair = f"{cpu % 6},{cpu % 6 + 6}"
        write(tmp_path / f"cpus/cpu{cpu}/topology/core_cpus_list", pair)
    return Machine(tmp_path / "cgroups", tmp_path / "own", tmp_path / "cpus")


def test_without_limits_it_is_the_physical_cores(machine: Machine) -> None:
    assert machine.cores() == 6


def test_affinity(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed, expected in (({1, 7}, 1), ({1, 2, 8}, 2), ({0, 1, 2, 3}, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, of=allowed: of)
        assert machine.cores() == expected
        assert machine.allowed() == len(allowed)


def test_a_machine_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert Machine(tmp_path, tmp_path / "own", tmp_path).cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert Machine(tmp_path, tmp_path / "own", tmp_path).cores() == 7


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("100000 100000", 1),
        ("250000 100000", 2),
        ("20000 100000", 1),
        ("max 100000", 6),
        ("900000 100000", 6),
        ("nonsense", 6),
        ("100000 0", 6),
    ],
)
@pytest.mark.parametrize("root", ["", "unified/"])
@pytest.mark.parametrize("folder", ["pods/one", "pods", "."])
def test_a_quota_of_version_2(
    machine: Machine, limit: str, expected: int, root: str, folder: str
) -> None:
    write(machine.own_cgroups, "0::/pods/one")
    write(machine.cgroups / root / "pods/one/cpu.max", "max 100000")
    write(machine.cgroups / root / folder / "cpu.max", limit)
    assert machine.cores() == expected


@pytest.mark.parametrize(
    ("quota", "period", "expected"),
    [("100000", "100000", 1), ("150000", "50000", 3), ("-1", "100000", 6), ("50000", "100000", 1)],
)
@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize("folder", ["docker/abc", "docker", "."])
def test_a_quota_of_version_1(
    machine: Machine, quota: str, period: str, expected: int, controllers: str, folder: str
) -> None:
    write(machine.own_cgroups, f"9:memory:/docker/abc\n4:{controllers}:/docker/abc\n0::/")
    write(machine.cgroups / controllers / folder / "cpu.cfs_quota_us", quota)
    write(machine.cgroups / controllers / folder / "cpu.cfs_period_us", period)
    assert machine.cores() == expected


def test_other_controllers_do_not_count(machine: Machine) -> None:
    write(machine.own_cgroups, "4:cpuset:/a\n3:cpuacct:/a")
    write(machine.cgroups / "cpuset/a/cpu.cfs_quota_us", "100000")
    write(machine.cgroups / "cpuset/a/cpu.cfs_period_us", "100000")
    assert machine.cores() == 6


def test_who_asks_for_too_many_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 1)
    told = too_many_threads(5, "-t")
    assert told is not None
    assert "5 threads were asked for, but 1 core is" in told
    assert "-t 1" in told
    monkeypatch.setattr(cores, "usable_cores", lambda: 5)
    assert too_many_threads(5, "-t") is None
    assert "but 5 cores are" in (too_many_threads(6, "-t") or "")


def test_threads_of_one_core_run_at_the_same_time(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.threads() == 12
    write(machine.own_cgroups, "0::/")
    write(machine.cgroups / "cpu.max", "250000 100000")
    assert machine.threads() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert machine.threads() == 1


class Times:
    """Simulate the times of two CPUs and of this process."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.now = self.own = self.others = 0.0
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        monkeypatch.setattr("time.process_time", lambda: self.own)
        self.machine = Machine(path, path / "own", path, path / "stat")
        self.pass_by(0.0)

    def pass_by(self, seconds: float, own: float = 0.0, others: float = 0.0) -> None:
        """Let `seconds` pass, in which this process uses `own` cores and others use `others`."""
        self.now += seconds
        self.own += seconds * own
        self.others += seconds * others
        second = round((self.own + self.others) * os.sysconf("SC_CLK_TCK"))
        lines = (
            "cpu  9999 0 0 0 0 0 0 0 0 0",
            "cpu0 0 0 0 777 777 0 0 0 0 0",
            f"cpu1 {second} 0 0 777 777 0 0 0 {second} 0",
            "cpu2 12345 0 0 0 0 0 0 0 0 0",
            "intr 1 2 3",
        )
        write(self.path / "stat", "\n".join(lines))


@pytest.mark.needs("os.sysconf")
def test_what_others_want(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(tmp_path, monkeypatch)
    others = OtherWork(times.machine)
    times.pass_by(0.05, own=1.0)
    assert others.wanted(2) is None
    times.pass_by(0.95, own=1.0)
    assert others.wanted(2) == pytest.approx(0.0, abs=0.02)
    times.pass_by(1.0, own=1.0, others=1.0)
    assert others.wanted(1) == pytest.approx(1.0, abs=0.02)
    times.pass_by(1.0, own=1.5, others=0.5)
    assert others.wanted(2) == pytest.approx(1.0, abs=0.02)
    times.pass_by(1.0, own=0.2, others=0.1)
    assert others.wanted(2) == pytest.approx(0.2, abs=0.02)


@pytest.mark.needs("os.sysconf")
def test_looks_that_take_long_are_rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(tmp_path, monkeypatch)
    look = times.machine.busy_seconds

    def slow(_: Machine) -> float | None:
        times.now += 0.01
        return look()

    monkeypatch.setattr(Machine, "busy_seconds", slow)
    others = OtherWork(times.machine)
    times.pass_by(4.9, others=1.0)
    assert others.wanted(0) is None
    times.pass_by(0.2, others=1.0)
    assert others.wanted(0) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("text", ["", "cpu0 1 2", "cpu0 a b c d e f g h", "cpu 1 2 3 4 5 6 7 8"])
def test_a_system_that_does_not_say_what_others_want(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    times = Times(tmp_path, monkeypatch)
    write(tmp_path / "stat", text)
    others = OtherWork(times.machine)
    times.now += 1.0
    assert others.wanted(2) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be pinned here")
def test_a_core_that_two_threads_want_is_free_for_neither() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        search = FreeCores(2)
        while (found := search.found()) is None:
            time.sleep(0.01)
    finally:
        os.sched_setaffinity(0, allowed)
    assert not found


@pytest.mark.parametrize(("shares", "free"), [([0.97], True), ([0.9, 0.5], False), ([0.5], False)])
def test_cores_are_free_if_each_thread_has_its_own(
    shares: list[float], free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter([0.0] * len(shares) + shares)
    monkeypatch.setattr(cores, "_hashing", lambda _rounds: next(left))
    moments = iter([0.0] + [1.0] * len(shares))
    monkeypatch.setattr(cores, "time", SimpleNamespace(perf_counter=moments.__next__))
    search = FreeCores(len(shares))
    while (found := search.found()) is None:
        time.sleep(0.001)
    assert found == free
