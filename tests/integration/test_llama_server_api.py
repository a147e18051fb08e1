"""`entropykv serve` answers on llama-server's own routes, in the form that its clients expect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.peers.peer_models import write_talkative
from tests.support.running_server import KEY, Server
from tests.support.served import served

PROMPT = "the old garden and the"
N_CTX = 512
QUESTION = {"role": "user", "content": "where is the garden"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tmp_path_factory.mktemp("models") / "talkative.gguf"
    write_talkative(model)
    options = ("-np", 2, "-c", N_CTX, "--kv-budget", 1.0, "-t", 1, "--seed", 7)
    yield from served("--alias", "tiny", "--api-key", KEY, model=model, usual=options)


def ask(server: Server, path: str, **body: Any) -> httpx.Response:
    return server.post(path, json.dumps(body))


def complete(server: Server, **body: Any) -> Any:
    given = {"prompt": PROMPT, "n_predict": 12, "temperature": 0, **body}
    response = ask(server, "/completion", **given)
    assert response.status_code == 200, response.text
    return response.json()


def chunks(server: Server, path: str, **body: Any) -> list[Any]:
    response = ask(server, path, **{"stream": True, **body})
    assert response.status_code == 200, response.text
    events = response.text.strip().split("\n\n")
    return [json.loads(each.removeprefix("data: ")) for each in events if "[DONE]" not in each]


def chat(server: Server, **body: Any) -> Any:
    given = {"messages": [QUESTION], "max_tokens": 8, "temperature": 0, **body}
    response = ask(server, "/v1/chat/completions", **given)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_text_is_that_of_openai_s_route(server: Server) -> None:
    answer = complete(server, return_tokens=True)
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    other = ask(server, "/v1/completions", **body).json()
    assert answer["content"] == other["choices"][0]["text"]
    assert answer["stop"] is True
    assert answer["stop_type"] == "limit"
    assert answer["truncated"] is False
    assert answer["model"] == "tiny"
    assert answer["prompt"] == PROMPT
    text = ask(server, "/detokenize", tokens=answer["tokens"]).json()["content"]
    assert text == answer["content"]
    assert complete(server)["tokens"] == []


def test_numbers_and_times_belong_together(server: Server) -> None:
    answer = complete(server, prompt="a text of its own", cache_prompt=False)
    times = answer["timings"]
    assert times["cache_n"] == 0
    assert times["prompt_n"] == answer["tokens_evaluated"]
    assert times["predicted_n"] == answer["tokens_predicted"] == 12
    assert times["prompt_per_second"] == pytest.approx(1e3 * times["prompt_n"] / times["prompt_ms"])
    rate = times["predicted_per_second"]
    # The prompt gave the logits of the first token.
    assert rate == pytest.approx(1e3 * 11 / times["predicted_ms"])
    again = complete(server, prompt="a text of its own")
    assert again["timings"]["cache_n"] > 0
    assert again["content"] == answer["content"]
    anew = complete(server, prompt="a text of its own", cache_prompt=False)
    assert anew["timings"]["cache_n"] == 0


def test_a_stream_has_tokens_and_the_same_text(server: Server) -> None:
    whole = complete(server, return_tokens=True, n_probs=3)
    body = {"prompt": PROMPT, "n_predict": 12, "temperature": 0, "n_probs": 3}
    *parts, end = chunks(server, "/completions", **body)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [t for part in parts for t in part["tokens"]] == whole["tokens"]
    values = [v for part in parts for v in part["completion_probabilities"]]
    assert [v["id"] for v in values] == whole["tokens"]
    assert values == whole["completion_probabilities"]
    assert [part["stop"] for part in parts] == [False] * len(parts)
    assert end["stop"] is True
    assert end["timings"]["predicted_n"] == 12
    assert end["generation_settings"] == whole["generation_settings"]


def test_a_stop_is_named(server: Server) -> None:
    text = complete(server)["content"]
    stop = text[4:6]
    answer = complete(server, stop=["never", stop])
    assert answer["content"] == text[: text.index(stop)]
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", stop)
    body = {"messages": [QUESTION], "max_tokens": 40, "temperature": 0}
    said = ask(server, "/v1/messages", **body).json()["content"][0]["text"]
    message = ask(server, "/v1/messages", **body, stop_sequences=[said[4:6]]).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", said[4:6])


def test_a_context_that_ends_is_told(server: Server) -> None:
    answer = complete(server, n_predict=-1)
    assert answer["truncated"] is True
    assert answer["stop_type"] == "limit"
    n_tokens = answer["tokens_evaluated"] + answer["tokens_predicted"]
    assert n_tokens == N_CTX + 1  # The last token is written, but not read.


def test_prompts_are_texts_tokens_and_both(server: Server) -> None:
    tokens = ask(server, "/tokenize", content=PROMPT, add_special=True).json()["tokens"]
    mixed = [tokens[0], PROMPT]
    one = complete(server)
    several = complete(server, prompt=[PROMPT, tokens, {"prompt_string": PROMPT}])
    assert [each["content"] for each in several] == [one["content"]] * 3
    assert [each["index"] for each in several] == [0, 1, 2]
    assert complete(server, prompt=mixed)["content"] == one["content"]
    assert ask(server, "/tokenize", content=mixed).json()["tokens"] == tokens
    both = complete(server, n_cmpl=2, temperature=1.0, seed=1)
    seeds = [each["generation_settings"]["seed"] for each in both]
    assert seeds == [1, 2]


def test_settings_tell_how_it_was_sampled(server: Server) -> None:
    body = {
        "temperature": 1.0,
        "samplers": ["top_k", "typical_p", "temperature"],
        "typical_p": 0.5,
        "dry_multiplier": 0.5,
        "dry_sequence_breakers": ["x"],
        "xtc_probability": 0.1,
        "mirostat": 2,
        "repeat_last_n": 3,
        "logit_bias": [["garden", False], [7, 1.5]],
    }
    settings = complete(server, **body)["generation_settings"]
    assert settings["samplers"] == ["top_k", "typ_p", "temperature"]
    assert settings["dry_sequence_breakers"] == ["x"]
    assert settings["mirostat"] == 2
    assert settings["seed"] == 7  # The seed is that of the server's command line.
    assert {"token": 7, "bias": 1.5} in settings["logit_bias"]
    assert None in [each["bias"] for each in settings["logit_bias"]]
    assert complete(server, samplers="kt")["generation_settings"]["samplers"] == [
        "top_k",
        "temperature",
    ]
    assert complete(server)["generation_settings"]["logit_bias"] == []
    unending = complete(server, ignore_eos=True)["generation_settings"]["logit_bias"]
    assert {"token": 2, "bias": None} in unending


def test_fields_of_an_answer_are_chosen(server: Server) -> None:
    fields = ["content", "generation_settings/n_predict", "nothing"]
    answer = complete(server, response_fields=fields)
    assert answer == {"content": answer["content"], "generation_settings/n_predict": 12}


def test_what_an_answer_must_be(server: Server) -> None:
    assert complete(server, grammar='root ::= "a"{5,5}')["content"] == "aaaaa"
    assert json.loads(complete(server, json_schema={"const": "ab"})["content"]) == "ab"
    assert complete(server, grammar="")["content"] == complete(server)["content"]


def test_progress_is_told_before_the_answer(server: Server) -> None:
    prompt = "a longer text than one batch has " * 12
    body = {"prompt": prompt, "n_predict": 2, "return_progress": True, "cache_prompt": False}
    found = chunks(server, "/completion", **body)
    progress = [each["prompt_progress"] for each in found if "prompt_progress" in each]
    assert len(progress) > 1
    assert progress[0]["processed"] == progress[0]["cache"] == 0
    done = [each["processed"] for each in progress]
    assert done == sorted(set(done))
    assert done[-1] == progress[-1]["total"] == found[-1]["tokens_evaluated"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_keep", 2),
        ("adaptive_target", 0.5),
        ("post_sampling_probs", True),
        ("backend_sampling", True),
        ("lora", [{"id": 0, "scale": 1.0}]),
        ("t_max_predict_ms", 100),
        ("n_indent", 4),
        ("image_data", [{"data": "x"}]),
        ("samplers", ["nothing"]),
        ("dry_sequence_breakers", []),
        ("dry_base", 0.5),
        ("typical_p", 2),
    ],
)
@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
def test_what_is_asked_and_not_done_is_refused_by_name(
    server: Server, path: str, field: str, value: Any
) -> None:
    asked = {"messages": [QUESTION]} if "chat" in path else {"prompt": PROMPT}
    response = ask(server, path, **{**asked, "n_predict": 2, field: value})
    assert response.status_code == 400, response.text
    assert field in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_probs", 101),
        ("prompt", {"prompt_string": "<__media__>", "multimodal_data": ["eA=="]}),
        ("prompt", [10**6]),
        ("prompt", []),
        ("n_predict", -3),
        ("n_cmpl", 0),
        ("response_fields", ["x" * 300]),
    ],
)
def test_a_completion_that_cannot_be_is_refused_by_name(
    server: Server, field: str, value: Any
) -> None:
    response = ask(server, "/completion", **{"prompt": PROMPT, "n_predict": 2, field: value})
    assert response.status_code == 400, response.text
    assert field in response.json()["error"]["message"]


def test_a_text_is_filled_in_by_the_model_s_own_tokens(server: Server) -> None:
    body = {"input_prefix": "the ", "input_suffix": " end", "prompt": "old ", "n_predict": 4}
    answer = ask(server, "/infill", **body).json()
    assert len(answer["content"]) > 0
    n_plain = sum(
        len(ask(server, "/tokenize", content=text).json()["tokens"])
        for text in ("the old ", " end")
    )
    assert answer["tokens_evaluated"] == 1 + n_plain + 3  # The prompt begins with BOS.
    extra = [{"filename": "a.txt", "text": "and more"}]
    longer = ask(server, "/infill", **body, input_extra=extra).json()
    assert longer["tokens_evaluated"] > answer["tokens_evaluated"] + len("a.txt")


@pytest.mark.parametrize("extra", [{}, {"filename": 1, "text": "x"}, {"text": 1}])
def test_further_texts_are_checked(server: Server, extra: Any) -> None:
    response = ask(server, "/infill", input_extra=[extra], n_predict=1)
    assert response.status_code == 400
    assert "input_extra.0" in response.json()["error"]["message"]


def test_a_prompt_is_shown_and_counted(server: Server) -> None:
    prompt = ask(server, "/apply-template", messages=[QUESTION]).json()["prompt"]
    assert prompt.endswith(f"{QUESTION['content']}<|im_end|>\n<|im_start|>assistant\n")
    closed = ask(server, "/apply-template", messages=[QUESTION], add_generation_prompt=False)
    assert closed.json()["prompt"] == prompt.removesuffix("<|im_start|>assistant\n")
    n_prompt = chat(server)["usage"]["prompt_tokens"]
    for path, body in (
        ("/chat/completions/input_tokens", {"messages": [QUESTION]}),
        ("/v1/responses/input_tokens", {"input": QUESTION["content"]}),
        ("/v1/messages/count_tokens", {"messages": [QUESTION]}),
    ):
        assert ask(server, path, **body).json()["input_tokens"] == n_prompt


def test_an_answer_continues_the_last_message(server: Server) -> None:
    begun = [QUESTION, {"role": "assistant", "content": "it is"}]
    prompt = ask(server, "/apply-template", messages=begun).json()["prompt"]
    assert prompt.endswith("<|im_start|>assistant\nit is")
    asked = ask(server, "/apply-template", messages=begun, continue_final_message=True)
    assert asked.json()["prompt"] == prompt
    ended = ask(server, "/apply-template", messages=begun, continue_final_message=False)
    assert ended.json()["prompt"].endswith("it is<|im_end|>\n<|im_start|>assistant\n")
    said = chat(server, messages=begun)["choices"][0]["message"]["content"]
    assert said == complete(server, prompt=prompt, n_predict=8)["content"]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [QUESTION], "continue_final_message": True},
        {
            "messages": [QUESTION, {"role": "assistant", "content": "a"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        {"messages": [QUESTION, *[{"role": "assistant", "content": "a"}] * 2]},
        {"messages": [QUESTION, {"role": "assistant", "content": "a", "reasoning_content": "Hm."}]},
    ],
)
def test_what_cannot_be_continued_is_refused(server: Server, body: dict[str, Any]) -> None:
    assert ask(server, "/apply-template", **body).status_code == 400


def test_chats_tell_their_times(server: Server) -> None:
    answer = chat(server, verbose=True)
    assert answer["timings"]["predicted_n"] == 8
    assert answer["__verbose"]["prompt"].endswith("<|im_start|>assistant\n")
    assert "__verbose" not in chat(server)
    body = {"messages": [QUESTION], "max_tokens": 8, "temperature": 0, "timings_per_token": True}
    first, *others = chunks(
        server, "/v1/chat/completions", **body, stream_options={"include_usage": True}
    )
    assert first["choices"][0]["delta"] == {"role": "assistant"}
    assert "timings" not in first
    assert [each["timings"]["predicted_n"] for each in others][-1] == 8
    assert others[-1]["choices"] == []
    assert {each["system_fingerprint"] for each in (first, *others)} == {
        answer["system_fingerprint"]
    }


def test_a_prompt_that_is_too_long_is_told_with_numbers(server: Server) -> None:
    error = ask(server, "/v1/chat/completions", messages=[QUESTION] * 100).json()["error"]
    assert error["type"] == "exceed_context_size_error"
    assert error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] > error["n_ctx"] == N_CTX
    assert "exceeds the available context size" in error["message"]


def test_the_folder_of_a_model_is_not_told(server: Server) -> None:
    props = server.get("/props").json()
    assert props["model_path"] == "talkative.gguf"
    assert props["default_generation_settings"]["params"]["seed"] == 7
