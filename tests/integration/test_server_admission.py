"""Clients that are slow, many, or ask for too much do not delay the answers of another client."""

from __future__ import annotations

import asyncio
import json
import operator
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from entropykv.server import ModelOptions, ServerOptions, create_app
from entropykv.server.dialects import streaming
from tests.support.running_server import KEY, MODEL, Server
from tests.support.served import PROMPT, served
from tests.support.waiting import wait_for

MOST_CONNECTIONS = 60
VIEWERS = 16
STALL = 8.0
"""The most seconds that /health may take while the server checks a body of 1 MiB. A check in the
event loop would block it for longer: on a busy machine, /health has taken 20 s beside half such a
body.
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    limits = ("--client-seconds", 1, "--max-connections", MOST_CONNECTIONS, "--max-waiting", 4)
    yield from served("--parallel", 2, *limits, "--allowed-hosts", "llm.example", "--api-key", KEY)


class Raw(ExitStack):
    """Hold a connection over which a test sends bytes at its own pace."""

    def __init__(self, server: Server, text: str = "") -> None:
        super().__init__()
        port = int(server.url.rpartition(":")[2])
        self.socket = self.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        self.send(text)

    def send(self, text: str) -> None:
        self.socket.sendall(text.encode())

    def answer(self) -> str:
        """Return all bytes that come until the server closes the connection."""
        pieces = []
        while piece := self.socket.recv(65536):
            pieces.append(piece)
        return b"".join(pieces).decode()

    def status(self) -> int:
        """Return the status of the first answer."""
        return int(self.socket.recv(65536).split()[1])


def head(path: str, *lines: str, method: str = "POST") -> str:
    own = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}"]
    return "\r\n".join([*own, "Content-Type: application/json", *lines]) + "\r\n"


class Health:
    """Request /health repeatedly, and record how long the slowest answer took."""

    def __init__(self, server: Server) -> None:
        self.slowest = 0.0
        self._url = f"{server.url}/health"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._ended.wait(0.01):
                start = time.monotonic()
                assert client.get(self._url).status_code == 200
                self.slowest = max(self.slowest, time.monotonic() - start)

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


@pytest.mark.parametrize("text", ["", "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_headers_that_do_not_come_end_the_connection(server: Server, text: str) -> None:
    start = time.monotonic()
    with Raw(server, text) as slow:
        assert " 408 " in slow.answer()
    assert time.monotonic() - start > 0.5


def test_headers_that_trickle_after_an_answer_end_the_connection(server: Server) -> None:
    with Raw(server, head("/health", method="GET") + "\r\n") as slow:
        assert slow.status() == 200
        # The client sends bytes often enough that the connection is never idle.
        wait_for(lambda: not _takes_a_byte(slow))


def _takes_a_byte(slow: Raw) -> bool:
    try:
        slow.send("G")
    except OSError:
        return False
    time.sleep(0.1)
    return True


def test_a_body_that_does_not_come_is_refused(server: Server) -> None:
    start = time.monotonic()
    with Raw(server, head("/v1/completions", "Content-Length: 100", "") + '{"prompt"') as slow:
        assert slow.status() == 408
        assert time.monotonic() - start > 0.5


def test_connections_have_a_limit() -> None:
    for server in served("--client-seconds", 600, "--max-connections", 8):
        with ExitStack() as stack:
            many = [stack.enter_context(Raw(server)) for _ in range(8 + 5)]
            assert [" 503 " in each.answer() for each in many[8:]] == [True] * 5
        wait_for(lambda running=server: running.get("/health").status_code == 200)


def test_viewers_are_counted_when_they_are_let_in(server: Server) -> None:
    asks = head("/v1/kv/stream", method="GET") + "\r\n"

    def n_let_in() -> int:
        with ExitStack() as stack:
            many = [stack.enter_context(Raw(server, asks)) for _ in range(3 * VIEWERS)]
            statuses = [each.status() for each in many]
        assert set(statuses) <= {200, 503}
        assert statuses.count(200) <= VIEWERS
        return statuses.count(200)

    assert n_let_in() == VIEWERS
    wait_for(lambda: n_let_in() == VIEWERS)  # Viewers that have gone are no longer counted.


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80"])
def test_pages_of_other_names_reach_nothing(server: Server, host: str) -> None:
    for path in ("/", "/health", "/v1/kv", "/docs"):
        answer = httpx.get(server.url + path, headers={"host": host})
        assert answer.status_code == 403
        assert "--allowed-hosts" in answer.json()["error"]["message"]
    allowed = httpx.get(f"{server.url}/health", headers={"host": "llm.example:80"})
    assert allowed.status_code == 200


@pytest.mark.parametrize("piece", ["{}", "[]", '"a"', "7", "null"])
def test_nobody_waits_for_a_body_that_is_checked(server: Server, piece: str) -> None:
    size = (1 << 20) - 100
    body = '{"prompt":[' + ",".join([piece] * (size // (len(piece) + 1))) + ',"x",{}]}'
    before = server.rss()
    with Health(server) as health:
        answer = server.post("/v1/completions", body)
    assert answer.status_code == 400
    assert len(answer.text) < 2_000
    assert health.slowest < STALL
    assert server.rss() - before < 200 << 20


@pytest.mark.parametrize("path", ["/", "/health", "/v1/completions"])
def test_nothing_that_a_stranger_sends_is_held(server: Server, path: str) -> None:
    asks = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    with Raw(server, asks) as stranger:
        # A stranger is refused at once, and not with 408 after waiting for the body.
        assert stranger.status() == 401


def test_pieces_of_tokens_have_a_limit(server: Server) -> None:
    body = {"content": "a b c " * 50_000}
    assert len(server.post("/tokenize", json.dumps(body)).json()["tokens"]) > 65_536
    answer = server.post("/tokenize", json.dumps({**body, "with_pieces": True}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "with_pieces"


def _hostile(server: Server, i: int) -> None:
    """Send hostile request number i, and disconnect."""
    body = json.dumps({"prompt": "The old garden", "max_tokens": 2_000, "stream": True})
    whole = head("/v1/completions", f"Content-Length: {len(body)}", "") + body
    texts = [
        "",
        "GET / HT",
        head("/v1/completions", "Content-Length: 1000", "") + '{"prompt',
        whole,
        head("/v1/kv/stream", method="GET") + "\r\n",
        head("/v1/completions", "Content-Length: 12", "") + '{"prompt":[]',
        head("/v1/completions", "Transfer-Encoding: chunked", "") + "5\r\n[[[[[\r\n",
    ]
    with Raw(server, texts[i % len(texts)]):
        time.sleep(0.02 * (i % 5))


def _files_and_threads(server: Server) -> tuple[int, int]:
    process = Path(f"/proc/{server.process.pid}")
    return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))


@pytest.mark.needs("/proc/self/fd")
def test_nothing_is_lost_beside_hostile_clients(server: Server) -> None:
    body = json.dumps({"prompt": "The old garden", "max_tokens": 3, "temperature": 0.0})
    expected = server.post("/v1/completions", body).json()["choices"][0]["text"]
    list(ThreadPoolExecutor(8).map(lambda i: _hostile(server, i), range(70)))
    server.idle_figures(30)
    before = _files_and_threads(server)

    def right(i: int) -> None:
        if i % 3 == 0:
            _hostile(server, i)
            return
        while (answer := server.post("/v1/completions", body)).status_code == 429:
            time.sleep(0.05)
        assert answer.json()["choices"][0]["text"] == expected

    with ThreadPoolExecutor(6) as clients:
        list(clients.map(right, range(240)))
    server.idle_figures(60)
    wait_for(lambda: not any(map(operator.gt, _files_and_threads(server), before)))


async def test_an_answer_ends_if_its_client_is_too_far_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer ends if its client has read the first piece, and does not read more until the model
    has stopped.
    """
    monkeypatch.setattr(streaming, "MOST_UNREAD", 50)
    body = {"prompt": PROMPT, "max_tokens": 3000, "min_tokens": 3000, "stream": True}
    content = json.dumps(body).encode()

    app = create_app(ModelOptions(model=str(MODEL), n_threads=1), ServerOptions())
    engine = app.state.engine
    pieces: list[bytes] = []
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        pieces.append(message.get("body", b""))
        while engine.waiting:
            await asyncio.sleep(0.01)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    headers = [(b"content-type", b"application/json")]
    await asyncio.wait_for(app({**scope, "headers": headers}, receive, send), 60)
    engine.close()
    assert 50 <= len(pieces) < 1000  # The worker may be a few pieces ahead of the event loop.
    assert engine.outcomes["refused"] == 1
    assert "reads too slowly" in pieces[-1].decode()


TWO_SECONDS_TO_FINISH = """
import sys
from entropykv import cli
from entropykv.server.http import running

running._SECONDS_TO_FINISH = 2
sys.exit(cli.main())
"""


def test_a_client_that_reads_nothing_delays_the_end_of_the_server_by_seconds() -> None:
    server = Server(program=("-c", TWO_SECONDS_TO_FINISH), ENTROPYKV_API_KEY=KEY)
    body = json.dumps({"content": "a b c d e " * 5000, "with_pieces": True})
    asks = head("/tokenize", f"Content-Length: {len(body)}", "") + body

    def n_answered() -> int:
        return sum("/tokenize 200" in line for line in server.log)

    with Raw(server) as client:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.send(asks * 12)
        before = 0
        while (now := n_answered()) > before or not now:
            before = now
            time.sleep(3)
        assert now < 12
        start = time.monotonic()
        code, log = server.end()
    assert code == 0
    assert time.monotonic() - start > 1
    assert "Traceback" not in log, log


def test_who_waits_for_room_can_leave() -> None:
    """While the pool has bytes for only one conversation, a client that waits for its next token
    can disconnect.
    """
    budget = ("--parallel", 2, "--kv-budget", "30KiB", "--policy", "uniform", "--checkpoints", 0)
    with Server(*budget, "--request-seconds", 20, ENTROPYKV_API_KEY=KEY) as server:
        endless: Any = {"max_tokens": 10_000, "min_tokens": 10_000, "stream": True}
        with ExitStack() as stack:
            for number, prompt in enumerate(("The old garden", "Simon likes"), 1):
                body = json.dumps({**endless, "prompt": prompt})
                asks = head("/v1/completions", f"Content-Length: {len(body)}", "") + body
                client = stack.enter_context(Raw(server, asks))
                wait_for(lambda n=number: server.kv()["requests"]["waiting"] == n)
            live = "entropykv_conversations_live 1.0\n"
            wait_for(lambda: live in server.get("/metrics").text)
            client.close()
            wait_for(lambda: server.kv()["requests"]["waiting"] == 1)
        server.idle_figures(60)


@pytest.fixture(scope="module")
def smollm2_server(smollm2: Path) -> Iterator[Server]:
    with Server("--parallel", 2, model=smollm2, ENTROPYKV_API_KEY=KEY) as running:
        yield running


@pytest.mark.parametrize("control", ["<|im_start|>", "<|im_start|><|im_end|>"])
def test_a_text_of_control_tokens_takes_no_minute(smollm2_server: Server, control: str) -> None:
    text = control * (1_000_000 // len(control))
    chat = [{"role": "user", "content": text}]
    for path, body, said in (
        ("/v1/completions", {"prompt": text}, "control tokens"),
        # In a chat, the text is plain, so it is only too long.
        ("/v1/chat/completions", {"messages": chat}, "maximum context length"),
        ("/tokenize", {"content": text}, "control tokens"),
        ("/extras/tokenize/count", {"input": text}, "control tokens"),
    ):
        answer = smollm2_server.post(path, json.dumps(body))  # The answer comes before a timeout.
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]
    few = control * 200
    assert smollm2_server.post("/tokenize", json.dumps({"content": few})).status_code == 200
