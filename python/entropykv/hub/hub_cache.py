"""Know where huggingface_hub's cache keeps a repository: its layout is documented and shared.

A repository has a folder with `blobs` (contents, named by their digests), `snapshots` (for every
commit, links to these under the files' own names) and `refs` (the commit that main is at).
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
    """Find files of one repository in the cache whose folder is `root`."""

    root: Path
    repo: str

    @property
    def folder(self) -> Path:
        """Return the folder of the repository, which may not be there yet."""
        return self.root / f"models--{self.repo.replace('/', '--')}"

    @property
    def _main(self) -> Path:
        return self.folder / "refs" / "main"

    def snapshot(self, commit: str) -> Path:
        """Return the folder in which a commit's files have their own names."""
        return self.folder / "snapshots" / commit

    def blob(self, digest: str) -> Path:
        """Return where the content of a digest is."""
        return self.folder / "blobs" / digest

    def part(self, digest: str) -> Path:
        """Return where a content is kept until all of it is there."""
        return self.folder / "blobs" / f"{digest}{_PART}"

    def lock(self, digest: str) -> Path:
        """Return the file that whoever fetches a content locks, as huggingface_hub does."""
        return self.root / ".locks" / self.folder.name / f"{digest}.lock"

    def _others(self, commit: str) -> list[Path]:
        """Return the folders of other commits that are here."""
        return [path for path in self.folder.glob("snapshots/*") if path.name != commit]

    def made_of_the_same(self, commit: str, name: str, sources: Sequence[str]) -> Path | None:
        """Return the file of this name that another commit has, made of the same contents.

        `sources`: the files that it was made of, which are there by now. A commit that changes a
        text beside a model is none for what was made of the model.
        """
        for other in self._others(commit):
            pairs = [(other / each, self.snapshot(commit) / each) for each in sources]
            if (other / name).is_file() and all(a.exists() and a.samefile(b) for a, b in pairs):
                return other / name
        return None

    def keep_profiles(self, commit: str, folder: str) -> None:
        """Link profiles that were made here beside files of other commits: weights tell them."""
        target = self.snapshot(commit) / folder
        for other in self._others(commit):
            for path in sorted((other / folder).glob(f"*{SUFFIX}")):
                with suppress(OSError):  # what cannot be linked is made again
                    if not path.is_symlink() and not (target / path.name).exists():
                        os.link(path, target / path.name)

    def missing_bytes(self, listing: Listing, file: HubFile) -> int:
        """Return how many bytes of a file are still to be fetched."""
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
        """Write down which commit main is at, for later without a network; all of it is there.

        Where nothing can be written, the next one without a network finds an earlier commit.
        """
        with suppress(OSError):
            if not self._main.exists() or self._main.read_text(encoding="ascii") != commit:
                self._main.parent.mkdir(parents=True, exist_ok=True)
                with new_file(self._main) as file:
                    file.write_text(commit, encoding="ascii")

    def listing(self) -> Listing | None:
        """Return the files that are here of the commit that main was at; None where nothing is."""
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
