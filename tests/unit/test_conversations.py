"""Turns of conversations on one model: what is loaded and saved when, and what a client sees."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entropykv import EntropyKVError, SessionFileError, SettingsError

pytest.importorskip("fastapi", reason="needs the extra server")

from entropykv.server.engine.conversations import Conversations
from entropykv.server.engine.engine import Engine
from entropykv.server.engine.turns import TurnMiddleware, _caller
from entropykv.server.http.users import Caller


@dataclass(eq=False)
class FakeLlama:
    """Fake a model that reads text; its saved sessions are this text."""

    text: str = ""
    checkpoint: Any = None
    read: int = 0
    calls: list[str] = field(default_factory=list)
    broken: bool = False
    pool: None = None
    prefix_cache: None = None
    callers: list[Caller] = field(default_factory=list)

    def serve_for(self, caller: Caller) -> None:
        self.callers.append(caller)

    @property
    def n_tokens(self) -> int:
        return len(self.text)

    def reset(self) -> None:
        self.text = ""

    def kv_stats(self) -> Any:
        return SimpleNamespace(prompt_tokens=self.read, generated_tokens=0)

    def counts(self) -> tuple[int, int]:
        return self.read, 0

    def save_session(self, path: Path) -> None:
        self.calls.append("save")
        if self.broken:
            raise EntropyKVError("the last decode failed half-way; call reset() first")
        part = path.with_suffix(".part")
        part.write_text(self.text)
        part.replace(path)

    def load_session(self, path: Path) -> None:
        self.calls.append("load")
        if path.read_text(encoding="utf-8") == "damaged":
            raise SessionFileError(f"{path}: is damaged; save a new session")
        self.text, self.read = path.read_text(encoding="utf-8"), 0

    def complete(self, text: str) -> None:
        self.text += text
        self.read += len(text)


def named(name: str, user: str = "") -> Caller:
    return Caller(user, name)


def turn(conversations: Conversations, llama: Any, name: str, text: str, *, user: str = "") -> None:
    conversations.enter(llama, named(name, user))
    llama.complete(text)
    conversations.leave(llama, named(name, user))


def test_switching_loads_only_what_the_model_does_not_hold(tmp_path: Path) -> None:
    llama, conversations = FakeLlama(), Conversations(tmp_path, 1 << 20)
    turn(conversations, llama, "a", "1")
    turn(conversations, llama, "a", "2")
    assert llama.calls == ["save", "save"]
    llama.text = ""
    turn(conversations, llama, "b", "3")
    turn(conversations, llama, "a", "4")
    assert llama.text == "124"
    assert llama.calls == ["save", "save", "save", "load", "save"]


def test_another_replica_has_read_on(tmp_path: Path) -> None:
    llamas = FakeLlama(), FakeLlama()
    both = Conversations(tmp_path, 1 << 20), Conversations(tmp_path, 1 << 20)
    for number, text in ((0, "1"), (1, "2"), (0, "3"), (1, "4")):
        turn(both[number], llamas[number], "a", text)
    assert llamas[1].text == "1234"


def test_what_was_read_without_a_name_is_not_taken_for_a_conversation(tmp_path: Path) -> None:
    llama, conversations = FakeLlama(), Conversations(tmp_path, 1 << 20)
    turn(conversations, llama, "a", "1")
    llama.text = "something else"
    conversations.forget()
    turn(conversations, llama, "a", "2")
    assert llama.text == "12"


def test_damage_and_failures_cost_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llama, conversations = FakeLlama(), Conversations(tmp_path, 1 << 20)
    conversations.path(named("a")).write_text("damaged")
    turn(conversations, llama, "a", "1")
    assert "is damaged" in caplog.text
    llama.broken = True
    turn(conversations, llama, "a", "2")
    assert "failed half-way" in caplog.text
    assert conversations.path(named("a")).read_text() == "1"


def test_least_recently_used_go_first(tmp_path: Path) -> None:
    llama, conversations = FakeLlama(), Conversations(tmp_path, 25)
    left = []
    # The second turn of conversation a makes its file 20 bytes long.
    for number, name in enumerate("abac"):
        if not conversations.path(named(name)).exists():
            llama.text = ""
        turn(conversations, llama, name, "x" * 10)
        # File times are too coarse to order the files.
        os.utime(conversations.path(named(name)), ns=(number, number))
        left.append("".join(name for name in "abc" if conversations.path(named(name)).exists()))
    assert left == ["a", "ab", "a", "c"]


def test_the_same_name_is_another_conversation_for_another_user(tmp_path: Path) -> None:
    llama, conversations = FakeLlama(), Conversations(tmp_path, 1 << 20, several=True)
    turn(conversations, llama, "a", "1", user="anna")
    llama.text = ""
    turn(conversations, llama, "a", "2", user="ben")
    assert conversations.path(named("a", "anna")).read_text() == "1"
    assert conversations.path(named("a", "ben")).read_text() == "2"


def test_names_are_no_paths(tmp_path: Path) -> None:
    conversations = Conversations(tmp_path / "deep" / "er", 1)
    for name in ("../../x", "/etc/passwd", "a\0b", "é" * 300):
        assert conversations.path(named(name)).parent == tmp_path / "deep" / "er"
    assert (tmp_path / "deep" / "er").stat().st_mode & 0o077 == 0


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="give another directory"):
        Conversations(tmp_path / "file", 1)


# --- the middleware -------------------------------------------------------------------------------

App = Callable[[Any, Any, Any], Awaitable[None]]


def middleware(app: App, llama: FakeLlama, directory: Path) -> TurnMiddleware:
    engine = Engine(llama)  # type: ignore[arg-type]
    conversations = Conversations(directory, 1 << 20)
    return TurnMiddleware(app, engine=engine, conversations=conversations, replica="one")


def scope(name: str | None = None) -> dict[str, Any]:
    headers = [] if name is None else [(b"x-session-id", name.encode())]
    return {"type": "http", "method": "POST", "headers": headers}


async def nothing() -> dict[str, Any]:
    await asyncio.sleep(3600)
    return {}


def start(kind: bytes) -> dict[str, Any]:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
def test_the_end_of_an_answer_comes_after_saving(tmp_path: Path, kind: bytes) -> None:
    llama = FakeLlama()
    seen: list[tuple[str, bool]] = []
    headers: dict[bytes, bytes] = {}

    async def app(_: Any, __: Any, send: Any) -> None:
        await asyncio.to_thread(llama.complete, "12345")
        await send(start(kind))
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        seen.append((message["type"], "save" in llama.calls))
        headers.update(message.get("headers", ()))

    asyncio.run(middleware(app, llama, tmp_path)(scope("a"), nothing, send))
    assert [saved for _, saved in seen] == [False, False, True]
    assert headers[b"x-entropykv-replica"] == b"one"
    expected = None if kind == b"text/event-stream" else b"5"
    assert headers.get(b"x-entropykv-tokens-read") == expected


def test_a_refused_request_changes_nothing(tmp_path: Path) -> None:
    llama = FakeLlama()

    async def app(_: Any, __: Any, send: Any) -> None:
        await send(start(b"application/json"))
        await send({"type": "http.response.body"})

    async def send(_: Any) -> None:
        pass

    asyncio.run(middleware(app, llama, tmp_path)(scope("a"), nothing, send))
    assert llama.calls == []
    assert not list(tmp_path.iterdir())


def test_a_cancelled_request_is_over_before_the_next_begins(tmp_path: Path) -> None:
    llama = FakeLlama()
    inside: list[str] = []
    engine = Engine(llama)  # type: ignore[arg-type]

    def generate(name: str) -> None:
        assert not inside
        inside.append(name)
        time.sleep(0.05)
        llama.complete(name)
        inside.remove(name)

    async def app(scope: Any, _: Any, send: Any) -> None:
        await engine.generate(lambda _: generate(_caller(scope).name or ""))
        await send({"type": "http.response.body"})

    async def send(_: Any) -> None:
        pass

    async def three() -> None:
        conversations = Conversations(tmp_path, 1 << 20)
        turns = TurnMiddleware(app, engine=engine, conversations=conversations, replica="one")
        first, second, third = (
            asyncio.create_task(turns(scope(name), nothing, send)) for name in "abc"
        )
        await asyncio.sleep(0.02)
        first.cancel()
        third.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await second
        assert conversations.path(named("a")).read_text() == "a"
        assert conversations.path(named("b")).read_text() == "ab"
        assert not conversations.path(named("c")).exists()

    asyncio.run(three())


def test_a_failed_generation_keeps_what_the_turn_before_saved(tmp_path: Path) -> None:
    llama, conversations = FakeLlama(), Conversations(tmp_path, 1 << 20)
    turn(conversations, llama, "a", "1")
    conversations.enter(llama, named("a"))  # type: ignore[arg-type]
    llama.complete("2")
    llama.reset()
    conversations.leave(llama, named("a"))  # type: ignore[arg-type]
    turn(conversations, llama, "a", "3")
    assert llama.text == "13"
