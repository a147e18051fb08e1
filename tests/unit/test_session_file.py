"""The file of a saved session is read as it was written, or refused by name."""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv import SessionFileError, _core, files
from entropykv.files import NotRegularError, new_file
from entropykv.session.file import (
    MAGIC,
    SECTION_ALIGNMENT,
    VERSION,
    SavedContents,
    SavedSettings,
    SessionReader,
    check_settings,
    check_target,
    new_session_file,
    open_session,
    write_session,
)
from entropykv.store.protocol import Section

SETTINGS = SavedSettings(
    entropykv="1.0",
    llama_cpp_python="0.3",
    model="tiny",
    fingerprint={"architecture": "llama", "n_vocab": 5},
    store="headwise",
    kv_type="q8_0",
    policy="uniform",
    n_ctx=64,
    kv_budget="0.5",
    n_sinks=4,
    recent_window=None,
    freeze=None,
    sequence_state=None,
)


CONTENTS = SavedContents(
    position=3,
    echoed=0,
    n_tokens=3,
    n_logits=5,
    entries=[[1, 2], [3, 0]],
    evicted=4,
    shift=0,
    chat=None,
    sections=[7, 0, 2],
    recalls_now=False,
    whole_from=0,
)


SECTIONS = [bytes(12), bytes(20), b"entries", b"", b"of"]


def file_bytes(contents: SavedContents = CONTENTS, sections: list[bytes] = SECTIONS) -> bytes:
    file = io.BytesIO()
    write_session(file, SETTINGS, contents, sections)
    return file.getvalue()


def read(data: bytes) -> tuple[SessionReader, list[Section]]:
    reader = SessionReader(io.BytesIO(data), "x.ekv")
    return reader, reader.sections()


def with_header(change: dict[str, Any]) -> bytes:
    """Return a session file with a changed header and a correct digest."""
    settings, contents = asdict(SETTINGS), CONTENTS.to_json()
    for key, value in change.items():
        (settings if key in settings else contents)[key] = value
    header = json.dumps({"settings": settings, "contents": contents}).encode()
    n_before = 16 + len(header) + 16 + sum(map(len, SECTIONS[:2]))
    header += b" " * (-n_before % 16)  # The store's sections begin at a multiple of 16.
    head = struct.pack("<8sII", MAGIC, VERSION, len(header)) + header
    head += hashlib.blake2b(head, digest_size=16).digest()
    body = head + b"".join(SECTIONS)
    return body + hashlib.blake2b(body, digest_size=16).digest()


def test_what_is_written_is_read() -> None:
    data = file_bytes()
    reader, sections = read(data)
    assert (reader.settings, reader.contents) == (SETTINGS, CONTENTS)
    assert sections == SECTIONS
    assert reader.contents.n_entries == 6
    assert data == with_header({})  # The bytes are those that the module's docstring describes.


def test_many_bytes_begin_at_a_page() -> None:
    for n_bytes in (65535, 65536, 100000):
        contents = replace(CONTENTS, sections=[n_bytes])
        sections = [*SECTIONS[:2], b"x" * n_bytes]
        data = file_bytes(contents, sections)
        reader, found = read(data)
        assert (reader.contents, found) == (contents, sections)
        start = len(data) - 16 - n_bytes
        assert (start % SECTION_ALIGNMENT == 0) == (n_bytes >= 65536)
        assert start % 16 == 0


@given(
    st.integers(0, 2**31 - 1),
    st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=3), max_size=3),
    st.lists(st.binary(max_size=40), max_size=4),
)
def test_all_sections_survive(number: int, entries: list[list[int]], stored: list[bytes]) -> None:
    contents = replace(
        CONTENTS, position=number, entries=entries, sections=[len(part) for part in stored]
    )
    reader, sections = read(file_bytes(contents, [*SECTIONS[:2], *stored]))
    assert reader.contents == contents
    assert sections[2:] == stored


def test_every_cut_is_refused() -> None:
    data = file_bytes()
    for size in range(len(data)):
        with pytest.raises(SessionFileError, match=r"^x\.ekv: is (cut short|not a saved session)"):
            read(data[:size])
    with pytest.raises(SessionFileError, match="1 bytes too many"):
        read(data + b"x")


def test_every_changed_byte_is_refused() -> None:
    data = file_bytes()
    for place in range(len(data)):
        for change in (1, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[place] ^= change
            with pytest.raises(SessionFileError, match=r"^x\.ekv: "):
                read(bytes(damaged))


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    for content in (data, MAGIC + data):
        with pytest.raises(SessionFileError, match=r"^x\.ekv: "):
            read(content)


@pytest.mark.parametrize(
    "change",
    [
        {"model": 5},
        {"kv_type": None},
        {"fingerprint": []},
        {"n_ctx": -1},
        {"n_sinks": True},
        {"recent_window": "8"},
        {"freeze": True},
        {"store": None},
        {"position": 1.0},
        {"n_tokens": None},
        {"n_tokens": 2**31},
        {"entries": [[2**31]]},
        {"entries": 3},
        {"entries": [3]},
        {"entries": [[-1]]},
        {"entries": [[None]]},
        {"images": [[1, 2]]},
        {"images": [[1, 2, -1]]},
        {"chat": 1},
        {"sections": [[7]]},
        {"sections": [-7, 7, 9]},
        {"whole_from": -1},
        {"whole_from": None},
        {"surprise": 1},
    ],
)
def test_an_impossible_header_is_damage(change: dict[str, Any]) -> None:
    with pytest.raises(SessionFileError, match="is damaged"):
        read(with_header(change))


def test_sizes_beyond_the_file_allocate_nothing() -> None:
    most = 2**31 - 1
    for change in ({"sections": [2**50, 0, 2]}, {"n_tokens": most}, {"n_logits": most}):
        with pytest.raises(SessionFileError, match="cut short"):
            read(with_header(change))
    with pytest.raises(SessionFileError, match="header of 4294967295 bytes"):
        read(struct.pack("<8sII", MAGIC, VERSION, 2**32 - 1) + bytes(100))


@pytest.mark.parametrize("version", [7, VERSION + 1])
def test_another_version_is_named(version: int) -> None:
    data = bytearray(file_bytes())
    data[8] = version
    words = f"has version {version} of the format, .*; load it with .*, or read the prompt again"
    with pytest.raises(SessionFileError, match=words):
        read(bytes(data))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fingerprint": {}}, "another model file"),
        ({"store": "flat"}, "--store headwise"),
        ({"kv_type": "f16"}, "--kv-type q8_0"),
        ({"policy": "entropy"}, "--policy uniform"),
    ],
)
def test_settings_that_must_be_the_same(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SessionFileError, match=words):
        check_settings(SETTINGS, replace(SETTINGS, **change), "x.ekv")


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (None, "q8_0", "without frozen entries, but this session freezes; leave --freeze"),
        ("q8_0", None, "but this session does not freeze; use --freeze ram --freeze-type q8_0"),
        ("q4_0", "f16", r"type q4_0, but this session freezes as f16; .*--freeze-type q4_0 \("),
    ],
)
def test_frozen_entries_must_be_of_the_same_type(
    theirs: str | None, ours: str | None, words: str
) -> None:
    saved = replace(SETTINGS, freeze=theirs)
    check_settings(saved, replace(saved, n_ctx=9), "x.ekv")
    with pytest.raises(SessionFileError, match=rf"^x\.ekv: .*{words}"):
        check_settings(saved, replace(saved, freeze=ours), "x.ekv")


def test_settings_that_may_differ() -> None:
    ours = replace(
        SETTINGS, entropykv="2.0", n_ctx=9, kv_budget="7", n_sinks=0, llama_cpp_python="0.4"
    )
    check_settings(SETTINGS, ours, "x.ekv")
    flat = replace(SETTINGS, store="flat", sequence_state=2)
    check_settings(flat, replace(flat, llama_cpp_python="0.4"), "x.ekv")
    with pytest.raises(
        SessionFileError, match=r"version 2 of .*\(llama-cpp-python 0\.3\), but 0\.4"
    ):
        check_settings(flat, replace(flat, llama_cpp_python="0.4", sequence_state=3), "x.ekv")
    with pytest.raises(SessionFileError, match=r"version 2 of .* but 0\.3 reads nothing here"):
        check_settings(flat, replace(flat, sequence_state=None), "x.ekv")


def store_of(kv_type: str, k_dim: int, v_dim: int, latent: bool) -> _core.HeadwiseStore:
    """Return a store that has evicted, so that entries are not sorted by position."""
    store = _core.HeadwiseStore(
        layers=[_core.LayerShape(2, 1, k_dim, v_dim, latent=latent)],
        kv_type=kv_type,
        importance=_core.ImportanceSettings(_core.ScoreKind.mass, 0.9, 16),
        n_sinks=2,
        recent_window=8,
        max_tokens=64,
        max_entries=512,
        n_threads=1,
    )
    store.set_budgets(budgets=[50], pool_pages=8, n_sinks=2, recent_window=8)
    random = np.random.default_rng(k_dim)

    def rows(n: int, heads: int, dim: int) -> Any:
        return random.standard_normal((n, heads, dim)).astype(np.float32)

    position = 0
    for n in (40, 30, 1, 1, 20, 1):
        store.begin(n, position, position)
        v = None if latent else rows(n, 1, v_dim)
        store.attend_alone(0, rows(n, 2, k_dim), rows(n, 1, k_dim), v, 0.3, position=position)
        position += n
    return store


def aligned(size: int) -> int:
    return -(-size // 64) * 64


@pytest.mark.parametrize(
    ("k_dim", "v_dim", "latent"),
    [(16, 16, False), (33, 20, False), (64, 128, False), (80, 64, True), (33, 20, True)],
)
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_pages_are_laid_out_as_described(
    kv_type: str, k_dim: int, v_dim: int, latent: bool
) -> None:
    """Pages have the bytes that page_layout.hpp and head_states.cpp describe; a change needs a new
    version of the file.
    """
    store = store_of(kv_type, k_dim, v_dim, latent)
    shape = _core.LayerShape(2, 1, k_dim, v_dim, latent=latent)
    _, (per_page,) = _core.page_geometry([shape], kv_type)
    count, state = store.count(0, 0), store.save_head(0, 0)
    ks, vs = (-(-dim // 16) * 16 for dim in (k_dim, v_dim))
    groups = per_page // 16
    quantised = kv_type == "q8_0"
    value = 1 if quantised else 2
    kb, vb = (-(-stride // 32) if quantised else 0 for stride in (ks, vs))
    sizes = [
        per_page * ks * value,
        per_page * kb * 2,
        0 if latent else per_page * vs * value,
        0 if latent else per_page * vb * 2,
        per_page * 4,
        per_page * 4,
    ]
    offsets = np.cumsum([0, *map(aligned, sizes)])
    n_pages = -(-count // per_page)
    assert len(state) == n_pages * offsets[-1]
    pages = np.frombuffer(state, np.uint8).reshape(n_pages, offsets[-1])
    k, k_scale, v, v_scale, positions, importance = (
        np.ascontiguousarray(pages[:, start : start + size])
        for start, size in zip(offsets, sizes, strict=False)
    )

    def scales(data: Any, blocks: int) -> Any:
        lanes = data.view("<f2").reshape(n_pages, groups, blocks, 16).transpose(0, 1, 3, 2)
        return np.repeat(lanes.reshape(-1, blocks), 32, axis=1).astype(np.float32)

    if quantised:
        quads = (k ^ 0x80).view(np.int8).reshape(n_pages, groups, ks // 4, 16, 4)
        k_rows = quads[..., [0, 2, 1, 3]].transpose(0, 1, 3, 2, 4).reshape(-1, ks)
        k_rows = k_rows * scales(k_scale, kb)[:, :ks]
        v_rows = k_rows
        if not latent:
            fours = v.view(np.int8).reshape(n_pages, per_page // 4, vs, 4)[..., [0, 2, 1, 3]]
            v_rows = fours.transpose(0, 1, 3, 2).reshape(-1, vs) * scales(v_scale, vb)[:, :vs]
    else:
        k_rows = k.view("<f2").reshape(n_pages, groups, ks, 16).transpose(0, 1, 3, 2)
        k_rows = k_rows.reshape(-1, ks).astype(np.float32)
        v_rows = k_rows if latent else v.view("<f2").reshape(-1, vs).astype(np.float32)
    places = positions.view("<i4").ravel()
    assert not places[count:].any()
    order = np.argsort(places[:count])
    expected = store.rows(0, 0)
    assert np.any(np.diff(places[:count]) < 0)
    np.testing.assert_array_equal(places[:count][order], expected[0])
    np.testing.assert_array_equal(importance.view("<f4").ravel()[:count][order], expected[1])
    np.testing.assert_array_equal(k_rows[:count, :k_dim][order], expected[2])
    np.testing.assert_array_equal(v_rows[:count, :v_dim][order], expected[3])


def assert_not_read(path: Path, words: str) -> None:
    with pytest.raises(SessionFileError, match=words), open_session(path):
        pass


@pytest.mark.needs("os.mkfifo")
def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert_not_read(tmp_path / "none.ekv", r"none\.ekv: no such file")
    assert_not_read(tmp_path, "is a directory")
    assert_not_read(pipe, "is not a regular file")
    assert_not_read(Path("a\0b"), "null")
    (tmp_path / "empty.ekv").touch()
    assert_not_read(tmp_path / "empty.ekv", "is not a saved session")


@pytest.mark.needs("permissions")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "x.ekv"
    path.write_bytes(file_bytes())
    path.chmod(0)
    assert_not_read(path, "Permission denied")


def write_to(path: Path) -> None:
    with new_session_file(path) as file:
        write_session(file, SETTINGS, CONTENTS, SECTIONS)


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    other = tmp_path / "model.gguf"
    other.write_bytes(b"GGUF and so on")
    for path, words in (
        (tmp_path, "is a directory"),
        (tmp_path / "none" / "x.ekv", "No such file or directory"),
        (other / "x.ekv", "Not a directory"),
        (other, "is not a saved session"),
        (Path("a\0b"), "null"),
        (tmp_path / ("x" * 250), "name too long"),
    ):
        with pytest.raises(SessionFileError, match=words):
            write_to(path)
    assert other.read_bytes() == b"GGUF and so on"
    assert os.listdir(tmp_path) == ["model.gguf"]


@pytest.mark.needs("os.mkfifo")
def test_a_pipe_or_a_device_is_not_replaced(tmp_path: Path) -> None:
    """A pipe or device is not replaced: a user who may write to /dev would lose /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(NotRegularError, match="is not a regular file"), new_file(pipe):
        pass
    assert pipe.is_fifo()
    assert [*tmp_path.iterdir()] == [pipe]


def test_an_older_session_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.ekv"
    path.touch()
    for _ in range(2):
        check_target(path)
        write_to(path)
        assert path.read_bytes() == file_bytes()
    assert os.listdir(tmp_path) == ["x.ekv"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.ekv"
    path.write_bytes(MAGIC + b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(SessionFileError, match="No space left"):
        write_to(path)
    assert os.listdir(tmp_path) == ["x.ekv"]
    assert path.read_bytes() == MAGIC + b"old"


def interrupted_write(path: Path) -> None:
    with new_file(path) as part:
        part.write_bytes(b"half")
        raise KeyboardInterrupt


def test_an_interrupt_leaves_no_debris(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted_write(tmp_path / "x")
    assert os.listdir(tmp_path) == []


def test_an_interrupt_right_after_a_file_was_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        open(*arguments, **options).close()
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "open", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt), files.new_file(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []
