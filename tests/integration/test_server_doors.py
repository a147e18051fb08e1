"""What OpenAI's, llama-server's and llama_cpp.server's clients ask of `entropykv serve`."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from entropykv.cli.instead import AT_SERVE, INSTEAD
from entropykv.cli.parser import CommandParser
from entropykv.cli.serve import add_serve
from entropykv.errors import SettingsError
from entropykv.server import ModelOptions, ServerOptions, create_app
from entropykv.server.starting import Starting
from entropykv.settings.cores import usable_cores
from tests.support.running_server import KEY, MODEL, Server

PROMPT = "The old garden"
QUESTION: list[Any] = [{"role": "user", "content": "Where is the garden?"}]
ORIGIN = "http://localhost:3000"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "boolean"}},
            "required": ["city", "days"],
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}


class Weather(BaseModel):
    """What structured answers are parsed into."""

    city: Literal["Rome", "Oslo"]
    sunny: bool


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server("--alias", "tiny", "--cors-origins", ORIGIN, "--api-key", KEY)
    yield running
    code, errors = running.end()
    assert code == 0
    assert "Traceback" not in errors, errors


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made


def chat(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": "tiny", "messages": QUESTION, "max_tokens": 60, "temperature": 0.0, **options}
    return client.chat.completions.create(**given)


# --- chats ----------------------------------------------------------------------------------------


def test_parts_roles_and_calls_of_earlier_turns(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    parts = [{"type": "text", "text": "Where is"}, {"type": "text", "text": "the garden?"}]
    answer = chat(
        client,
        messages=[
            {"role": "developer", "content": "Answer."},
            {"role": "user", "content": "How late is it?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
            {"role": "user", "content": parts},
        ],
        max_tokens=5,
    )
    assert answer.usage.completion_tokens == 5
    whole = chat(client, messages=[{"role": "user", "content": "Where is\nthe garden?"}])
    again = chat(client, messages=[{"role": "user", "content": parts}])
    assert again.choices[0].message.content == whole.choices[0].message.content


def test_structured_answers(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="tiny", messages=QUESTION, response_format=Weather, temperature=0.0, max_tokens=60
    )
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    nearly = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": nearly}}
    answer = chat(client, response_format=schema)
    assert json.loads(answer.choices[0].message.content).keys() == {"x"}
    assert (
        chat(client, response_format={"type": "json_object"}, max_tokens=8)
        .choices[0]
        .message.content.startswith("{")
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "clock"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ],
)
def test_a_tool_that_must_be_called_is(
    client: openai.OpenAI, choice: Any, names: set[str], stream: bool
) -> None:
    options = {
        "tools": [WEATHER, CLOCK],
        "tool_choice": choice,
        "stream": stream,
        "max_tokens": 200,
    }
    answer = chat(client, **options)
    if stream:
        chunks = list(answer)
        deltas = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
        (called,), reason = deltas, chunks[-1].choices[0].finish_reason
    else:
        (called,) = answer.choices[0].message.tool_calls
        reason = answer.choices[0].finish_reason
        assert answer.choices[0].message.content is None
    assert reason == "tool_calls"
    assert called.function.name in names
    assert called.id
    arguments = json.loads(called.function.arguments)
    assert arguments.keys() == ({"city", "days"} if called.function.name == "weather" else set())


def test_tools_with_a_choice_leave_text_as_it_is(client: openai.OpenAI) -> None:
    plain = chat(client, max_tokens=8).choices[0].message
    none = chat(client, max_tokens=8, tools=[WEATHER], tool_choice="none").choices[0].message
    assert none.content == plain.content
    auto = chat(client, max_tokens=8, tools=[WEATHER])
    assert auto.choices[0].message.content
    chunks = chat(client, max_tokens=8, tools=[WEATHER], stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == auto.choices[0].message.content


def test_usage_of_a_stream(client: openai.OpenAI) -> None:
    whole = chat(client, max_tokens=7)
    chunks = list(chat(client, max_tokens=7, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert all(chunk.usage is None for chunk in chat(client, max_tokens=7, stream=True))


# --- completions ----------------------------------------------------------------------------------


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    given = {"max_tokens": 6, "temperature": 0.0, **options}
    return client.completions.create(model="tiny", prompt=prompt, **given)


def tokens_of(server: Server, text: str, **options: Any) -> Any:
    body = {"content": text, **options}
    return server.post("/tokenize", json.dumps(body)).json()["tokens"]


def test_prompts_of_tokens_and_lists(client: openai.OpenAI, server: Server) -> None:
    texts = [PROMPT, "In the harbour"]
    alone = [complete(client, text).choices[0].text for text in texts]
    tokens = [tokens_of(server, text, add_special=True) for text in texts]
    assert complete(client, tokens[0]).choices[0].text == alone[0]
    for prompts in (texts, tokens):
        answer = complete(client, prompts)
        assert [choice.text for choice in answer.choices] == alone
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage.completion_tokens == 12
        assert answer.usage.prompt_tokens == sum(map(len, tokens))
    echoed = complete(client, tokens[0], echo=True).choices[0].text
    assert echoed.strip().startswith(PROMPT)
    assert echoed.endswith(alone[0])


def test_choices_differ_and_can_be_repeated(client: openai.OpenAI) -> None:
    options = {"temperature": 1.5, "seed": 7, "max_tokens": 12}
    three = complete(client, PROMPT, n=3, **options)
    texts = [choice.text for choice in three.choices]
    assert len(set(texts)) == 3
    assert [choice.text for choice in complete(client, PROMPT, n=3, **options).choices] == texts
    assert complete(client, PROMPT, **options).choices[0].text == texts[0]
    assert three.usage.prompt_tokens == complete(client, PROMPT, n=1).usage.prompt_tokens
    pieces = ["", "", ""]
    for chunk in complete(client, PROMPT, n=3, stream=True, **options):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == texts


# --- responses ------------------------------------------------------------------------------------


def test_a_response_is_the_chat_completion(client: openai.OpenAI) -> None:
    text = chat(client, max_tokens=8).choices[0].message.content
    options: Any = {"model": "tiny", "temperature": 0.0, "max_output_tokens": 8}
    response = client.responses.create(input="Where is the garden?", **options)
    assert response.output_text == text
    assert response.usage is not None
    assert response.usage.output_tokens == 8
    listed = client.responses.create(input=QUESTION, **options)
    assert listed.output_text == text
    with client.responses.stream(input=QUESTION, **options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response() if kinds[-1] == "response.completed" else None
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds.count("response.output_text.delta") > 1
    assert final is None or final.output_text == text


def test_a_response_of_a_schema_and_of_a_tool(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "temperature": 0.0, "input": "Where is the garden?"}
    parsed = client.responses.parse(text_format=Weather, **options)
    assert isinstance(parsed.output_parsed, Weather)
    tool: Any = {"type": "function", **WEATHER["function"], "strict": False}
    called: Any = client.responses.create(tools=[tool], tool_choice="required", **options)
    (item,) = called.output
    assert item.type == "function_call"
    assert json.loads(item.arguments).keys() == {"city", "days"}
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
    history: Any = [*QUESTION, item.model_dump(), result]
    again = client.responses.create(model="tiny", input=history, max_output_tokens=4)
    assert again.status == "incomplete"


# --- what operators and browsers ask --------------------------------------------------------------


def test_models_by_name_and_without_a_path(client: openai.OpenAI, server: Server) -> None:
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"
    for path in ("/v1/models", "/v1/kv", "/props", "/metrics", "/openapi.json", "/docs"):
        assert str(MODEL.parent) not in server.get(path).text


def test_health_and_docs_need_no_key(server: Server) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    page = httpx.get(f"{server.url}/docs").text
    assert "/v1/chat/completions" in page
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page)
    assert httpx.get(f"{server.url}/props").status_code == 401


def test_props_and_tokens_as_llama_server_has_them(server: Server) -> None:
    props = server.get("/props").json()
    assert props["total_slots"] == 1
    assert props["model_alias"] == "tiny"
    assert props["default_generation_settings"]["n_ctx"] == 16384
    ids = tokens_of(server, PROMPT)
    assert tokens_of(server, PROMPT, add_special=True)[-len(ids) :] == ids
    pieces = tokens_of(server, PROMPT, with_pieces=True)
    assert [piece["id"] for piece in pieces] == ids
    assert "".join(piece["piece"] for piece in pieces).strip() == PROMPT
    body = json.dumps({"tokens": ids})
    assert server.post("/detokenize", body).json()["content"].strip() == PROMPT
    assert server.post("/detokenize", '{"tokens": [-1]}').status_code == 400


def test_a_preflight_needs_no_key_and_knows_its_origins(server: Server) -> None:
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    url = f"{server.url}/v1/chat/completions"
    allowed = httpx.options(url, headers={"origin": ORIGIN, **asked})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    other = httpx.options(url, headers={"origin": "http://elsewhere", **asked})
    assert "access-control-allow-origin" not in other.headers
    refused = httpx.post(url, headers={"origin": ORIGIN}, json={})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN


def test_the_log_has_one_line_for_a_request_and_nothing_that_was_said() -> None:
    running = Server("--api-key", KEY)
    with running.client() as client:
        complete(client, "a secret prompt", max_tokens=3)
    running.get("/v1/models?secret=1%0a")
    _, errors = running.end()
    first, second = errors.splitlines()
    end = r"POST /v1/completions 200 \d+\.\d{3} s, \d+ tokens read, 3 written"
    assert re.search(end + "$", first), first
    assert re.search(r"GET /v1/models 200 \d+\.\d{3} s$", second), second
    assert "secret" not in errors


def test_the_server_listens_while_it_loads() -> None:
    ready, loaded = threading.Event(), asyncio.Event()

    def load() -> Any:
        assert ready.wait(30)
        return create_app(ModelOptions(model=str(MODEL), n_threads=1), ServerOptions(api_key=KEY))

    async def talk() -> list[httpx.Response]:
        app = Starting(load)
        app.when_done = loaded.set
        incoming: asyncio.Queue[Any] = asyncio.Queue()
        await incoming.put({"type": "lifespan.startup"})
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        life = asyncio.ensure_future(app({"type": "lifespan"}, incoming.get, send))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            while not sent:
                await asyncio.sleep(0.01)
            answers = [await client.get("/health")]
            ready.set()
            await loaded.wait()
            answers += [await client.get("/health"), await client.get("/v1/models")]
        await incoming.put({"type": "lifespan.shutdown"})
        await life
        return answers

    loading, healthy, keyless = asyncio.run(talk())
    assert loading.status_code == 503
    assert loading.json()["error"]["code"] == "model_loading"
    assert healthy.json() == {"status": "ok"}
    assert keyless.status_code == 401


def test_the_description_holds_what_the_server_does(server: Server) -> None:
    described = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {"/health", "/props", "/tokenize", "/v1/responses", "/v1/models/{name}"} <= set(
        described
    )
    assert "422" not in described["/v1/chat/completions"]["post"]["responses"]


# --- the command ----------------------------------------------------------------------------------


def options_of(*given: str) -> Any:
    parser = CommandParser(prog="entropykv")
    add_serve(parser.add_subparsers(), chosen=True)
    return parser.parse_args(["serve", *given])


@pytest.mark.parametrize(
    ("spellings", "field", "value"),
    [
        (("-m", "--model"), "model", "x.gguf"),
        (("-c", "--ctx-size", "--n_ctx", "--n-ctx"), "n_ctx", 4096),
        (("-b", "--batch-size", "--n_batch"), "n_batch", 64),
        (("-ub", "--ubatch-size", "--n_ubatch"), "n_ubatch", 32),
        (("-t", "--threads", "--n_threads"), "n_threads", 2),
        (("-tb", "--threads-batch", "--n_threads_batch"), "n_threads_batch", 2),
        (("-np", "--parallel"), "parallel", 1),
        (("--host",), "host", "0.0.0.0"),  # noqa: S104
        (("--port",), "port", 8080),
        (("--api-key", "--api_key"), "api_key", "key"),
        (("-a", "--alias", "--model_alias", "--model-alias"), "model_alias", "name"),
        (("-ngl", "--gpu-layers", "--n_gpu_layers", "--n-gpu-layers"), "n_gpu_layers", 1),
        (("-s", "--seed"), "seed", 3),
        (("--cors-origins", "--cors_origins"), "cors_origins", "*"),
    ],
)
def test_options_have_the_names_of_both_servers(
    spellings: tuple[str, ...], field: str, value: object
) -> None:
    for spelling in spellings:
        assert getattr(options_of(spelling, str(value)), field) == value


@pytest.mark.parametrize("again", ["-m", "--model"])
def test_a_second_model_is_refused_in_a_sentence(again: str) -> None:
    with pytest.raises(SettingsError, match="is given twice"):
        options_of("-m", "a.gguf", again, "b.gguf")


def test_options_that_serve_has_not_say_what_to_do() -> None:
    assert AT_SERVE["-ctk"] == "K and V have one type; use --kv-type"
    assert AT_SERVE["-hf"] != INSTEAD["-hf"]
    for flag in (AT_SERVE.keys() - INSTEAD.keys()) | {"-hf", "-cb", "-md"}:
        with pytest.raises(SettingsError) as refused:
            options_of("-m", "a.gguf", flag, "value")
        assert f"{flag} is not an option of entropykv serve; {AT_SERVE[flag]}" == str(refused.value)


def test_threads_are_as_run_has_them() -> None:
    assert ModelOptions(model="m", n_threads=-1).n_threads == usable_cores()
    assert ModelOptions(model="m", n_threads=3).n_threads_batch == 3
    assert ModelOptions(model="m", n_threads=3, n_threads_batch=2).n_threads_batch == 2


def test_a_model_without_an_alias_has_the_name_of_its_file() -> None:
    assert ModelOptions(model="/somewhere/file.gguf").served_name == "file.gguf"


# --- freezing and recovery ------------------------------------------------------------------------


def test_the_ladder_is_climbed_and_shown() -> None:
    options = {"freeze": "ram", "kv_budget": "32", "recovery": "full", "recovery_deviations": 0.01}

    async def talk() -> dict[str, int]:
        app = create_app(ModelOptions(model=str(MODEL), n_threads=1, **options), ServerOptions())
        transport = httpx.ASGITransport(app)
        body = {"prompt": "Another text " * 40, "max_tokens": 60, "temperature": 2.0, "seed": 1}
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            climbs = (await client.get("/v1/kv")).json()["climbs"]
        app.state.engine.close()
        return dict(climbs)

    climbs = asyncio.run(talk())
    assert climbs
    assert climbs.keys() <= {"soft", "window", "full"}


@pytest.mark.parametrize("options", [{"recovery": "full"}, {"recovery_window": 3}])
def test_a_ladder_that_would_change_nothing_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"--freeze ram|--recovery soft"):
        create_app(ModelOptions(model=str(MODEL), **options), ServerOptions())
