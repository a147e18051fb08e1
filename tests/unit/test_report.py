"""A report reads and compares results, and its page needs no other file."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from entropykv.cli import main
from entropykv.errors import ProfileError, SettingsError
from entropykv.evaluation.bench import BenchRow
from entropykv.evaluation.rows import EvalRow
from entropykv.profile.profile import EntropyProfile
from entropykv.report.page import read_sources
from entropykv.session.stats import SessionStats

pytest.importorskip("matplotlib", reason="draws")


def written(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def eval_file(path: Path, kl: float) -> Path:
    rows = [
        EvalRow("stock", "f16", "full", kept=1.0),
        EvalRow("uniform", "q8_0", "0.2", 0.2, 2**20, 2**23, kl=kl, kl_worst=2 * kl, recall=0.5),
        EvalRow("uniform", "q8_0", "0.1", 0.1, 2**19, 2**23, kl=2 * kl, kl_worst=kl, recall=0.25),
    ]
    return written(
        path,
        {
            "model": {"name": "small <b>"},
            "settings": {},
            "complete": False,
            "rows": [dataclasses.asdict(row) for row in rows],
            "items": [],
        },
    )


def ruler_file(path: Path, score: float) -> Path:
    """Write results for two lengths, as `eval --suite ruler --json` does."""
    rows = [
        EvalRow(
            policy,
            "f16" if policy == "stock" else "q8_0",
            "0.2",
            0.2,
            2**20 * length / 1024,
            2**23,
            length=length,
            question="unknown",
            scores={"niah_single_1": share, **({"vt": share / 2} if length == 1024 else {})},
            score=share,
            score_relative=share,
        )
        for length in (1024, 4096)
        for policy, share in (("stock", 1.0), ("uniform", score))
    ]
    return written(
        path,
        {
            "model": {"name": "small"},
            "settings": {"ruler_haystacks": ["whale <i>"]},
            "complete": True,
            "rows": [dataclasses.asdict(row) for row in rows],
            "items": [],
        },
    )


def bench_file(path: Path) -> Path:
    rows = [
        BenchRow(length, name, 100.0 * length, 1.5, 50.0, 2.5, kv_bytes)
        for length in (512, 1024)
        for name, kv_bytes in (("stock", 0), ("q8_0 0.2", 3 << 20))
    ]
    return written(
        path,
        {
            "model": "/home/somebody/models/small.gguf",
            "threads": 2,
            "read_bandwidth": 5e9,
            "attention_bandwidth": [],
            "rows": [dataclasses.asdict(row) for row in rows],
        },
    )


def run_file(path: Path, *, freezes: bool) -> Path:
    counts = {
        field.name: 7
        for field in dataclasses.fields(SessionStats)
        if field.type in ("int", "float")
    }
    texts = {name: name for name in ("model", "store", "policy", "kv_type", "kv_budget")}
    stats = dataclasses.asdict(SessionStats(**counts, **texts))  # type: ignore[arg-type]
    if freezes:
        stats["freeze"] = "disk:/home/somebody/cold"
        stats["trajectory"] = {
            "positions": [10, 20, 30],
            "hot": [10.0, 12.0, 12.0],
            "frozen": [0.0, 8.0, 18.0],
            "climbs": [[20, "soft"]],
        }
    return written(path, stats)


def profile_file(path: Path) -> Path:
    entropies = np.arange(8.0).reshape(2, 4) / 2
    EntropyProfile(2, 4, 2, 256, entropies, model="small").save(path)
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "again").mkdir()
    return [
        eval_file(tmp_path / "eval.json", 0.01),
        eval_file(tmp_path / "again" / "eval.json", 0.03),
        bench_file(tmp_path / "bench.json"),
        ruler_file(tmp_path / "ruler.json", 0.625),
        run_file(tmp_path / "frozen.json", freezes=True),
        run_file(tmp_path / "plain.json", freezes=False),
        profile_file(tmp_path / "small.entropy.json"),
    ]


def page_of(files: list[Path], tmp_path: Path) -> str:
    output = tmp_path / "out.html"
    assert main(["report", *map(str, files), "-o", str(output)]) == 0
    return output.read_text(encoding="utf-8")


def test_a_page_of_all_kinds_is_complete(files: list[Path], tmp_path: Path) -> None:
    page = page_of(files, tmp_path)
    for title in ("Quality over bytes", "RULER", "Speed over context", "Runs", "Heads"):
        assert f"<h2>{title}</h2>" in page
    assert "<script" not in page
    loaded = re.findall(r"(?:src|href)=\"(?!#|data:)([^\"]*)\"", page)
    assert not loaded, "the page would load something"
    assert "somebody" not in page, "a path of the machine is in the page"
    assert "small &lt;b&gt;" in page
    assert "It was interrupted" in page
    assert "Essays are replaced by whale &lt;i&gt;." in page


def test_several_runs_are_compared(files: list[Path], tmp_path: Path) -> None:
    page = page_of(files[:2], tmp_path)
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page)
    assert cells.count("eval") == cells.count("eval (2)") == 3
    assert "0.0100" in cells
    assert "0.0300" in cells
    for label in ("eval: uniform, q8_0", "eval (2): uniform, q8_0", "facts recalled"):
        assert label in page


def test_scores_of_ruler_are_compared_by_length_and_task(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    files = [
        ruler_file(tmp_path / f"{name}ruler.json", score)
        for name, score in (("", 0.625), ("b/", 0.25))
    ]
    page = page_of(files, tmp_path)
    assert "<h2>Quality over bytes</h2>" not in page, "a suite has no such figures"
    table = [
        re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", row)
        for row in re.findall(r"<tr>.*?</tr>", page, re.DOTALL)
    ]
    names = [
        "run",
        "policy",
        "type",
        "tokens",
        "question",
        "budget",
        "kept",
        "KV MiB",
        "of full f16",
    ]
    assert table[0] == [*names, "mean", "of full cache", "niah_single_1", "vt"]
    assert [row[0] for row in table[1:]] == ["ruler", "ruler", "ruler (2)", "ruler (2)"] * 2
    assert [row[3] for row in table[1:]] == ["1,024"] * 4 + ["4,096"] * 4
    assert table[2][-4:] == ["62.5", "62.5%", "62.5", "31.2"]
    assert table[8][-4:] == ["25.0", "25.0%", "25.0", ""]
    for label in (
        "1,024 tokens, question unknown",
        "ruler (2): full cache",
        "ruler: uniform, q8_0",
    ):
        assert label in page


def test_figures_are_whole_and_their_ids_are_their_own(files: list[Path], tmp_path: Path) -> None:
    page = page_of(files, tmp_path)
    figures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(figures) == 5
    ids: set[str] = set()
    for figure in figures:
        tree = ElementTree.fromstring(figure)  # noqa: S314
        own = {each.attrib["id"] for each in tree.iter() if "id" in each.attrib}
        assert not own & ids
        ids |= own
        for wanted in re.findall(r"(?:href=\"#|url\(#)([^\")]+)", figure):
            assert wanted in own


def test_without_a_trajectory_there_is_no_figure(files: list[Path], tmp_path: Path) -> None:
    assert "<svg" not in page_of([files[5]], tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[1]", "of no kind that a report shows"),
        ('{"rows": []}', "of no kind that a report shows"),
        ('{"rows": [{"length": 1}], "read_bandwidth": 1}', "is damaged"),
        ('{"entries_kept": 1, "kv_bytes_peak": 1, "trajectory": {}}', "is damaged"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match=says) as refusal:
        read_sources([path])
    assert str(path) in str(refusal.value)


def test_a_missing_file_and_a_damaged_profile(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.json: No such file"):
        read_sources([tmp_path / "none.json"])
    path = tmp_path / "p.json"
    path.write_text('{"head_entropies": {}}', encoding="utf-8")
    with pytest.raises(ProfileError, match="lacks n_layer"):
        read_sources([path])


def test_it_says_what_it_needs(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["report", str(files[0])]) == 2
    assert "entropykv[plot]" in capsys.readouterr().err
