"""`entropykv serve` serves the clients of OpenAI, llama-server and llama_cpp.server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.support.running_server import KEY, Server
from tests.support.served import ORIGIN, PROMPT, completion, served, tokens_of

QUESTION: list[Any] = [{"role": "user", "content": "Where is the garden?"}]


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
    """Define the type of structured answers."""

    city: Literal["Rome", "Oslo"]
    sunny: bool


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from served("--alias", "tiny", "--cors-origins", ORIGIN, "--api-key", KEY)


def chat(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": "tiny", "messages": QUESTION, "max_tokens": 60, "temperature": 0.0, **options}
    return client.chat.completions.create(**given)


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
        model="tiny", messages=QUESTION, response_format=Weather, temperature=0.0, max_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    nearly = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
    nearly["additionalProperties"] = False
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
        "max_tokens": 400,
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
    chat(client, max_tokens=7)
    whole = chat(client, max_tokens=7)  # Both requests find the prompt already read.
    chunks = list(chat(client, max_tokens=7, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert all(chunk.usage is None for chunk in chat(client, max_tokens=7, stream=True))


def test_prompts_of_tokens_and_lists(client: openai.OpenAI, server: Server) -> None:
    texts = [PROMPT, "In the harbour"]
    alone = [completion(client, text).choices[0].text for text in texts]
    tokens = [tokens_of(server, text, add_special=True) for text in texts]
    assert completion(client, tokens[0]).choices[0].text == alone[0]
    for prompts in (texts, tokens):
        answer = completion(client, prompts)
        assert [choice.text for choice in answer.choices] == alone
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage.completion_tokens == 12
        assert answer.usage.prompt_tokens == sum(map(len, tokens))
    echoed = completion(client, tokens[0], echo=True).choices[0].text
    assert echoed.strip().startswith(PROMPT)
    assert echoed.endswith(alone[0])


def test_choices_differ_and_can_be_repeated(client: openai.OpenAI) -> None:
    options = {"temperature": 1.5, "seed": 7, "max_tokens": 12}
    three = completion(client, PROMPT, n=3, **options)
    texts = [choice.text for choice in three.choices]
    assert len(set(texts)) == 3
    assert [choice.text for choice in completion(client, PROMPT, n=3, **options).choices] == texts
    assert completion(client, PROMPT, **options).choices[0].text == texts[0]
    assert three.usage.prompt_tokens == completion(client, PROMPT, n=1).usage.prompt_tokens
    pieces = ["", "", ""]
    for chunk in completion(client, PROMPT, n=3, stream=True, **options):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == texts


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
