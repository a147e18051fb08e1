"""Messages, tools and schemas of requests, and the calls in answers, are read and checked."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from entropykv.chat.chat_template import ChatTemplate, TemplateTraits
from entropykv.errors import SettingsError
from entropykv.generation.events import AnswerPiece, Ended, PromptRead
from entropykv.generation.prompt import Prompt
from entropykv.server.chat.chat_request import ChatRequest
from entropykv.server.chat.messages import ImageParts, Message, template_messages
from entropykv.server.chat.tool_calls import CallReader, NamedTool, Tool, ToolUse
from entropykv.server.dialects.answers import AnswerForm, ChatWriter
from entropykv.server.http.errors import RequestError
from tests.support.constraints import takes

PLAIN = TemplateTraits()
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ASSISTANT = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
TEXTS_ONLY = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] + '\n' }}{% endfor %}"
WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "%s{% endfor %}{% endfor %}"
)


def tool(name: str, **parameters: Any) -> Tool:
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    return Tool.model_validate({"function": {"name": name, "parameters": schema}})


ADD, WALK = tool("add", a={"type": "integer"}), tool("walk", to={"enum": ["home", "away"]})
USE = ToolUse([ADD, WALK])


def shown(*messages: dict[str, Any], traits: TemplateTraits = PLAIN) -> list[dict[str, Any]]:
    return template_messages(
        [Message.model_validate(each) for each in messages], traits, None, ImageParts(None)
    )


def test_text_parts_are_joined_and_the_developer_is_the_system() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert shown({"role": "developer", "content": parts}) == [
        {"role": "system", "content": "one\ntwo"}
    ]


def test_an_image_is_refused_without_a_projector() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(RequestError, match=r"messages\.0\.content\.0: .* --mmproj FILE"):
        shown({"role": "user", "content": [part]})


@pytest.mark.parametrize("kind", ["input_audio", "unheard-of", None])
def test_a_part_that_is_no_text_is_refused_by_name(kind: str | None) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind}]
    with pytest.raises(RequestError, match=rf"messages\.0\.content\.1: parts of type {kind!r}"):
        shown({"role": "user", "content": parts})


def test_calls_and_results_are_text_where_the_template_knows_no_tools() -> None:
    call, result = shown(ASSISTANT, RESULT)
    assert call["role"] == "assistant"
    assert USE.read(call["content"])[1][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert result == {"role": "user", "content": "<tool_response>\n3\n</tool_response>"}


@pytest.mark.parametrize("as_object", [False, True])
def test_a_template_with_tools_gets_arguments_as_it_needs_them(as_object: bool) -> None:
    filtered = "{{ c.function.arguments | tojson }}" if as_object else "{{ c.function.arguments }}"
    template = WITH_TOOLS.replace("%s", filtered) + "{{ messages[-1].content }}"
    traits = ChatTemplate(template).traits
    assert traits.shows_tools
    assert traits.shows_calls
    assert traits.object_arguments == as_object
    call, result = shown(ASSISTANT, RESULT, traits=traits)
    arguments = call["tool_calls"][0]["function"]["arguments"]
    assert arguments == ({"a": 1} if as_object else '{"a": 1}')
    assert result == RESULT


def test_the_thought_before_a_call_goes_where_the_template_looks_for_it() -> None:
    thought = {**ASSISTANT, "reasoning_content": "Add them."}
    traits = replace(PLAIN, shows_calls=True, thinking_field=True)
    (message,) = shown(thought, traits=traits)
    assert message["thinking"] == "Add them."
    assert "reasoning_content" not in message
    (other,) = shown(thought, traits=replace(PLAIN, shows_calls=True))
    assert other["reasoning_content"] == "Add them."


def test_a_template_of_texts_shows_no_tools_and_no_null() -> None:
    traits = ChatTemplate(TEXTS_ONLY).traits
    assert not traits.shows_tools
    assert not traits.shows_calls
    assert not traits.null_content


Call = tuple[str, str]
ADDED: Call = ("add", '{"a": 1}')
READ: dict[str, tuple[str, str, list[Call]]] = {
    "text": ("Just text. ", "Just text. ", []),
    "a call behind text": (
        'Well. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        "Well.",
        [ADDED],
    ),
    "text behind a call": (
        'Well.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n\nAnd then.\n',
        "Well.\nAnd then.",
        [ADDED],
    ),
    "an end tag in an argument": (
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call><tool_call>"}}</tool_call>',
        "",
        [("add", '{"a": "</tool_call><tool_call>"}')],
    ),
    "line breaks and tabs in an argument": (
        '<tool_call>{"name": "add", "arguments": {"a": "one\n\ttwo"}}</tool_call>',
        "",
        [("add", '{"a": "one\\n\\ttwo"}')],
    ),
    "two calls, the second without an end": (
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"name": "walk", "arguments": {"to": "home"}}',
        "",
        [("add", "{}"), ("walk", '{"to": "home"}')],
    ),
    "a broken call between two": (
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "add", '
        '"arguments": {"a": 1}</tool_call><tool_call>{"name": "walk"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>',
        [ADDED, ("walk", "{}")],
    ),
    "an unknown tool between two": (
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "fly", '
        '"arguments": {}}</tool_call>\n<tool_call>{"name": "walk"}</tool_call>',
        '<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
        [ADDED, ("walk", "{}")],
    ),
    "two end tags": (
        '<tool_call>{"name": "walk"}</tool_call>\n</tool_call>',
        "</tool_call>",
        [("walk", "{}")],
    ),
    "several calls in one tag": (
        '<tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "walk"}]</tool_call>',
        "",
        [ADDED, ("walk", "{}")],
    ),
    "arguments that are null": ('{"name": "add", "arguments": null}', "", [("add", "{}")]),
    "arguments that are empty": ('{"name": "add", "arguments": ""}', "", [("add", "{}")]),
    "arguments as JSON text": (
        '{"name": "add", "arguments": "{\\"a\\": 1}"}',
        "",
        [("add", '{"a": 1}')],
    ),
    "without a tag": (
        '{"name": "walk", "parameters": {"to": "home"}}',
        "",
        [("walk", '{"to": "home"}')],
    ),
    "two without a tag": (
        '{"name": "add", "arguments": {"a": 1}}\n{"name": "walk", "arguments": {}} Done.',
        "Done.",
        [ADDED, ("walk", "{}")],
    ),
    "a list": (
        '[{"name": "walk", "arguments": {}}, {"name": "add", "arguments": {"a": 1}}]',
        "",
        [("walk", "{}"), ADDED],
    ),
    **{
        f"no call: {text}": (text, text, [])
        for text in (
            '{"name": "other", "arguments": {}}',
            '{"name": "walk", "age": 30}',
            '{"name": "walk", "arguments": {}, "age": 30}',
            '{"name": "walk"}',
            '[{"name": "walk", "arguments": {}}, {"name": "fly", "arguments": {}}]',
            '{"say": "<tool_call>{\\"name\\": \\"add\\"}</tool_call>"} and more',
            'It is {"name": "add", "arguments": {}}',
            "<tool_call>{broken</tool_call>",
            '<tool_call>{"name": "add", "arguments": {"a": tru',
            "<tool_call>",
            "a <tool",
            "a <toolbox>",
            "[]",
            "[1]",
            "{",
            "  ",
        )
    },
}


@pytest.mark.parametrize("case", READ)
def test_calls_are_read_whole_and_in_pieces(case: str) -> None:
    text, content, calls = READ[case]
    for size in (1, 3, 7, 1000):
        reader = CallReader(USE)
        parts = [reader.take(text[i : i + size]) for i in range(0, len(text), size)]
        parts.append(reader.finish())
        functions = [call["function"] for part in parts for call in part.calls]
        assert "".join(part.text for part in parts) == content
        assert [(each["name"], each["arguments"]) for each in functions] == calls
    assert USE.read(text)[0] == content


FRAGMENTS = (
    *("<tool_call>", "</tool_call>", " ", "\n", "word", "{", "}", "[", "]", '"', ",", "\\", "1"),
    *('{"name": "add", "arguments": {"a": 1}}', '{"name": "walk"}', '"</tool_call>"', "<tool"),
)


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.integers(1, 9))
def test_pieces_of_any_size_give_the_same_answer(parts: list[str], size: int) -> None:
    def read(pieces: list[str]) -> tuple[str, list[str]]:
        reader = CallReader(USE)
        shown = [*(reader.take(piece) for piece in pieces), reader.finish()]
        names = [call["function"]["name"] for part in shown for call in part.calls]
        return "".join(part.text for part in shown), names

    text = "".join(parts)
    whole, names = read([text])
    assert read([text[i : i + size] for i in range(0, len(text), size)]) == (whole, names)
    if not names:
        assert whole == text


def test_a_call_is_passed_on_once_its_json_has_ended() -> None:
    reader = CallReader(USE)
    assert reader.take('<tool_call>{"name": "add", "arguments": {"a": 1}').calls == []
    assert len(reader.take("}").calls) == 1
    assert reader.take("</tool_call>\nThen").text == "Then"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "<tool_call>" + "[" * 100_000])
def test_brackets_without_an_end_are_text(text: str) -> None:
    """Thousands of brackets that are not closed are plain text, and do not end the generation with
    an error.
    """
    assert USE.read(text) == (text, [])
    call = {**CALL, "function": {"name": "add", "arguments": text}}
    message = {**ASSISTANT, "tool_calls": [call]}
    (shown_message,) = shown(message, traits=TemplateTraits(True, True, object_arguments=True))
    assert shown_message["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.parametrize("legacy", [False, True])
def test_streams_have_calls_by_their_older_name_where_functions_were_sent(legacy: bool) -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' * 2
    pieces = [AnswerPiece(5, text[i : i + 9], "", text[i : i + 9]) for i in range(0, 200, 9)]
    events = [PromptRead(3, 0, 0.0), *pieces, Ended("stop", len(pieces), None, 0.0)]
    job: Any = SimpleNamespace(
        model=SimpleNamespace(model=None),
        **dict.fromkeys(("n_prompt", "n_cached", "n_read", "n_written", "n_passages"), 0),
        **dict.fromkeys(("n_drafted", "prompt_seconds", "answer_seconds"), 0),
        n_thought=None,
    )
    form = AnswerForm(job, Prompt([1, 2, 3]), "m", use=USE, legacy_calls=legacy)
    writer = ChatWriter(form)
    chunks = [*writer.chunks(iter(events))]
    assert chunks.pop()["choices"] == []
    shown = [each["choices"][0] for each in chunks]
    calls = [each["delta"]["tool_calls"][0] for each in shown if "tool_calls" in each["delta"]]
    older = [each["delta"]["function_call"] for each in shown if "function_call" in each["delta"]]
    assert [call["index"] for call in calls] == [0, 1]
    assert older == ([{"name": "add", "arguments": '{"a": 1}'}] if legacy else [])
    assert shown[-1]["finish_reason"] == "tool_calls"


def test_an_answer_in_json_is_no_call_where_json_was_asked_for() -> None:
    function = {"name": "add", "parameters": {"type": "object"}}
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": function}],
    }
    for kind, asks in (
        (None, False),
        ({"type": "text"}, False),
        ({"type": "json_object"}, True),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}, True),
    ):
        request = ChatRequest.model_validate({**fields, "response_format": kind})
        assert request.reads_calls(request.tool_use()) is not asks
        required = {**fields, "response_format": kind, "tool_choice": "required"}
        request = ChatRequest.model_validate(required)
        assert request.reads_calls(request.tool_use())


@pytest.mark.parametrize("size", [1, 3, 1_000])
def test_one_call_is_all_that_is_shown_where_several_are_not_wanted(size: int) -> None:
    first, second = '{"name": "add", "arguments": {"a": 1}}', '{"name": "walk", "arguments": {}}'
    one = replace(USE, parallel=False)
    for text in (
        f"So: <tool_call>{first}</tool_call><tool_call>{second}</tool_call> Done.",
        f"So: <tool_call>[{first}, {second}]</tool_call>",
    ):
        reader = CallReader(one)
        parts = [reader.take(text[i : i + size]) for i in range(0, len(text), size)]
        parts.append(reader.finish())
        assert "".join(part.text for part in parts) == "So:"
        assert [c["function"]["name"] for part in parts for c in part.calls] == ["add"]
        assert reader.is_over
    assert len(USE.read(f"[{first}, {second}]")[1]) == 2


def test_text_that_is_no_call_is_shown_as_it_comes() -> None:
    reader = CallReader(USE)
    assert reader.take("Hello ").text == "Hello"
    assert reader.take("a <tool").text == " a"
    assert reader.take("box>").text == " <toolbox>"


def test_choices_that_cannot_be() -> None:
    with pytest.raises(RequestError, match="no tool 'fly'"):
        ToolUse.of([ADD], NamedTool.model_validate({"function": {"name": "fly"}}))
    with pytest.raises(RequestError, match="there are no tools"):
        ToolUse.of(None, "required")
    assert ToolUse.of([ADD], "none") is None


def test_schemas_with_definitions_of_the_same_name_do_not_mix() -> None:
    def with_definition(name: str, kind: str) -> Tool:
        schema = {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/Inner"}},
            "$defs": {"Inner": {"type": kind}},
        }
        return Tool.model_validate({"function": {"name": name, "parameters": schema}})

    use = ToolUse([with_definition("a", "integer"), with_definition("b", "boolean")], required=True)
    calls = ['{"name": "a", "arguments": {"x": 1}}', '{"name": "b", "arguments": {"x": true}}']
    mixed = ['{"name": "a", "arguments": {"x": true}}', '{"name": "b", "arguments": {"x": 1}}']
    assert takes(use.constraint(), *calls, *mixed) == [True, True, False, False]


def test_references_of_tools_begin_at_their_own_parameters() -> None:
    tree = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {
            "left": {"$ref": "#"},
            "$ref": {"type": "integer"},
            "c": {"$ref": "#/definitions/a~1b"},
        },
        "definitions": {"a/b": {"const": {"$ref": "#"}}},
        "additionalProperties": False,
    }
    tool = Tool.model_validate({"function": {"name": "t~/", "parameters": tree}})
    use = ToolUse([tool, ADD], required=True)
    good = ['{"left": {"left": {}, "$ref": 1}}', '{"c": {"$ref": "#"}}']
    bad = ['{"left": []}', '{"$ref": "#"}', '{"c": {"$ref": "#/$defs/t~/"}}', "[]"]
    texts = [f'{{"name": "t~/", "arguments": {each}}}' for each in (*good, *bad)]
    assert takes(use.constraint(), *texts) == [True] * 2 + [False] * 4


def test_a_named_tool_is_the_only_one_that_may_be_called() -> None:
    use = ToolUse.of([ADD, WALK], NamedTool.model_validate({"function": {"name": "walk"}}))
    assert use is not None
    calls = [
        '{"name": "walk", "arguments": {"to": "home"}}',
        '{"name": "add", "arguments": {"a": 1}}',
    ]
    assert takes(use.constraint(), *calls) == [True, False]
    assert len(use.definitions()) == 2


def test_a_tool_that_cannot_be_enforced_is_refused_by_its_name_and_path() -> None:
    parameters = {"type": "object", "properties": {"x": {"not": {}}}}
    tool = Tool.model_validate({"function": {"name": "fly", "parameters": parameters}})
    with pytest.raises(SettingsError, match=r"#/\$defs/fly/properties/x: Unimplemented.*not"):
        takes(ToolUse([tool, ADD], required=True).constraint(), "{}")


def test_instructions_hold_every_tool() -> None:
    lines = USE.instructions().splitlines()
    assert [json.loads(line)["function"]["name"] for line in lines[2:4]] == ["add", "walk"]
