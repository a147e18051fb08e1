"""A server with several models loads a model for its first request, and unloads unused ones."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("fastapi", reason="needs the extra server")

from entropykv import Session
from entropykv.errors import SettingsError
from entropykv.server import ModelCatalog, ModelOptions, ServerOptions, create_app
from entropykv.server.http.errors import RequestError
from entropykv.server.models.held_model import estimate_memory
from tests.support.running_server import Server
from tests.support.several_models import WORDS, Running, catalog_of, running, write_models
from tests.support.tiny_models import write_llama
from tests.support.waiting import until, wait_for

LONG = {"max_tokens": 4000, "min_tokens": 4000}
"""An answer that takes more than a second, so that others find it unfinished."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    write_models(made, "one", "two", "three", "broken")
    return made


def text_alone(path: Path) -> str:
    """Return the answer of a model in a session without a server."""
    with Session(path, n_ctx=256, kv_budget="64", n_threads=1) as session:
        prompt = session.tokenize(str(WORDS["prompt"]))
        tokens = session.generate(prompt, max_tokens=6, temperature=0.0)
        return session.detokenize([*tokens])


async def text_of(served: Running, model: str | None) -> str:
    answer = await served.ask(model)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


async def streamed(served: Running, model: str) -> list[Any]:
    """Return all chunks of a long answer, which ASGITransport delivers when it is complete."""
    answer = await served.ask(model, **LONG, stream=True)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_each_request_is_answered_by_the_model_it_names(folder: Path) -> None:
    async with running(catalog_of(folder, "one", "two")) as served:
        assert await served.states() == {"one": "unloaded", "two": "unloaded"}
        assert served.gates.loads == []
        for name in ("one", "two", "one"):
            assert await text_of(served, name) == text_alone(folder / f"{name}.gguf")
        assert served.gates.loads == ["one", "two"]
        assert await served.states() == {"one": "loaded", "two": "loaded"}

    assert text_alone(folder / "one.gguf") != text_alone(folder / "two.gguf")


async def test_a_request_that_names_no_model_or_an_unknown_one(folder: Path) -> None:
    async with running(catalog_of(folder, "one", "two")) as served:
        unknown, none = await served.ask("four"), await served.ask(None)
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "model_not_found"
        assert none.status_code == 400
        for answer in (unknown, none):
            assert "'one' and 'two'" in answer.json()["error"]["message"]
        assert served.gates.loads == []
        router = (await served.client.get("/props")).json()
        assert router["role"] == "router"
        assert (await served.client.get("/props?model=two")).json()["model_alias"] == "two"
    async with running(catalog_of(folder, "one", "two", default="two")) as served:
        assert await text_of(served, None) == text_alone(folder / "two.gguf")
    async with running(catalog_of(folder, "one")) as served:
        assert await text_of(served, None) == text_alone(folder / "one.gguf")
        assert (await served.ask("any")).status_code == 404


async def test_routes_take_the_model_from_the_body_or_the_query(folder: Path) -> None:
    async with running(catalog_of(folder, "one", "two")) as served:
        for path, field in (
            ("/tokenize", "content"),
            ("/extras/tokenize", "input"),
            ("/extras/tokenize/count", "input"),
        ):
            answer = await served.client.post(path, json={field: "garden", "model": "two"})
            assert answer.status_code == 200, answer.text
        await text_of(served, "two")
        for path in ("/slots", "/v1/kv", "/v1/kv/text"):
            here = await served.client.get(f"{path}?model=two")
            assert here.status_code == 200
            away = await served.client.get(f"{path}?model=one")
            assert away.json()["error"]["code"] == "model_not_loaded"
            assert (await served.client.get(path)).status_code == 400
        assert served.gates.loads == ["two"]
        figures = (await served.client.get("/metrics")).text
        assert 'entropykv_kv_bytes{model="two"} ' in figures
        assert 'entropykv_model_loaded{model="one"} 0' in figures
        assert figures.count("# TYPE entropykv_kv_bytes gauge") == 1


async def test_models_are_loaded_and_unloaded_by_routes(folder: Path) -> None:
    options = {"models_autoload": False}
    async with running(catalog_of(folder, "one", "two"), **options) as served:
        assert (await served.ask("one")).json()["error"]["code"] == "model_not_loaded"
        load, unload = "/models/load", "/models/unload"
        answer = await served.client.post(load, json={"model": "one"})
        assert answer.json() == {"success": True}
        await served.until("one", "loaded")
        assert (await served.ask("one")).status_code == 200
        assert (await served.client.post(load, json={"model": "one"})).status_code == 400
        assert (await served.client.post(load, json={"model": "x"})).status_code == 404
        assert (await served.client.post(unload, json={"model": "two"})).status_code == 400
        answer = await served.client.post(unload, json={"model": "one"})
        assert answer.json() == {"success": True}
        await served.until("one", "unloaded")
        assert (await served.ask("one")).status_code == 400
        forced = await served.client.post(
            "/v1/completions?autoload=true", json={**WORDS, "model": "two"}
        )
        assert forced.status_code == 200


async def test_a_server_of_one_model_has_no_routes_that_unload_it(folder: Path) -> None:
    model = ModelOptions(model=str(folder / "one.gguf"), n_ctx=256, kv_budget="64", n_threads=1)
    async with running(model) as served:
        assert served.gates.loads == ["one.gguf"]
        assert (await served.ask("any name")).status_code == 200
        answer = await served.client.post("/models/unload", json={"model": "one.gguf"})
        assert answer.status_code == 404
        (entry,) = (await served.client.get("/v1/models")).json()["data"]
        assert "status" not in entry


async def test_the_least_recently_used_model_makes_room(folder: Path) -> None:
    async with running(catalog_of(folder, "one", "two", "three"), models_max=2) as served:
        for name in ("one", "two", "one", "three"):
            await text_of(served, name)
        assert await served.states() == {"one": "loaded", "two": "unloaded", "three": "loaded"}
        await text_of(served, "two")
        assert (await served.states())["one"] == "unloaded"
        assert await text_of(served, "one") == text_alone(folder / "one.gguf")


async def test_loaded_models_take_no_more_memory_than_they_may(folder: Path) -> None:
    options = catalog_of(folder, "one").models[0].options
    size = estimate_memory(folder / "one.gguf", options).total
    models = catalog_of(folder, "one", "two", "three")

    async with running(models, models_max=0, models_memory=f"{2 * size + 100}B") as served:
        for name in ("one", "two", "three"):
            await text_of(served, name)
        assert list((await served.states()).values()) == ["unloaded", "loaded", "loaded"]
    async with running(models, models_max=0, models_memory=f"{size - 1}B") as served:
        answer = await served.ask("one")
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "model_too_large"
        assert "--models-memory" in answer.json()["error"]["message"]
        assert served.gates.loads == []

    one = ModelOptions(model=str(folder / "one.gguf"), n_ctx=256, kv_budget="64")
    with pytest.raises(SettingsError, match="--models-memory"):
        create_app(one, ServerOptions(models_memory=f"{size - 1}B"))


async def test_a_model_that_is_too_large_unloads_no_other_one(folder: Path) -> None:
    small = catalog_of(folder, "one").models
    large = catalog_of(folder, "two", n_ctx=2048, parallel=8, kv_budget="64MiB").models
    catalog = ModelCatalog.of_several([*small, *large])
    async with running(catalog, models_memory="64MiB") as served:
        await text_of(served, "one")
        assert (await served.ask("two")).status_code == 400
        assert (await served.ask("broken")).status_code == 404
        assert await served.states() == {"one": "loaded", "two": "unloaded"}


async def test_a_model_sleeps_although_timers_fire_early(folder: Path) -> None:
    """A model sleeps when it was idle for its time, though timers of uvloop may fire early."""

    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    early: list[float] = []

    def called_early(delay: float, *arguments: Any, **named: Any) -> asyncio.TimerHandle:
        if 0.5 < delay <= 1.0 and len(early) < 2:
            early.append(delay)
            delay -= 0.4
        return call_later(delay, *arguments, **named)

    async with running(catalog_of(folder, "one", sleep_idle_seconds=1)) as served:
        loop.call_later = called_early  # type: ignore[method-assign]
        assert (await served.client.post("/v1/completions", json=WORDS)).status_code == 200
        await served.until("one", "sleeping")
        assert early


@pytest.mark.parametrize("several", [True, False])
async def test_an_idle_model_sleeps_until_the_next_request(folder: Path, several: bool) -> None:
    catalog = catalog_of(folder, "one", sleep_idle_seconds=1)
    models = catalog if several else catalog.models[0].options
    async with running(models) as served:
        before = await text_of(served, "one")
        await served.until("one", "sleeping")
        assert served.models.named("one").engine is None
        assert (await served.client.get("/health")).json() == {"status": "ok"}
        assert (await served.client.get("/props?model=one")).json()["is_sleeping"] is True
        assert (await served.client.get("/v1/kv?model=one")).status_code == 400
        await asyncio.sleep(0.1)
        assert served.models.named("one").engine is None, "looking wakes nothing"
        assert await text_of(served, "one") == before
        assert served.gates.loads == ["one", "one"]


async def test_the_engine_of_an_app_is_the_one_in_memory(folder: Path) -> None:
    options = catalog_of(folder, "one", sleep_idle_seconds=1).models[0].options
    async with running(options) as served:
        await text_of(served, "one")
        state = served.app.state
        first = state.engine
        assert first is served.models.named("one").engine
        await served.until("one", "sleeping")
        with pytest.raises(RequestError, match="is not loaded"):
            _ = state.engine
        await text_of(served, "one")
        assert state.engine is served.models.named("one").engine
        assert state.engine is not first


def test_an_app_of_several_models_has_no_engine(folder: Path) -> None:
    app = create_app(catalog_of(folder, "one", "two"), ServerOptions())
    assert not hasattr(app.state, "engine")
    assert app.state.models.has_several


async def test_unloading_waits_for_the_end_of_an_answer(folder: Path) -> None:
    async with running(catalog_of(folder, "one", "two", n_ctx=8192), models_max=1) as served:
        await text_of(served, "one")
        long = asyncio.ensure_future(streamed(served, "one"))
        await until(lambda: served.counts("one")[1] == 1)
        assert (await served.client.get("/props?model=one")).json()["is_sleeping"] is False
        other = asyncio.ensure_future(served.ask("two"))
        await until(lambda: served.models.named("one").leaves)
        late = asyncio.ensure_future(served.ask("one"))
        chunks = await long
        assert sum(bool(each["choices"][0]["text"]) for each in chunks) > 50
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert (await other).status_code == (await late).status_code == 200
        assert served.gates.loads == ["one", "two", "one"]
        again = asyncio.ensure_future(streamed(served, "one"))
        await until(lambda: served.counts("one")[1] == 1)
        await served.client.post("/models/unload", json={"model": "one"})
        assert (await again)[-1]["choices"][0]["finish_reason"] == "length"
        await served.until("one", "unloaded")


async def test_whoever_watches_keeps_no_model_in_memory(folder: Path) -> None:
    async with running(catalog_of(folder, "one", sleep_idle_seconds=1)) as served:
        await text_of(served, "one")
        watching = await served.client.get("/v1/kv/stream?model=one")
        assert "event: kv" in watching.text
        assert served.models.named("one").engine is None


async def test_requests_at_the_same_time_load_a_model_once(folder: Path) -> None:
    async with running(catalog_of(folder, "one", "two")) as served:
        answers = await asyncio.gather(*(served.ask("one") for _ in range(6)))
        assert {answer.status_code for answer in answers} == {200}
        assert served.gates.loads == ["one"]
        assert served.counts("one") == (1, 0)


async def test_the_others_answer_while_one_is_loaded(folder: Path) -> None:
    async with running(catalog_of(folder, "one", "two")) as served:
        await text_of(served, "one")
        gate = served.gates.close("two")
        waiting = asyncio.ensure_future(served.ask("two"))
        await until(lambda: "two" in served.gates.loads)
        assert await served.states() == {"one": "loaded", "two": "loading"}
        assert await text_of(served, "one") == text_alone(folder / "one.gguf")
        assert (await served.client.get("/health")).status_code == 200
        assert not waiting.done()
        gate.set()
        assert (await waiting).status_code == 200


async def test_a_model_that_cannot_be_loaded_harms_no_other(folder: Path, tmp_path: Path) -> None:
    write_models(tmp_path, "one", "broken")

    async with running(catalog_of(tmp_path, "one", "broken"), models_max=1) as served:
        await text_of(served, "one")
        for answer in await asyncio.gather(*(served.ask("broken") for _ in range(3))):
            assert answer.status_code == 500
            error = answer.json()["error"]
            assert error["code"] == "model_load_failed"
            assert "broken.gguf: is truncated" in error["message"]
            assert str(tmp_path) not in answer.text
        entry = (await served.client.get("/v1/models/broken")).json()
        assert entry["status"]["failed"] is True
        assert str(tmp_path) not in json.dumps(entry)
        assert (await served.states())["one"] == "loaded", "a damaged file made room"
        assert await text_of(served, "one") == text_alone(tmp_path / "one.gguf")
        (tmp_path / "broken.gguf").write_bytes((folder / "two.gguf").read_bytes())
        assert await text_of(served, "broken") == text_alone(folder / "two.gguf")


async def test_requests_that_wait_for_a_model_have_limits(folder: Path) -> None:
    limits = {"max_waiting": 2, "request_seconds": 2}
    async with running(catalog_of(folder, "one"), **limits) as served:
        gate = served.gates.close("one")
        waiting = [asyncio.ensure_future(served.ask("one")) for _ in range(2)]
        await until(lambda: served.models.named("one").waiting == 2)
        refused = await served.ask("one")
        assert refused.status_code == 429
        assert "retry-after" in refused.headers
        assert [each.status_code for each in await asyncio.gather(*waiting)] == [504, 504]
        gate.set()
        await served.until("one", "loaded")
        assert (await served.ask("one")).status_code == 200


async def test_a_model_is_not_loaded_for_clients_that_have_gone(folder: Path) -> None:
    async with running(catalog_of(folder, "one", "two", n_ctx=8192), models_max=1) as served:
        await text_of(served, "one")
        long = asyncio.ensure_future(streamed(served, "one"))
        await until(lambda: served.counts("one")[1] == 1)
        leaves = asyncio.Event()
        request = asyncio.ensure_future(served.ask_and_leave("two", leaves))
        await until(lambda: served.models.named("one").leaves)
        leaves.set()
        assert await request == 499
        await until(lambda: not served.models.named("one").leaves)
        assert not long.done()
        await long
        assert served.gates.loads == ["one"]
        assert await served.states() == {"one": "loaded", "two": "unloaded"}


async def test_nor_where_its_turn_comes_once_they_have_gone(folder: Path) -> None:
    async with running(catalog_of(folder, "one", "two")) as served:
        gate, leaves = served.gates.close("one"), asyncio.Event()
        first = asyncio.ensure_future(served.ask("one"))
        await until(lambda: "one" in served.gates.loads)
        request = asyncio.ensure_future(served.ask_and_leave("two", leaves))
        await until(lambda: served.models.named("two").estimate is not None)
        leaves.set()
        assert await request == 499
        gate.set()
        assert (await first).status_code == 200
        await served.until("two", "unloaded")
        assert served.gates.loads == ["one"]
        assert (await served.ask("two")).status_code == 200


async def test_a_shutdown_while_a_model_is_loaded_answers_who_waits(folder: Path) -> None:
    async with running(catalog_of(folder, "one", "two")) as served:
        await text_of(served, "one")
        gate = served.gates.close("two")
        waiting = asyncio.ensure_future(served.ask("two"))
        await until(lambda: "two" in served.gates.loads)
        served.models.stop()
        assert (await waiting).status_code == 503
        assert (await served.ask("one")).status_code == 503
        assert served.models.is_loading
        gate.set()
    assert not served.models.is_loading


async def test_each_model_has_options_and_a_pool_of_its_own(folder: Path) -> None:
    alone = catalog_of(folder, "one").models
    pool = catalog_of(folder, "two", parallel=3, kv_budget="300").models
    async with running(ModelCatalog.of_several([*alone, *pool])) as served:
        await text_of(served, "one")
        await text_of(served, "two")
        for name, slots, budget in (("one", 1, "64"), ("two", 3, "300")):
            answer = (await served.client.get(f"/slots?model={name}")).json()
            assert len(answer) == slots
            figures = (await served.client.get(f"/v1/kv?model={name}")).json()
            assert figures["kv_budget"].startswith(budget)
            assert len(figures["conversations"]) == 1


async def test_users_see_only_their_conversations_in_every_model(
    folder: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("anna\nben\n", encoding="utf-8")
    catalog = catalog_of(folder, "one", "two", parallel=2, kv_budget="300")

    async with running(catalog, api_key_file=str(keys), show_text=True) as served:

        def of(user: str) -> dict[str, str]:
            return {"authorization": f"Bearer {user}"}

        assert (await served.ask("one")).status_code == 401
        load = await served.client.post("/models/load", json={"model": "one"})
        assert load.status_code == 401
        for user, model in (("anna", "one"), ("ben", "two")):
            body = {**WORDS, "prompt": f"A secret of {user}: ", "model": model, "user": user}
            answer = await served.client.post("/v1/completions", json=body, headers=of(user))
            assert answer.status_code == 200
        for user, own, foreign in (("anna", "one", "two"), ("ben", "two", "one")):
            here = await served.client.get(f"/v1/kv?model={own}", headers=of(user))
            assert [each["name"] for each in here.json()["conversations"]] == [user]
            there = await served.client.get(f"/v1/kv?model={foreign}", headers=of(user))
            assert there.json()["conversations"] == []
            text = await served.client.get(f"/v1/kv/text?model={foreign}", headers=of(user))
            assert text.status_code == 404
            text = await served.client.get(f"/v1/kv/text?model={own}", headers=of(user))
            assert f"secret of {user}" in "".join(text.json()["texts"])


async def test_saved_slots_of_models_have_folders_of_their_own(
    folder: Path, tmp_path: Path
) -> None:
    catalog = catalog_of(folder, "one", "two")

    async with running(catalog, slot_save_path=str(tmp_path)) as served:
        for name in ("one", "two"):
            await text_of(served, name)
            answer = await served.client.post(
                "/slots/0?action=save", json={"filename": "talk", "model": name}
            )
            assert answer.status_code == 200, answer.text
            assert (tmp_path / name / "talk").is_file()
        answer = await served.client.post(
            "/slots/0?action=restore&model=two", json={"filename": "talk"}
        )
        assert answer.json()["n_restored"] > 0


def serving(*options: object) -> Server:
    return Server("-t", 1, "-c", 512, "--kv-budget", 64, *options, model=None, usual=())


def ask(server: Server, model: str, prompt: str = "The old garden") -> int:
    body = json.dumps({**WORDS, "model": model, "prompt": prompt})
    return server.post("/v1/completions", body).status_code


def wait_until(server: Server, model: str, state: str) -> None:
    entry = f"/v1/models/{model}"
    wait_for(lambda: server.get(entry).json()["status"]["value"] == state)


def test_memory_goes_back_when_a_model_is_unloaded(tmp_path: Path) -> None:
    large = tmp_path / "large.gguf"
    write_llama(large, n_layer=2, n_head=16, n_head_kv=4, head_dim=64, n_ff=4096)
    write_models(tmp_path, "small")
    size = large.stat().st_size
    assert size > 50 << 20
    with serving("--models-dir", tmp_path, "--models-max", 1) as server:
        # The first load also allocates memory that stays for the whole process.
        assert ask(server, "small") == 200
        before = server.rss()
        after = []
        for _ in range(3):
            assert ask(server, "large", "word " * 40) == 200
            assert server.rss() - before > 0.8 * size
            assert ask(server, "small") == 200
            after.append(server.rss() - before)
        assert max(after) < 0.4 * size, after


def test_a_signal_ends_the_process_while_a_model_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = socket.create_server(("127.0.0.1", 0))  # This hub accepts connections, but never answers.
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    preset = tmp_path / "models.ini"
    preset.write_text(
        "[slow]\nhf-repo = somebody/slow\nload-on-startup = true\n"
        f"[one]\nmodel = {folder}/one.gguf\n",
        encoding="utf-8",
    )
    with hub, serving("--models-preset", preset) as server:
        wait_until(server, "slow", "loading")
        assert ask(server, "one") == 200
        start = time.monotonic()
        code, errors = server.end()
        assert code == 0
        assert "Traceback" not in errors
        assert time.monotonic() - start < 10


def test_the_command_serves_a_directory(tmp_path: Path) -> None:
    write_models(tmp_path, "one", "two")
    options = ("--models-max", 1, "--sleep-idle-seconds", 1)
    with serving("--models-dir", tmp_path, *options) as server:
        with server.client() as client:
            assert [each.id for each in client.models.list()] == ["one", "two"]
            answer = client.completions.create(model="two", prompt="The old", max_tokens=4)
            assert answer.model == "two"
            with pytest.raises(openai.NotFoundError, match="'one' and 'two' are"):
                client.completions.create(model="three", prompt="The old", max_tokens=4)
        wait_until(server, "two", "sleeping")
        assert ask(server, "two") == 200
    assert "2 models, loaded when asked for: one, two" in "".join(server.log)
