"""`entropykv serve --parallel` answers many clients at a time, in one budget."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.support.running_server import KEY, N_CTX, Server

# With equal budgets of KV heads, short answers evict nothing, and depend on no other requests.
PARALLEL = ("--parallel", 3, "--kv-budget", 6000, "--kv-type", "f16", "--policy", "uniform")
PROMPTS = ["The old garden", "Simon likes", "The house on the hill", "A cat and a dog", "In May"]
ENDLESS = {"max_tokens": N_CTX - 100, "extra_body": {"min_tokens": N_CTX}}
LONG = {"max_tokens": 2000, "extra_body": {"min_tokens": 2000}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*PARALLEL, ENTROPYKV_API_KEY=KEY) as running:
        yield running
    (told,) = [line for line in running.log if "serving" in line]
    assert re.search(r"context [\d,]+ tokens, budget 2,000 tokens per KV head for each", told)
    assert re.search(r"\([\d.]+ MiB for 3 conversations\), policy uniform; Ctrl-C", told)


def complete(client: openai.OpenAI, prompt: str, **options: Any) -> Any:
    options = {"max_tokens": 24, "temperature": 0.0, **options}
    return client.completions.create(model="any", prompt=prompt, **options)


def figure(server: Server, name: str) -> float:
    found = re.search(rf"^entropykv_{name} (\S+)$", server.get("/metrics").text, re.MULTILINE)
    assert found, name
    return float(found[1])


def test_answers_side_by_side_are_those_of_one_alone(server: Server) -> None:
    budget = ("--kv-budget", 2000, "--kv-type", "f16")
    with Server(*budget, ENTROPYKV_API_KEY=KEY) as alone, alone.client() as client:
        expected = [complete(client, prompt).choices[0].text for prompt in PROMPTS]
    with server.client() as client, ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = list(threads.map(lambda prompt: complete(client, prompt), PROMPTS))
    assert [answer.choices[0].text for answer in answers] == expected


def test_streams_are_interleaved(server: Server) -> None:
    with server.client() as client:
        streams = [complete(client, prompt, stream=True, **ENDLESS) for prompt in PROMPTS[:3]]
        for stream in streams:
            next(iter(stream))
        # No answer had ended when the last one began.
        assert figure(server, "requests_running") == 3
        for stream in streams:
            stream.close()
    server.idle_figures(60)
    assert figure(server, "first_tokens_total") >= 3
    assert figure(server, "first_token_seconds_total") > 0


def test_choices_are_written_side_by_side_and_their_prompt_is_read_once(server: Server) -> None:
    prompt = "A gardener and a fisherman meet at the harbour, and talk. " * 20
    many = 500  # All requests begin while the first answer is written.
    options: dict[str, Any] = {"temperature": 1.2, "seed": 5, "max_tokens": many}
    options["extra_body"] = {"min_tokens": many}
    with server.client() as client:
        before = server.idle_figures(60)["prompt_tokens"]
        answer = complete(client, prompt, n=3, **options)
        texts = [choice.text for choice in answer.choices]
        assert len(set(texts)) == 3
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        n_prompt = answer.usage.prompt_tokens
        assert answer.usage.completion_tokens == 3 * many
        assert server.idle_figures(60)["prompt_tokens"] - before < 1.2 * n_prompt
        assert complete(client, prompt, **options).choices[0].text == texts[0]
        order, pieces, ids = [], ["", "", ""], set()
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        for chunk in complete(client, prompt, n=3, **usage, **options):
            ids.add(chunk.id)
            if chunk.choices:
                order.append(chunk.choices[0].index)
                pieces[chunk.choices[0].index] += chunk.choices[0].text
        assert pieces == texts
        assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (n_prompt, 3 * many)
    assert len(ids) == 1
    first_end = min(len(order) - order[::-1].index(i) for i in range(3))
    assert {0, 1, 2} == set(order[:first_end])  # All answers had begun before the first one ended.
    assert figure(server, "forked_total") >= 2


def test_checkpoints_are_an_option_of_the_server() -> None:
    """With checkpoints, one conversation goes back after evictions; else it is read again."""
    text = "In the garden there is a tree, and a bird sings. " * 40
    n_read = {}
    for limit in ("8MiB", "0"):
        budget = ("--kv-budget", 200, "--checkpoints", limit)
        with Server(*budget, ENTROPYKV_API_KEY=KEY) as running, running.client() as client:
            answers = []
            for _ in range(2):
                before = running.idle_figures(60)["prompt_tokens"]
                answers.append(complete(client, text).choices[0].text)
                n_read[limit] = running.idle_figures(60)["prompt_tokens"] - before
            assert answers[0] == answers[1]
    assert n_read["8MiB"] == 0 < n_read["0"]


def test_the_next_turn_reads_only_what_is_new(server: Server) -> None:
    with server.client() as client:
        texts = [f"{prompt} was here {'and there ' * 30}" for prompt in PROMPTS]
        first = [complete(client, text) for text in texts]
        resumed = figure(server, "resumed_total")
        for text, answer in zip(texts, first, strict=True):
            before = server.idle_figures(60)["prompt_tokens"]
            complete(client, f"{text}{answer.choices[0].text} And then")
            read = server.idle_figures(60)["prompt_tokens"] - before
            assert read < answer.usage.prompt_tokens / 4
        assert figure(server, "resumed_total") == resumed + len(texts)
        # There are more conversations than the three that fit.
        assert figure(server, "conversations_swapped_out") > 0
        assert figure(server, "conversations") >= len(texts)


def test_a_chat_without_a_template_goes_on_and_takes_no_second_place(server: Server) -> None:
    """A chat without a template goes on in its place, also where a full stop and a line break are
    one token.
    """
    messages: list[dict[str, str]] = []
    n_held = 0
    for turn in range(3):
        question = f"Tell me about {'the sea and ' * 8}the ships, part {turn}."
        messages.append({"role": "user", "content": question})
        resumed, forked = (figure(server, name) for name in ("resumed_total", "forked_total"))
        n_kept = figure(server, "conversations")
        body = {"messages": messages, "max_tokens": 8, "temperature": 0}
        answer = server.post("/v1/chat/completions", json.dumps(body)).json()
        if turn:
            n_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert n_cached >= n_held
            assert figure(server, "resumed_total") == resumed + 1
            assert figure(server, "forked_total") == forked
            assert figure(server, "conversations") == n_kept
        # The last token of the answer was not read yet.
        n_held = answer["usage"]["total_tokens"] - 1
        content = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})


def test_what_begins_as_another_one_goes_on_with_a_copy(server: Server) -> None:
    document = "In the garden there is a tree, and a bird sings. " * 12
    with server.client() as client:
        first = complete(client, f"{document} The tree is old, and so on. " + "It was so. " * 120)
        before = server.idle_figures(60)["prompt_tokens"]
        forked = figure(server, "forked_total")
        complete(client, f"{document} The bird")
        assert figure(server, "forked_total") == forked + 1
        read = server.idle_figures(60)["prompt_tokens"] - before
        assert read < first.usage.prompt_tokens / 4


def test_one_system_prompt_is_read_once_and_an_answer_is_written_again(server: Server) -> None:
    system = "You are a gardener who knows all trees, and answers in a few words. " * 25
    with server.client() as client, ThreadPoolExecutor(3) as threads:
        before = server.idle_figures(60)["prompt_tokens"]
        prompts = [f"{system} What is {name}?" for name in ("an oak", "a birch", "an elm")]
        answers = list(threads.map(lambda prompt: complete(client, prompt), prompts))
        read = server.idle_figures(60)["prompt_tokens"] - before
        assert read < 2 * answers[0].usage.prompt_tokens
        before = server.idle_figures(60)["prompt_tokens"]
        again = [complete(client, prompt).choices[0].text for prompt in prompts]
        assert server.idle_figures(60)["prompt_tokens"] - before < 3
        assert again == [answer.choices[0].text for answer in answers]


def test_slots_and_figures_of_conversations(server: Server) -> None:
    assert server.get("/props").json()["total_slots"] == 3
    with server.client() as client:
        stream = complete(client, PROMPTS[0], stream=True, **LONG)
        next(iter(stream))
        slots = server.get("/slots").json()
        assert [slot["id"] for slot in slots] == [0, 1, 2]
        assert sum(slot["is_processing"] for slot in slots) == 1
        assert figure(server, "requests_running") == 1
        stream.close()
    figures = server.idle_figures(20)
    assert not any(slot["is_processing"] for slot in server.get("/slots").json())
    assert figures["kv_bytes_now"] <= figures["kv_bytes_peak"] <= figures["kv_bytes_budget"]
    kept = figures["conversations"]
    assert all(each["kv_bytes_now"] <= each["kv_bytes_budget"] for each in kept if each["live"])


def test_a_client_that_disconnects_stops_no_other_request(server: Server) -> None:
    with server.client() as client:
        expected = complete(client, PROMPTS[1], max_tokens=60).choices[0].text
        going = [complete(client, prompt, stream=True, **LONG) for prompt in PROMPTS[:2]]
        for stream in going:
            next(iter(stream))
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(complete, client, PROMPTS[1], max_tokens=60)
            for stream in going:
                stream.close()
            assert answer.result().choices[0].text == expected
    server.idle_figures(20)


def test_conversations_have_names(server: Server) -> None:
    text = "The river is long and slow. " * 20
    with server.client() as client:
        for name in ("anna", "ben"):
            named = client.with_options(default_headers={"X-Session-Id": name})
            complete(named, text)
    names = [each["name"] for each in server.kv()["conversations"]]
    assert {"anna", "ben"} <= set(names)


def test_a_request_that_takes_too_long_is_told_so() -> None:
    too_long = pytest.raises(openai.APIError, match="longer than the server lets it")
    server = Server(*PARALLEL, "--request-seconds", 1, ENTROPYKV_API_KEY=KEY)
    with server, server.client() as client, too_long:
        list(complete(client, PROMPTS[0], stream=True, **ENDLESS))


def test_running_answers_end_before_the_server_does() -> None:
    server = Server(*PARALLEL, "--drain-seconds", 60, ENTROPYKV_API_KEY=KEY)
    with server.client() as client, ThreadPoolExecutor(1) as threads:
        stream = complete(client, PROMPTS[0], stream=True, **LONG)
        next(iter(stream))
        rest = threads.submit(lambda: sum(1 for _ in stream))
        assert server.end()[0] == 0
        assert 1 + rest.result() >= LONG["max_tokens"]  # type: ignore[operator]


@pytest.mark.needs("mallopt()")
def test_the_memory_of_large_requests_is_given_back() -> None:
    """The memory of large requests is freed at once, after every worker has refused a prompt of
    140,000 tokens.
    """
    with Server("-np", 8, "--kv-budget", 256, "-t", 1, usual=("-c", 512)) as server:
        body = json.dumps({"prompt": "the cat sat. " * 20_000, "max_tokens": 1})

        def ask(_: int) -> int:
            return server.post("/v1/completions", body).status_code

        assert ask(0) == 400
        before = server.rss()
        with ThreadPoolExecutor(8) as clients:
            assert set(clients.map(ask, range(16))) == {400}
        assert server.rss() - before < 50 << 20
