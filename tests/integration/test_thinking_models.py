"""`entropykv serve`, `chat` and `run` separate thoughts from answers, and drop them in later turns.

The model of the package writes no tags itself. So the template begins the thought, and a budget
ends it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, TokenType

from tests.support.chats import Chat
from tests.support.running_server import KEY, MODEL, Server
from tests.support.thinking import CLOSING, OPENING
from tests.support.tiny_models import write_llama

THOUGHT = 40
SYSTEM = {"role": "system", "content": "The quiet barn stood below the square. " * 12}
NEEDS: tuple[object, ...] = ("--kv-budget", 64, "--policy", "uniform", "--kv-type", "f16")


def template_file(folder: Path, template: str) -> Path:
    path = folder / "template.jinja"
    path.write_text(template, encoding="utf-8")
    return path


def question(text: str = "Where is the garden?") -> dict[str, str]:
    return {"role": "user", "content": text}


class Asked:
    """Hold a server whose template begins a thought, and send chats to it."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def whole(self, *messages: dict[str, Any], **fields: Any) -> Any:
        body = {"messages": messages or [question()], "max_tokens": 70, "temperature": 0, **fields}
        response = self.server.post("/v1/chat/completions", json.dumps(body))
        assert response.status_code == 200, response.text
        return response.json()

    def message(self, *messages: dict[str, Any], **fields: Any) -> Any:
        return self.whole(*messages, **fields)["choices"][0]["message"]

    def deltas(self, **fields: Any) -> list[Any]:
        body = {"messages": [question()], "max_tokens": 70, "temperature": 0, "stream": True}
        text = self.server.post("/v1/chat/completions", json.dumps({**body, **fields})).text
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    path = template_file(tmp_path_factory.mktemp("template"), OPENING)
    options = ("--chat-template-file", path, "--reasoning-budget", THOUGHT, "--api-key", KEY)
    with Server(*options, *NEEDS, usual=("--n_ctx", 16384, "-t", 1)) as server:
        yield Asked(server)


def test_a_thought_is_apart_from_the_answer(asked: Asked) -> None:
    answer = asked.whole(min_tokens=70)
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"]
    assert "think" not in message["content"] + message["reasoning_content"]
    n_thought = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert THOUGHT < n_thought < answer["usage"]["completion_tokens"]


def test_a_stream_has_the_thought_first(asked: Asked) -> None:
    message = asked.message(min_tokens=70)
    deltas = asked.deltas(min_tokens=70)
    thought = [each["reasoning_content"] for each in deltas if "reasoning_content" in each]
    text = [each["content"] for each in deltas if "content" in each]
    assert "".join(thought) == message["reasoning_content"]
    assert "".join(text) == message["content"]
    assert len(thought) > 5
    kinds = ["content" in each for each in deltas if each.keys() & {"content", "reasoning_content"}]
    assert kinds == sorted(kinds)


def test_formats_say_where_a_thought_is(asked: Asked) -> None:
    plain = asked.message(min_tokens=70)
    thought, said = plain["reasoning_content"], plain["content"]
    none = asked.message(min_tokens=70, reasoning_format="none")
    assert "reasoning_content" not in none
    assert none["content"].startswith(thought)
    assert none["content"].partition("</think>")[2].lstrip() == said
    legacy = asked.message(min_tokens=70, reasoning_format="deepseek-legacy")
    assert legacy["reasoning_content"] == thought
    assert legacy["content"] == f"<think>{none['content']}"
    streamed = asked.deltas(min_tokens=70, reasoning_format="deepseek-legacy")
    assert "".join(each.get("content", "") for each in streamed) == none["content"]


@pytest.mark.parametrize(
    "fields", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}]
)
def test_a_request_can_do_without_thought(asked: Asked, fields: dict[str, Any]) -> None:
    answer = asked.whole(min_tokens=30, **fields)
    assert "reasoning_content" not in answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_request_has_its_own_budget_and_ending(asked: Asked) -> None:
    fields = {"reasoning_budget_tokens": 3, "reasoning_budget_message": " Enough."}
    short = asked.message(min_tokens=30, **fields)["reasoning_content"]
    assert short.endswith(" Enough.")
    assert asked.message(thinking_budget_tokens=0, min_tokens=30).get("reasoning_content") is None


def test_a_schema_describes_what_comes_behind_the_thought(asked: Asked) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}}
    schema |= {"required": ["city"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    message = asked.message(response_format=form, max_tokens=200)
    assert message["reasoning_content"]
    assert json.loads(message["content"])["city"] in ("Rome", "Oslo")


def test_a_forced_call_comes_behind_the_thought(asked: Asked) -> None:
    tool = {"name": "walk", "parameters": {"type": "object", "properties": {}}}
    message = asked.message(
        tools=[{"type": "function", "function": tool}], tool_choice="required", max_tokens=200
    )
    assert message["reasoning_content"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["walk"]


def test_the_responses_api_has_reasoning_items(asked: Asked) -> None:
    body = {"input": "Where is the garden?", "max_output_tokens": 70, "temperature": 0}
    whole = asked.server.post("/v1/responses", json.dumps(body)).json()
    thought = whole["output"][0]
    assert thought["type"] == "reasoning"
    (part,) = thought["content"]
    assert part["type"] == "reasoning_text"
    assert part["text"]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    text = asked.server.post("/v1/responses", json.dumps({**body, "stream": True})).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [each for each in events if each["type"] == "response.reasoning_text.delta"]
    assert "".join(each["delta"] for each in deltas) == part["text"]
    assert [item["type"] for item in events[-1]["response"]["output"]][:1] == ["reasoning"]
    off = {**body, "reasoning": {"effort": "none"}}
    answer = asked.server.post("/v1/responses", json.dumps(off)).json()
    assert {item["type"] for item in answer["output"]} <= {"message"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {str(n): n for n in range(65)}}, "chat_template_kwargs"),
        ({"reasoning_format": "loud"}, "reasoning_format"),
        ({"reasoning_budget_tokens": -2}, "reasoning_budget_tokens"),
        ({"reasoning_budget_message": "a" * 5000}, "reasoning_budget_message"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    asked: Asked, fields: dict[str, Any], named: str
) -> None:
    body = json.dumps({"messages": [question()], "max_tokens": 4, **fields})
    response = asked.server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == named


def test_a_turn_reads_its_answer_and_what_is_new(asked: Asked) -> None:
    """A turn reads the last answer and new text only, and a checkpoint restores what the thought
    had evicted.
    """
    messages = [SYSTEM]
    n_kept = len(asked.server.kv()["conversations"])
    read, lengths, answers = [], [], []
    for turn in range(3):
        messages.append(question(f"Where is the garden? {turn}"))
        before = asked.server.kv()["prompt_tokens"]
        answer = asked.whole(*messages, min_tokens=70)
        message = answer["choices"][0]["message"]
        lengths.append(answer["usage"]["prompt_tokens"])
        read.append(asked.server.kv()["prompt_tokens"] - before)
        answers.append(message["content"])
        messages.append({"role": "assistant", "content": message["content"]})
    assert asked.server.kv()["evictions"] > 0
    assert read[0] == lengths[0] > 120
    for turn in (1, 2):
        new = lengths[turn] - lengths[turn - 1]
        assert new < read[turn] < new + 12  # The tag that begins the thought is read again.
    assert len(asked.server.kv()["conversations"]) == n_kept + 1  # Earlier turns are not kept.
    again = asked.message(*messages[:-1], min_tokens=70)
    assert again["content"] == answers[-1]


def test_chat_keeps_no_thoughts(chat: Chat, tmp_path: Path) -> None:
    """The context of a chat grows by prompts and answers alone; thoughts show only their length."""
    path = template_file(tmp_path, OPENING)
    options = ("--chat-template-file", path, "--reasoning-budget", 60, *NEEDS, "-n", 100)
    options += ("--ignore-eos",)
    answers, errors = chat(MODEL, "Where is the garden?\nAnd the barn?\n/stats\n", *options)
    assert errors.count("[thought for ") == 2
    assert "think" not in answers
    position = int(errors.split("context  ")[1].split(" ")[0].replace(",", ""))
    assert position < 180  # Two thoughts alone have 120 tokens.
    _, shown = chat(MODEL, "Where is the garden?\n", *options, "--show-thoughts")
    assert "[thought for" not in shown
    _, raw = chat(MODEL, "Where is the garden?\n", *options, "--reasoning-format", "none")
    assert "[thought for" not in raw


def test_chat_undoes_a_turn_with_a_thought(chat: Chat, tmp_path: Path) -> None:
    path = template_file(tmp_path, OPENING)
    options = ("--chat-template-file", path, "--reasoning-budget", 60, *NEEDS, "-n", 100)
    options += ("--ignore-eos",)
    first, _ = chat(MODEL, "Where is the garden?\nAnd the barn?\n", *options)
    again, _ = chat(MODEL, "Where is the garden?\nWho?\n/undo\nAnd the barn?\n", *options)
    assert again.splitlines()[-1] == first.splitlines()[-1]


def test_run_writes_the_answer_alone_to_stdout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from entropykv.cli import main  # noqa: PLC0415

    path = template_file(tmp_path, OPENING)
    command = ["run", "-m", str(MODEL), "--chat-template-file", str(path), "-p", "Where?"]
    command += ["--temp", "0", "-t", "1", "-n", "60"]
    budget = ["--reasoning-budget", "8", "--grammar", "root ::= [a-z ]{9,9}"]
    assert main([*command, *budget]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.strip("\n")) <= 9
    assert main([*command, *budget, "--reasoning-format", "none"]) == 0
    raw = capsys.readouterr().out.strip("\n")
    thought, _, said = raw.partition("</think>")
    assert said.strip() == shown.out.strip() != ""
    assert shown.err.startswith(thought.strip())


def test_run_tells_the_template_whether_to_think(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from entropykv.cli import main  # noqa: PLC0415

    path = template_file(tmp_path, OPENING)
    command = ["run", "-m", str(MODEL), "--chat-template-file", str(path), "-p", "Where?"]
    command += ["--temp", "0", "-t", "1", "-n", "4"]
    read = []
    for options in ([], ["--reasoning", "on"], ["-rea", "off"], ["--reasoning-effort", "low"]):
        assert main([*command, *options]) == 0
        read.append(capsys.readouterr().err.split("prompt  ")[1].split(" tokens")[0])
    assert read[0] == read[1] == read[3] != read[2]


def test_thoughts_are_no_part_of_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    from entropykv.cli import main  # noqa: PLC0415

    command = ["run", "-m", str(MODEL), "-p", "The garden", "--temp", "0", "-t", "1", "-n", "8"]
    assert main(command) == 0
    plain = capsys.readouterr().out
    assert main([*command, "--reasoning-budget", "0"]) == 0
    assert capsys.readouterr().out == plain


@pytest.fixture
def magistral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a tiny model whose vocabulary has [THINK] and [/THINK] as control tokens."""
    tags = {"<unused0>": "[THINK]", "<unused1>": "[/THINK]"}
    places: list[int] = []
    add_list, add_types = GGUFWriter.add_token_list, GGUFWriter.add_token_types

    def with_tags(writer: GGUFWriter, tokens: list[str]) -> None:
        places.extend(place for place, token in enumerate(tokens) if token in tags)
        add_list(writer, [tags.get(token, token) for token in tokens])

    def with_types(writer: GGUFWriter, types: list[int]) -> None:
        kinds = [TokenType.CONTROL if i in places else kind for i, kind in enumerate(types)]
        add_types(writer, [int(kind) for kind in kinds])

    monkeypatch.setattr(GGUFWriter, "add_token_list", with_tags)
    monkeypatch.setattr(GGUFWriter, "add_token_types", with_types)
    path = tmp_path / "tiny.gguf"
    write_llama(path, n_vocab=340)
    return path


def test_tags_that_are_control_tokens_are_seen(magistral: Path, tmp_path: Path) -> None:
    template = OPENING.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    path = template_file(tmp_path, template)
    options = ("--chat-template-file", path, "--reasoning-budget", 20, "--api-key", KEY)
    with Server(*options, model=magistral, usual=("--n_ctx", 512, "-t", 1)) as server:
        message = Asked(server).message(min_tokens=60, max_tokens=60)
        assert message["reasoning_content"]
        assert message["content"]
        assert "THINK" not in message["content"] + message["reasoning_content"]
        raw = Asked(server).message(min_tokens=60, max_tokens=60, reasoning_format="none")
        assert "[/THINK]" in raw["content"]
        form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
        chosen = Asked(server).message(response_format=form)
        assert json.loads(chosen["content"]) in ("yes", "no")


def test_a_turn_reads_only_what_is_new_if_the_model_begins_its_thoughts(tmp_path: Path) -> None:
    """A turn reads only new text, also if the model itself begins its thoughts, as Qwen 3 does."""
    path = template_file(tmp_path, CLOSING)
    with Server(
        "--chat-template-file", path, "--api-key", KEY, *NEEDS, usual=("-c", 8192)
    ) as server:
        grammar = 'root ::= "<think>" [a-z ]{200,200} "</think>" [a-z ]{8,8}'
        messages = [SYSTEM]
        for turn in range(3):
            messages.append(question(f"Where is the garden? {turn}"))
            before = server.kv()["prompt_tokens"]
            answer = Asked(server).whole(*messages, grammar=grammar, max_tokens=400)
            message = answer["choices"][0]["message"]
            assert len(message["reasoning_content"]) > 150
            n_read = server.kv()["prompt_tokens"] - before
            n_prompt = answer["usage"]["prompt_tokens"]
            assert n_read == n_prompt if turn == 0 else n_read < 60 < n_prompt
            messages.append({"role": "assistant", "content": message["content"]})
        assert server.kv()["evictions"] > 0
        assert len(server.kv()["conversations"]) == 1
