"""Replicas with pools save conversations after each turn, so that another can continue them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from entropykv.model import shipped

pytest.importorskip("fastapi", reason="needs the extra server")

from fastapi.testclient import TestClient
from starlette.middleware import Middleware

from entropykv.server import ModelOptions, ServerOptions, create_app
from entropykv.server.engine.turns import Conversations, TurnMiddleware

OPENING = "the winding road to the land of the king is far from the sea and "
MORE = " and then the king said"
N_CTX = 1024
MOST = 19
"""The most tokens that a turn may read: MORE, and the end of the last answer."""


class Replica:
    """Hold one server of two sequences."""

    def __init__(self, client: TestClient, engine: Any) -> None:
        self._client = client
        self.engine = engine

    def complete(self, text: str, name: str | None, **options: Any) -> tuple[str, int]:
        """Return the answer, and the number of tokens that were read for it."""
        body = {"prompt": text, "max_tokens": 6, "temperature": 0.0, **options}
        headers = {} if name is None else {"X-Session-Id": name}
        answer = self._client.post("/v1/completions", json=body, headers=headers)
        assert answer.headers["X-EntropyKV-Replica"] == "one"
        if answer.status_code != 200:
            return answer.text, int(answer.headers["X-EntropyKV-Tokens-Read"])
        read = int(answer.headers["X-EntropyKV-Tokens-Read"])
        return answer.json()["choices"][0]["text"], read


@contextmanager
def replica(directory: Path, **options: Any) -> Iterator[Replica]:
    chosen: dict[str, Any] = {
        "model": str(shipped.DEMOS["bitnet"].path),
        "n_ctx": N_CTX,
        "kv_budget": "2000",
        "kv_type": "f16",
        "policy": "uniform",
        "parallel": 2,
        "n_threads": 1,
        "n_threads_batch": 1,
        "verbose": False,
        **options,
    }
    app = create_app(ModelOptions(**chosen), ServerOptions())
    engine = app.state.engine
    conversations = Conversations(directory, 1 << 30, engine.prefix_cache)
    app.user_middleware.append(
        Middleware(TurnMiddleware, engine=engine, conversations=conversations, replica="one")
    )
    with TestClient(app, base_url="http://localhost") as client:
        yield Replica(client, engine)


def test_another_replica_goes_on_with_what_one_has_saved(tmp_path: Path) -> None:
    names = [f"conversation {i}" for i in range(5)]
    texts = {name: f"{i} {OPENING * (i + 1)}" for i, name in enumerate(names)}
    with replica(tmp_path) as first, ThreadPoolExecutor(len(names)) as threads:
        for name, (text, read) in zip(
            names, threads.map(lambda name: first.complete(texts[name], name), names), strict=True
        ):
            assert read > 10
            texts[name] += text
        # The request belongs to no conversation, so nothing is saved.
        first.complete(OPENING, None)
    assert len(list(tmp_path.glob("*.session"))) == len(names)
    with replica(tmp_path) as second, replica(tmp_path / "other") as fresh:
        for name in names:
            text, read = second.complete(texts[name] + MORE, name)
            expected, whole = fresh.complete(texts[name] + MORE, name)
            assert text == expected
            assert 0 < read <= MOST < whole
            assert second.complete(texts[name] + MORE + text + MORE, name)[1] <= MOST


def test_what_another_replica_has_read_meanwhile_counts(tmp_path: Path) -> None:
    """A conversation that changes between two replicas has the answers and reads of one replica."""
    with ExitStack() as stack:
        both = [stack.enter_context(replica(tmp_path)) for _ in range(2)]
        alone = stack.enter_context(replica(tmp_path / "alone"))
        text, total = OPENING, 0
        for turn in range(6):
            answer, read = both[turn % 2].complete(text, "a")
            assert (answer, read) == alone.complete(text, "a")
            text, total = text + answer + MORE, total + read
        # Reading all six prompts anew would take more than twice as many tokens.
        assert total < 250


def test_turns_of_one_conversation_follow_each_other(tmp_path: Path) -> None:
    with replica(tmp_path) as one, ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: one.complete(OPENING, "a"), range(4)))
        assert len({text for text, _ in found}) == 1
        # The other sessions continue from the checkpoint of the one that read the prompt.
        assert sum(read > 2 for _, read in found) == 1


def test_refused_and_failed_requests_save_nothing(tmp_path: Path) -> None:
    with replica(tmp_path) as one:
        assert "context" in one.complete(OPENING * 200, "a")[0]
        assert not list(tmp_path.iterdir())
        text, _ = one.complete(OPENING, "a")
        (path,) = tmp_path.iterdir()
        path.write_bytes(path.read_bytes()[:-50])
        # If the file is damaged, the text is read again.
        again, _ = one.complete(OPENING + text + MORE, "a")
        assert again
    with replica(tmp_path) as other:
        assert other.complete(OPENING + text + MORE + again + MORE, "a")[1] <= MOST


def test_who_leaves_a_stream_has_its_turn_saved_before_the_next(tmp_path: Path) -> None:
    with replica(tmp_path) as one:
        left = threading.Event()
        body = {"prompt": OPENING, "max_tokens": 400, "min_tokens": 400, "stream": True}

        async def leave() -> None:
            sent: list[Any] = [{"type": "http.request", "body": json.dumps(body).encode()}]

            async def receive() -> Any:
                if sent:
                    return sent.pop()
                await asyncio.to_thread(left.wait)
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                if message["type"] == "http.response.body" and message.get("body"):
                    left.set()

            scope = {
                "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
                "headers": [(b"x-session-id", b"a"), (b"content-type", b"application/json")],
            }  # fmt: skip
            await one._client.app(scope, receive, send)

        one._client.portal.call(leave)  # type: ignore[union-attr]
        assert not one.engine.running
        assert len(list(tmp_path.glob("*.session"))) == 1
