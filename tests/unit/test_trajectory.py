"""A trajectory records entries while a text grows, in bounded memory, and can be shown as JSON and
as a picture.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv import Session, SettingsError
from entropykv.report.figures import trajectory_figure
from entropykv.session.recovery import Climb
from entropykv.session.stats import SessionStats, Trajectory, stats_rows
from entropykv.settings.freezing import Rung

Point = tuple[int, int, int]


def climb_to(rung: Rung, position: int) -> Climb:
    return Climb(position, rung, entropy=4.0, mean_entropy=2.0, top_probability=0.1)


def points(trajectory: Trajectory) -> list[Point]:
    return list(zip(trajectory.positions, trajectory.hot, trajectory.frozen, strict=True))


def recorded(given: list[Point], n_kv_heads: int = 1, **more: int) -> Trajectory:
    trajectory = Trajectory(n_kv_heads, **more)
    for point in given:
        trajectory.record(*point)
    return trajectory


def test_means_are_those_of_a_kv_head() -> None:
    trajectory = recorded([(3, 9, 0), (4, 7, 5), (5, 10, 5)], 3)
    trajectory.mark(4, "soft")
    assert trajectory.to_json() == {
        "positions": [3, 4, 5],
        "hot": [3.0, 2.33, 3.33],
        "frozen": [0.0, 1.67, 1.67],
        "climbs": [[4, "soft"]],
    }
    trajectory.clear()
    assert not any(trajectory.to_json().values())


@given(st.integers(1, 3000), st.integers(1, 50))
def test_memory_is_bounded_and_points_stay_evenly_apart(n_points: int, most: int) -> None:
    given = [(i, 2 * i, 3 * i) for i in range(1, n_points + 1)]
    kept = points(recorded(given, most=most))
    assert len(kept) <= most
    assert set(kept) <= set(given)
    stride = 1
    while n_points // stride > most:
        stride *= 2
    assert kept == given[stride - 1 :: stride]


@given(st.lists(st.integers(1, 5), max_size=40), st.integers(0, 100))
def test_going_back_forgets_what_came_after(steps: list[int], position: int) -> None:
    positions = [sum(steps[: i + 1]) for i in range(len(steps))]
    trajectory = recorded([(at, at, 0) for at in positions])
    trajectory.mark(70, "rewalk")
    trajectory.truncate(position)
    assert list(trajectory.positions) == [at for at in positions if at <= position]
    assert len(trajectory.hot) == len(trajectory.frozen) == len(trajectory.positions)
    assert trajectory.climbs == [(min(70, position), "rewalk")]


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("given", [[], [(4, 8, 0)], [(4, 8, 0), (9, 10, 8), (10, 6, 14)]])
def test_a_trajectory_is_drawn(suffix: str, given: list[Point], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws")
    from entropykv.cli.plots import draw  # noqa: PLC0415

    trajectory = recorded(given, 2)
    for rung in ("soft", "soft", "full"):
        trajectory.mark(9, rung)
    path = tmp_path / f"trajectory.{suffix}"
    draw(lambda: trajectory_figure({"": trajectory.to_json()}), path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    if suffix == "svg":
        for label in ("full cache", "in attention", "frozen", "recovery: soft", "recovery: full"):
            assert content.count(f"<!-- {label} -->".encode()) == 1, label
    with pytest.raises(SettingsError, match=r"\.png or \.svg"):
        draw(lambda: None, tmp_path / "trajectory.pdf")


def test_the_lines_are_the_trajectory_s() -> None:
    pytest.importorskip("matplotlib", reason="draws")
    trajectory = recorded([(4, 8, 0), (9, 10, 8)], 2)
    trajectory.mark(9, "soft")
    (axes,) = trajectory_figure({"": trajectory.to_json()}).axes
    lines = {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines
    }
    assert lines == {
        "full cache": ([4, 9], [4, 9]),
        "in attention": ([4, 9], [4, 5]),
        "frozen": ([4, 9], [0, 4]),
        "recovery: soft": ([9], [5]),
    }


class Frozen:
    """Stand in for the counters of a store with cold storage that freezes one entry per token."""

    def __init__(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        counters = session._slot.store.counters

        def with_frozen() -> dict[str, Any]:
            return {**counters(), "frozen_entries": session.position}

        monkeypatch.setattr(session._slot.store, "counters", with_frozen)


def test_a_session_records_every_micro_batch(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(tiny_llama, n_ctx=64, n_ubatch=8, freeze="ram", n_threads=1) as session:
        Frozen(session, monkeypatch)
        trajectory = session.cache.trajectory
        assert trajectory is not None
        n_heads = trajectory.n_kv_heads
        assert n_heads == sum(map(len, session.cache.budgets()))
        session.decode(list(range(3, 15)))
        session.decode([5])
        assert points(trajectory) == [(n, n * n_heads, n) for n in (8, 12, 13)]
        assert session.stats().frozen_entries == 13
        session.note_climb(climb_to(Rung.SOFT, session.position))
        session.note_climb(climb_to(Rung.SOFT, session.position))
        session.note_climb(climb_to(Rung.REWALK, session.position))
        session.text.truncate(12)
        assert list(trajectory.positions) == [8, 12]
        assert trajectory.climbs == [(12, "soft"), (12, "soft"), (12, "rewalk")]
        assert session.stats().climbs == {"soft": 2, "rewalk": 1}
        saved = session.files.save_state()
        session.reset()
        assert not len(trajectory.positions)
        assert session.stats().climbs == {}
        session.decode([3])
        session.files.load_state(saved)
        assert not len(trajectory.positions)
        json.dumps(trajectory.to_json())


def test_without_freezing_there_is_nothing_to_record(tiny_llama: Path) -> None:
    with Session(tiny_llama, n_ctx=64, n_threads=1) as session:
        session.decode([3])
        session.note_climb(climb_to(Rung.SOFT, session.position))
        assert session.cache.trajectory is None
        stats = session.stats()
        assert (stats.freeze, stats.frozen_entries, stats.climbs) == (None, 0, {"soft": 1})


def stats_with(**change: Any) -> SessionStats:
    texts = {"model": "tiny", "store": "headwise", "policy": "uniform", "kv_type": "f16"}
    numbers = {
        name: 1
        for name, field in SessionStats.__dataclass_fields__.items()
        if field.type in ("int", "float")
    }
    return SessionStats(**{**numbers, **texts, "kv_budget": "1", **change})  # type: ignore[arg-type]


def test_the_table_has_rows_of_frozen_entries_only_where_there_are_some() -> None:
    names = {"frozen", "restored", "recovery"}
    assert not names & {name for name, _ in stats_rows(stats_with())}
    stats = stats_with(
        freeze="disk:/x",
        frozen_entries=12,
        frozen_bytes=3 << 20,
        frozen_bytes_peak=5 << 20,
        frozen_sketch_bytes=1 << 19,
        frozen_overhead_bytes=1 << 18,
        entries_frozen=40,
        entries_restored=28,
        entries_recalled=7,
        cold_seconds=0.25,
    )
    rows = dict(stats_rows(stats))
    of_frozen = (
        "12 entries, 3.0 MiB (5.0 MiB at most, disk:/x), sketches in memory 0.5 MiB, "
        "records 0.2 MiB"
    )
    assert rows["frozen"] == of_frozen
    restored = "28 of 40 times that an entry was frozen, 7 of them by recall; 0.250 s"
    assert rows["restored"] == restored
    assert "recovery" not in rows
    climbed = dict(stats_rows(stats_with(freeze="ram", climbs={"soft": 2, "full": 1})))
    assert climbed["recovery"] == "soft 2x, full 1x"


def test_print_shows_the_figures_as_a_table() -> None:
    stats = stats_with(prompt_tokens=1234, prompt_seconds=2.0)
    lines = str(stats).splitlines()
    assert 6 <= len(lines) <= 10
    assert any(line.split()[:3] == ["prompt", "1234", "tokens,"] for line in lines)
    assert "SessionStats(" in repr(stats)
