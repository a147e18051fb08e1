"""Locate files in huggingface_hub's cache, whose layout is documented and shared by many programs.

A repository has a folder with `blobs` (contents, named by their digests), `snapshots` (for every
commit, links to blobs under the files' own names) and `refs` (the commit of branch main).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from entropykv.files import new_file
from entropykv.hub.listing import MOST_FILES, HubFile, Listing
from entropykv.profile.find import SUFFIX

_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_PART = ".part"


@dataclass(frozen=True)
class HubCache:
    """Find the files of one repository in the cache folder `root`."""

    root: Path
    repo: str

    @property
    def folder(self) -> Path:
        """Return the folder of the repository, which may not exist yet."""
        return self.root / f"models--{self.repo.replace('/', '--')}"

    @property
    def _main(self) -> Path:
        return self.folder / "refs" / "main"

    def snapshot(self, commit: str) -> Path:
        """Return the folder in which a commit's files have their own names."""
        return self.folder / "snapshots" / commit

    def blob(self, digest: str) -> Path:
        """Return the path of the content with this digest."""
        return self.folder / "blobs" / digest

    def part(self, digest: str) -> Path:
        """Return the path of a content that is not complete yet."""
        return self.folder / "blobs" / f"{digest}{_PART}"

    def lock(self, digest: str) -> Path:
        """Return the lock file for downloading a content, which huggingface_hub uses, too."""
        return self.root / ".locks" / self.folder.name / f"{digest}.lock"

    def _other_snapshots(self, commit: str) -> list[Path]:
        """Return the folders of other commits in the cache."""
        return [path for path in self.folder.glob("snapshots/*") if path.name != commit]

    def made_of_the_same(self, commit: str, name: str, sources: Sequence[str]) -> Path | None:
        """Return the file `name` that was made from the same contents for another commit, or None.

        `sources`: the files that it is made from, which have been fetched. Therefore a commit that
        changes only a text beside a model needs no new conversion.
        """
        for other in self._other_snapshots(commit):
            pairs = [(other / each, self.snapshot(commit) / each) for each in sources]
            if (other / name).is_file() and all(a.exists() and a.samefile(b) for a, b in pairs):
                return other / name
        return None

    def keep_profiles(self, commit: str, folder: str) -> None:
        """Link profiles that were made for other commits' files into this commit's folder.

        A profile identifies its weights, so that one of other weights is not used.
        """
        target = self.snapshot(commit) / folder
        for other in self._other_snapshots(commit):
            for path in sorted((other / folder).glob(f"*{SUFFIX}")):
                with suppress(OSError):  # A profile that cannot be linked can be made again.
                    if not path.is_symlink() and not (target / path.name).exists():
                        os.link(path, target / path.name)

    def missing_bytes(self, listing: Listing, file: HubFile) -> int:
        """Return how many bytes of a file are not downloaded yet."""
        if (self.snapshot(listing.commit) / file.path).exists():
            return 0
        if file.digest is None:
            return file.size
        if self.blob(file.digest).exists():
            return 0
        with suppress(OSError):
            return max(file.size - self.part(file.digest).stat().st_size, 0)
        return file.size

    def note_main(self, commit: str) -> None:
        """Record main's commit, whose files are now complete, for later use without a network.

        If the record cannot be written, an earlier commit is used without a network.
        """
        with suppress(OSError):
            if not self._main.exists() or self._main.read_text(encoding="ascii") != commit:
                self._main.parent.mkdir(parents=True, exist_ok=True)
                with new_file(self._main) as file:
                    file.write_text(commit, encoding="ascii")

    def listing(self) -> Listing | None:
        """Return the files in the cache of the recorded commit of main; None if there are none."""
        try:
            commit = self._main.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
        if not _COMMIT.fullmatch(commit):
            return None
        root = self.snapshot(commit)
        found = islice((path for path in root.rglob("*") if path.is_file()), MOST_FILES)
        files = [
            HubFile(path.relative_to(root).as_posix(), os.stat(path).st_size) for path in found
        ]
        files.sort(key=lambda file: file.path)
        return Listing(self.repo, commit, tuple(files)) if files else None
