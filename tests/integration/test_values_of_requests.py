"""Values of requests mean what clients of llama-server and of OpenAI expect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")

import httpx

from entropykv import EntropyLlama
from entropykv.llamacpp.model import NO_TEMPLATE
from entropykv.server import ModelOptions
from tests.support.command import entropykv
from tests.support.running_server import MODEL
from tests.support.several_models import run, running

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
SAID: list[dict[str, Any]] = [{"role": "user", "content": "the land in the"}]


def answers_of(
    model: Path, requests: Sequence[tuple[str, dict[str, Any]]], **options: Any
) -> list[httpx.Response]:
    """Send requests one after the other, as (path, body), to a server of one model; return the
    answers.

    `options` are fields of the server's ModelOptions.
    """
    given = {"n_ctx": 256, "kv_budget": "128", "n_threads": 1, **options}
    answers = []

    async def talk() -> None:
        async with running(ModelOptions(model=str(model), **given)) as server:
            for path, body in requests:
                # The text is sent as it is, because httpx itself would refuse NaN and lone
                # surrogates.
                content = json.dumps(body)
                headers = {"content-type": "application/json"}
                answers.append(await server.client.post(path, content=content, headers=headers))

    run(talk())
    return answers


def answer_of(model: Path, path: str, body: dict[str, Any], **options: Any) -> Any:
    """Return the JSON of the answer to a single request, which must be 200."""
    (answer,) = answers_of(model, [(path, body)], **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def completed(model: Path, **body: Any) -> Any:
    """Return the choice of a greedy completion, by default of a short prompt and 6 tokens."""
    given = {"prompt": "the land", "max_tokens": 6, "temperature": 0.0, **body}
    return answer_of(model, COMPLETION, given)["choices"][0]


def pieces_of(answer: httpx.Response) -> list[Any]:
    """Return the chunks of a streamed answer as parsed JSON."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


PROMPT = "The old garden"
TOOL = {"type": "function", "function": {"name": "add", "description": "Zählt 数 zusammen."}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.fixture(scope="module")
def words() -> EntropyLlama:
    """Open a model that writes words; with random bytes, the ends of tokens would be hidden."""
    return EntropyLlama(str(MODEL), n_ctx=256, n_threads=1, verbose=False)


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> EntropyLlama:
    return EntropyLlama(str(tiny_llama), n_ctx=256, n_threads=1, verbose=False)


def expected_logprobs(llama: EntropyLlama, prompt: str, n: int) -> tuple[list[int], list[float]]:
    """Return the first n tokens of a greedy answer and their log-probabilities, computed by plain
    readings.
    """
    tokens = llama.tokenize(prompt.encode())
    values = []
    for _ in range(n):
        llama.reset()
        llama.eval(tokens)
        row = llama.scores[0].astype(np.float64)
        values.append(float(row.max() - _log_sum(row)))
        tokens.append(int(row.argmax()))
    return tokens[-n:], values


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_model_without_logits_all(
    words: EntropyLlama, parallel: int, stream: bool
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0.0, "stream": stream}
    chat = {"messages": SAID, "max_tokens": 5, "temperature": 0.0, "stream": stream}
    asked = [
        (COMPLETION, {**body, "logprobs": 3}),
        (CHAT, {**chat, "logprobs": True, "top_logprobs": 2}),
        (CHAT, {**chat, "logprobs": True}),
    ]
    answers = answers_of(MODEL, asked, parallel=parallel)
    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
    read = [pieces_of(each) if stream else [each.json()] for each in answers]
    parts = [[part["choices"][0]["logprobs"] for part in each if part["choices"]] for each in read]
    values = [value for part in parts[0] if part for value in part["token_logprobs"]]
    tokens, expected = expected_logprobs(words, PROMPT, 5)
    assert values == pytest.approx(expected, abs=2e-2)
    names = [name for part in parts[0] if part for name in part["tokens"]]
    assert names == [words.detokenize([token]).decode("utf-8", "ignore") for token in tokens]
    tops = [top for part in parts[0] if part for top in part["top_logprobs"]]
    assert all(
        max(top.values()) == pytest.approx(value) for top, value in zip(tops, values, strict=True)
    )
    for each in parts[1:]:
        content = [token for part in each if part for token in part["content"]]
        assert len(content) == 5
        assert all(token["logprob"] <= 0.0 for token in content)


def test_an_echo_has_the_logprobs_of_the_prompt_in_a_bounded_memory(
    tiny_llama: Path, llama: EntropyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    from entropykv.session import logprobs  # noqa: PLC0415

    # Only 3 rows of logits fit at a time; values must not depend on where such a piece ends.
    monkeypatch.setattr(logprobs, "MOST_LOGIT_BYTES", 3 * 4 * llama.n_vocab())
    prompt = "the land in the and of the win"
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    first, second, after = answers_of(
        tiny_llama, [(COMPLETION, body), (COMPLETION, body), (COMPLETION, {"prompt": prompt})]
    )
    choice = first.json()["choices"][0]
    assert choice["text"] == prompt
    assert choice == second.json()["choices"][0]
    assert after.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 3
    tokens = llama.tokenize(prompt.encode())
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(tokens) - 1
    assert "".join(found["tokens"]) == prompt
    assert found["token_logprobs"][0] is None
    for at in (2, 3, 4, len(tokens) - 1):
        llama.reset()
        llama.eval(tokens[:at])
        row = llama.scores[0].astype(np.float64)
        value = float(row[tokens[at]] - _log_sum(row))
        assert found["token_logprobs"][at - 1] == pytest.approx(value, abs=2e-2)


def _log_sum(row: Any) -> float:
    return float(row.max() + np.log(np.exp(row - row.max()).sum()))


def test_entropy_llama_gives_logprobs_without_logits_all(words: EntropyLlama) -> None:
    answer: Any = words(PROMPT, max_tokens=4, temperature=0.0, logprobs=2)
    found = answer["choices"][0]["logprobs"]
    assert len(found["tokens"]) == 4
    assert json.loads(json.dumps(found)) == found
    assert found["text_offset"][0] == len(PROMPT)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_end_where_a_stop_text_ends_the_answer(words: EntropyLlama, stream: bool) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}
    whole: Any = words(PROMPT, **options)
    text = whole["choices"][0]["text"]
    options |= {"stop": [text[20:25]], "logprobs": 0, "stream": stream}
    cut: Any = words(PROMPT, **options)
    choices = [each["choices"][0] for each in (cut if stream else [cut])]
    names = [name for each in choices if each["logprobs"] for name in each["logprobs"]["tokens"]]
    shown = "".join(each["text"] for each in choices)
    assert shown == text[:20]
    assert "".join(names).startswith(shown)
    assert not "".join(names[:-1]).startswith(shown)


def test_values_of_logprobs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from entropykv.session import logprobs  # noqa: PLC0415

    monkeypatch.setattr(logprobs, "MOST_VALUES", 100)
    long = {"prompt": f"{PROMPT} and " * 10, "max_tokens": 40, "logprobs": 4, "temperature": 0}
    asked = [
        (COMPLETION, long),
        (COMPLETION, {**long, "echo": True, "max_tokens": 1}),
        (COMPLETION, {**long, "stream": True}),
        (COMPLETION, {**long, "max_tokens": 5}),
    ]
    answers = answers_of(MODEL, asked)
    assert [answer.status_code for answer in answers] == [400, 400, 200, 200]
    assert all("ask for fewer" in answer.json()["error"]["message"] for answer in answers[:2])
    assert "error" not in answers[2].text


HOT = {"prompt": "the land", "max_tokens": 24, "temperature": 1.5, "top_k": 0, "top_p": 1.0}


@pytest.mark.parametrize("given", [{}, {"seed": -1}, {"seed": 2**32 - 1}])
def test_servers_without_a_seed_answer_differently(tiny_llama: Path, given: dict[str, int]) -> None:
    asked = [(COMPLETION, {**HOT, **sent}) for sent in ({}, {"seed": -1}, {"seed": 7, "n": 1})]
    first, second = (
        [answer.json()["choices"][0]["text"] for answer in answers_of(tiny_llama, asked, **given)]
        for _ in range(2)
    )
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert first[2] == second[2]


def test_a_seed_of_the_server_repeats_its_answers_but_those_to_seed_minus_one(
    tiny_llama: Path,
) -> None:
    asked = [(COMPLETION, HOT), (COMPLETION, {**HOT, "seed": -1, "n": 2})]
    first, second = (
        [answer.json()["choices"] for answer in answers_of(tiny_llama, asked, seed=5)]
        for _ in range(2)
    )
    assert first[0] == second[0]
    assert len({choice["text"] for choice in [*first[1], *second[1]]}) == 4


def test_entropy_llama_draws_a_seed_where_it_gets_minus_one(tiny_llama: Path) -> None:
    texts = []
    for seed, asked in ((-1, None), (-1, None), (3, None), (3, None), (3, -1), (3, -1)):
        llm = EntropyLlama(str(tiny_llama), n_ctx=128, n_threads=1, verbose=False, seed=seed)
        options: dict[str, Any] = {**HOT, "seed": asked}
        answer: Any = llm.create_completion(**options)
        texts.append(answer["choices"][0]["text"])
        llm.close()
    assert texts[0] != texts[1]
    assert texts[2] == texts[3]
    assert texts[4] != texts[5]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parallel", [1, 2])
def test_max_tokens_of_zero_and_below(tiny_llama: Path, parallel: int, stream: bool) -> None:
    """max_tokens of 0 only reads the prompt; -1 and -2 write until the model stops or the context
    is full.
    """
    common: dict[str, Any] = {
        "temperature": 0.0,
        "stream": stream,
        "stream_options": {"include_usage": True},
    }
    bodies: list[tuple[str, dict[str, Any]]] = [
        (COMPLETION, {"prompt": "the land"}),
        (CHAT, {"messages": SAID}),
    ]
    asked = [
        (path, {**body, **common, "max_tokens": limit})
        for path, body in bodies
        for limit in (0, -1, -2)
    ]
    for (_, body), answer in zip(
        asked, answers_of(tiny_llama, asked, n_ctx=64, parallel=parallel), strict=True
    ):
        assert answer.status_code == 200, answer.text
        last = pieces_of(answer)[-1] if stream else answer.json()
        written = last["usage"]["completion_tokens"]
        assert written == 0 if body["max_tokens"] == 0 else written > 16
        whole = answer.json()["choices"][0] if not stream else None
        if whole and body["max_tokens"] == 0:
            assert whole["finish_reason"] == "length"
            assert (whole.get("text") or whole.get("message", {}).get("content")) in ("", None)


@pytest.mark.parametrize("stop", ["", [""], ["", "\n\n\n\n"]])
def test_an_empty_stop_text_ends_nothing(
    tiny_llama: Path, llama: EntropyLlama, stop: str | list[str]
) -> None:
    assert completed(tiny_llama, stop=stop)["text"] == completed(tiny_llama)["text"]
    ask: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0}
    said, plain = llama("the land", **ask, stop=stop), llama("the land", **ask)
    assert said["choices"][0]["text"] == plain["choices"][0]["text"]


def test_top_k_of_minus_one_is_all_tokens(tiny_llama: Path) -> None:
    sampled = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
    assert completed(tiny_llama, **sampled, top_k=-1) == completed(tiny_llama, **sampled, top_k=0)


def test_repetitions_are_penalised_only_where_it_is_asked_for(tiny_llama: Path) -> None:
    given = {"prompt": "the the the the the the", "max_tokens": 24}
    plain = completed(tiny_llama, **given)
    assert plain == completed(tiny_llama, **given, repeat_penalty=1.0)
    assert plain != completed(tiny_llama, **given, repeat_penalty=1.9)
    asked = {"messages": SAID, "temperature": 0.0, "max_tokens": 24}
    chats = answers_of(tiny_llama, [(CHAT, asked), (CHAT, {**asked, "repeat_penalty": 1.0})])
    first, second = (chat.json()["choices"] for chat in chats)
    assert first == second


@pytest.mark.parametrize(
    "bias",
    [{"{}": 500}, [["{}", 500]], [[" win", 500]], {" win": 500}, [["{}", 400.0], [1, False]]],
)
def test_logit_bias_in_every_form_of_llama_server(
    tiny_llama: Path, llama: EntropyLlama, bias: Any
) -> None:
    (token,) = llama.tokenize(b"ing", add_bos=False)
    given = json.loads(json.dumps(bias).replace("{}", str(token)).replace(" win", "ing"))
    if isinstance(given, list) and str(token) in given[0]:
        given[0][0] = token
    assert completed(tiny_llama, logit_bias=given, max_tokens=3)["text"] == "inginging"


def test_a_bias_of_false_forbids_a_token(words: EntropyLlama) -> None:
    options: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1}
    first = completed(MODEL, **options)["text"]
    (token,) = words.tokenize(first.encode(), add_bos=False)
    for bias in ({str(token): False}, [[token, False]], [[first, False]]):
        assert completed(MODEL, **options, logit_bias=bias)["text"] != first


def test_prompts_of_texts_and_tokens(tiny_llama: Path, llama: EntropyLlama) -> None:
    plain = llama.tokenize(b"the land", add_bos=False)
    prompts: list[Any] = [
        ["the land", *plain],
        [llama.token_bos(), *plain, "the land"],
        [["the land", plain[0]], "the land", plain],
    ]
    expected = [
        1 + 2 * len(plain),
        1 + 2 * len(plain),
        (1 + len(plain) + 1) + (1 + len(plain)) + len(plain),
    ]
    asked = [(COMPLETION, {"prompt": prompt, "max_tokens": 1}) for prompt in prompts]
    answers = [answer.json() for answer in answers_of(tiny_llama, asked)]
    assert [each["usage"]["prompt_tokens"] for each in answers] == expected
    assert [len(each["choices"]) for each in answers] == [1, 1, 3]


def test_content_that_is_null_is_empty_at_every_door(tiny_llama: Path, llama: EntropyLlama) -> None:
    roles = ("system", "user", "assistant", "tool")
    said = [{"role": role, "content": None} for role in roles]
    end = {"role": "user", "content": "the"}
    items = [{"role": role, "content": None} for role in roles[:3]]
    asked: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [*said, end], "max_tokens": 1}),
        (CHAT, {"messages": [{"role": "user"}, end], "max_tokens": 1}),
        (
            CHAT,
            {
                "messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}, end],
                "max_tokens": 1,
            },
        ),
        ("/v1/responses", {"input": [*items, end], "max_output_tokens": 1}),
        (
            "/api/chat",
            {
                "model": "m",
                "messages": [*said, end],
                "stream": False,
                "options": {"num_predict": 1},
            },
        ),
    ]
    for (path, _), answer in zip(asked, answers_of(tiny_llama, asked), strict=True):
        assert answer.status_code == 200, (path, answer.text)
    shown = []
    llama.chat_handler = lambda messages, **_: shown.extend(messages) or {}  # type: ignore[func-returns-value]
    llama.create_chat_completion(said)
    llama.chat_handler = None
    assert [message["content"] for message in shown] == [""] * 4


def test_cached_tokens_are_reported_whole_and_in_streams(tiny_llama: Path) -> None:
    text = "the land in the and of the win " * 3
    common = {"temperature": 0.0, "max_tokens": 2}
    asked = [
        (COMPLETION, {"prompt": text, **common}),
        (COMPLETION, {"prompt": text, **common}),
        (
            COMPLETION,
            {"prompt": text, **common, "stream": True, "stream_options": {"include_usage": True}},
        ),
        (CHAT, {"messages": SAID, **common}),
        (CHAT, {"messages": SAID, **common}),
        ("/v1/responses", {"input": "the land in the", "max_output_tokens": 2}),
    ]
    answers = answers_of(tiny_llama, asked, parallel=2)
    usages = [
        (pieces_of(each)[-1] if index == 2 else each.json())["usage"]
        for index, each in enumerate(answers)
    ]
    cached = [
        usage.get("prompt_tokens_details", usage.get("input_tokens_details"))["cached_tokens"]
        for usage in usages
    ]
    counts = [usage.get("prompt_tokens", usage.get("input_tokens")) for usage in usages]
    assert cached[0] == cached[3] == 0
    assert cached[1:3] == [counts[1]] * 2 or min(cached[1:3]) >= counts[1] - 1
    assert cached[4] >= counts[4] - 1
    assert cached[5] >= counts[5] - 1


def test_a_model_without_a_template_continues_what_is_said(
    tiny_llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = [
        {"role": "system", "content": "in the"},
        {"role": "user", "content": "the land"},
        {"role": "assistant", "content": " and"},
        {"role": "user", "content": "the win"},
    ]
    options = {"temperature": 0.0, "max_tokens": 6}
    chat = answer_of(tiny_llama, CHAT, {"messages": said, **options})
    assert NO_TEMPLATE in capfd.readouterr().err
    plain = completed(tiny_llama, prompt="in the\nthe land and\nthe win")
    assert chat["choices"][0]["message"]["content"] == plain["text"]


def test_the_command_line_says_the_same_and_answers_the_same() -> None:
    words = ("-m", MODEL, "-t", 1, "-n", 6, "--temp", 0, "-sys", "It rains.")
    expected = completed(MODEL, prompt=f"It rains.\n{PROMPT}")["text"]
    for command in (("run", "-p", PROMPT), ("chat", "-p", PROMPT, "-st")):
        result = entropykv(*command, *words)
        assert result.stderr.count(NO_TEMPLATE) == 1, result.stderr
        assert result.stdout.strip() == expected.strip()


def test_tools_reach_the_model_with_the_characters_of_all_languages() -> None:
    from entropykv.chat.chat_template import TemplateTraits  # noqa: PLC0415
    from entropykv.server.chat.messages import (  # noqa: PLC0415
        ImageParts,
        Message,
        template_messages,
    )
    from entropykv.server.chat.tool_calls import Tool, ToolUse  # noqa: PLC0415

    use = ToolUse([Tool.model_validate(TOOL)])
    assert "Zählt 数" in use.instructions()
    call = {"function": {"name": "add", "arguments": {"x": "Zürich 数"}}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [call]})
    for traits in (TemplateTraits(), TemplateTraits(shows_calls=True)):
        assert "Zürich 数" in str(template_messages([message], traits, None, ImageParts(None)))
    _, (read,) = use.read('{"name": "add", "arguments": {"x": "Z\\u00fcrich 数"}}')
    assert "Zürich 数" in read["function"]["arguments"]
