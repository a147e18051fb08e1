"""`entropykv serve --mmproj` reads images in chats, inside the budget and within its limits."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.image_reference import MARKER
from tests.support.running_server import KEY, Server
from tests.support.served import served
from tests.support.tiny_vision import png
from tests.support.vision_models import TOKENS, VisionModel, prompt_of, write_vision

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
LIMITS = ("--max-images", 2, "--max-image-bytes", 20_000, "--max-image-pixels", 100_000)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return write_vision("causal", tmp_path_factory.mktemp("vision"))


def options_of(model: VisionModel) -> dict[str, Any]:
    budget = ("--kv-budget", 128, "--kv-type", "f16", "--n_ctx", 512, "-t", 1)
    return {"usual": (*budget, "--chat-template", TEMPLATE), "model": model.path}


@pytest.fixture(scope="module")
def server(model: VisionModel) -> Iterator[Server]:
    with Server(
        "--mmproj", model.projector, *LIMITS, ENTROPYKV_API_KEY=KEY, **options_of(model)
    ) as running:
        yield running


def image(data: bytes, head: str = "data:image/png;base64,") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": head + base64.b64encode(data).decode()}}


def question(*parts: Any, text: str = "what is it") -> list[Any]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> str:
    answer = client.chat.completions.create(model="any", messages=messages, **{**GREEDY, **options})
    return str(answer.choices[0].message.content)


def test_answers_are_those_of_a_session(
    server: Server, client: openai.OpenAI, model: VisionModel
) -> None:
    data = png(64, 40)
    with model.session(kv_budget=128) as session:
        prompt = prompt_of(session, f"user: {MARKER}\nwhat is it\nassistant:", [data])
        # The template adds no BOS.
        tokens = session.generate(prompt.tokens[1:], 12, temperature=0.0)
        expected = session.detokenize(list(tokens))
    assert ask(client, question(image(data))) == expected
    assert server.get("/props").json()["modalities"] == {"vision": True, "audio": False}
    kv = server.kv()
    assert kv["kv_bytes_peak"] <= kv["kv_bytes_budget"]
    held = re.search(r"^entropykv_image_bytes (\S+)$", server.get("/metrics").text, re.MULTILINE)
    assert held is not None
    assert float(held[1]) >= TOKENS["causal"] * 64 * 4


def test_streams_and_responses_have_images_too(client: openai.OpenAI) -> None:
    data = png(64, 40)
    expected = ask(client, question(image(data)))
    stream = client.chat.completions.create(
        model="any", messages=question(image(data)), stream=True, **GREEDY
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected
    url = image(data)["image_url"]["url"]
    given: Any = [
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": url},
                {"type": "input_text", "text": "what is it"},
            ],
        }
    ]
    response = client.responses.create(
        model="any", input=given, temperature=0.0, max_output_tokens=12
    )
    assert response.output_text == expected


def test_a_further_turn_goes_on_from_the_image_and_another_image_does_not(
    server: Server, client: openai.OpenAI
) -> None:
    messages = question(image(png(64, 40)))
    messages += [
        {"role": "assistant", "content": ask(client, messages)},
        {"role": "user", "content": "what else"},
    ]

    def spared(what: list[Any]) -> int:
        """Ask; return the number of prompt tokens that were not read again."""
        before = server.kv()["prompt_tokens"]
        answer = client.chat.completions.create(model="any", messages=what, **GREEDY)
        assert answer.usage is not None
        return int(answer.usage.prompt_tokens - (server.kv()["prompt_tokens"] - before))

    assert spared(messages) > 36  # The image and the text before it take more tokens than this.
    other = question(image(png(64, 40, seed=5)))
    assert spared([*other, *messages[1:]]) < 6


BAD: dict[str, tuple[list[Any], str]] = {
    "an address": (
        question({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}),
        r"messages\.0\.content\.0: images are not fetched from addresses \(https:\)",
    ),
    "a file": (
        question({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
        r"not fetched from addresses \(file:\)",
    ),
    "no address": (question({"type": "image_url"}), "it has no image_url"),
    "no base64": (
        question({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}),
        "base64",
    ),
    "damaged base64": (
        question({"type": "image_url", "image_url": {"url": "data:image/png;base64,a&b"}}),
        "base64 is damaged",
    ),
    "a damaged image": (question(image(png(64, 40)[:200])), "image 1 is damaged"),
    "no image": (question(image(b"hello")), "image 1: is no image that can be read"),
    "sound": (question(image(b"RIFF\0\0\0\0WAVEfmt ", "data:audio/wav;base64,")), "no image"),
    "too many": (question(*[image(png())] * 3), r"more than 2 images \(--max-images\)"),
    "too large": (question(image(bytes(20_001))), r"20,000 bytes \(--max-image-bytes\)"),
    "too many pixels": (question(image(png(400, 300))), "120,000 pixels .* 100,000"),
    "an image of the assistant": (
        [{"role": "assistant", "content": [image(png())]}, {"role": "user", "content": "a"}],
        "parts of type 'image_url' are not possible",
    ),
    "the place of an image in words": (question(text="<__media__>"), ""),
}


@pytest.mark.parametrize("what", BAD)
def test_refuses_by_name_and_goes_on(client: openai.OpenAI, what: str) -> None:
    messages, words = BAD[what]
    if not words:  # No refusal is expected: the marker is read as text.
        assert ask(client, messages)
        return
    with pytest.raises(openai.BadRequestError, match=words):
        ask(client, messages)
    assert ask(client, question(image(png(64, 40))))


def test_a_prompt_of_more_tokens_than_the_context_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context length"):
        ask(client, question(image(png()), text="the old road " * 200))


def test_conversations_with_images_run_at_a_time(model: VisionModel) -> None:
    options = options_of(model)
    options["usual"] = ("--kv-budget", 1.0, *options["usual"][2:])
    with Server("--mmproj", model.projector, "--parallel", 3, **options) as running:
        answers: dict[int, str] = {}
        with running.client() as client:

            def converse(number: int) -> None:
                answers[number] = ask(client, question(image(png(seed=number))))

            threads = [threading.Thread(target=converse, args=(n,)) for n in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [ask(client, question(image(png(seed=n)))) for n in range(6)] == [
                answers[n] for n in range(6)
            ]
            kv = running.kv()
            assert kv["kv_bytes_peak"] <= kv["kv_bytes_budget"]


def test_a_server_without_a_projector_says_what_to_do() -> None:
    for server in served():
        body = {"messages": question(image(png()))}
        answer = server.post("/v1/chat/completions", json.dumps(body))
        assert answer.status_code == 400
        assert "start the server with --mmproj FILE" in answer.json()["error"]["message"]


def test_a_template_that_shows_no_images_is_refused(model: VisionModel, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}{% endfor %}:", encoding="utf-8")
    options = options_of(model)
    options["usual"] = (*options["usual"][:-2], "--chat-template-file", template)
    with Server("--mmproj", model.projector, **options) as running:
        body = {"messages": question(image(png())), "stream": True}
        for stream in (True, False):
            answer = running.post("/v1/chat/completions", json.dumps({**body, "stream": stream}))
            assert answer.status_code == 400
            assert "does not show the images" in answer.text
