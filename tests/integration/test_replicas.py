"""Requests reach the replica that has read their text, and a replica that dies loses nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from entropykv.model import shipped
from tests.support.ending import ask_to_end, creation_flags
from tests.support.ray_cluster import ThreeNodes

pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.replicas

SYSTEM = "the winding road to the land of the king is far from the sea and " * 12
TOKENS_READ, REPLICA = "X-EntropyKV-Tokens-Read", "X-EntropyKV-Replica"


class Served:
    """Hold a server of two replicas, each on a node of its own."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self._process = process
        self._log = log
        self._client = httpx.Client(base_url=url, timeout=120)

    def wait(self) -> None:
        deadline = time.monotonic() + 240
        while b"is ready at" not in self._log.read_bytes():
            assert self._process.poll() is None, self._log.read_text(errors="replace")
            assert time.monotonic() < deadline, self._log.read_text(errors="replace")
            time.sleep(0.2)

    def ask(self, prompt: str, name: str | None = None) -> tuple[str, str, int]:
        """Return the answer, the replica, and how many tokens of the prompt it has read."""
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0.0}
        headers = {} if name is None else {"X-Session-Id": name}
        deadline = time.monotonic() + 120
        while True:
            # Ray Serve has a proxy on every node, and on one machine they share a port: the death
            # of a node breaks the connections of its proxy, and a while passes until Ray notices.
            with contextlib.suppress(httpx.TransportError):
                answer = self._client.post("/v1/completions", json=body, headers=headers)
                if answer.status_code < 500:
                    break
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["text"]
        return text, answer.headers[REPLICA], int(answer.headers[TOKENS_READ])

    def post(self, body: bytes) -> httpx.Response:
        return self._client.post("/v1/completions", content=body)

    def stream(self, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0.0, "stream": True}
        with self._client.stream("POST", "/v1/completions", json=body) as answer:
            return "".join(answer.iter_text())

    def close(self) -> None:
        self._client.close()
        ask_to_end(self._process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._process.kill()
        self._process.wait()


@pytest.fixture
def served(cluster: ThreeNodes, tmp_path: Path) -> Iterator[Served]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "--model": shipped.DEMOS["bitnet"].path,
        "--n_ctx": 2048,
        "--kv-budget": 256,
        "--n_threads": 1,
        "--n_threads_batch": 1,
        "--parallel": 4,
        "--port": port,
        "--replicas": 2,
        "--sessions": tmp_path / "sessions",
    }
    command = [sys.executable, "-m", "entropykv.cli", "serve"]
    command += [str(word) for option in options.items() for word in option]
    environment = {
        **os.environ,
        "RAY_ADDRESS": cluster.address,
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    }
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=log, stderr=log,
            creationflags=creation_flags(),
        )  # fmt: skip
    server = Served(process, f"http://127.0.0.1:{port}", tmp_path / "log")
    try:
        server.wait()
        yield server
    finally:
        server.close()


def test_requests_find_their_text_and_a_node_that_dies_loses_no_finished_turn(
    served: Served, cluster: ThreeNodes
) -> None:
    # A text that was read before is continued where it was read.
    first, replica, whole = served.ask(f"once {SYSTEM}")
    for _ in range(3):
        answer, again, read = served.ask(f"once {SYSTEM}")
        assert (answer, again) == (first, replica)
        assert read < whole / 4
    # Different texts are spread.
    opened = {served.ask(f"{number} {SYSTEM}")[1] for number in range(12)}
    assert len(opened) == 2
    # Streams and refusals pass the front.
    assert served.stream(f"once {SYSTEM}").rstrip().endswith("data: [DONE]")
    assert served.post(b"{").status_code == 400
    assert served.post(b" " * (2 << 20)).status_code == 413

    texts = {f"named {number}": f"{number} {SYSTEM}" for number in range(12)}
    where = {}
    for name, text in texts.items():
        answer, where[name], _ = served.ask(text, name)
        texts[name] = f"{text}{answer} and then the king said"
    assert len(set(where.values())) == 2
    cluster.kill_a_node()
    for name, text in texts.items():
        answer, _, read = served.ask(text, name)
        assert answer
        assert 0 < read < 20  # The finished turn was not read again.
    # The processes of a node that died may answer a little longer.
    deadline = time.monotonic() + 60
    while len({served.ask(text, name)[1] for name, text in texts.items()}) > 1:
        assert time.monotonic() < deadline
