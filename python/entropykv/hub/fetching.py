"""Fetch a model of the Hugging Face Hub: list the files, choose, download, and convert."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from entropykv.errors import EntropyKVError, HubError
from entropykv.hub import client
from entropykv.hub.client import HubCache
from entropykv.hub.listing import HubFile, Listing
from entropykv.hub.model_choice import Reference, choose_model, models_of, parts_of
from entropykv.hub.ternary_repositories import (
    Tell,
    checkpoint_of,
    convert_once,
    converted_name,
    is_known,
)
from entropykv.model.header import is_i2s
from entropykv.profile.find import MOST_PROFILE_BYTES, SUFFIX

_RESERVE_BYTES = 1 << 20
"""Bytes of disk space for folders and links, in addition to the files themselves."""
_MOST_PROFILES = 16


def fetch_model(
    reference: str,
    filename: str | None = None,
    *,
    additional_files: Sequence[str] = (),
    local_dir: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    tell: Tell | None = None,
) -> Path:
    """Return the path of a model of the hub, and download it if it is not on this machine yet.

    `reference`: user/model or user/model:quant. `filename`: the name of a file of the repository,
    instead of a quant, or a pattern that matches one model, such as *q8_0.gguf. Without both,
    Q4_K_M is chosen, else Q8_0, else the first model. All parts of a split model are downloaded,
    and the path of the first one is returned. Entropy profiles in the same folder are downloaded,
    too. 1.58-bit models that stock llama.cpp cannot load are converted once, beside the download:
    I2_S files, and the checkpoints that `entropykv models --known` lists. `additional_files`: names
    or patterns of more files to download.

    `cache_dir` replaces huggingface_hub's cache, in which an interrupted download is continued.
    `local_dir` is a folder that gets the files under their own names; there, an interrupted
    download starts again. `tell` is called with notes for the user: sizes before a download or
    conversion starts, and that the cache is used because the hub does not answer.

    Raises HubError for a model or file that is not there, and if fetching or converting fails.
    """
    wanted = Reference.parse(reference)
    if wanted.quant is not None and filename is not None:
        raise HubError(f"{reference} names a quantisation, and {filename} a file; give one of them")
    cache = HubCache(client.cache_folder() if cache_dir is None else Path(cache_dir), wanted.repo)
    say = tell or (lambda _: None)
    fetching = _Fetching(cache, None if local_dir is None else Path(local_dir), say)
    listing = fetching.listing()
    if not models_of(listing.files) and is_known(listing.repo):
        if wanted.quant is not None or filename is not None:
            raise HubError(
                f"{wanted.repo} has no GGUF file: its checkpoint is converted, to one file; leave "
                f"{filename or wanted.quant} out"
            )
        return fetching.converted(listing)
    model = choose_model(listing, wanted.quant, filename)
    more = [_named(listing, pattern) for pattern in additional_files]
    return fetching.model(listing, model, more)


def _named(listing: Listing, pattern: str) -> HubFile:
    """Return the one file that matches this name or pattern; raises HubError for none or
    several.
    """
    found = [file for file in listing.files if fnmatchcase(file.path, pattern)]
    if len(found) != 1:
        raise HubError(
            f"{listing.repo} has {len(found) or 'no'} files of the name {pattern!r}; give the name "
            "of one"
        )
    return found[0]


def _profiles(listing: Listing, model: HubFile) -> list[HubFile]:
    """Return the entropy profiles in a model's folder, except files that are too large to
    be one.
    """
    found = [
        file
        for file in listing.files
        if file.path.endswith(SUFFIX)
        and file.folder == model.folder
        and file.size <= MOST_PROFILE_BYTES
    ]
    return found[:_MOST_PROFILES]


@dataclass(frozen=True)
class _Fetching:
    """Fetch files of one repository into the cache, or into a user's folder."""

    cache: HubCache
    folder: Path | None
    tell: Tell

    def listing(self) -> Listing:
        """Return the repository's files: as the hub lists them, or those in the cache if it does
        not answer or must not be asked; raises HubError without either.
        """
        if client.is_offline():
            return self._cached(
                HubError(
                    f"{self.cache.repo}: is not in {self.cache.root}, and HF_HUB_OFFLINE forbids "
                    "to fetch it; unset it once"
                )
            )
        try:
            return client.list_files(self.cache.repo)
        except client.UnreachableError as error:
            listing = self._cached(error)
            self.tell(f"no answer from the hub: {self.cache.repo} is taken from {self.cache.root}")
            return listing

    def _cached(self, otherwise: Exception) -> Listing:
        listing = self.cache.listing()
        if listing is None:
            raise otherwise
        return listing

    def model(self, listing: Listing, model: HubFile, more: Sequence[HubFile]) -> Path:
        """Fetch all parts of a model, its profiles and `more`; returns the path of the first part.

        An I2_S file is converted, and the path of the result is returned.
        """
        root = self._root(listing)
        converted = root / converted_name(listing, model)
        if converted.is_file():
            self._fetch(listing, more)
            return converted
        files = [*parts_of(listing, model), *_profiles(listing, model), *more]
        self._fetch(listing, files)
        if self.folder is None:
            self.cache.keep_profiles(listing.commit, model.folder)
        path = root / model.path
        try:
            needs_conversion = is_i2s(path)
        except EntropyKVError:
            return path  # Loading the model reports what is wrong with it.
        return self._convert(listing, path, [model], converted) if needs_conversion else path

    def converted(self, listing: Listing) -> Path:
        """Fetch a checkpoint and convert it, unless that was already done; returns the result's
        path.

        Entropy profiles are fetched, too, because their names end in .json, as those of other files
        that are read.
        """
        root = self._root(listing)
        target = root / converted_name(listing, None)
        if target.is_file():
            return target
        files = checkpoint_of(listing)
        self._fetch(listing, files)
        if self.folder is None:
            self.cache.keep_profiles(listing.commit, ".")
        return self._convert(listing, root, files, target)

    def _convert(
        self, listing: Listing, source: Path, files: Sequence[HubFile], target: Path
    ) -> Path:
        """Return `target`, as a link to the result for an earlier commit with equal files if that
        is possible, else converted from `source`, which was made of `files`.
        """
        earlier = None
        if self.folder is None:
            name = target.relative_to(self._root(listing)).as_posix()
            sources = [file.path for file in files if not file.path.endswith(SUFFIX)]
            earlier = self.cache.made_of_the_same(listing.commit, name, sources)
        if earlier is not None:
            with suppress(OSError):  # Not every file system supports links.
                os.link(earlier, target)
                return target
        convert_once(source, target, listing.repo, self.tell)
        return target

    def _root(self, listing: Listing) -> Path:
        return self.cache.snapshot(listing.commit) if self.folder is None else self.folder

    def _fetch(self, listing: Listing, files: Sequence[HubFile]) -> None:
        """Tell the user what is fetched, check that the disk has room for it, and fetch it."""
        missing = {file: self._missing_bytes(listing, file) for file in dict.fromkeys(files)}
        missing = {file: n_bytes for file, n_bytes in missing.items() if n_bytes > 0}
        if missing:
            self._announce(listing, missing)
        for file in dict.fromkeys(files):
            if self.folder is None:
                client.fetch_into_cache(listing, file, self.cache)
            else:
                client.fetch_into_folder(listing, file, self.folder)
        if self.folder is None:
            self.cache.note_main(listing.commit)

    def _missing_bytes(self, listing: Listing, file: HubFile) -> int:
        if self.folder is None:
            return self.cache.missing_bytes(listing, file)
        return 0 if (self.folder / file.path).exists() else file.size

    def _announce(self, listing: Listing, missing: dict[HubFile, int]) -> None:
        place = self.cache.root if self.folder is None else self.folder
        needed, total = sum(missing.values()), sum(file.size for file in missing)
        free = _free_bytes(place)
        if needed + _RESERVE_BYTES > free:
            raise HubError(
                f"{place}: has {free / 2**20:,.0f} MiB free, but {listing.repo} needs "
                f"{needed / 2**20:,.0f}; make room, or set HF_HUB_CACHE to a folder on another disk"
            )
        large = [file.path for file in missing if file.path.endswith((".gguf", ".safetensors"))]
        names = large or [file.path for file in missing]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        going_on = (
            f", {(total - needed) / 2**20:,.1f} of them from earlier" if needed < total else ""
        )
        self.tell(
            f"fetching {listing.repo}: {names[0]}{more}, {total / 2**20:,.1f} MiB{going_on}, to "
            f"{place}"
        )


def _free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of a folder, which may not exist yet."""
    for place in (folder, *folder.absolute().parents):
        if place.exists():
            return shutil.disk_usage(place).free
    return shutil.disk_usage(Path.cwd()).free
