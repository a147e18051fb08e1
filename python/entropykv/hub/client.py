"""Access the Hugging Face Hub through huggingface_hub, with its token, endpoint and offline mode.

huggingface_hub discards the data of an interrupted download. Therefore large files are downloaded
here, into a partial file in huggingface_hub's cache, from which the next download continues. Then
huggingface_hub finds the complete file there and links it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from entropykv import _version
from entropykv.errors import HubError, MissingExtraError, reason_of
from entropykv.files import new_file
from entropykv.hub.listing import MOST_FILES, HubFile, Listing, listing_of
from entropykv.profile.find import SUFFIX

_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_PART = ".part"


@dataclass(frozen=True)
class HubCache:
    """Find the files of one repository in huggingface_hub's cache folder `root`.

    Its layout is documented and shared by many programs: a repository has a folder with `blobs`
    (contents, named by their digests), `snapshots` (for every commit, links to blobs under the
    files' own names) and `refs` (the commit of branch main).
    """

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
        """Record main's commit, of which files were fetched, for later use without a network.

        If the record cannot be written, an earlier commit is used without a network.
        """
        with suppress(OSError):
            if not self._main.exists() or self._main.read_text(encoding="ascii") != commit:
                self._main.parent.mkdir(parents=True, exist_ok=True)
                with new_file(self._main) as file:
                    file.write_text(commit, encoding="ascii")

    def listing(self) -> Listing | None:
        """Return the cached files of the commit recorded for main; None if there are none."""
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


try:
    import httpx
    import huggingface_hub
    from huggingface_hub import constants, errors
    from huggingface_hub.file_download import get_hf_file_metadata, hf_hub_url, http_get
    from huggingface_hub.utils import (
        WeakFileLock,
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )
except ImportError as error:
    raise MissingExtraError(
        f"models of the hub need {error.name}, which is not installed; run "
        'pip install "entropykv[hub]"'
    ) from None

_MOST_ANSWER = 16 << 20
"""The most bytes of an answer about a repository; an answer with 20,000 files has about 6 MiB."""
_SECONDS_TO_ANSWER = 30.0
_ETAG = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 50 * 10**9
"""The most bytes of a file that the hub serves through HTTP; larger ones need the package
hf_xet.
"""


class UnreachableError(HubError):
    """Raised if the hub does not answer, or with 429 or 5xx: then only the cache can be used."""


def cache_folder() -> Path:
    """Return the folder of huggingface_hub's cache: HF_HUB_CACHE, or one in HF_HOME."""
    return Path(constants.HF_HUB_CACHE).expanduser()


def is_offline() -> bool:
    """Tell whether HF_HUB_OFFLINE forbids requests to the hub."""
    return bool(constants.HF_HUB_OFFLINE)


def list_files(repo: str) -> Listing:
    """Request the list of a repository's files; raises HubError if the hub refuses or its answer is
    invalid, and UnreachableError if it cannot answer now.

    The answer is read up to a limit, and checked before it is used.
    """
    url = f"{constants.ENDPOINT}/api/models/{repo}"
    with _clear_errors(repo):
        content = _answer(url)
    try:
        return listing_of(repo, json.loads(content))
    except (ValueError, RecursionError) as error:
        raise HubError(
            f"{constants.ENDPOINT}: its answer about {repo} cannot be read ({error}); check "
            "HF_ENDPOINT, and try again"
        ) from None


def _answer(url: str) -> bytes:
    content = bytearray()
    with get_session().stream(
        "GET", url, params={"blobs": "true"}, headers=_headers(), timeout=_SECONDS_TO_ANSWER
    ) as response:
        for chunk in response.iter_bytes():
            content += chunk
            if len(content) > _MOST_ANSWER:
                raise HubError(
                    f"{url}: its answer has more than {_MOST_ANSWER >> 20} MiB; check HF_ENDPOINT"
                )
        headers = {k: v for k, v in response.headers.items() if k.lower().startswith("x-")}
        # Replace the body of an error response, because huggingface_hub would read all of it.
        hf_raise_for_status(
            httpx.Response(response.status_code, headers=headers, request=response.request)
        )
    return bytes(content)


def _headers() -> dict[str, str]:
    """Return request headers with the user's token, if there is one."""
    headers: dict[str, str] = build_hf_headers(
        library_name="entropykv", library_version=_version.VERSION
    )
    return headers


def fetch_into_cache(listing: Listing, file: HubFile, cache: HubCache) -> None:
    """Download a file into the cache, and continue an interrupted download.

    Raises HubError if that fails; what was downloaded so far is kept for the next time.
    """
    if (cache.snapshot(listing.commit) / file.path).exists():
        return
    with _clear_errors(listing.repo):
        if file.size <= _LARGEST:
            _fetch_content(listing, file, cache)
        huggingface_hub.hf_hub_download(
            listing.repo,
            file.path,
            revision=listing.commit,
            cache_dir=cache.root,
            endpoint=constants.ENDPOINT,
        )


def fetch_into_folder(listing: Listing, file: HubFile, folder: Path) -> None:
    """Download a file into a user's folder; huggingface_hub skips files that have not changed.
    Raises HubError if that fails.
    """
    with _clear_errors(listing.repo):
        huggingface_hub.hf_hub_download(
            listing.repo,
            file.path,
            revision=listing.commit,
            local_dir=folder,
            endpoint=constants.ENDPOINT,
        )


def _fetch_content(listing: Listing, file: HubFile, cache: HubCache) -> None:
    url = hf_hub_url(listing.repo, file.path, revision=listing.commit, endpoint=constants.ENDPOINT)
    about = get_hf_file_metadata(url, headers=_headers(), endpoint=constants.ENDPOINT)
    etag = about.etag or ""
    if not _ETAG.fullmatch(etag) or about.size != file.size:
        raise HubError(f"{url}: does not say what it holds; check HF_ENDPOINT, and try again")
    blob, lock = cache.blob(etag), cache.lock(etag)
    for path in (blob, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not blob.exists():
            _continue_download(url, file, cache.part(etag), etag)
            cache.part(etag).replace(blob)


def _continue_download(url: str, file: HubFile, part: Path, etag: str) -> None:
    """Download the missing part of a file; raises HubError if the result has a wrong size or
    digest.

    A broken connection is opened again, unless two connections in a row yield no data. Only a file
    that was joined from several downloads is read again to check its digest.
    """
    put_together, in_vain = False, 0
    while True:
        with open(part, "ab") as target:
            there = target.tell()
            if there > file.size:
                there = target.truncate(0)
            put_together |= there > 0
            try:
                http_get(
                    url,
                    target,
                    resume_size=there,
                    headers=_headers(),
                    expected_size=file.size,
                    displayed_filename=file.name,
                )
                break
            except httpx.TransportError:
                in_vain = 0 if target.tell() > there else in_vain + 1
                if in_vain > 1:
                    raise
    if put_together and _SHA256.fullmatch(etag) and _sha256(part) != etag:
        part.unlink()
        raise HubError(
            f"{file.path}: what an earlier download has left was damaged, and is deleted now; run "
            "it again"
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _clear_errors(repo: str) -> Iterator[None]:
    """Convert errors of huggingface_hub and of the disk in the `with` block to HubErrors."""
    try:
        yield
    except HubError:
        raise
    except errors.GatedRepoError:
        raise HubError(
            f"{repo}: is gated; accept its terms at {constants.ENDPOINT}/{repo}, and log in with "
            "`hf auth login` or set HF_TOKEN to a token that may read it"
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"{repo}: {constants.ENDPOINT} has no such model, or a private one; check the name, or "
            "log in with `hf auth login` or HF_TOKEN"
        ) from None
    except errors.HfHubHTTPError as error:
        raise _status_error(repo, error.response.status_code) from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, httpx.HTTPError):
        raise UnreachableError(
            f"{repo}: no answer from {constants.ENDPOINT}; check the network, and run it again: "
            "what was downloaded is kept"
        ) from None
    except OSError as error:
        raise HubError(_disk_error(repo, error)) from None
    except ValueError as error:  # For example, the file needs hf_xet, which is not installed.
        raise HubError(f"{repo}: {reason_of(error)}") from None


def _status_error(repo: str, status: int) -> HubError:
    """Return the HubError for a status code of the hub; a busy or broken hub gives
    UnreachableError.
    """
    if status == 429 or status >= 500:
        return UnreachableError(
            f"{repo}: {constants.ENDPOINT} answered with {status}; run it again later: what was "
            "downloaded is kept"
        )
    if status in (401, 403):
        return HubError(
            f"{repo}: {constants.ENDPOINT} refuses access ({status}); log in with `hf auth login`, "
            "or set HF_TOKEN to a token that may read it"
        )
    return HubError(
        f"{repo}: {constants.ENDPOINT} answered with {status}; check the name, and HF_ENDPOINT"
    )


def _disk_error(repo: str, error: OSError) -> str:
    # Without an errno, the error is huggingface_hub's, for a file of a wrong size.
    if error.errno is None:
        return f"{repo}: was not received completely ({reason_of(error)}); run it again"
    where = f"{error.filename}: " if error.filename else ""
    reason = error.strerror
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"{repo}: the disk is full ({reason}); make room and run it again: it continues from "
            "there, or set HF_HUB_CACHE to a folder on another disk"
        )
    return f"{repo}: cannot be kept ({where}{reason}); set HF_HUB_CACHE to a folder of yours"
