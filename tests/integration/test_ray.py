"""Two replicas under Ray Serve keep their conversations, also after a restart."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from entropykv import EntropyLlama
from entropykv.model import shipped
from tests.support.ending import ask_to_end, creation_flags
from tests.support.waiting import wait_for

psutil = pytest.importorskip("psutil")
pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.replicas

N_CTX, BUDGET, MAX_TOKENS = 2048, 64, 4
N_UBATCH = 128
"""The tokens of a micro-batch in a pool, on which evictions depend."""
OPENING = "the winding road to the land of the king is far from the sea and " * 6
MORE = " and then the king said"


@dataclass(frozen=True)
class Answer:
    """Hold the answer of one replica."""

    text: str
    replica: str
    tokens_read: int


@dataclass(frozen=True)
class Replicas:
    """Hold the server's process, address and log."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def complete(self, prompt: str, session: str | None) -> Answer:
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0.0}
        headers = {"Content-Type": "application/json"}
        if session is not None:
            headers["X-Session-Id"] = session
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", data, headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
            return Answer(
                json.load(response)["choices"][0]["text"],
                response.headers["X-EntropyKV-Replica"],
                int(response.headers["X-EntropyKV-Tokens-Read"]),
            )

    def watch(self) -> Any:
        """Open the stream that shows a replica's cache."""
        return urllib.request.urlopen(f"{self.url}/v1/kv/stream", timeout=60)  # noqa: S310

    def is_ready(self) -> bool:
        """Tell whether every replica runs; requests are answered once the first one does."""
        assert self.process.poll() is None, "the server ended"
        return b"is ready at" in self.log.read_bytes()


def processes_of(server: subprocess.Popen[bytes]) -> list[Any]:
    """Return the server's process and all that Ray has started for it; none if it has ended."""
    try:
        process = psutil.Process(server.pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@pytest.fixture
def program() -> tuple[str, ...]:
    """Return the arguments of Python that run the command."""
    return ("-m", "entropykv.cli")


@pytest.fixture(params=[1, 2])
def replicas(
    request: pytest.FixtureRequest, tmp_path: Path, program: tuple[str, ...]
) -> Iterator[Replicas]:
    """Start replicas that each hold one conversation, or a pool of two."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The path is short, because Ray adds names of sockets, whose length is limited.
    directory = Path(tempfile.mkdtemp(prefix="ray-"))
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "RAY_TMPDIR": str(directory),
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(80 << 20),
    }
    environment.pop("RAY_ADDRESS", None)
    options = {
        "--model": shipped.DEMOS["bitnet"].path,
        "--n_ctx": N_CTX,
        "--kv-budget": BUDGET,
        "--n_ubatch": N_UBATCH,
        "--n_threads": 1,
        "--n_threads_batch": 1,
        "--verbose": "false",
        "--port": port,
        "--replicas": 2,
        "--parallel": request.param,
        "--sessions": tmp_path / "sessions",
    }
    arguments = [str(word) for option in options.items() for word in option]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *program, "serve", *arguments],
            env=environment, cwd=tmp_path, stdout=log, stderr=log, creationflags=creation_flags(),
        )  # fmt: skip
    try:
        yield Replicas(process, f"http://127.0.0.1:{port}", tmp_path / "log")
    finally:
        left = processes_of(process)
        for child in left:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(left, timeout=5)
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def new_tokens(llama: EntropyLlama, added: str) -> int:
    """Return the most tokens that a turn may read: the new ones, and the end of the last answer."""
    return len(llama.tokenize(added.encode(), add_bos=False)) + 2


@pytest.mark.needs("signal.SIGHUP")
def test_rolling_restart_loses_no_conversation(replicas: Replicas, tmp_path: Path) -> None:
    wait_for(replicas.is_ready, 300)
    texts: dict[str, str] = {}
    where: dict[str, str] = {}
    answers: dict[str, list[str]] = {}

    def turn(name: str, added: str) -> Answer:
        prompt = texts.get(name, "") + added
        answer = replicas.complete(prompt, name)
        texts[name] = prompt + answer.text
        answers.setdefault(name, []).append(answer.text)
        return answer

    for number in itertools.count():  # Stop when both replicas have two conversations.
        name = f"conversation/{number}"
        where[name] = turn(name, f"{number} {OPENING}").replica
        counts = [list(where.values()).count(replica) for replica in set(where.values())]
        if len(counts) == 2 and min(counts) >= 2:
            break
        assert number < 60

    llama = EntropyLlama(
        shipped.DEMOS["bitnet"].path, n_ctx=N_CTX, kv_budget=BUDGET, n_ubatch=N_UBATCH, n_threads=1,
        n_threads_batch=1, verbose=False,
    )  # fmt: skip
    most = new_tokens(llama, MORE)
    # Four turns each make it unlikely that conversations stay at their replica by chance.
    for name, replica in [*where.items()] * 4:
        answer = turn(name, MORE)
        assert answer.replica == replica
        assert 0 < answer.tokens_read <= most
    replicas.complete(OPENING, None)  # A request of no conversation may go to any replica.

    os.kill(replicas.process.pid, signal.SIGHUP)
    before, moved = set(where.values()), set()
    end = time.monotonic() + 300
    while moved != set(where):
        assert time.monotonic() < end, "the replicas were not restarted"
        for name in where:
            answer = turn(name, MORE)
            assert 0 < answer.tokens_read <= most
            if answer.replica not in before:
                moved.add(name)
        time.sleep(0.5)

    name = next(iter(where))
    text = f"0 {OPENING}"
    for expected in answers[name]:  # The answers are those of one model that was never stopped.
        got = llama.create_completion(text, max_tokens=MAX_TOKENS, temperature=0.0)
        assert got["choices"][0]["text"] == expected
        text += expected + MORE
    llama.close()

    started = processes_of(replicas.process)
    with ThreadPoolExecutor(1) as threads:
        with replicas.watch() as events:
            assert events.readline() == b"event: model\n"
            watching = threads.submit(events.read)
            ask_to_end(replicas.process)
            # The stream ends by itself, so no replica is killed while it sends.
            assert b"event: kv" in watching.result(60)
        assert replicas.process.wait(60) == 0
    assert not psutil.wait_procs(started, timeout=20)[1]
    assert len(list((tmp_path / "sessions").glob("*.session"))) == len(where)


IMPATIENT = """
import sys
import ray.serve._private.api as api
from entropykv.cli import main

api.HTTP_PROXY_TIMEOUT = 0.001
sys.exit(main(sys.argv[1:]))
"""
"""A program that runs the command, but lets Ray wait only shortly for its proxy."""


@pytest.mark.parametrize("program", [("-c", IMPATIENT)], ids=["impatient"])
@pytest.mark.parametrize("replicas", [1], indirect=True)
def test_a_proxy_that_starts_slowly_is_waited_for(replicas: Replicas) -> None:
    wait_for(replicas.is_ready, 300)
    assert replicas.complete(OPENING, None).text
