"""Serve a small Hugging Face Hub on the loopback interface, with huggingface_hub's routes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

_PIECE = 1 << 14


@dataclass
class FakeRepository:
    """Hold files by their paths, and how the hub answers requests for them."""

    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    status: int | None = None
    """The status of every answer about this repository; None: normal answers."""
    answer: bytes | None = None
    """The body that the hub sends in place of the list of files."""
    stall_after: int | None = None
    """The number of bytes of a file after which the answer stalls until the hub ends; once."""
    cut_after: int | None = None
    """The number of bytes of a file after which the connection breaks; once."""

    @property
    def commit(self) -> str:
        names = "".join(f"{name} {digest(name, data)}" for name, data in self.files.items())
        return hashlib.sha1(names.encode()).hexdigest()  # noqa: S324


def is_large(name: str) -> bool:
    """Tell whether the hub would store a file outside git, as it does with large ones."""
    return name.endswith((".gguf", ".safetensors"))


def digest(name: str, data: bytes) -> str:
    """Return the name that huggingface_hub's cache gives a content: SHA-256 for large files, git's
    SHA-1 for others.
    """
    if is_large(name):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # noqa: S324


@dataclass
class FakeHub:
    """Serve repositories while the object is used as a context manager."""

    repositories: dict[str, FakeRepository] = field(default_factory=dict)
    token: str | None = None
    """The token that gated and private repositories require."""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and range of every request."""

    def __enter__(self) -> FakeHub:
        self._ended = threading.Event()
        self.stalled = threading.Event()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, name: str, files: Mapping[str, bytes | Path], **how: Any) -> FakeRepository:
        contents = {
            path: data if isinstance(data, bytes) else data.read_bytes()
            for path, data in files.items()
        }
        self.repositories[name] = FakeRepository(contents, **how)
        return self.repositories[name]

    def add_folder(self, name: str, folder: Path, **how: Any) -> FakeRepository:
        files = {path.name: path for path in sorted(folder.iterdir())}
        return self.add(name, files, **how)

    def environment(self, cache: Path) -> dict[str, str]:
        """Return environment variables for a process with this hub, and `cache` as its cache."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_HUB_CACHE": str(cache / "hub"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0",
        }

    def contents(self) -> list[tuple[str, str | None]]:
        """Return names and ranges of the large files whose contents were sent."""
        return [
            (path.rpartition("/")[2], sent)
            for method, path, sent in self.requests
            if method == "GET" and path.startswith("/content/")
        ]

    def wait_for_end(self) -> None:
        self.stalled.set()
        self._ended.wait(60)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Write nothing to the log of the tests."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        about = re.fullmatch(r"/api/models/([^/]+/[^/]+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        content = re.fullmatch(r"/content/([^/]+/[^/]+)/(.+)", path)
        found = about or file or content
        if found:  # Other requests of huggingface_hub are not recorded.
            self.hub.requests.append((self.command, path, self.headers.get("Range")))
        repository = self.hub.repositories.get(found[1]) if found else None
        known = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if content is not None and repository is not None:
            if "Authorization" in self.headers:
                self._refuse(400, None)  # The token must not be sent to another host.
            else:
                self._send_content(repository, content[2])
        elif repository is None or (repository.private and not known):
            self._refuse(401, "RepoNotFound")
        elif repository.status is not None:
            self._refuse(repository.status, None)
        elif about is not None:
            self._send_listing(repository)
        elif repository.gated and not known:
            self._refuse(403, "GatedRepo")
        elif file is not None and file[3] in repository.files:
            self._send_file(repository, file[1], file[3], with_body=with_body)
        else:
            self._refuse(404, "EntryNotFound")

    def _refuse(self, status: int, code: str | None) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_listing(self, repository: FakeRepository) -> None:
        siblings = [
            {"rfilename": name, "size": len(data)}
            | (
                {"lfs": {"sha256": digest(name, data), "size": len(data)}}
                if is_large(name)
                else {"blobId": digest(name, data)}
            )
            for name, data in repository.files.items()
        ]
        body = repository.answer
        if body is None:
            body = json.dumps({"sha": repository.commit, "siblings": siblings}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(
        self, repository: FakeRepository, repo: str, name: str, *, with_body: bool
    ) -> None:
        """Send a small file; for a large one, redirect to another name of this host."""
        data = repository.files[name]
        etag = f'"{digest(name, data)}"'
        self.send_response(302 if is_large(name) else 200)
        self.send_header("X-Repo-Commit", repository.commit)
        if is_large(name):
            elsewhere = self.hub.url.replace("127.0.0.1", "localhost")
            self.send_header("Location", f"{elsewhere}/content/{repo}/{quote(name)}")
            self.send_header("X-Linked-Size", str(len(data)))
            self.send_header("X-Linked-ETag", etag)
            data = b""
        else:
            self.send_header("ETag", etag)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def _send_content(self, repository: FakeRepository, name: str) -> None:
        data = repository.files[name]
        begins = 0
        if (wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))) is not None:
            begins = int(wanted[1])
        self.send_response(206 if begins else 200)
        if begins:
            self.send_header("Content-Range", f"bytes {begins}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", f'"{digest(name, data)}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - begins))
        self.end_headers()
        self._send_pieces(repository, data[begins:])

    def _send_pieces(self, repository: FakeRepository, data: bytes) -> None:
        for first in range(0, len(data), _PIECE):
            self.wfile.write(data[first : first + _PIECE])
            self.wfile.flush()
            sent = first + _PIECE
            if repository.stall_after is not None and sent >= repository.stall_after:
                repository.stall_after = None
                self.hub.wait_for_end()
                return
            if repository.cut_after is not None and sent >= repository.cut_after:
                repository.cut_after = None
                self.close_connection = True
                self.connection.shutdown(2)
                return
