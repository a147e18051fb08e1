"""Read the JSON files that commands write, for a report."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from entropykv.errors import SettingsError
from entropykv.evaluation.bench import BenchRow
from entropykv.evaluation.rows import EvalRow
from entropykv.profile.profile import EntropyProfile

Kind = Literal["eval", "ruler", "bench", "profile", "run"]
_WRITERS = (
    "`eval --json`, `bench --json`, `calibrate`, `profile --convert` or `run --stats-json` write"
)


@dataclass(frozen=True)
class ReportSource:
    """Hold the content of one file, and which command wrote it."""

    kind: Kind
    name: str
    """The name of the file in the report, without the path on this machine."""
    n_bytes: int
    data: Any
    """The JSON object; for a profile, an EntropyProfile."""
    rows: Sequence[Any] = ()
    """The rows of eval or bench, as EvalRow or BenchRow."""


def read_sources(paths: Sequence[str | os.PathLike[str]]) -> list[ReportSource]:
    """Read files; raises SettingsError or ProfileError, naming a file that cannot be read."""
    files = [Path(path) for path in paths]
    return [_read(path, name) for path, name in zip(files, _names(files), strict=True)]


def _names(files: Sequence[Path]) -> list[str]:
    """Return the names of files, with a number appended if several have the same name."""
    names: list[str] = []
    for file in files:
        stem = file.name.removesuffix(".json").removesuffix(".entropy")
        count = sum(name == stem or name.startswith(f"{stem} (") for name in names)
        names.append(f"{stem} ({count + 1})" if count else stem)
    return names


def _read(path: Path, name: str) -> ReportSource:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not text"
        raise SettingsError(f"{path}: {why}; give JSON that {_WRITERS}") from None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise SettingsError(f"{path}: is not JSON; give what {_WRITERS}") from None
    kind = _kind_of(data)
    if kind is None:
        raise SettingsError(f"{path}: is of no kind that a report shows; give what {_WRITERS}")
    size = len(text.encode("utf-8"))
    if kind == "profile":
        return ReportSource(kind, name, size, EntropyProfile.from_dict(data, str(path)))
    try:
        return ReportSource(kind, name, size, data, _rows_of(kind, data))
    except (TypeError, KeyError, ValueError, AttributeError):
        raise SettingsError(
            f"{path}: is damaged, or of another version of entropykv; measure it again"
        ) from None


def _kind_of(data: Any) -> Kind | None:
    if not isinstance(data, dict):
        return None
    if "head_entropies" in data:
        return "profile"
    if "entries_kept" in data and "kv_bytes_peak" in data:
        return "run"
    rows = data.get("rows")
    if isinstance(rows, list) and isinstance(data.get("settings"), dict):
        return "ruler" if data["settings"].get("ruler_haystacks") else "eval"
    if isinstance(rows, list) and "read_bandwidth" in data:
        return "bench"
    return None


def _rows_of(kind: Kind, data: dict[str, Any]) -> Sequence[Any]:
    """Return the rows of eval or bench; raises TypeError or KeyError if a field is missing."""
    if kind == "run":
        for name in ("positions", "hot", "frozen", "climbs"):
            _ = data.get("trajectory", {name: []})[name]
        return ()
    made = BenchRow if kind == "bench" else EvalRow
    known = {field.name for field in dataclasses.fields(made)}
    return [made(**{key: row[key] for key in row.keys() & known}) for row in data["rows"]]


def of_kind(sources: Sequence[ReportSource], kind: Kind) -> list[ReportSource]:
    """Return the sources of one kind."""
    return [source for source in sources if source.kind == kind]
