"""Turns of conversations on one model are loaded and saved at the right time, and clients see the
right text.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from entropykv import EntropyKVError, SessionFileError, SettingsError

pytest.importorskip("fastapi", reason="needs the extra server")

from entropykv.server.engine.engine import Engine
from entropykv.server.engine.turns import Conversations, TurnMiddleware, _caller
from entropykv.server.http.access import Caller
from entropykv.server.http.request_log import note_tokens
from tests.support.fake_loaded_model import FakeLoadedModel


@dataclass(eq=False)
class FakeCache:
    """Stand in for a prefix cache that holds one conversation; a saved session is its text."""

    text: str = ""
    caller: Caller | None = None
    """The caller to whom the text belongs."""
    calls: list[str] = field(default_factory=list)
    broken: bool = False

    def length_of(self, caller: Caller) -> int:
        return len(self.text) if caller == self.caller else 0

    def save(self, caller: Caller, path: Path) -> str | None:
        if not self.length_of(caller):
            return None
        self.calls.append("save")
        if self.broken:
            raise EntropyKVError("the last decode failed half-way; call reset() first")
        part = path.with_suffix(".part")
        part.write_text(self.text)
        part.replace(path)
        return self.text

    def load(self, caller: Caller, path: Path) -> None:
        self.calls.append("load")
        if path.read_text(encoding="utf-8") == "damaged":
            raise SessionFileError(f"{path}: is damaged; save a new session")
        self.text, self.caller = path.read_text(encoding="utf-8"), caller

    def read(self, caller: Caller, text: str) -> None:
        if caller != self.caller:  # The conversation takes the place of another caller's.
            self.text, self.caller = "", caller
        self.text += text


def conversations_of(directory: Path, cache: FakeCache, max_bytes: int = 1 << 20) -> Conversations:
    return Conversations(directory, max_bytes, cache)  # type: ignore[arg-type]


def named(name: str, user: str = "") -> Caller:
    return Caller(user, name)


def turn(
    conversations: Conversations, cache: FakeCache, name: str, text: str, *, user: str = ""
) -> None:
    conversations.enter(named(name, user))
    cache.read(named(name, user), text)
    conversations.leave(named(name, user))


def test_switching_loads_only_what_the_model_does_not_hold(tmp_path: Path) -> None:
    cache = FakeCache()
    conversations = conversations_of(tmp_path, cache)
    turn(conversations, cache, "a", "1")
    turn(conversations, cache, "a", "2")
    assert cache.calls == ["save", "save"]
    turn(conversations, cache, "b", "3")
    turn(conversations, cache, "a", "4")
    assert cache.text == "124"
    assert cache.calls == ["save", "save", "save", "load", "save"]


def test_another_replica_has_read_on(tmp_path: Path) -> None:
    caches = FakeCache(), FakeCache()
    both = [conversations_of(tmp_path, cache) for cache in caches]
    for number, text in ((0, "1"), (1, "2"), (0, "3"), (1, "4")):
        turn(both[number], caches[number], "a", text)
    assert caches[1].text == "1234"


def test_a_forgotten_conversation_is_loaded_again(tmp_path: Path) -> None:
    cache = FakeCache()
    conversations = conversations_of(tmp_path, cache)
    turn(conversations, cache, "a", "1")
    cache.text = ""  # Another conversation has taken its place.
    turn(conversations, cache, "a", "2")
    assert cache.text == "12"


def test_damage_and_failures_cost_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = FakeCache()
    conversations = conversations_of(tmp_path, cache)
    conversations.path(named("a")).write_text("damaged")
    turn(conversations, cache, "a", "1")
    assert "is damaged" in caplog.text
    cache.broken = True
    turn(conversations, cache, "a", "2")
    assert "failed half-way" in caplog.text
    assert conversations.path(named("a")).read_text() == "1"


def test_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = FakeCache()
    conversations = conversations_of(tmp_path, cache, 25)
    left = []
    # The second turn of conversation `a` makes its file 20 bytes long.
    for number, name in enumerate("abac"):
        turn(conversations, cache, name, "x" * 10)
        # The times of files are set, because they are too coarse to order the files.
        os.utime(conversations.path(named(name)), ns=(number, number))
        left.append("".join(name for name in "abc" if conversations.path(named(name)).exists()))
    assert left == ["a", "ab", "a", "c"]


def test_the_same_name_is_another_conversation_for_another_user(tmp_path: Path) -> None:
    cache = FakeCache()
    conversations = conversations_of(tmp_path, cache)
    turn(conversations, cache, "a", "1", user="anna")
    turn(conversations, cache, "a", "2", user="ben")
    assert conversations.path(named("a", "anna")).read_text() == "1"
    assert conversations.path(named("a", "ben")).read_text() == "2"


def test_names_are_no_paths(tmp_path: Path) -> None:
    conversations = conversations_of(tmp_path / "deep" / "er", FakeCache(), 1)
    for name in ("../../x", "/etc/passwd", "a\0b", "é" * 300):
        assert conversations.path(named(name)).parent == tmp_path / "deep" / "er"
    assert (tmp_path / "deep" / "er").stat().st_mode & 0o077 == 0


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="give another directory"):
        conversations_of(tmp_path / "file", FakeCache())


App = Callable[[Any, Any, Any], Awaitable[None]]


def middleware(app: App, cache: FakeCache, directory: Path) -> TurnMiddleware:
    engine = Engine(FakeLoadedModel())  # type: ignore[arg-type]
    conversations = conversations_of(directory, cache)
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
    cache = FakeCache()
    seen: list[tuple[str, bool]] = []
    headers: dict[bytes, bytes] = {}

    async def app(scope: Any, _: Any, send: Any) -> None:
        cache.read(named("a"), "12345")
        note_tokens(scope)(5, 1)
        await send(start(kind))
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        seen.append((message["type"], "save" in cache.calls))
        headers.update(message.get("headers", ()))

    asyncio.run(middleware(app, cache, tmp_path)(scope("a"), nothing, send))
    assert [saved for _, saved in seen] == [False, False, True]
    assert headers[b"x-entropykv-replica"] == b"one"
    expected = None if kind == b"text/event-stream" else b"5"
    assert headers.get(b"x-entropykv-tokens-read") == expected


def test_a_refused_request_changes_nothing(tmp_path: Path) -> None:
    cache = FakeCache()

    async def app(_: Any, __: Any, send: Any) -> None:
        await send(start(b"application/json"))
        await send({"type": "http.response.body"})

    async def send(_: Any) -> None:
        pass

    asyncio.run(middleware(app, cache, tmp_path)(scope("a"), nothing, send))
    assert cache.calls == []
    assert not list(tmp_path.iterdir())


async def test_a_cancelled_request_is_over_before_the_next_begins(tmp_path: Path) -> None:
    cache = FakeCache()
    inside: list[str] = []
    engine = Engine(FakeLoadedModel())  # type: ignore[arg-type]

    begun, go_on = threading.Event(), threading.Event()

    def generate(name: str) -> None:
        assert not inside
        inside.append(name)
        begun.set()
        assert go_on.wait(60)
        cache.read(named(name), name)
        inside.remove(name)

    async def app(scope: Any, _: Any, send: Any) -> None:
        def note_read(*_: int) -> None:
            note_tokens(scope)(1, 0)

        name = _caller(scope).name or ""
        await engine.run_job(lambda _: generate(name), note=note_read)
        await send({"type": "http.response.body"})

    async def send(_: Any) -> None:
        pass

    conversations = conversations_of(tmp_path, cache)
    turns = TurnMiddleware(app, engine=engine, conversations=conversations, replica="one")
    first, second, third = (
        asyncio.create_task(turns(scope(name), nothing, send)) for name in "abc"
    )
    assert await asyncio.to_thread(begun.wait, 60)
    first.cancel()
    third.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert conversations.path(named("a")).read_text() == "a"
    assert conversations.path(named("b")).read_text() == "b"
    assert not conversations.path(named("c")).exists()


def test_a_failed_generation_keeps_what_the_turn_before_saved(tmp_path: Path) -> None:
    cache = FakeCache()
    conversations = conversations_of(tmp_path, cache)
    turn(conversations, cache, "a", "1")
    conversations.enter(named("a"))
    cache.text = ""
    conversations.leave(named("a"))
    turn(conversations, cache, "a", "3")
    assert cache.text == "13"
