"""`entropykv serve` works with OpenAI's own client, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from entropykv import system
from entropykv.server import ModelOptions, ServerOptions, create_app
from entropykv.session.reader import SequenceReader
from tests.support.command import python
from tests.support.running_server import KEY, MODEL, Server
from tests.support.served import (
    LONG,
    MESSAGES,
    PROMPT,
    assert_next_is_right,
    client_of,
    complete,
    served,
)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from served(ENTROPYKV_API_KEY=KEY)


def test_completion_is_that_of_the_model(client: openai.OpenAI) -> None:
    assert_next_is_right(client)


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="any", prompt=PROMPT, max_tokens=12, temperature=0.0, stream=True
        )
    )
    assert len(chunks) > 5
    assert "".join(chunk.choices[0].text for chunk in chunks) == complete(client)


def test_chat_whole_and_in_pieces(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "any", "messages": MESSAGES, "temperature": 0.0}
    whole = client.chat.completions.create(**options, max_tokens=8)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    chunks = client.chat.completions.create(**options, max_completion_tokens=8, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_two_clients_are_served_in_turn(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "In the harbour", "A quiet market", "The museum"]
    alone = [complete(client, prompt, max_tokens=200) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        together = list(threads.map(lambda p: complete(client, p, max_tokens=200), prompts))
    assert together == alone


def test_the_second_turn_reads_only_what_is_new(client: openai.OpenAI, server: Server) -> None:
    complete(client, "Something else", max_tokens=1)
    text = " ".join([PROMPT] * 20)
    first = client.completions.create(model="any", prompt=text, max_tokens=9, temperature=0.0)
    before = server.kv()
    second = text + first.choices[0].text + " and"
    answer = client.completions.create(model="any", prompt=second, max_tokens=1)
    assert answer.usage is not None
    assert server.kv()["prompt_tokens"] - before["prompt_tokens"] <= 3
    assert answer.usage.prompt_tokens > 60


def test_logit_bias_and_min_tokens_go_together(client: openai.OpenAI, server: Server) -> None:
    token = server.post("/extras/tokenize", json.dumps({"input": " garden"})).json()["tokens"][-1]
    extra = {"min_tokens": 4}
    text = complete(client, max_tokens=4, logit_bias={str(token): 500}, extra_body=extra)
    assert text.count("garden") == 4


def test_models_and_extras(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == [MODEL.name]
    ids = server.post("/extras/tokenize", json.dumps({"input": PROMPT})).json()["tokens"]
    count = server.post("/extras/tokenize/count", json.dumps({"input": PROMPT})).json()["count"]
    text = server.post("/extras/detokenize", json.dumps({"tokens": ids})).json()["text"]
    assert count == len(ids)
    assert text.strip() == PROMPT
    assert server.post("/extras/detokenize", '{"tokens": [100000]}').status_code == 400


def test_a_stream_ends_where_its_client_leaves(client: openai.OpenAI, server: Server) -> None:
    stopped = server.kv()["requests"]["stopped"]
    stream = client.completions.create(model="any", prompt=PROMPT, stream=True, **LONG)  # type: ignore[call-overload]
    for _ in range(3):
        next(iter(stream))
    stream.close()
    assert server.idle_figures(60)["requests"]["stopped"] == stopped + 1
    assert_next_is_right(client)


def test_a_whole_answer_ends_where_its_client_leaves(client: openai.OpenAI, server: Server) -> None:
    stopped = server.kv()["requests"]["stopped"]
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model="any", prompt=PROMPT, timeout=2, **LONG)  # type: ignore[call-overload]
    assert server.idle_figures(60)["requests"]["stopped"] == stopped + 1
    assert_next_is_right(client)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_within_is_a_500_and_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("llama_decode returned -3")

    app = create_app(ModelOptions(model=str(MODEL), n_threads=1), ServerOptions())
    body = {"prompt": PROMPT, "temperature": 0.0, "max_tokens": 5}
    async with client_of(app) as client:
        right = (await client.post("/v1/completions", json=body)).json()
        with monkeypatch.context() as patch:
            patch.setattr(SequenceReader, "read", broken)
            other = {**body, "prompt": f"{PROMPT} again", "stream": stream}
            failed = await client.post("/v1/completions", json=other)
        again = (await client.post("/v1/completions", json=body)).json()
    app.state.engine.close()
    assert failed.status_code == 500
    assert "llama_decode returned -3" in failed.json()["error"]["message"]
    assert again["choices"] == right["choices"]


async def test_the_model_can_be_reached_before_it_is_freed() -> None:
    seen: list[int] = []

    app = create_app(ModelOptions(model=str(MODEL), n_threads=1), ServerOptions())
    engine = app.state.engine
    engine.before_close(lambda model: seen.append(model.model.n_vocab))
    async with app.router.lifespan_context(app):
        seen.append(await engine.call(lambda model: model.model.n_vocab))

    assert seen[0] == seen[1] > 0


def test_figures_of_the_kv_cache(client: openai.OpenAI, server: Server) -> None:
    before = server.kv()
    complete(client, "Another text " * 100, max_tokens=10)
    after = server.kv()
    assert after["generated_tokens"] - before["generated_tokens"] == 10
    assert after["evictions"] > before["evictions"]
    assert 0 < after["kv_bytes_now"] <= after["kv_bytes_peak"] <= after["kv_bytes_budget"]
    assert after["requests"]["finished"] == before["requests"]["finished"] + 1
    samples = {}
    for line in server.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.split(" ")
            samples[name] = float(value)
    assert samples["entropykv_kv_budget_bytes"] == after["kv_bytes_budget"]
    assert samples["entropykv_generated_tokens_total"] == after["generated_tokens"]
    finished = samples['entropykv_requests_total{outcome="finished"}']
    assert finished == after["requests"]["finished"]


def test_metrics_are_what_prometheus_reads(server: Server) -> None:
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert answer.text.endswith("\n")
    metrics = list(text_string_to_metric_families(answer.text))
    assert all(metric.documentation for metric in metrics)
    for metric in metrics:
        kind, names = metric.type, {sample.name for sample in metric.samples}
        assert names == {f"{metric.name}_total" if kind == "counter" else metric.name}
        assert kind in ("counter", "gauge")
        assert all(name.startswith("entropykv_") for name in names)
    names = [metric.name for metric in metrics]
    assert len(names) == len(set(names)) > 20
    assert "entropykv_kv_bytes" in names
    assert not any(name.startswith(("python_", "process_")) for name in names)


def test_memory_does_not_grow(client: openai.OpenAI, server: Server) -> None:
    def ask(count: int) -> None:
        for index in range(count):
            complete(client, f"{PROMPT} {index}", max_tokens=4)

    ask(60)
    before = server.rss()
    ask(200)
    assert server.rss() - before < 8 * 2**20


def refused(*options: object, code: str = "from entropykv.cli import main") -> str:
    command = f"import sys; {code}; sys.exit(main(sys.argv[1:]))"
    result = python(command, "serve", *options, code=2)
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize(
    "number", [None, pytest.param(signal.SIGINT, marks=pytest.mark.needs("signal.SIGKILL"))]
)
def test_a_signal_ends_the_server_in_the_midst_of_an_answer(number: signal.Signals | None) -> None:
    running = Server()
    with running.client() as client:
        stream = client.completions.create(model="any", prompt=PROMPT, stream=True, **LONG)  # type: ignore[call-overload]
        next(iter(stream))
        code, errors = running.end(number)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
    assert code == 0
    assert re.fullmatch(r"\S+ \S+ 127\.0\.0\.1 POST /v1/completions 200 .*\n", errors), errors


AS_ON_WINDOWS = """
import signal, sys
signal.SIGBREAK = signal.SIGUSR1
from entropykv.cli import main
sys.exit(main())
"""


@pytest.mark.needs("signal.SIGUSR1")
def test_ctrl_break_ends_the_server_with_exit_code_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Break ends the server with exit code 0; another signal stands for it here."""
    running = Server(program=("-c", AS_ON_WINDOWS), ENTROPYKV_API_KEY=KEY)
    monkeypatch.setattr(system, "WINDOWS", True)
    monkeypatch.setattr(signal, "CTRL_BREAK_EVENT", signal.SIGUSR1, raising=False)
    with running.client() as client:
        stream = client.completions.create(model="any", prompt=PROMPT, stream=True, **LONG)  # type: ignore[call-overload]
        next(iter(stream))
        code, errors = running.end()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
    assert code == 0, errors


def test_one_sentence_for_what_cannot_be_served(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(50))
    assert "broken.gguf" in refused("-m", broken, "--port", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1 port {port}" in refused("-m", MODEL, "--port", port)
    assert "with -m" in refused("--port", 0)
    hidden = "sys.modules['fastapi'] = None; from entropykv.cli import main"
    assert 'pip install "entropykv[server]"' in refused("-m", MODEL, code=hidden)


def test_the_example_of_the_official_client(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["openai_client.py", server.url, KEY])
    runpy.run_path(str(EXAMPLES / "openai_client.py"), run_name="__main__")
    assert "KV bytes" in capsys.readouterr().out


@pytest.mark.skipif(
    importlib.util.find_spec("langchain_openai") is None, reason="langchain-openai is not installed"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_example_with_langchain(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["langchain_llama.py", server.url, KEY])
    runpy.run_path(str(EXAMPLES / "langchain_llama.py"), run_name="__main__")
    assert "answer" in capsys.readouterr().out
