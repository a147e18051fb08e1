"""Hold the hub's list of a repository's files at one commit, after checking it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from entropykv import system

MOST_FILES = 20_000
"""The most files of a repository that are considered; the largest model repositories have
hundreds.
"""
_MOST_PATH = 1024
_MOST_BYTES = 1 << 50
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class HubFile:
    """Name a file of a repository by its path within it, and its size in bytes.

    `digest` is the name of its content in the cache: SHA-256 for a large file, git's SHA-1 for
    others; None if the hub does not tell.
    """

    path: str
    size: int
    digest: str | None = None

    @property
    def name(self) -> str:
        """Return the file name without folders."""
        return PurePosixPath(self.path).name

    @property
    def folder(self) -> str:
        """Return the path of its folder in the repository; "." for the repository itself."""
        return str(PurePosixPath(self.path).parent)


@dataclass(frozen=True)
class Listing:
    """Hold the files of a repository at one commit, in the order in which the hub lists them."""

    repo: str
    commit: str
    files: tuple[HubFile, ...]


def listing_of(repo: str, answer: object) -> Listing:
    """Read the hub's answer about a repository; raises ValueError with a reason for an invalid
    answer.

    Files whose paths would lie outside the repository's folder, or that this system cannot have,
    are left out.
    """
    data = _mapping(answer, "the answer")
    commit = data.get("sha")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise ValueError("it names no commit")
    siblings = data.get("siblings")
    if not isinstance(siblings, list):
        raise ValueError("it lists no files")
    if len(siblings) > MOST_FILES:
        raise ValueError(f"it lists {len(siblings)} files, more than {MOST_FILES}")
    found = (_file_of(_mapping(sibling, "a file")) for sibling in siblings)
    return Listing(repo, commit, tuple(file for file in found if _can_be_kept(file.path)))


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    return value


def _file_of(sibling: Mapping[str, Any]) -> HubFile:
    path, size = sibling.get("rfilename"), sibling.get("size")
    if not isinstance(path, str) or not 0 < len(path) <= _MOST_PATH:
        raise ValueError("a file has no name")
    if not isinstance(size, int) or not 0 <= size <= _MOST_BYTES:
        raise ValueError(f"{path!r} has no size")
    stored = sibling.get("lfs")
    digest = stored.get("sha256") if isinstance(stored, dict) else sibling.get("blobId")
    known = isinstance(digest, str) and _DIGEST.fullmatch(digest)
    return HubFile(path, size, digest if known else None)


def _can_be_kept(path: str) -> bool:
    return _is_inside(path) and system.name_obstacle(path) is None


def _is_inside(path: str) -> bool:
    """Tell whether a path stays inside a folder that it is joined to, on every operating system."""
    parts = path.split("/")
    return path.isprintable() and not set("\\:") & set(path) and not {"", ".", ".."} & set(parts)
