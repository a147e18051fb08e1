"""A prompt whose text was read in other tokens is not read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import LlamaGrammar

from entropykv import ContextError, EntropyLlama
from tests.support.llamas import GREEDY, QUIET, answer
from tests.support.reads import Reads

BYTE = 3  # The first of the 256 byte tokens of tiny models.


def as_bytes(text: str) -> list[int]:
    """Return a byte token for each byte of a text, where the tokenizer would give pieces."""
    return [BYTE + byte for byte in text.encode("utf-8")]


@pytest.mark.parametrize("how", ["generate", "list", "text", "stream"])
def test_the_same_text_in_other_tokens_is_not_read_again(llm: EntropyLlama, how: str) -> None:
    text = "the winding road to the land " * 8
    more = "and on"
    cached = [llm.token_bos(), *as_bytes(text)]
    llm.eval(cached)
    assert llm.kv_stats().evictions > 0
    prompt = llm.tokenize((text + more).encode(), add_bos=True)
    rest = llm.tokenize(more.encode(), add_bos=False)
    assert len(prompt) < len(cached)
    reads = Reads(llm)
    if how == "generate":
        next(llm.generate(prompt, temp=0.0))
    elif how == "stream":
        list(llm(text + more, stream=True, **GREEDY))
    else:
        reply = llm(prompt if how == "list" else text + more, **GREEDY)
        assert reply["usage"]["prompt_tokens"] == len(cached) + len(rest)
    assert llm.input_ids[: len(cached) + len(rest)].tolist() == [*cached, *rest]
    assert reads.count() == len(rest)


def test_the_boundary_may_be_within_a_token(llm: EntropyLlama) -> None:
    cached = [llm.token_bos(), *as_bytes("of th")]
    llm.eval(cached)
    prompt = llm.tokenize(b"of the king", add_bos=True)
    reads = Reads(llm)
    llm(prompt, **GREEDY)
    rest = llm.tokenize(b"e king", add_bos=False)
    assert llm.input_ids[: len(cached) + len(rest)].tolist() == [*cached, *rest]
    assert reads.count() == len(rest)


def test_echo_of_a_text_in_other_tokens(llm: EntropyLlama) -> None:
    llm.eval([llm.token_bos(), *as_bytes("the land")])
    reply = llm("the land of", echo=True, **GREEDY)
    assert reply["choices"][0]["text"].startswith("the land of")
    assert reply["usage"]["prompt_tokens"] > 8


def test_a_name_of_a_control_token_is_not_the_token(llm: EntropyLlama) -> None:
    """Text that spells </s> is no match for a prompt with the control token."""
    llm.eval([llm.token_bos(), *as_bytes("the </s>")])
    prompt = llm.tokenize(b"the </s>and", add_bos=True, special=True)
    assert llm.token_eos() in prompt
    llm(prompt, **GREEDY)
    assert llm.input_ids[: len(prompt)].tolist() == prompt


def test_other_tokens_never_exceed_the_context(tiny_llama: Path) -> None:
    """An answer ends at the end of the context, also if the text was read in more tokens than the
    tokenizer gives. If those tokens leave no room, the text is read again in the tokenizer's.
    """
    llm = EntropyLlama(str(tiny_llama), n_ctx=64, **QUIET)
    letters = LlamaGrammar.from_string("root ::= [a-z ]+", verbose=False)
    endless: dict[str, Any] = {"max_tokens": None, "grammar": letters, "logit_bias": {2: -1e9}}
    cached = [llm.token_bos(), *as_bytes("the land in the land")]
    llm.eval(cached)
    reply = llm("the land in the land and", **endless)
    usage = reply["usage"]
    assert usage["prompt_tokens"] > len(cached)
    assert usage["total_tokens"] == 64
    llm.reset()
    text = "the land in the land " * 3
    cached = [llm.token_bos(), *as_bytes(text)]
    llm.eval(cached[:63])
    prompt = llm.tokenize(text.encode(), add_bos=True)
    llm(prompt, **endless)  # In single bytes, the text would not fit.
    assert llm.input_ids[: len(prompt)].tolist() == prompt
    llm.close()


def test_with_logits_all_rows_are_those_of_the_prompt(tiny_llama: Path) -> None:
    llm = EntropyLlama(str(tiny_llama), n_ctx=128, logits_all=True, kv_type="f16", **QUIET)
    text = "the land in the "
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "logprobs": 2}
    expected = llm(text, **options)["choices"][0]["logprobs"]
    llm.reset()
    llm.eval([llm.token_bos(), *as_bytes("the land")])
    again = llm(text, **options)["choices"][0]["logprobs"]
    assert again["tokens"] == expected["tokens"]
    np.testing.assert_allclose(
        again["token_logprobs"], expected["token_logprobs"], rtol=1e-2, atol=1e-2
    )
    llm.close()


def test_a_prompt_beyond_the_context_names_it(llm: EntropyLlama) -> None:
    with pytest.raises(ContextError, match=r"exceed context window of 512; shorten the prompt"):
        llm("the land " * 400)


QUESTIONS = [
    "Hello! My name is Ada and I keep a lighthouse on a cold and windy island. Who are you?",
    "The island has a small harbour, a school, and a bakery. What would you ask the baker?",
    "My brother has a boat with a blue sail. He fishes every morning. Is that a good life?",
    "Yesterday a storm broke two windows of the school. What should we do first?",
    "We have glass, but no putty, and the next ship comes in a week. Any ideas?",
    "Good. The children want to help. What can children of eight years do safely?",
    "They also want to sing while they work. Which song would you choose, and why?",
    "The teacher says that songs about storms bring storms. What do you say to her?",
    "In the evening we sit together and drink tea. What do you like about evenings?",
    "My brother asks whether you know the name of the wind from the north.",
    "He calls it the old grey man, and he is not afraid of it at all. Would you be?",
    "Good night! What should I write into the book of the lighthouse today?",
]


def test_twelve_turns_read_only_what_is_new(smollm2: Path) -> None:
    """With 512 tokens per KV head, each turn reads only new text, whether the last answer ended by
    itself or was cut off.
    """
    llm = EntropyLlama(str(smollm2), n_ctx=4096, kv_budget=512, n_ubatch=128, **QUIET)
    messages: list[dict[str, str]] = []
    endings = []
    read = 0
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        held = llm.n_tokens
        limit = 28 if len(endings) % 3 else 200  # Some answers have room to end by themselves.
        reply = llm.create_chat_completion(messages, max_tokens=limit, temperature=0.0)  # type: ignore[arg-type]
        messages.append({"role": "assistant", "content": answer(reply)})
        endings.append(reply["choices"][0]["finish_reason"])
        read += reply["usage"]["prompt_tokens"] - held
        stats = llm.kv_stats()
        assert stats.prompt_tokens == read
        assert stats.kv_bytes_peak <= stats.kv_bytes_budget
        assert stats.entries_kept <= 512 * 90
    assert set(endings) == {"stop", "length"}
    assert llm.n_tokens > 512
    assert stats.evictions > 0
    # Every token was read once; the last one of a turn is read with the next turn, or not at all.
    assert stats.prompt_tokens + stats.generated_tokens - llm.n_tokens in range(len(QUESTIONS) + 1)
    llm.close()


def test_a_chat_whose_words_were_cut_otherwise(smollm2: Path) -> None:
    """A word that the model wrote as "hel" + "lo" is not read again, though the next turn spells it
    in one token.
    """
    llm = EntropyLlama(str(smollm2), n_ctx=512, kv_budget=128, n_ubatch=32, **QUIET)

    def tokens(text: str) -> list[int]:
        return llm.tokenize(text.encode(), add_bos=False, special=True)

    opening = tokens(
        "<|im_start|>user\n" + "Say hello! " * 40 + "<|im_end|>\n<|im_start|>assistant\n"
    )
    written = [*tokens("hel"), *tokens("lo"), *tokens(" to"), *tokens(" un"), *tokens("der")]
    assert written != tokens("hello to under")
    llm.eval([*opening, *written])
    assert llm._session.text.held().text.reusable_from > 0
    reads = Reads(llm)
    ending = "<|im_end|>\n<|im_start|>user\nAgain!<|im_end|>\n<|im_start|>assistant\n"
    prompt = [*opening, *tokens("hello to under" + ending)]
    llm(prompt, **GREEDY)
    assert reads.count() == len(tokens(ending))
    llm.reset()
    llm.eval([*opening, *written])
    reads.count()
    # The answer ended within a word.
    llm([*opening, *tokens("hello to understanding" + ending)], **GREEDY)
    assert reads.count() == len(tokens("standing" + ending))
    llm.close()
