"""Convert refuses by name what it cannot convert, and leaves no file behind."""

from __future__ import annotations

import dataclasses
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from entropykv import cli
from entropykv.convert import convert
from entropykv.errors import EntropyKVError, ModelFileError, SettingsError, UnsupportedModelError
from tests.support.i2s_files import I2sModel
from tests.support.refusals import refused
from tests.support.tiny_models import write_llama
from tests.support.weights import assert_weights_are, read_weights

TINY = I2sModel(n_layer=1, n_embd=64, n_ff=96, n_head=2, n_head_kv=1, n_vocab=264)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY.write(tmp_path_factory.mktemp("models") / "i2s.gguf")


def changed(tiny: Path, target: Path, old: bytes, new: bytes, offset: int = 0) -> Path:
    """Write a copy of a file, with `new` at `offset` after the first `old`; return its path."""
    content = bytearray(tiny.read_bytes())
    start = content.index(old) + offset
    content[start : start + len(new)] = new
    target.write_bytes(content)
    return target


def test_truncated_files_are_refused(tmp_path: Path, tiny: Path) -> None:
    content = tiny.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[:-1])
    refused(path, tmp_path / "out.gguf", r"cut.gguf: is truncated, 1 bytes of tensor blk.0.ffn_")
    path.write_bytes(content[:-60])
    refused(path, tmp_path / "out.gguf", "is truncated, 60 bytes of tensor")
    path.write_bytes(content[:300])
    refused(path, tmp_path / "out.gguf", "cut.gguf: is truncated or damaged")
    path.write_bytes(b"")
    refused(path, tmp_path / "out.gguf", "cut.gguf: is empty")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, tiny: Path) -> None:
    path = tmp_path / "i2s.gguf"
    path.write_bytes(tiny.read_bytes())

    def cut(_done: int, _total: int) -> None:
        os.truncate(path, 20_000)

    refused(path, tmp_path / "out.gguf", "i2s.gguf: ends .* bytes early", progress=cut)


def test_other_models_are_refused_by_name(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama.gguf")
    refused(
        tmp_path / "llama.gguf",
        tmp_path / "out.gguf",
        "llama.gguf: has architecture 'llama' and no I2_S weights",
        UnsupportedModelError,
    )
    (tmp_path / "text.gguf").write_text("hello")
    refused(tmp_path / "text.gguf", tmp_path / "out.gguf", "text.gguf: is not a GGUF file")
    refused(tmp_path / "none.gguf", tmp_path / "out.gguf", "none.gguf: no such file")


def test_heads(tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    convert(TINY.write(tmp_path / "tied.gguf", head=TINY.embedding), target)
    assert "output.weight" not in read_weights(target)
    assert_weights_are(target, TINY)
    head = TINY.embedding
    head[-1, -1] += 1
    source = TINY.write(tmp_path / "untied.gguf", head=head)
    refused(source, tmp_path / "2.gguf", "untied.gguf: has an untied head", UnsupportedModelError)
    source = TINY.write(tmp_path / "short.gguf", head=head[:-1])
    refused(source, tmp_path / "2.gguf", "short.gguf: has an untied head", UnsupportedModelError)


@pytest.mark.parametrize(
    ("old", "new", "offset", "message", "kind"),
    [
        (b"blk.0.attn_q.weight", b"blk.0.attn_x", 0, "no place", UnsupportedModelError),
        (b"blk.0.attn_q.weight", b"blk.1", 0, "no place", UnsupportedModelError),
        (b"blk.0.attn_q.weight", b"blk.0.attn_k", 0, "two tensors are named", ModelFileError),
        (b"bitnet-b1.58.block_count", b"x", 0, "lacks bitnet-b1.58.block_count", ModelFileError),
        (
            b"bitnet-b1.58.block_count",
            struct.pack("<I", 2),
            len(b"bitnet-b1.58.block_count") + 4,
            "lacks tensor blk.1",
            ModelFileError,
        ),
        (
            b"bitnet-b1.58.feed_forward_length",
            struct.pack("<I", 64),
            len(b"bitnet-b1.58.feed_forward_length") + 4,
            "tensor blk.0.ffn_.* has shape",
            ModelFileError,
        ),
        (
            b"blk.0.attn_q.weight",
            struct.pack("<Q", 66),
            19 + 4,
            r"tensor blk.0.attn_q.weight.*\[64, 66\]|I2_S has shape \[64, 66\]",
            ModelFileError,
        ),
        (b"tokenizer.ggml.tokens", b"x", 0, "has no tokenizer.*take a file that", ModelFileError),
    ],
)
def test_wrong_tensors_are_named(
    tmp_path: Path,
    tiny: Path,
    old: bytes,
    new: bytes,
    offset: int,
    message: str,
    kind: type[EntropyKVError],
) -> None:
    path = changed(tiny, tmp_path / "odd.gguf", old, new, offset)
    refused(path, tmp_path / "out.gguf", rf"odd\.gguf: .*({message})", kind)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_scales_are_refused(tmp_path: Path, scale: float) -> None:
    model = dataclasses.replace(TINY, ternary={}, scales={})
    model.scales["blk.0.ffn_up"] = scale
    source = model.write(tmp_path / "i2s.gguf")
    refused(source, tmp_path / "out.gguf", r"i2s.gguf: is damaged \(the scale of blk.0.ffn_up")


def test_embeddings_that_are_not_finite_are_refused(tmp_path: Path, tiny: Path) -> None:
    start = TINY.embedding[:1].tobytes()
    path = changed(tiny, tmp_path / "nan.gguf", start, b"\xff\xff")
    refused(path, tmp_path / "out.gguf", "nan.gguf: .*token_embd.weight .*not finite")


def test_outputs_that_cannot_be_are_refused(tmp_path: Path, tiny: Path) -> None:
    target = tmp_path / "out.gguf"
    target.write_bytes(b"mine")
    refused(tiny, target, "out.gguf: exists already; .*--force", SettingsError)
    refused(tiny, tiny, "the model itself", SettingsError, force=True)
    (tmp_path / "link.gguf").symlink_to(tiny)
    refused(tiny, tmp_path / "link.gguf", "the model itself", SettingsError, force=True)
    refused(tiny, tmp_path, "is a directory", SettingsError, force=True)
    refused(tiny, tmp_path / "none" / "a.gguf", "none: no such directory", SettingsError)
    refused(tiny, Path("a\0b"), "cannot be written", SettingsError)
    refused(tiny, tmp_path / ("a" * 250), "cannot be", SettingsError)
    assert target.read_bytes() == b"mine"
    convert(tiny, target, force=True)
    assert_weights_are(target, TINY)


@pytest.mark.needs("/proc/version")
def test_a_directory_that_takes_no_files(tiny: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be written"):
        convert(tiny, "/proc/out.gguf")


@pytest.mark.needs("permissions")
def test_a_directory_without_permission(tmp_path: Path, tiny: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(0o555)
    refused(tiny, folder / "out.gguf", "cannot be written", SettingsError)


def test_a_failed_conversion_keeps_the_old_output(tmp_path: Path, tiny: Path) -> None:
    path, target = tmp_path / "i2s.gguf", tmp_path / "out.gguf"
    path.write_bytes(tiny.read_bytes())
    target.write_bytes(b"mine")

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(path, target, force=True, progress=interrupt)
    assert target.read_bytes() == b"mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["i2s.gguf", "out.gguf"]


def test_a_disk_without_room(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 10_000})
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    refused(tiny, tmp_path / "out.gguf", "MiB free, but the converted model needs", SettingsError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_type": "q8_0"}, "weight_type cannot be 'q8_0'; use one of tq2_0, q4_0"),
        ({"embedding_type": "q4_0"}, "embedding_type cannot be"),
        ({"i2s_layout": "arm"}, "i2s_layout cannot be 'arm'"),
        ({"activation": "gelu"}, "activation cannot be 'gelu'"),
        ({"embedding_type": "q6_k"}, "multiple of 256 elements, but token_embd.weight has 64"),
    ],
)
def test_options_that_cannot_be(
    tmp_path: Path, tiny: Path, options: dict[str, Any], message: str
) -> None:
    refused(tiny, tmp_path / "out.gguf", message, SettingsError, **options)


def test_weight_type_needs_ternary_weights(tmp_path: Path, tiny: Path) -> None:
    convert(tiny, tmp_path / "stock.gguf")
    refused(
        tmp_path / "stock.gguf",
        tmp_path / "out.gguf",
        "has no I2_S weights",
        SettingsError,
        weight_type="q4_0",
    )
    convert(tmp_path / "stock.gguf", tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "stock.gguf").read_bytes()


def test_the_command_returns_2(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "out.gguf")
    assert cli.main(["convert", str(tmp_path / "none.gguf"), target]) == 2
    assert cli.main(["convert", str(tiny), target]) == 0
    assert cli.main(["convert", str(tiny), target]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("entropykv: ")
    assert "exists already" in lines[-1]
    assert cli.main(["convert", str(tiny), target, "--force"]) == 0
