"""Budgets that follow the text continue in loaded sessions, and damage is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.logits import tokens_for
from tests.support.online_sessions import BY_LAYER, check, each_policy
from tests.support.saved_sessions import (
    assert_load_refused,
    sections_start,
    session_of,
    signed,
    with_contents,
)


@each_policy
def test_a_damaged_section_is_refused(uneven_llama: Path, policy: str) -> None:
    def last_section(size: int) -> Any:
        return lambda contents: contents["sections"].__setitem__(-1, size)

    with session_of(uneven_llama, policy=policy) as session:
        session.decode(tokens_for(200))
        data = session.files.save_state()
        size = json.loads(data[16 : sections_start(data) - 16])["contents"]["sections"][-1]
        start = len(data) - 16 - size
        session.decode(tokens_for(70, seed=2))
        seen = np.frombuffer(data[start:-16], "<f8")
        for place in (0, 1, len(seen) - 1):
            for value in (float("nan"), -0.5, float("inf")):
                changed = bytearray(data)
                changed[start + 8 * place : start + 8 * place + 8] = struct.pack("<d", value)
                assert_load_refused(session, signed(bytes(changed)), "that cannot be")
        for cut in (1, 8, size):
            body = data[: -16 - cut] + bytes(16)
            if cut == size and policy == "adaptive":
                continue  # A state without measurements is valid.
            words = "a cut number" if cut == 1 else "that cannot be"
            assert_load_refused(session, with_contents(body, last_section(size - cut)), words)
        body = data[:start] + bytes(16)
        without = with_contents(body, lambda contents: contents["sections"].pop())
        assert_load_refused(session, without, "other KV heads")
        check(session)
        session.files.load_state(data)


def test_knots_that_do_not_ascend_are_refused(uneven_llama: Path) -> None:
    with session_of(uneven_llama, policy="adaptive") as session:
        session.decode(tokens_for(200))
        data = session.files.save_state()
        size = json.loads(data[16 : sections_start(data) - 16])["contents"]["sections"][-1]
        start = len(data) - 16 - size
        changed = data[: start + 8] + data[start + 16 : start + 24] + data[start + 8 : start + 16]
        changed += data[start + 24 :]
        assert_load_refused(session, signed(changed), "losses that cannot be")


@pytest.mark.parametrize("policy", BY_LAYER)
def test_heads_of_a_layer_that_hold_different_numbers_are_refused(
    uneven_llama: Path, policy: str
) -> None:
    with session_of(uneven_llama, policy=policy) as session:
        session.decode(tokens_for(200))

        def change(contents: dict[str, Any]) -> None:
            contents["entries"][0][0] -= 1

        lie = with_contents(session.files.save_state(), change)
        assert_load_refused(session, lie, "KV heads of a layer that keep different positions")
