"""`entropykv serve` as OpenAI's own client meets it: a process of its own."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from entropykv import EntropyLlama
from entropykv.server import ModelOptions, ServerOptions, create_app
from tests.support.running_server import KEY, MODEL, N_CTX, Server

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROMPT = "The old garden"
MESSAGES: list[Any] = [{"role": "user", "content": "Where is the garden?"}]
LONG = {"max_tokens": N_CTX - 100, "extra_body": {"min_tokens": N_CTX}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server(ENTROPYKV_API_KEY=KEY)
    yield running
    code, errors = running.end()
    assert code == 0
    assert "Traceback" not in errors, errors


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made


def complete(client: openai.OpenAI, prompt: str = PROMPT, **options: Any) -> str:
    options = {"max_tokens": 12, "temperature": 0.0, **options}
    return str(client.completions.create(model="any", prompt=prompt, **options).choices[0].text)


def assert_next_is_right(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}
    with closing(EntropyLlama(MODEL, n_ctx=N_CTX, kv_budget="256", **arguments)) as llama:
        expected: Any = llama(PROMPT, max_tokens=12, temperature=0.0)["choices"][0]["text"]
    assert complete(client) == expected


# --- answers --------------------------------------------------------------------------------------


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


# --- refusals -------------------------------------------------------------------------------------

BAD: dict[str, tuple[int, str, dict[str, Any]]] = {
    "grammar": (400, "/v1/completions", {"prompt": "a", "grammar": "root ::= ("}),
    "grammar of many groups": (
        400,
        "/v1/completions",
        {"prompt": "a", "grammar": "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000},
    ),
    "grammar and min_tokens": (
        400,
        "/v1/completions",
        {"prompt": "a", "grammar": 'root ::= "a"', "min_tokens": 5},
    ),
    "bias": (400, "/v1/completions", {"prompt": "a", "logit_bias": {"100000": 1}}),
    "bias of no token": (400, "/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}),
    "n": (400, "/v1/completions", {"prompt": "a", "n": 0}),
    "best_of": (400, "/v1/completions", {"prompt": "a", "best_of": 3}),
    "no prompt": (400, "/v1/completions", {}),
    "empty list of prompts": (400, "/v1/completions", {"prompt": []}),
    "empty tokens": (400, "/v1/completions", {"prompt": [[]]}),
    "tokens that are none": (400, "/v1/completions", {"prompt": [1, 100_000]}),
    "no messages": (400, "/v1/chat/completions", {}),
    "empty messages": (400, "/v1/chat/completions", {"messages": []}),
    "message without text": (400, "/v1/chat/completions", {"messages": [{"role": "user"}]}),
    "unknown role": (400, "/v1/chat/completions", {"messages": [{"role": "x", "content": "a"}]}),
    "image": (
        400,
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is this?"},
                        {"type": "image_url", "image_url": {"url": "data:,"}},
                    ],
                }
            ]
        },
    ),
    "required without tools": (
        400,
        "/v1/chat/completions",
        {"messages": MESSAGES, "tool_choice": "required"},
    ),
    "strict schema that is not enforced": (
        400,
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "a",
                    "strict": True,
                    "schema": {"type": "array", "items": {"type": "number", "minimum": 0}},
                },
            },
        },
    ),
    "stored response": (400, "/v1/responses", {"input": "a", "previous_response_id": "resp_1"}),
    "tool of OpenAI's": (400, "/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}),
    "response of an image": (
        400,
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
    ),
    "max_tokens": (400, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": -1}),
    "response_format": (
        400,
        "/v1/chat/completions",
        {"messages": MESSAGES, "response_format": {"type": "unknown"}},
    ),
    "tool_choice": (
        400,
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": {"name": "a", "parameters": {}}}],
            "tool_choice": {"type": "function", "function": {"name": "b"}},
        },
    ),
    "schema that is no grammar": (
        400,
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "response_format": {
                "type": "json_object",
                "schema": {"type": "string", "maxLength": 1_000_000},
            },
        },
    ),
    "response_format and min_tokens": (
        400,
        "/v1/chat/completions",
        {"messages": MESSAGES, "response_format": {"type": "json_object"}, "min_tokens": 50},
    ),
    "logprobs": (400, "/v1/completions", {"prompt": "a", "logprobs": 3}),
    "no string": (400, "/v1/completions", {"prompt": 7}),
    "long": (400, "/v1/completions", {"prompt": "a " * 2 * N_CTX}),
    "embeddings": (400, "/v1/embeddings", {"input": "a"}),
    "unknown route": (404, "/v1/nothing", {}),
    "too large": (413, "/v1/completions", {"prompt": "a" * 10_000_000}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_by_name(server: Server, name: str, stream: bool) -> None:
    status, path, body = BAD[name]
    answer = server.post(path, json.dumps({**body, "stream": stream}))
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"


def test_the_next_request_is_right_after_all_of_them(client: openai.OpenAI) -> None:
    assert_next_is_right(client)


def test_what_a_long_prompt_is_told(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="exceed context") as caught:
        complete(client, "a " * 2 * N_CTX)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("body", ["", "{", '{"prompt": "a', "[]", "\x00"])
def test_a_body_that_is_no_request(server: Server, body: str) -> None:
    assert server.post("/v1/completions", body).status_code == 400


def test_a_body_of_unknown_length_has_the_same_limit(server: Server) -> None:
    pieces = iter([b'{"prompt": "', *[b"a" * 2**20] * 10, b'"}'])
    try:
        status = server.post("/v1/completions", pieces).status_code
    except httpx.WriteError:  # the server closed the connection before it was all written
        return
    assert status == 413


@pytest.mark.parametrize("path", ["/v1/models", "/v1/kv", "/metrics"])
def test_a_wrong_key_is_refused(server: Server, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answer = httpx.get(server.url + path, headers=headers)
        assert answer.status_code == 401
    with server.client("wrong") as stranger, pytest.raises(openai.AuthenticationError):
        complete(stranger)


# --- clients that leave, and errors within --------------------------------------------------------


def test_a_stream_ends_where_its_client_leaves(client: openai.OpenAI, server: Server) -> None:
    stopped = server.kv()["requests"]["stopped"]
    stream = client.completions.create(model="any", prompt=PROMPT, stream=True, **LONG)  # type: ignore[call-overload]
    for _ in range(3):
        next(iter(stream))
    stream.close()
    figures = server.idle_figures(seconds=2.0)
    assert figures["requests"]["stopped"] == stopped + 1
    assert_next_is_right(client)


def test_a_whole_answer_ends_where_its_client_leaves(client: openai.OpenAI, server: Server) -> None:
    stopped = server.kv()["requests"]["stopped"]
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model="any", prompt=PROMPT, timeout=0.5, **LONG)  # type: ignore[call-overload]
    assert server.idle_figures(seconds=2.0)["requests"]["stopped"] == stopped + 1
    assert_next_is_right(client)


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_within_is_a_500_and_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("llama_decode returned -3")

    async def talk() -> None:
        app = create_app(ModelOptions(model=str(MODEL), n_threads=1), ServerOptions())
        transport = httpx.ASGITransport(app)
        body = {"prompt": PROMPT, "temperature": 0.0, "max_tokens": 5}
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            right = (await client.post("/v1/completions", json=body)).json()
            with monkeypatch.context() as patch:
                patch.setattr(EntropyLlama, "eval", broken)
                failed = await client.post("/v1/completions", json={**body, "stream": stream})
            again = (await client.post("/v1/completions", json=body)).json()
        app.state.engine.close()
        assert failed.status_code == 500
        assert "llama_decode returned -3" in failed.json()["error"]["message"]
        assert again["choices"] == right["choices"]

    asyncio.run(talk())


def test_the_model_can_be_reached_before_it_is_freed() -> None:
    seen: list[int] = []

    async def talk() -> None:
        app = create_app(ModelOptions(model=str(MODEL), n_threads=1), ServerOptions())
        engine = app.state.engine
        engine.before_close(lambda llama: seen.append(llama.n_tokens))
        async with app.router.lifespan_context(app):
            await engine.call(lambda llama: llama.eval([1, 2, 3]))

    asyncio.run(talk())
    assert seen == [3]


# --- figures --------------------------------------------------------------------------------------


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
    kinds = dict(re.findall(r"^# TYPE (\S+) (counter|gauge)$", answer.text, re.MULTILINE))
    helps = re.findall(r"^# HELP (\S+) \S.+$", answer.text, re.MULTILINE)
    sample = r"^([a-z_]+)(?:\{[a-z]+=\"[a-z]+\"\})? [0-9.e+-]+$"
    samples = re.findall(sample, answer.text, re.MULTILINE)
    assert list(kinds) == helps
    assert set(samples) == set(kinds)
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in kinds.items())


def test_memory_does_not_grow(client: openai.OpenAI, server: Server) -> None:
    def ask(count: int) -> None:
        for index in range(count):
            complete(client, f"{PROMPT} {index}", max_tokens=4)

    ask(60)
    before = server.rss()
    ask(200)
    assert server.rss() - before < 8 * 2**20


# --- the command ----------------------------------------------------------------------------------


def refused(*options: object, code: str = "from entropykv.cli import main") -> str:
    command = f"import sys; {code}; sys.exit(main(sys.argv[1:]))"
    result = subprocess.run(
        [sys.executable, "-c", command, "serve", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_in_the_midst_of_an_answer(number: signal.Signals) -> None:
    running = Server()
    with running.client() as client:
        stream = client.completions.create(model="any", prompt=PROMPT, stream=True, **LONG)  # type: ignore[call-overload]
        next(iter(stream))
        start = time.monotonic()
        code, errors = running.end(number)
        assert time.monotonic() - start < 8.0
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
    assert code == 0
    assert re.fullmatch(r"\S+ \S+ 127\.0\.0\.1 POST /v1/completions 200 .*\n", errors), errors


def test_one_sentence_for_what_cannot_be_served(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(50))
    assert "broken.gguf" in refused("-m", broken, "--port", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1 port {port}" in refused("-m", MODEL, "--port", port)
    assert "--model" in refused("--port", 0)
    hidden = "sys.modules['fastapi'] = None; from entropykv.cli import main"
    assert 'pip install "entropykv[server]"' in refused("-m", MODEL, code=hidden)


# --- examples -------------------------------------------------------------------------------------


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
