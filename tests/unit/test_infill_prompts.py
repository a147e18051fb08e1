"""Texts to fill in get the control tokens that the model was trained with; models without such
tokens are refused.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from entropykv.server.dialects.llama_server_requests import InfillRequest
from entropykv.server.http.errors import RequestError

BOS, BEFORE, AFTER, BETWEEN, PROJECT, FILE = range(1000, 1006)


def tokens_of(*, files: bool, trained: bool = True, **body: Any) -> list[int]:
    model = SimpleNamespace(
        adds_bos=True,
        bos=BOS,
        infill_marks=(BEFORE, AFTER, BETWEEN) if trained else None,
        file_marks=(PROJECT, FILE) if files else None,
    )
    loaded = SimpleNamespace(model=model, tokenize=lambda text, **_: [*text.encode()])
    job = cast(Any, SimpleNamespace(model=loaded, document=None))
    return InfillRequest.model_validate(body).own_prompt(job).tokens


def test_the_text_stands_between_its_neighbours() -> None:
    found = tokens_of(files=False, input_prefix="a", prompt="b", input_suffix="c")
    assert found == [BOS, BEFORE, *b"ab", AFTER, *b"c", BETWEEN]


def test_further_texts_are_named_if_the_model_knows_files() -> None:
    extra = [{"filename": "x", "text": "y"}]
    found = tokens_of(files=True, input_extra=extra)
    assert found[1] == PROJECT
    first = found.index(FILE)
    assert found[first : first + 4] == [FILE, *b"x\ny"]
    assert found.count(FILE) == 2  # One of the two belongs to the text itself.
    assert tokens_of(files=False, input_extra=extra) == [BOS, *b"y\n\n", BEFORE, AFTER, BETWEEN]


def test_a_model_without_these_tokens_refuses() -> None:
    with pytest.raises(RequestError, match="not trained"):
        tokens_of(files=False, trained=False, input_prefix="a")
