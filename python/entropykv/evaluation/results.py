"""Log measured figures, so that an interrupted evaluation can be continued."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropykv.errors import SettingsError
from entropykv.evaluation.reading import Item, Values
from entropykv.files import json_of, open_regular

FORMAT = "entropykv eval 1"
_OTHER = "use another file, or the model and settings that it was begun with"


@dataclass(frozen=True)
class Record:
    """Hold the figures of one item; `contestant` is STOCK or a Combination.key."""

    contestant: str
    part: str
    item: str
    digest: str
    values: Values

    @property
    def key(self) -> tuple[str, str, str]:
        """Return the key that identifies the record; it does not contain the item's name."""
        return (self.contestant, self.part, self.digest)


class ResultLog:
    """Keep records in order, and append them to a file of JSON lines if a path is given.

    The first line of the file has model and settings; an incomplete last line is dropped. Every
    record is flushed to disk before the next item is measured.
    """

    def __init__(
        self, path: str | None, model: Values, settings: Values, known: Sequence[Record] = ()
    ) -> None:
        """Read the file if it exists; its records are added to those that are `known` already.
        Raises SettingsError if it is unreadable, damaged, or of another model or evaluation.
        """
        self._path = path
        self._header: Values = json.loads(
            json.dumps({"format": FORMAT, "model": model, "settings": settings})
        )
        self._records = {record.key: record for record in known}
        self._n_good = 0
        """How many bytes of the file are complete lines."""
        if path is not None:
            self._load(Path(path))

    def begin(self) -> None:
        """Drop an incomplete last line of the file, or begin a new file; raises SettingsError if
        that fails.
        """
        if self._path is None:
            return
        path = Path(self._path)
        if self._n_good:
            with _writable(path):
                os.truncate(path, self._n_good)
        else:
            path.unlink(missing_ok=True)
            _append(path, self._header)

    def get(self, contestant: str, part: str, item: Item) -> Record | None:
        """Return the record of an item; None if it was not measured."""
        return self._records.get((contestant, part, item.digest))

    def add(self, contestant: str, part: str, item: Item, values: Values) -> None:
        """Keep the figures of an item; raises SettingsError if the file cannot be written."""
        record = Record(contestant, part, item.name, item.digest, values)
        self._records[record.key] = record
        if self._path is not None:
            _append(Path(self._path), vars(record))

    def _load(self, path: Path) -> None:
        lines = []
        try:
            with suppress(FileNotFoundError), open_regular(path) as file:
                lines = file.readlines()
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror}; give a file for the results") from None
        if lines and not lines[-1].endswith(b"\n"):
            cut = lines.pop()
            if not lines and not self._header_line().startswith(cut):
                raise SettingsError(f"{path}: is not a log of `entropykv eval`; {_OTHER}")
        if not lines:
            return
        self._n_good = sum(map(len, lines))
        self._check_header(path, json_of(lines[0]))
        for number, line in enumerate(lines[1:], start=2):
            record = _record(json_of(line))
            if record is None:
                raise SettingsError(f"{path}: line {number} is damaged; remove it or {_OTHER}")
            self._records[record.key] = record

    def _header_line(self) -> bytes:
        return json.dumps(self._header).encode()

    def _check_header(self, path: Path, header: Any) -> None:
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise SettingsError(f"{path}: is not a log of `entropykv eval`; {_OTHER}")
        if header.get("model") != self._header["model"]:
            raise SettingsError(f"{path}: has results of another model; {_OTHER}")
        theirs, ours = header.get("settings"), self._header["settings"]
        if theirs == ours:
            return
        known = theirs if isinstance(theirs, dict) else {}
        name = next((key for key in ours if known.get(key) != ours[key]), "entropykv")
        raise SettingsError(
            f"{path}: has results with another setting: {name} was {known.get(name)!r}, now it is "
            f"{ours.get(name)!r}; {_OTHER}"
        )


def _record(content: Any) -> Record | None:
    try:
        record = Record(**content)
    except TypeError:
        return None
    names = (record.contestant, record.part, record.item, record.digest)
    valid = all(isinstance(name, str) for name in names) and isinstance(record.values, dict)
    return record if valid else None


def _append(path: Path, content: Values) -> None:
    with _writable(path), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    """Convert an OSError in the `with` block to a SettingsError about writing."""
    try:
        yield
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; give a file that can be written") from None
