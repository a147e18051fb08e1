"""Saved sessions of other models, false values and damage are refused, and change nothing."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import SessionFileError
from tests.support.logits import tokens_for
from tests.support.saved_sessions import (
    assert_load_refused,
    sections_start,
    session_of,
    signed,
    with_contents,
)
from tests.support.tiny_models import write_llama


def test_other_models_and_settings(tiny_llama: Path, tiny_bitnet: Path, tmp_path: Path) -> None:
    with session_of(tiny_llama) as session:
        session.decode(tokens_for(200))
        data = session.files.save_state()
    twin = tmp_path / "twin.gguf"  # The other model has the same header, but other weights.
    write_llama(twin, n_layer=3, n_head=6, n_head_kv=2, head_dim=32, weight_type="F32", seed=1)
    for path, options, words in (
        (tiny_bitnet, {}, "another model file"),
        (twin, {}, "another model file"),
        (tiny_llama, {"kv_type": "f16"}, "--kv-type q8_0"),
        (tiny_llama, {"store": "flat"}, "--store headwise"),
        (tiny_llama, {"policy": "streaming"}, "--policy adaptive"),
        (tiny_llama, {"policy": "uniform:mass+values"}, "--policy adaptive"),
        (tiny_llama, {"n_ctx": 199}, "holds 200 tokens, more than the context of 199"),
    ):
        with session_of(path, **options) as session:
            session.decode(tokens_for(100, seed=4))
            assert_load_refused(session, data, words)
            session.decode(tokens_for(20))
    with session_of(tiny_llama, n_ctx=200) as session:
        session.files.load_state(data)


def test_a_flat_session_that_needs_more_cells(tiny_llama: Path) -> None:
    with session_of(tiny_llama, store="flat", kv_budget=1.0) as session:
        session.decode(tokens_for(400))
        data = session.files.save_state()
    with session_of(tiny_llama, store="flat", kv_budget=50) as session:
        session.decode(tokens_for(100))
        assert_load_refused(session, data, "--kv-budget 400")


def test_lies_under_a_right_digest(tiny_llama: Path) -> None:
    def change(**values: Any) -> Callable[[dict[str, Any]], None]:
        return lambda contents: contents.update(values)

    with session_of(tiny_llama) as session:
        session.decode(tokens_for(200))
        data = session.files.save_state()
        start = sections_start(data)
        n = len(session.cache.entries(0, 0))
        whole = json.loads(data[16 : start - 16])["contents"]
        other = [[n - 20, n], *whole["entries"][1:]]
        for lie, words in (
            (change(position=100), "KV head 0 of layer 0 has a position that was never read"),
            (change(position=201), "tokens that cannot be"),
            (change(entries=other), "KV head 0 of layer 0 has a size"),
            (change(entries=[[n, n]]), "other KV heads"),
            (change(entries=[[n], [n], [n]]), "other KV heads"),
            (change(entries=[[2**31 - 1, n], *whole["entries"][1:]]), "impossible number"),
            (
                change(n_tokens=199, sections=[whole["sections"][0] + 4, *whole["sections"][1:]]),
                "is",
            ),
            (change(n_logits=0, n_tokens=200 + whole["n_logits"]), "tokens that cannot be"),
            (change(sections=[sum(whole["sections"])]), "other KV heads"),
        ):
            assert_load_refused(session, with_contents(data, lie), words)
        token = data[:start] + struct.pack("<i", session.model.n_vocab) + data[start + 4 :]
        assert_load_refused(session, signed(token), "tokens that cannot be")
        logits = start + 4 * 200
        nan = data[:logits] + struct.pack("<f", float("nan")) + data[logits + 4 :]
        assert_load_refused(session, signed(nan), "logits that cannot be")


@pytest.mark.parametrize("store", ["headwise", "flat"])
def test_damage_and_cuts_change_nothing(tiny_llama: Path, tmp_path: Path, store: str) -> None:
    chance = random.Random(4)
    file = tmp_path / "x.ekv"
    with session_of(tiny_llama, store=store) as session:
        session.decode(tokens_for(200))
        data = session.files.save_state()
        session.decode(tokens_for(20))
        before = session.files.save_state()
        contents = json.loads(data[16 : sections_start(data) - 16])["contents"]
        sizes = [800, 4 * contents["n_logits"], *contents["sections"]]
        edges = sections_start(data) + np.cumsum([0, *sizes])
        cuts = {0, 1, 8, 16, len(data) - 1, *edges.tolist()}
        cuts |= {chance.randrange(len(data)) for _ in range(20)}
        damaged = [data[:cut] for cut in cuts]
        for _ in range(30):
            changed = bytearray(data)
            changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            damaged.append(bytes(changed))
        for content in damaged:
            file.write_bytes(content)
            with pytest.raises(SessionFileError, match=r"x\.ekv: (is|has) "):
                session.files.load(file)
        assert session.files.save_state() == before


def test_llama_cpp_refuses_a_flat_state_and_the_old_one_is_back(
    tiny_llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with session_of(tiny_llama, store="flat") as session:
        session.decode(tokens_for(200))
        data = session.files.save_state()
        contents = json.loads(data[16 : sections_start(data) - 16])["contents"]
        start = len(data) - 16 - contents["sections"][1]
        session.decode(tokens_for(20))
        for place in (start, start + 8, start + 12, start + 30):
            changed = bytearray(data)
            changed[place] ^= 0x15
            assert_load_refused(session, signed(bytes(changed)), "cannot be loaded|damaged")
        positions = bytearray(data)
        positions[start - 4 : start] = struct.pack("<i", 198)
        assert_load_refused(session, signed(bytes(positions)), "positions that cannot be")
        session.decode(tokens_for(20))
    assert capfd.readouterr().err == ""


def test_a_failed_save_leaves_the_old_file(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.ekv"
    with session_of(tiny_llama) as session:
        session.decode(tokens_for(50))
        session.files.save(file)
        old = file.read_bytes()
        session.decode(tokens_for(50))

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(SessionFileError, match="No space left"):
                session.files.save(file)
        assert (file.read_bytes(), os.listdir(tmp_path)) == (old, ["x.ekv"])
        with pytest.raises(SessionFileError, match="is not a saved session"):
            session.files.save(tiny_llama)
        session.files.save(file)
        assert file.read_bytes() == session.files.save_state()


def test_no_memory_changes_nothing(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with session_of(tiny_llama) as session:
        session.decode(tokens_for(50))
        data = session.files.save_state()

        def fail(*_: object) -> None:
            raise MemoryError("no pages")

        with monkeypatch.context() as patch:
            patch.setattr(session._slot.store, "load_state", fail)
            with pytest.raises(SessionFileError, match="no pages"):
                session.files.load_state(data)
        session.decode(tokens_for(5))
        assert session.files.load_state(data).position == 50
