"""The choices of a request get numbers, one id and seeds of their own; its prompt counts once."""

from __future__ import annotations

from typing import Any

import pytest

from entropykv.server.dialects.requests import Choices, seed_of


def answer(text: str, n_prompt: int, n_written: int, **more: Any) -> dict[str, Any]:
    usage: dict[str, Any] = {"prompt_tokens": n_prompt, "completion_tokens": n_written}
    usage["prompt_tokens_details"] = {"cached_tokens": n_prompt // 2}
    head = {"id": text, "object": "o", "created": 1, "model": "m"}
    return {**head, "choices": [{"index": 0, "text": text}], "usage": usage, **more}


def test_a_prompt_counts_once_however_many_choices_it_has() -> None:
    parts = [answer("a", 5, 2), answer("b", 5, 3), answer("c", 7, 4), answer("d", 7, 1)]
    joined = Choices(2).whole(parts)
    assert joined["id"] == "a"
    assert [(each["index"], each["text"]) for each in joined["choices"]] == list(enumerate("abcd"))
    details = {"prompt_tokens_details": {"cached_tokens": 5}}
    numbers = {"prompt_tokens": 12, "completion_tokens": 10, "total_tokens": 22}
    assert joined["usage"] == {**numbers, **details}


@pytest.mark.parametrize("usage", [False, True])
def test_chunks_have_one_id_in_whatever_order_they_come(usage: bool) -> None:
    choices = Choices(2, usage)
    shown = [choices.chunk(i, answer(text, 0, 0)) for i, text in ((1, "x"), (0, "y"), (1, "z"))]
    assert [each and each["id"] for each in shown] == ["x"] * 3
    assert [each and each["choices"][0]["index"] for each in shown] == [1, 0, 1]
    for index, n_written in ((1, 2), (0, 1)):
        assert choices.chunk(index, answer("", 4, n_written, choices=[])) is None
    end = choices.end()
    if not usage:
        assert end is None
        return
    assert end is not None
    assert (end["id"], end["choices"]) == ("x", [])
    details = {"prompt_tokens_details": {"cached_tokens": 2}}
    numbers = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    assert end["usage"] == {**numbers, **details}


def test_choices_have_seeds_of_their_own() -> None:
    assert [seed_of(None, i) for i in range(3)] == [None] * 3
    assert [seed_of(7, i) for i in range(3)] == [7, 8, 9]
    assert [seed_of(2**32 - 1, i) for i in range(2)] == [2**32 - 1, 0]
