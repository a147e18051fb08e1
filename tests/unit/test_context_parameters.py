"""Contexts of llama.cpp get the right parameters."""

from __future__ import annotations

from typing import Any

import llama_cpp
import pytest

from entropykv.llamacpp.context import decode_one_token


def test_the_token_of_a_probe_lives_while_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a probe's token is not reused by objects that are created before it is
    decoded.
    """
    seen = []

    def decode(_context: Any, batch: Any) -> int:
        others = [(llama_cpp.llama_token * 1)(7) for _ in range(1000)]
        seen.append(batch.token[0])
        return len(others) - 1000

    monkeypatch.setattr(llama_cpp, "llama_decode", decode)
    assert decode_one_token(None)
    assert seen == [0]
