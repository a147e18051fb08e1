"""Clients from PyPI work with `entropykv serve` and their default requests (extra clients)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.support.running_server import KEY, Server
from tests.support.served import served

pytest.importorskip("langchain_openai", reason="needs the extra clients")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # Warnings come from other packages.
]

MODEL = "tiny"
MOST_TOKENS = 400
"""The most tokens of an answer in JSON: a tiny model writes many spaces between its parts."""


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]
    sunny: bool


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from served("--alias", MODEL, "--api-key", KEY)


@pytest.fixture(scope="module")
def langchain(server: Server) -> Any:
    from langchain_openai import ChatOpenAI  # noqa: PLC0415
    from pydantic import SecretStr  # noqa: PLC0415

    return ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key=SecretStr(KEY),
        model=MODEL,
        temperature=0.0,
        max_completion_tokens=MOST_TOKENS,
        max_retries=0,
        timeout=120,
    )


def test_langchain_streams_with_usage(langchain: Any) -> None:
    whole = langchain.invoke("Where is the garden?")
    chunks = list(langchain.stream("Where is the garden?", stream_usage=True))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usage[-1]["output_tokens"] == whole.usage_metadata["output_tokens"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_with_structured_output(langchain: Any, method: str) -> None:
    answer = langchain.with_structured_output(Weather, method=method).invoke("The weather?")
    assert isinstance(answer, Weather)


def test_langchain_bind_tools_and_their_results(langchain: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage  # noqa: PLC0415

    question = HumanMessage("The weather?")
    called = langchain.bind_tools([Weather], tool_choice="any").invoke([question])
    (call,) = called.tool_calls
    assert Weather(**call["args"])
    result = ToolMessage("sunny", tool_call_id=call["id"])
    assert langchain.bind_tools([Weather]).invoke([question, called, result]).text


def test_langchain_with_the_responses_api(server: Server) -> None:
    from langchain_openai import ChatOpenAI  # noqa: PLC0415
    from pydantic import SecretStr  # noqa: PLC0415

    model = ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key=SecretStr(KEY),
        model=MODEL,
        use_responses_api=True,
        max_completion_tokens=8,
    )
    assert model.invoke("Where is the garden?").text
    assert "".join(chunk.text for chunk in model.stream("Where is the garden?"))


def test_llama_index(server: Server) -> None:
    from llama_index.core.llms import ChatMessage  # noqa: PLC0415
    from llama_index.llms.openai_like import OpenAILike  # noqa: PLC0415

    options = {
        "model": MODEL,
        "api_base": f"{server.url}/v1",
        "api_key": KEY,
        "max_tokens": MOST_TOKENS,
    }
    chat = OpenAILike(**options, is_chat_model=True, is_function_calling_model=True)
    messages = [ChatMessage(role="user", content="Where is the garden?")]
    assert chat.chat(messages).message.content
    assert [chunk.delta for chunk in chat.stream_chat(messages)]
    assert chat.structured_predict(Weather, _prompt("The weather?"))
    assert OpenAILike(**options).complete("The old garden").text


def _prompt(text: str) -> Any:
    from llama_index.core import PromptTemplate  # noqa: PLC0415

    return PromptTemplate(text)


def test_litellm(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise litellm sends a request to the internet.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm  # noqa: PLC0415

    litellm.suppress_debug_info = True
    options: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "api_base": f"{server.url}/v1",
        "api_key": KEY,
        "messages": [{"role": "user", "content": "The weather?"}],
        "max_tokens": MOST_TOKENS,
        "temperature": 0.0,
    }
    answer = litellm.completion(**options, response_format=Weather)
    assert Weather.model_validate_json(answer.choices[0].message.content)
    chunks = litellm.completion(**options, stream=True, stream_options={"include_usage": True})
    assert [chunk for chunk in chunks if getattr(chunk, "usage", None)]
    tools = [openai.pydantic_function_tool(Weather)]
    called = litellm.completion(**options, tools=tools, tool_choice="required")
    arguments = called.choices[0].message.tool_calls[0].function.arguments
    assert Weather(**json.loads(arguments))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**options, "messages": [{"role": "user", "content": "a " * 40_000}]})


@pytest.fixture
def server_of_every_route(tmp_path: Path) -> Iterator[Server]:
    """Run a server with every option that any route needs; without them, some routes answer 501."""
    files = ("--documents", tmp_path / "documents", "--slot-save-path", tmp_path / "slots")
    yield from served("--alias", MODEL, "--api-key", KEY, *files)


def test_the_server_does_what_its_description_says(
    server_of_every_route: Server, tmp_path: Path
) -> None:
    """The server does what its OpenAPI description says, for every route and for valid and invalid
    requests that are made from it.
    """
    import schemathesis  # noqa: PLC0415
    from hypothesis import HealthCheck, configuration, given, settings  # noqa: PLC0415
    from hypothesis.errors import Unsatisfiable  # noqa: PLC0415
    from schemathesis import GenerationMode  # noqa: PLC0415
    from schemathesis.checks import not_a_server_error  # noqa: PLC0415
    from schemathesis.core.failures import FailureGroup  # noqa: PLC0415
    from schemathesis.specs.openapi.checks import (  # noqa: PLC0415
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
        unsupported_method,
    )

    server = server_of_every_route
    configuration.set_hypothesis_home_dir(tmp_path)
    description = httpx.get(f"{server.url}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(description)
    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
        unsupported_method,
    ]
    seen: dict[str, int] = {}
    wrong: list[str] = []
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @settings(
                max_examples=12,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                _shorten(case)
                answer = case.call(
                    base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=120
                )
                case.validate_response(answer, checks=checks)
                name = f"{case.method} {case.path}"
                seen[name] = seen.get(name, 0) + 1

            try:
                check()
            except Unsatisfiable:  # For a route without parameters, no invalid request can be made.
                assert mode is GenerationMode.NEGATIVE
            except FailureGroup as group:
                wrong += [f"{operation.label}: {failure}" for failure in group.exceptions]
    assert not wrong, "\n\n".join(wrong)
    assert sum(count > 10 for count in seen.values()) > 5, seen
    assert server.get("/health").status_code == 200


def _shorten(case: Any) -> None:
    """Limit a request to two tokens or to a second: only the form of the answer is tested."""
    # A value out of range stays, because the server must refuse it.
    if case.path == "/v1/kv/stream" and case.query.get("seconds", 3600) in range(1, 3601):
        case.query["seconds"] = 1
    body = case.body
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n"):
            if isinstance(body.get(name), int) and body[name] > 2:
                body[name] = 2
        if "messages" in body and "max_tokens" not in body:
            body["max_tokens"] = 2
        if "input" in body and "max_output_tokens" not in body:
            body["max_output_tokens"] = 2
