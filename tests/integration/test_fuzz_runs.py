"""Run a few seeds of the fuzzers, and damage metadata; `make fuzz` runs new seeds."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from gguf import GGUFValueType

from entropykv import EntropyLlama, ModelFileError, Session, SessionFileError
from entropykv.model.shipped import DEMOS
from tests.fuzz.file_runs import run_files
from tests.fuzz.forgery import crafted
from tests.fuzz.metadata import Header, failures
from tests.fuzz.pool_runs import run_pool
from tests.support.logits import tokens_for
from tests.support.tiny_models import write_gemma


@pytest.mark.parametrize("seed", [3, 8, 12, 14])
def test_pools_beside_a_fresh_reading(tmp_path: Path, seed: int) -> None:
    assert "compared" in run_pool(seed, tmp_path)


@pytest.mark.parametrize("seed", [4, 5, 20])
def test_crafted_files_are_refused_or_work(tmp_path: Path, seed: int) -> None:
    assert "files refused" in run_files(seed, tmp_path)


def test_a_seed_crafts_the_same_file_again(tiny_llama: Path) -> None:
    with Session(tiny_llama, n_ctx=64) as session:
        session.decode(tokens_for(20))
        data = session.files.save_state()
        made = [[crafted(random.Random(seed), data) for seed in range(60)] for _ in range(2)]
        assert made[0] == made[1]
        assert len({what for what, _ in made[0]}) > 20
        assert 30 < sum(is_refused(session, other) for _, other in made[0]) < 60


def is_refused(session: Session, data: bytes) -> bool:
    try:
        session.files.load_state(data)
    except SessionFileError:
        return True
    return False


def test_damaged_metadata_never_ends_the_process() -> None:
    assert list(failures(seed=1, n_files=40, removed=False)) == []


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("tokenizer.ggml.tokens", None, "has no tokenizer"),
        ("tokenizer.ggml.model", None, "has no tokenizer"),
        ("tokenizer.ggml.scores", b"\x09\0\0\0\x06\0\0\0" + bytes(8), "0 values for"),
        ("tokenizer.ggml.token_type", b"\x04\0\0\0" + bytes(4), "not an array of int32"),
        ("llama.attention.layer_norm_rms_epsilon", b"\x06\0\0\0\0\0\x80\xbf", "is -1"),
    ],
)
def test_what_llama_cpp_asserts_is_refused_before(
    tiny_llama: Path, tmp_path: Path, key: str, value: bytes | None, why: str
) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(Header.read(tiny_llama).with_key(key, value))
    for open_model in (Session, EntropyLlama):
        with pytest.raises(ModelFileError, match=why):
            open_model(path)


def test_a_vocabulary_that_cannot_spell_every_text_is_refused(tmp_path: Path) -> None:
    """A vocabulary without all bytes is refused, because tokenizing would end the process."""
    path = tmp_path / "damaged.gguf"
    header = Header.read(DEMOS["bitnet"].path)
    llama = struct.pack("<IQ", GGUFValueType.STRING, 5) + b"llama"
    path.write_bytes(header.with_key("tokenizer.ggml.model", llama))
    with pytest.raises(ModelFileError, match="tokens lacks <0x00>"):
        Session(path)


def test_rope_of_no_values_is_refused(tmp_path: Path) -> None:
    """RoPE over no values is refused, because llama.cpp's op would never end in gemma's and
    bitnet's graphs.
    """
    whole, damaged = tmp_path / "whole.gguf", tmp_path / "damaged.gguf"
    write_gemma(whole)
    header = Header.read(whole)
    damaged.write_bytes(header.with_key("gemma.rope.dimension_count", b"\x04\0\0\0" + bytes(4)))
    for open_model in (Session, EntropyLlama):
        with pytest.raises(ModelFileError, match=r"damaged\.gguf: .*rope\.dimension_count is 0"):
            open_model(damaged)


def test_the_fuzzer_puts_files_together_again(tiny_llama: Path, tmp_path: Path) -> None:
    header = Header.read(tiny_llama)
    name = next(iter(header.keys))
    raw = header.keys[name]
    path = tmp_path / "same.gguf"
    path.write_bytes(header.with_key(name, raw[8 + len(name) :]))
    with Session(path, n_ctx=64) as same, Session(tiny_llama, n_ctx=64) as other:
        assert (same.decode([5, 6, 7]) == other.decode([5, 6, 7])).all()
