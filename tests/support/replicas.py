"""Run `entropykv serve --replicas 2` on a Ray cluster of this machine, and talk to it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from entropykv.model import shipped
from tests.support.ending import ask_to_end, creation_flags
from tests.support.ray_cluster import ThreeNodes

TOKENS_READ, REPLICA = "X-EntropyKV-Tokens-Read", "X-EntropyKV-Replica"


class Served:
    """Send requests to a server of two replicas, each on a node of its own."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self._process = process
        self._log = log
        self.client = httpx.Client(base_url=url, timeout=120)

    def wait(self) -> None:
        deadline = time.monotonic() + 240
        while b"is ready at" not in self._log.read_bytes():
            assert self._process.poll() is None, self._log.read_text(errors="replace")
            assert time.monotonic() < deadline, self._log.read_text(errors="replace")
            time.sleep(0.2)

    def ask(self, prompt: str, name: str | None = None, **fields: Any) -> tuple[str, str, int]:
        """Return the answer, the replica's name, and how many prompt tokens it has read."""
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0.0, **fields}
        headers = {} if name is None else {"X-Session-Id": name}
        deadline = time.monotonic() + 120
        while True:
            # Ray Serve has a proxy on every node, and on one machine they share a port. When a node
            # dies, connections of its proxy break, and a while passes until Ray notices. A proxy
            # that has just started answers 404 until it knows the routes.
            with contextlib.suppress(httpx.TransportError):
                answer = self.client.post("/v1/completions", json=body, headers=headers)
                if answer.status_code < 500 and "/-/routes" not in answer.text:
                    break
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["text"]
        return text, answer.headers[REPLICA], int(answer.headers[TOKENS_READ])

    def post(self, body: bytes) -> httpx.Response:
        return self.client.post("/v1/completions", content=body)

    def stream(self, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0.0, "stream": True}
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            return "".join(answer.iter_text())

    def close(self) -> None:
        self.client.close()
        ask_to_end(self._process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._process.kill()
        self._process.wait()


@contextmanager
def two_replicas(cluster: ThreeNodes, folder: Path, *more: object) -> Iterator[Served]:
    """Start two replicas, each on a node of its own, and wait until they are ready.

    `more`: options and their values, such as another number of replicas.
    """
    log = folder / "log"
    process, url = start_replicas(cluster, folder, log, *more)
    server = Served(process, url, log)
    try:
        server.wait()
        yield server
    finally:
        server.close()


def start_replicas(
    cluster: ThreeNodes, folder: Path, log: Path, *more: object
) -> tuple[subprocess.Popen[bytes], str]:
    """Start the command, whose output goes to `log`; returns its process and the URL.

    `more`: options and their values, which replace those of this function.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options: dict[object, object] = {
        "--model": shipped.DEMOS["bitnet"].path,
        "--n_ctx": 2048,
        "--kv-budget": 256,
        "--n_threads": 1,
        "--n_threads_batch": 1,
        "--parallel": 4,
        "--port": port,
        "--replicas": 2,
        "--sessions": folder / "sessions",
        **dict(zip(more[::2], more[1::2], strict=True)),
    }
    command = [sys.executable, "-m", "entropykv.cli", "serve"]
    command += [str(word) for option in options.items() for word in option]
    environment = {
        **os.environ,
        "RAY_ADDRESS": cluster.address,
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    }
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdout=file,
            stderr=file,
            creationflags=creation_flags(),
        )
    return process, f"http://127.0.0.1:{port}"
