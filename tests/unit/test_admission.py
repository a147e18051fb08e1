"""Requests have limits, their host is checked, and a slow, long or malformed one delays none."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra server")

from pydantic import BaseModel

from entropykv.errors import EntropyKVError, PoolError
from entropykv.server.chat.chat_request import ChatRequest
from entropykv.server.dialects.fields import MOST_VALUES, check_values
from entropykv.server.dialects.llama_server_routes import DetokenizeRequest
from entropykv.server.dialects.requests import CompletionRequest
from entropykv.server.dialects.responses import ResponsesRequest
from entropykv.server.engine import admission as admission_module
from entropykv.server.engine import engine as engine_module
from entropykv.server.engine.admission import Admission, Limits
from entropykv.server.engine.answering import Answering
from entropykv.server.engine.engine import Engine, Job
from entropykv.server.engine.turns import Conversations, TurnMiddleware
from entropykv.server.http.access import HostHeaderCheck
from entropykv.server.http.app import limits_of
from entropykv.server.http.bodies import Bodies, read_body
from entropykv.server.http.errors import RequestError, as_request_error
from entropykv.server.options import ModelOptions, ServerOptions
from tests.support.cpu_time import takes_less_than
from tests.support.fake_loaded_model import FakeLoadedModel
from tests.support.waiting import until


def engine_of(**limits: Any) -> Engine:
    return Engine(FakeLoadedModel(), limits=Limits(**limits))  # type: ignore[arg-type]


CHAT = {"messages": [{"role": "user", "content": "a"}]}
LONG = "x" * 2_000
FIELDS: list[tuple[type[BaseModel], dict[str, Any], str]] = [
    (CompletionRequest, {"prompt": "a", "user": LONG}, "user"),
    (CompletionRequest, {"prompt": "a", "model": LONG}, "model"),
    (CompletionRequest, {"prompt": "a", "stop": LONG}, "stop"),
    (CompletionRequest, {"prompt": "a", "stop": ["a"] * 65}, "stop"),
    (CompletionRequest, {"prompt": "a", "suffix": LONG * 50}, "suffix"),
    (CompletionRequest, {"prompt": "a", "grammar": LONG * 600}, "grammar"),
    (CompletionRequest, {"prompt": "a", "logprobs": 1_000}, "logprobs"),
    (CompletionRequest, {"prompt": "a", "seed": 10**30}, "seed"),
    (CompletionRequest, {"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
    (CompletionRequest, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(5_000)}}, "logit"),
    (CompletionRequest, {"prompt": "a", "logit_bias": {LONG: 1}}, "logit_bias"),
    (ChatRequest, {**CHAT, "user": LONG}, "user"),
    (ChatRequest, {**CHAT, "model": LONG}, "model"),
    (ChatRequest, {**CHAT, "stop": [LONG]}, "stop"),
    (ChatRequest, {"messages": CHAT["messages"] * 5_000}, "messages"),
    (ChatRequest, {"messages": [{"role": "user", "content": "a", "name": LONG}]}, "messages"),
    (ChatRequest, {**CHAT, "tools": [{"function": {"name": "a"}}] * 129}, "tools"),
    (ChatRequest, {**CHAT, "tools": [{"function": {"name": LONG}}]}, "tools"),
    (ChatRequest, {**CHAT, "functions": [{"name": "a"}] * 129}, "functions"),
    (ResponsesRequest, {"input": "a", "model": LONG}, "model"),
    (ResponsesRequest, {"input": "a", "user": LONG}, "user"),
    (ResponsesRequest, {"input": "a", "metadata": {"a": LONG}}, "metadata"),
    (ResponsesRequest, {"input": "a", "metadata": {str(i): "a" for i in range(17)}}, "metadata"),
    (ResponsesRequest, {"input": "a", "tools": [{}] * 129}, "tools"),
    (ResponsesRequest, {"input": [{}] * 5_000}, "input"),
]


@pytest.mark.parametrize(
    ("model", "body", "name"),
    [pytest.param(*each, id=f"{each[0].__name__}-{each[2]}-{i}") for i, each in enumerate(FIELDS)],
)
def test_every_field_has_a_length_and_is_named(
    model: type[BaseModel], body: dict[str, Any], name: str
) -> None:
    with pytest.raises(RequestError) as caught:
        read_body(model, json.dumps(body).encode())
    assert caught.value.status_code == 400
    assert str(caught.value.body["error"]["param"]).startswith(name)
    assert len(caught.value.detail) < 1_000


PIECES = {
    "objects": (CompletionRequest, '{"prompt":[%s]}', "{}"),
    "lists": (CompletionRequest, '{"prompt":[%s]}', "[]"),
    "texts and one object": (CompletionRequest, '{"prompt":[%s,{}]}', '""'),
    "tokens and one object": (CompletionRequest, '{"prompt":[%s,{}]}', "7"),
    "tokens": (DetokenizeRequest, '{"tokens":[%s]}', '"x"'),
    "messages": (ChatRequest, '{"messages":[%s]}', "7"),
    "parts": (ChatRequest, '{"messages":[{"role":"user","content":[%s]}]}', "7"),
    "calls": (ChatRequest, '{"messages":[{"role":"assistant","tool_calls":[%s]}]}', "7"),
    "tools": (ChatRequest, '{"messages":[],"tools":[%s]}', "7"),
    "stops": (ChatRequest, '{"messages":[],"stop":[%s]}', "7"),
    "items": (ResponsesRequest, '{"input":[%s]}', "7"),
}


@pytest.mark.parametrize("name", PIECES)
def test_an_invalid_body_of_any_size_is_refused_by_its_first_errors(name: str) -> None:
    model, around, piece = PIECES[name]
    body = (around % ",".join([piece] * (2_000_000 // len(piece)))).encode()

    def read() -> None:
        with pytest.raises(RequestError) as caught:
            read_body(model, body)
        assert len(caught.value.detail) < 1_000

    assert takes_less_than(5, read)


def test_members_of_objects_are_counted_before_they_are_checked() -> None:
    many = {f"{i:x}": 0 for i in range(MOST_VALUES)}
    with pytest.raises(RequestError, match="50,000 objects, lists and members"):
        check_values(many)
    check_values([7] * 500_000)  # A body of the largest size has room for this many tokens.


@pytest.mark.parametrize("depth", [129, 150, 250, 100_000])
@pytest.mark.parametrize("pair", ["[]", ('{"a":', "}")])
def test_deep_bodies_are_refused(depth: int, pair: Any) -> None:
    begin, end = pair
    deep = begin * depth + "7" + end * depth
    tools = '"tools":[{"function":{"name":"a","parameters":' + deep + "}}]"
    body = '{"messages":[{"role":"user","content":"a"}],' + tools + "}"
    with pytest.raises(RequestError, match="within each other") as caught:
        read_body(ChatRequest, body.encode())
    assert caught.value.status_code == 400


def test_templates_that_end_in_recursion_are_no_failure_of_the_server() -> None:
    error = as_request_error(RecursionError("maximum recursion depth exceeded"))
    assert error.status_code == 400
    assert "nested too deeply" in error.detail


def test_a_pool_without_room_is_no_failure_of_the_server() -> None:
    error = as_request_error(PoolError("close some, or give a larger limit"))
    assert (error.status_code, error.detail) == (503, "close some, or give a larger limit")


@pytest.mark.parametrize("text", ["{", "", "NaN", '{"prompt": NaN}', '"\\ud800"', "\xff"])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="the body is not JSON"):
        read_body(CompletionRequest, text.encode("latin-1"))


def test_a_request_may_have_so_many_jobs() -> None:
    admission = Admission(Limits(max_jobs=10, max_waiting=100), n_lanes=2)
    admission.check(10)
    with pytest.raises(RequestError, match="asks for 11 choices") as caught:
        admission.check(11)
    assert caught.value.status_code == 400
    few = Admission(Limits(max_jobs=10, max_waiting=4), n_lanes=2)
    few.check(6)
    with pytest.raises(RequestError, match="6 are the most here"):
        few.check(7)  # Status 429 would make the client try again forever.


def test_prompts_times_n_are_jobs() -> None:
    def n_jobs(prompt: Any, n: int) -> int:
        return CompletionRequest(prompt=prompt, n=n).n_jobs  # type: ignore[call-arg]

    assert n_jobs("a", 3) == 3
    assert n_jobs([5, 6], 3) == 3
    assert n_jobs(["a"] * 20_000, 128) == 2_560_000
    assert n_jobs([[5], [6]], 3) == 6


def test_waiting_is_counted_in_jobs() -> None:
    admission = Admission(Limits(max_waiting=4), n_lanes=2)
    with admission.jobs_of(5):
        with admission.jobs_of(1):
            assert admission.jobs == 6
            with pytest.raises(RequestError) as caught, admission.jobs_of(1):
                pass
            assert caught.value.status_code == 429
            assert caught.value.retry_after
        with pytest.raises(RequestError), admission.jobs_of(2):
            pass
    assert admission.jobs == 0


async def test_a_job_that_missed_the_call_to_stop_is_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Answering] = []
    interrupted = threading.Event()

    def interrupt(answering: Answering) -> None:
        calls.append(answering)
        if len(calls) > 1:  # The first interruption came before the job waited.
            interrupted.set()

    monkeypatch.setattr(Answering, "interrupt", interrupt)
    engine = engine_of()
    begun = threading.Event()

    def wait_for_room(_: Any) -> None:
        begun.set()
        assert interrupted.wait(60)

    task = asyncio.ensure_future(engine.run_jobs([Job(wait_for_room, None, None)]))
    await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    await until(lambda: not engine.running)

    engine.close()


async def test_who_looks_at_the_model_waits_for_no_answer() -> None:
    engine = engine_of()
    begun, go_on = threading.Event(), threading.Event()

    def answer(_: Any) -> None:
        begun.set()
        assert go_on.wait(60)

    def fail(_: Any) -> None:
        raise EntropyKVError("the pool is closed; make a new one")

    task = asyncio.ensure_future(engine.run_jobs([Job(answer, None, None)]))
    assert await asyncio.to_thread(begun.wait, 60)
    assert await engine.look(lambda model: model.name) == "fake"
    with pytest.raises(EntropyKVError, match="the pool is closed"):
        await engine.look(fail)
    go_on.set()
    await task
    await asyncio.to_thread(engine.close)
    with pytest.raises(RequestError, match="shutting down"):
        await engine.look(fail)


async def test_an_answer_that_the_end_of_the_server_interrupts_is_refused() -> None:
    engine = engine_of()
    begun = threading.Event()

    def wait_for_room(_: Any) -> None:
        begun.set()
        assert job.stop.wait(60)
        raise PoolError("the decode was called off")

    job = Job(wait_for_room, None, None)

    task = asyncio.ensure_future(engine.run_jobs([job]))
    assert await asyncio.to_thread(begun.wait, 60)
    await asyncio.to_thread(engine.close)
    with pytest.raises(RequestError, match="shutting down"):
        await task

    assert engine.outcomes["stopped"] == 1


async def test_the_next_job_is_not_stopped_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that ends while it is stopped does not pass the stop on to the model's next job."""
    engine = engine_of()
    stopped: list[Any] = []

    def interrupt(_: Answering) -> None:
        time.sleep(0.1)
        stopped.extend(engine._jobs.values())

    monkeypatch.setattr(Answering, "interrupt", interrupt)
    begun = threading.Event()

    def wait_for_the_stop(_: Any) -> None:
        begun.set()
        assert first.stop.wait(60)

    first = Job(wait_for_the_stop, None, None)
    second = Job(lambda _: None, None, None)

    tasks = [asyncio.ensure_future(engine.run_jobs([job])) for job in (first, second)]
    assert await asyncio.to_thread(begun.wait, 60)
    tasks[0].cancel()
    await tasks[1]

    assert stopped
    assert second not in stopped
    engine.close()


async def test_seconds_of_a_request_go_by_while_it_waits() -> None:
    engine = engine_of(request_seconds=60)
    begun, release = threading.Event(), threading.Event()

    def answer(_: Any) -> None:
        begun.set()
        assert release.wait(60)

    slow = Job(answer, None, None, arrival=time.monotonic() + 3600)
    first = asyncio.ensure_future(engine.run_jobs([slow]))
    assert await asyncio.to_thread(begun.wait, 60)
    late = Job(lambda _: None, None, None, arrival=time.monotonic() - 61)
    with pytest.raises(RequestError) as caught:
        await engine.run_jobs([late])
    assert caught.value.status_code == 504
    # The first request is still running, so that the second one had to wait for it.
    assert engine.running
    release.set()
    await first

    engine.close()


def test_figures_of_a_pool_are_taken_once_however_many_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        taken = 0

        def stats(self) -> int:
            self.taken += 1
            return self.taken

    engine = engine_of()
    pool = engine.pool = Pool()  # type: ignore[assignment]
    now = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: now))
        moments = [engine.moment() for _ in range(1_000)]
        assert pool.taken == 1
        assert moments[0] is moments[999]
        now += 1
        engine.moment()
        assert pool.taken == 2
    engine.close()


def scope(**headers: str) -> dict[str, Any]:
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": "POST", "path": "/", "headers": given}


def piece(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def status_of(
    app: Any,
    asked: dict[str, Any],
    *messages: dict[str, Any],
    waits: asyncio.Event | None = None,
) -> int:
    """Return the status of an ASGI app's answer; the client sends nothing after the messages.

    `waits` is set once the app waits for more.
    """
    rest, seen = list(messages), []

    async def receive() -> dict[str, Any]:
        if not rest:
            if waits is not None:
                waits.set()
            await asyncio.sleep(3600)
        return rest.pop(0)

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    await app(asked, receive, send)
    return int(seen[0])


async def echo(_: Any, receive: Any, send: Any) -> None:
    body = await receive()
    assert body["more_body"] is False
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body["body"]})


def test_every_limit_of_a_server_reaches_its_requests() -> None:
    given = {
        name: number
        for number, name in enumerate(Limits.__dataclass_fields__, 1001)
        if name in ServerOptions.model_fields
    }
    server = ServerOptions(**given)
    limits = limits_of(ModelOptions(model="model.gguf"), server)
    # The conversations are counted for each model.
    assert dataclasses.asdict(limits) == {**given, "conversations": Limits.conversations}


def test_bodies_have_limits_of_bytes_and_seconds() -> None:
    admission = Admission(Limits(max_body=10, max_bodies=12, client_seconds=60), 1)
    app = Bodies(echo, admission)
    hasty = Bodies(echo, Admission(Limits(max_body=10, client_seconds=0.1), 1))

    def status(*messages: dict[str, Any], of: Any = app, **headers: str) -> int:
        return asyncio.run(status_of(of, scope(**headers), *messages))

    assert status(piece(b"12345", more=True), piece(b"67890")) == 200
    assert status(piece(b"12345", more=True), piece(b"678901")) == 413
    assert status(content_length="11") == 413
    assert status(content_length="9" * 5_000, of=hasty) in (408, 413)
    assert status(piece(b"1", more=True), of=hasty) == 408
    assert status(piece(b""), x_session_id="a" * 300) == 400
    with admission.body() as other:
        other.add(b"1234")
        assert status(piece(b"123456789")) == 503
    assert status(piece(b"123456789")) == 200  # Refused bodies are no longer counted.


async def test_a_slow_upload_occupies_no_place_in_the_queue(tmp_path: Path) -> None:
    engine = engine_of(client_seconds=60)
    conversations = Conversations(tmp_path, 1 << 20, engine.prefix_cache)
    turns = TurnMiddleware(echo, engine=engine, conversations=conversations, replica="one")
    app = Bodies(turns, engine.admission)

    waits = asyncio.Event()
    begin = piece(b"{", more=True)
    slow = asyncio.ensure_future(status_of(app, scope(), begin, waits=waits))
    await waits.wait()
    assert await asyncio.wait_for(status_of(app, scope(), piece(b"{}")), 60) == 200
    slow.cancel()

    engine.close()


async def test_who_waits_for_a_turn_and_leaves_waits_no_more(tmp_path: Path) -> None:
    """A request whose client has left gets no turn, and so its conversation is not loaded."""
    engine = engine_of()
    release = asyncio.Event()
    inside = []

    async def slow(_: Any, receive: Any, send: Any) -> None:
        inside.append((await receive())["body"])
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    conversations = Conversations(tmp_path, 1 << 20, engine.prefix_cache)
    turns = TurnMiddleware(slow, engine=engine, conversations=conversations, replica="one")

    first = asyncio.ensure_future(status_of(turns, scope(), piece(b"1")))
    await until(lambda: inside)
    third = asyncio.ensure_future(status_of(turns, scope(), piece(b"3")))
    gone = status_of(turns, scope(), piece(b"2"), {"type": "http.disconnect"})
    assert await asyncio.wait_for(gone, 60) == 499
    assert not first.done()
    release.set()
    assert [await first, await third] == [200, 200]
    assert inside == [b"1", b"3"]

    engine.close()


@pytest.mark.parametrize("limits", [{"max_waiting": 1}, {"request_seconds": 60}])
async def test_who_waits_for_a_turn_is_counted_and_has_a_limit_of_time(
    tmp_path: Path, limits: dict[str, float]
) -> None:
    engine = engine_of(**limits)
    begun, release = asyncio.Event(), asyncio.Event()

    async def slow(_: Any, __: Any, send: Any) -> None:
        begun.set()
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    conversations = Conversations(tmp_path, 1 << 20, engine.prefix_cache)
    turns = TurnMiddleware(slow, engine=engine, conversations=conversations, replica="one")
    app = Bodies(turns, engine.admission)

    first = asyncio.ensure_future(status_of(app, scope(), piece(b"{}")))
    await begun.wait()
    if "max_waiting" in limits:
        second = asyncio.ensure_future(status_of(app, scope(), piece(b"{}")))
        await until(lambda: turns._waiting[None] == 2)
        assert await status_of(app, scope(), piece(b"{}")) == 429
        release.set()
        assert await second == 200
    else:
        late = {**scope(), admission_module._ARRIVAL: time.monotonic() - 61}
        assert await status_of(app, late, piece(b"{}")) == 504
    release.set()
    assert await first == 200

    engine.close()


@pytest.mark.parametrize(
    ("host", "allowed", "given", "status"),
    [
        ("127.0.0.1", None, "127.0.0.1:8000", 200),
        ("127.0.0.1", None, "localhost", 200),
        ("127.0.0.1", None, "app.localhost:8000", 200),
        ("::1", None, "[::1]:8000", 200),
        ("127.0.0.1", None, "192.168.1.5:8000", 200),  # An address is never the name of a web page.
        ("127.0.0.1", None, "evil.example", 403),
        ("127.0.0.1", None, "evil.example:8000", 403),
        ("127.0.0.1", None, "localhost.evil.example", 403),
        ("127.0.0.1", None, "127.0.0.1.evil.example", 403),
        ("127.0.0.1", None, "", 403),
        ("0.0.0.0", None, "evil.example", 403),  # noqa: S104
        ("llm.example.com", None, "LLM.example.com.", 200),
        ("0.0.0.0", "llm.example.com, other", "other:80", 200),  # noqa: S104
        ("0.0.0.0", "*.example.com", "llm.example.com", 200),  # noqa: S104
        ("0.0.0.0", "*.example.com", "evilexample.com", 403),  # noqa: S104
        ("0.0.0.0", "*", "evil.example", 200),  # noqa: S104
    ],
)
def test_hosts(host: str, allowed: str | None, given: str, status: int) -> None:
    app = HostHeaderCheck(echo, host, allowed)
    assert asyncio.run(status_of(app, scope(host=given), piece(b""))) == status


def test_a_server_knows_its_machines_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Machine")
    for host, status in (("0.0.0.0", 200), ("127.0.0.1", 403)):  # noqa: S104
        app = HostHeaderCheck(echo, host, None)
        assert asyncio.run(status_of(app, scope(host="machine:1"), piece(b""))) == status
