"""Replicas that do not see each other's documents end with a clear sentence."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from entropykv.errors import SettingsError
from entropykv.server.documents.library import DocumentLibrary
from entropykv.server.replicas.shared_documents import check_shared, marked


@pytest.fixture(params=["path", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "path":
        return str(tmp_path / "kept")
    pytest.importorskip("fsspec")
    if request.param == "file":
        return (tmp_path / "kept").as_uri()
    return f"memory://{uuid.uuid4()}/kept"


def test_who_sees_the_mark_shares_the_documents_and_who_does_not_is_refused(place: str) -> None:
    with marked(place) as mark:
        check_shared(place, mark)
        with pytest.raises(SettingsError, match="a directory that all nodes share"):
            check_shared(f"{place}-of-another-node", mark)
    with pytest.raises(SettingsError, match="--documents"):
        check_shared(place, mark)


def test_marks_are_no_documents_and_those_of_killed_processes_are_removed(tmp_path: Path) -> None:
    library = DocumentLibrary(tmp_path, None, several=False)
    (tmp_path / ".replicas-0123").touch()
    with marked(str(tmp_path)) as first, marked(str(tmp_path)) as second:
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([first, second])
        assert library.names("", "") == []
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(SettingsError, match="documents cannot be kept there"),
        marked(str(tmp_path / "file")),
    ):
        pass
