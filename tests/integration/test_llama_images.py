"""llama-cpp-python's image handlers answer inside the budget of an EntropyLlama."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import llama_cpp
import pytest
from llama_cpp.llama_chat_format import Llava15ChatHandler, MTMDChatHandler, Qwen25VLChatHandler

from entropykv import EntropyLlama, attach, detach
from entropykv.errors import ContextError, ImageError
from tests.support.llamas import QUIET, answer, as_long
from tests.support.tiny_vision import png
from tests.support.vision_models import KINDS, VisionModel, write_vision

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "repeat_penalty": 1.0}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}\n{% endfor %}assistant:"
)


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def question(*files: bytes, text: str = "what is it") -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": url(data)}} for data in files]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VisionModel]:
    folder = tmp_path_factory.mktemp("vision")
    return {kind: write_vision(kind, folder) for kind in KINDS}


def handler_of(kind: type[Any], model: VisionModel) -> Any:
    return kind(clip_model_path=str(model.projector), verbose=False)


def ours(model: VisionModel, kind: type[Any] = Llava15ChatHandler, **options: Any) -> EntropyLlama:
    given = {"n_ctx": 512, "kv_type": "f16", **QUIET, **options}
    llama = EntropyLlama(str(model.path), chat_handler=handler_of(kind, model), **given)
    llama.metadata["tokenizer.chat_template"] = TEMPLATE
    return llama


@pytest.fixture
def causal(models: dict[str, VisionModel]) -> Iterator[EntropyLlama]:
    llama = ours(models["causal"])
    yield llama
    llama.close()


@pytest.mark.parametrize("handler", [Llava15ChatHandler, Qwen25VLChatHandler, MTMDChatHandler])
def test_answers_are_those_of_the_stock_model(
    models: dict[str, VisionModel], handler: type[Any]
) -> None:
    model = models["causal"]
    stock = llama_cpp.Llama(
        str(model.path), n_ctx=512, chat_handler=handler_of(handler, model), **QUIET
    )
    stock.metadata["tokenizer.chat_template"] = TEMPLATE
    llama = ours(model, handler)
    for messages in (question(png(64, 40)), question(png(seed=1), png(seed=2), text="and these")):
        expected: Any = stock.create_chat_completion(messages, **GREEDY)
        found: Any = llama.create_chat_completion(messages, **as_long(GREEDY, expected))
        assert answer(found) == answer(expected)
        assert found["usage"] == expected["usage"]
    llama.close()
    stock.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_budget_is_never_exceeded(models: dict[str, VisionModel], kind: str) -> None:
    llama = ours(models[kind], kv_budget=48, n_ubatch=32)
    for seed in range(3):
        llama.create_chat_completion(question(png(64, 40, seed=seed)), **GREEDY)
        stats = llama.kv_stats()
        assert stats.kv_bytes_peak <= stats.kv_bytes_budget
    assert llama.kv_stats().evictions > 0
    llama.close()


def test_a_further_turn_reads_only_what_is_new(causal: EntropyLlama) -> None:
    messages = question(png(64, 40))
    first: Any = causal.create_chat_completion(messages, **GREEDY)
    read = causal.kv_stats().prompt_tokens
    messages += [
        {"role": "assistant", "content": answer(first)},
        {"role": "user", "content": "and what else"},
    ]
    causal.create_chat_completion(messages, **GREEDY)
    assert causal.kv_stats().prompt_tokens - read < 80 < read


def test_the_same_question_about_another_image_is_another_prompt(causal: EntropyLlama) -> None:
    first: Any = causal.create_chat_completion(question(png(seed=1)), **GREEDY)
    other: Any = causal.create_chat_completion(question(png(seed=2)), **GREEDY)
    again: Any = causal.create_chat_completion(question(png(seed=1)), **GREEDY)
    assert answer(first) != answer(other)
    assert answer(first) == answer(again)


def test_streams_and_states_have_images(causal: EntropyLlama) -> None:
    messages = question(png(64, 40))
    whole: Any = causal.create_chat_completion(messages, **GREEDY)
    state = causal.save_state()
    chunks: Any = causal.create_chat_completion(messages, stream=True, **GREEDY)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == answer(whole)
    causal.reset()
    causal.load_state(state)
    again: Any = causal.create_chat_completion(messages, **GREEDY)
    assert answer(again) == answer(whole)


def test_attach_and_detach_keep_the_handler(models: dict[str, VisionModel]) -> None:
    model = models["causal"]
    handler = handler_of(Llava15ChatHandler, model)
    llm = llama_cpp.Llama(str(model.path), n_ctx=512, chat_handler=handler, **QUIET)
    expected: Any = llm.create_chat_completion(question(png(64, 40)), **GREEDY)
    attached = attach(llm, kv_type="f16")
    found: Any = attached.create_chat_completion(question(png(64, 40)), **GREEDY)
    assert answer(found) == answer(expected)
    stock = detach(attached)
    assert stock.chat_handler is handler
    again: Any = stock.create_chat_completion(question(png(64, 40)), **GREEDY)
    assert answer(again) == answer(expected)
    stock.close()


def test_refuses_damaged_images_and_goes_on(causal: EntropyLlama) -> None:
    with pytest.raises(ImageError, match="damaged"):
        causal.create_chat_completion(question(png(64, 40)[:200]), **GREEDY)
    with pytest.raises(ImageError, match="no image that can be read"):
        causal.create_chat_completion(question(b"RIFF" + bytes(100)), **GREEDY)
    with pytest.raises(ContextError, match="with its images, more than the 512"):
        causal.create_chat_completion(question(*(png(seed=n) for n in range(15))), **GREEDY)
    assert causal.create_chat_completion(question(png(64, 40)), **GREEDY)


def test_sequences_of_a_pool_share_the_projector(models: dict[str, VisionModel]) -> None:
    llama = ours(models["causal"], n_sequences=2)
    other = llama.another()
    found: Any = llama.create_chat_completion(question(png(64, 40)), **GREEDY)
    same: Any = other.create_chat_completion(question(png(64, 40)), **GREEDY)
    assert answer(found) == answer(same)
    assert llama.images is other.images is not None
    other.close()
    llama.close()
