"""Make a saved session without a model: settings, contents, and the bytes of its file."""

from __future__ import annotations

import io

from entropykv.session.file import (
    SavedContents,
    SavedSettings,
    write_session,
)

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
