"""Requests of Anthropic's interface become chats, and chunks become events of that interface."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from entropykv.server.dialects.answers import SaidPart
from entropykv.server.dialects.anthropic_requests import MessagesRequest, MessageWriter


def chat_fields(*messages: Any, **more: Any) -> dict[str, Any]:
    given = {"messages": list(messages), **more}
    return MessagesRequest.model_validate(given).chat_fields()


def test_results_come_before_what_the_user_says_and_images_of_results_with_it() -> None:
    """Results of tools come before what the user says, but their images with it: a template shows
    results right after their call, and images only in messages of users.
    """
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "7",
        "content": [{"type": "text", "text": "a"}, image, {"type": "text", "text": "b"}],
    }
    said = {"type": "text", "text": "So?"}
    found = chat_fields({"role": "user", "content": [said, result]})["messages"]
    assert found == [
        {"role": "tool", "tool_call_id": "7", "content": "a\nb"},
        {
            "role": "user",
            "content": [
                said,
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}},
            ],
        },
    ]


def test_what_the_model_said_has_its_thoughts_and_calls() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "text", "text": "I "},
        {"type": "text", "text": "look."},
        {"type": "tool_use", "id": "7", "name": "look", "input": {"at": "ä"}},
    ]
    (message,) = chat_fields({"role": "assistant", "content": blocks})["messages"]
    assert message["content"] == "I look."
    assert message["reasoning_content"] == "Hm."
    function = {"name": "look", "arguments": '{"at": "ä"}'}
    assert message["tool_calls"] == [{"id": "7", "type": "function", "function": function}]


def test_the_number_that_a_client_changes_in_every_request_is_left_out() -> None:
    """A number that changes in every request is removed: prompts of Claude Code begin alike."""
    line = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={};You are"
    first, second = (
        chat_fields({"role": "user", "content": "a"}, system=[{"type": "text", "text": text}])
        for text in (line.format("a5145"), line.format("00b1f"))
    )
    assert first["messages"] == second["messages"]
    assert first["messages"][0]["content"].endswith(";You are")


def test_thinking_is_told_to_the_template() -> None:
    ask = {"role": "user", "content": "a"}
    found = chat_fields(ask, thinking={"type": "enabled", "budget_tokens": 50})
    assert found["thinking_budget_tokens"] == 50
    assert found["chat_template_kwargs"]["enable_thinking"] is True
    found = chat_fields(ask, thinking={"type": "disabled"}, output_config={"effort": "low"})
    assert found["chat_template_kwargs"]["enable_thinking"] is False
    assert found["reasoning_effort"] == "low"


def test_every_block_of_a_stream_has_a_number_and_ends() -> None:
    call = {"id": "7", "function": {"name": "look", "arguments": '{"at": 1}'}}
    parts = [
        *(SaidPart(), SaidPart("H"), SaidPart("m."), SaidPart(text="Yes")),
        *(SaidPart(calls=[call]), SaidPart(calls=[call]), SaidPart(reason="tool_calls")),
    ]
    job = SimpleNamespace(n_prompt=9, n_cached=4, n_written=5, stop=None)
    form = cast(Any, SimpleNamespace(job=job, parts=iter))
    found = list(MessageWriter({"id": "m"}, form).chunks(cast(Any, parts)))
    assert found[0]["message"]["usage"]["input_tokens"] == 5
    begun = [e for e in found if e["type"] == "content_block_start"]
    kinds = ["thinking", "text", "tool_use", "tool_use"]
    assert [(e["index"], e["content_block"]["type"]) for e in begun] == list(enumerate(kinds))
    assert [e["index"] for e in found if e["type"] == "content_block_stop"] == [0, 1, 2, 3]
    deltas_of_first = [e["delta"]["type"] for e in found if e.get("index") == 0 and "delta" in e]
    assert deltas_of_first == ["thinking_delta", "thinking_delta", "signature_delta"]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    assert found[-2]["usage"]["cache_read_input_tokens"] == 4
