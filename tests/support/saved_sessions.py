"""Save and load sessions, and compare all that they do afterwards."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import Session, SessionFileError
from entropykv.session.file import MAGIC, VERSION
from tests.support.logits import tokens_for


def session_of(path: Path, **options: Any) -> Session:
    return Session(
        path, **{"n_ctx": 512, "kv_budget": 96, "n_ubatch": 64, "n_threads": 1, **options}
    )


def all_entries(session: Session) -> list[list[int]]:
    return [
        session.cache.entries(layer, head).tolist()
        for layer, heads in enumerate(session.cache.budgets())
        for head in range(len(heads))
    ]


def future(session: Session) -> tuple[Any, ...]:
    """Return everything that can be observed of a session, now and after further tokens."""
    state = (session.position, session.tokens, all_entries(session), session.cache.budgets())
    written = list(session.generate([], 40)) if session.logits is not None else []
    rows = np.concatenate(
        [session.decode(tokens_for(90, seed=9), all_logits=True), session.logits[None]]
    )  # type: ignore[index]
    return (*state, written, rows.tobytes(), all_entries(session))


def assert_goes_on_from(
    opened: Callable[[], Session], n_prompt: int, n_answer: int, firsts: Sequence[int], n: int
) -> None:
    """Assert that a session that is saved and loaded within an answer continues as one that was
    not.

    A text of n_prompt and n_answer tokens is read; from each of the tokens `firsts` of the answer
    on, n tokens are compared.
    """
    tokens = tokens_for(n_prompt + n_answer)
    with opened() as session:
        session.decode(tokens[:n_prompt])
        rows, kept, states = [], [], []
        for token in tokens[n_prompt:]:
            states.append(session.files.save_state())
            rows.append(session.decode([token], all_logits=True)[0])
            kept.append((session.cache.budgets(), all_entries(session)))
    with opened() as other:
        for first in firsts:
            other.files.load_state(states[first])
            for i in range(first, min(first + n, len(rows))):
                row = other.decode([tokens[n_prompt + i]], all_logits=True)[0]
                assert (other.cache.budgets(), all_entries(other)) == kept[i]
                np.testing.assert_array_equal(row, rows[i])


def assert_load_refused(session: Session, data: bytes, words: str) -> None:
    """Assert that loading fails with these words, and does not change the session."""
    before = session.files.save_state()
    with pytest.raises(SessionFileError, match=words):
        session.files.load_state(data)
    assert session.files.save_state() == before


def signed(data: bytes) -> bytes:
    """Return a changed session file with the digests that belong to its content."""
    size = struct.unpack_from("<I", data, 12)[0]
    head = data[: 16 + size]
    head += hashlib.blake2b(head, digest_size=16).digest()
    body = head + data[len(head) : -16]
    return body + hashlib.blake2b(body, digest_size=16).digest()


def sections_start(data: bytes) -> int:
    return 16 + int(struct.unpack_from("<I", data, 12)[0]) + 16


def with_contents(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    return _with_part("contents", data, change)


def with_settings(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    return _with_part("settings", data, change)


def _with_part(part: str, data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    start = sections_start(data)
    header = json.loads(data[16 : start - 16])
    change(header[part])
    text = json.dumps(header).encode()
    return signed(struct.pack("<8sII", MAGIC, VERSION, len(text)) + text + bytes(16) + data[start:])
