"""Converted files load in llama.cpp, and their logits are those of the source."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from entropykv import Session
from entropykv.convert import convert
from entropykv.model.geometry import read_geometry
from tests.support.command import assert_refused, entropykv, python, started
from tests.support.exact_logits import TOKENS, exact_logits
from tests.support.i2s_files import I2sModel
from tests.support.logits import relative_error
from tests.support.tiny_models import write_bitnet
from tests.support.waiting import wait_for


@pytest.mark.parametrize("layout", ["x86", "arm64", "rows4"])
@pytest.mark.parametrize("arch", ["bitnet", "bitnet-b1.58", "bitnet-25"])
def test_logits_equal_those_of_a_file_written_for_stock(
    tmp_path: Path, layout: str, arch: str
) -> None:
    model = I2sModel(arch=arch)
    activation = "silu" if arch == "bitnet" else "relu2"
    source = model.write(tmp_path / "i2s.gguf", layout)
    direct = model.write(tmp_path / "direct.gguf", "tq2_0", activation=activation, pre="llama-bpe")
    target = tmp_path / "out.gguf"
    summary = convert(source, target, i2s_layout=layout, embedding_type="keep")
    assert summary.activation == activation
    assert np.array_equal(exact_logits(target), exact_logits(direct))


def test_the_wrong_layout_shows_in_the_logits(tmp_path: Path) -> None:
    model = I2sModel()
    source = model.write(tmp_path / "i2s.gguf", "arm64")
    convert(source, tmp_path / "right.gguf", i2s_layout="arm64")
    convert(source, tmp_path / "wrong.gguf")
    right, wrong = (exact_logits(tmp_path / f"{name}.gguf") for name in ("right", "wrong"))
    assert relative_error(wrong, right) > 0.3


@pytest.mark.parametrize(
    ("weight_type", "tolerance"), [("f16", 2e-3), ("tq2_0", 5e-2), ("q4_0", 5e-2)]
)
def test_weight_types_agree(tmp_path: Path, weight_type: str, tolerance: float) -> None:
    source = I2sModel().write(tmp_path / "i2s.gguf")
    logits = {}
    for kind in ("f32", weight_type):
        target = tmp_path / f"{kind}.gguf"
        convert(source, target, weight_type=kind, embedding_type="f32")
        logits[kind] = exact_logits(target)
    assert relative_error(logits[weight_type], logits["f32"]) < tolerance


def test_rows_that_fit_no_block_of_tq2_0(tmp_path: Path) -> None:
    """Rows of 96 and 160 values, which do not fill blocks of 256, become Q4_0 with nearly the same
    logits.
    """
    model = I2sModel(n_embd=96, n_ff=160, n_head=3, n_head_kv=1)
    source = model.write(tmp_path / "i2s.gguf")
    result = entropykv("convert", source, tmp_path / "auto.gguf")
    assert "rows fill no blocks of 256 became Q4_0" in result.stderr
    convert(source, tmp_path / "f32.gguf", weight_type="f32", embedding_type="f32")
    kinds = {tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "auto.gguf").tensors}
    assert kinds == {"Q4_0", "Q8_0", "F32"}
    auto, dense = exact_logits(tmp_path / "auto.gguf"), exact_logits(tmp_path / "f32.gguf")
    assert relative_error(auto, dense) < 5e-2


@pytest.mark.parametrize(
    ("embedding_type", "tolerance"), [("f16", 1e-6), ("q8_0", 3e-2), ("q6_k", 0.1), (None, 0.1)]
)
def test_embedding_types_agree(
    tmp_path: Path, embedding_type: str | None, tolerance: float
) -> None:
    source = I2sModel().write(tmp_path / "i2s.gguf")
    for name, kind in (("kept", "keep"), ("other", embedding_type)):
        convert(source, tmp_path / f"{name}.gguf", weight_type="f32", embedding_type=kind)
    kept, other = exact_logits(tmp_path / "kept.gguf"), exact_logits(tmp_path / "other.gguf")
    assert relative_error(other, kept) < tolerance


def test_a_file_of_stock_gets_the_activation_and_keeps_its_logits(tmp_path: Path) -> None:
    source, target = tmp_path / "stock.gguf", tmp_path / "out.gguf"
    write_bitnet(source, weight_type="F16")
    convert(source, target, embedding_type="keep")
    assert read_geometry(target).activation == "silu"
    assert np.array_equal(exact_logits(target), exact_logits(source))
    relu2, again = tmp_path / "relu2.gguf", tmp_path / "again.gguf"
    convert(source, relu2, embedding_type="keep", activation="relu2")
    convert(relu2, again)  # The metadata key stays, and the embedding becomes smaller.
    assert read_geometry(again).activation == "relu2"
    assert relative_error(exact_logits(again), exact_logits(source)) > 0.1


def test_session_serves_a_converted_model(tmp_path: Path) -> None:
    source, target = I2sModel().write(tmp_path / "i2s.gguf"), tmp_path / "out.gguf"
    convert(source, target, weight_type="f32")
    expected = exact_logits(target)
    with Session(target, n_ctx=256, kv_type="f16", n_threads=2) as session:
        ours = session.decode(TOKENS, all_logits=True)
        text = session.detokenize(session.tokenize("the cat, 12 Äpfel"))
        assert session.model.chat_prompt("hello") == "User: hello"
    assert text == "the cat, 12 Äpfel"
    assert relative_error(ours, expected) < 1e-2  # The cache is f16.


def test_convert_and_run_on_the_command_line(tmp_path: Path) -> None:
    source, target = I2sModel().write(tmp_path / "i2s.gguf"), tmp_path / "a b.gguf"
    result = entropykv("convert", source, target)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert "activation relu2" in result.stderr
    assert re.search(
        r"^writing .* MiB: about \d+ s, and \d+ MiB of memory", result.stderr, re.MULTILINE
    )
    assert f"entropykv run -m '{target}'" in result.stderr
    result = entropykv("run", "-m", target, "-p", "the", "-n", "4", "--temp", "0", "-c", "128")
    assert result.returncode == 0, result.stderr


def test_run_names_the_command_that_converts(tmp_path: Path) -> None:
    source = I2sModel().write(tmp_path / "i2s.gguf")
    result = entropykv("run", "-m", source, "-p", "the")
    assert_refused(result, f"entropykv convert {source}")


@pytest.mark.needs("/dev/full")
def test_a_device_is_no_output(tmp_path: Path) -> None:
    source = I2sModel().write(tmp_path / "i2s.gguf")
    assert_refused(entropykv("convert", source, "/dev/full", "--force"), "regular file")


@pytest.mark.needs("resource.setrlimit")
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    """A full disk is reported in one sentence; a limit on the size of files simulates it."""
    source, target = I2sModel().write(tmp_path / "i2s.gguf"), tmp_path / "out.gguf"
    program = (
        "import resource, signal, sys; from entropykv.cli import main;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "sys.exit(main(sys.argv[1:]))"
    )
    result = python(program, "convert", source, target, code=2)
    estimate, refusal = result.stderr.strip().splitlines()
    assert estimate.startswith("writing 0.4 MiB")
    assert refusal.startswith("entropykv: ")
    assert "out.gguf: cannot be written" in refusal
    assert [path.name for path in tmp_path.iterdir()] == ["i2s.gguf"]


def large_model(path: Path) -> Path:
    """Write 140 MB of I2_S weights in 420 tensors, and an embedding of 60 MB."""
    ternary = I2sModel(n_layer=1, n_embd=1024, n_ff=2048)
    model = I2sModel(n_layer=0, n_embd=1024, n_ff=2048, n_vocab=30_000)
    object.__setattr__(model, "n_layer", 60)
    for layer in range(60):
        for name, values in ternary.ternary.items():
            renamed = name.replace("blk.0", f"blk.{layer}")
            model.ternary[renamed] = values
            model.scales[renamed] = ternary.scales[name]
    return model.write(path)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_model(tmp_path_factory.mktemp("models") / "large.gguf")


@pytest.mark.needs("/proc/self/status")
def test_memory_stays_far_below_the_size_of_the_file(large: Path, tmp_path: Path) -> None:
    # Do not use ru_maxrss, which a new process inherits from its parent.
    program = """
import re, sys
from entropykv.convert import convert
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
before = peak()
convert(sys.argv[1], sys.argv[2])
print(peak() - before)
"""
    result = python(program, large, tmp_path / "out.gguf")
    growth, size = int(result.stdout) * 1024, large.stat().st_size
    assert growth < size / 3, f"{growth / 2**20:.0f} MiB for a file of {size / 2**20:.0f}"


@pytest.mark.needs("signal.SIGKILL")
def test_an_interrupt_leaves_nothing(large: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    with started("convert", large, target) as process:
        wait_for(lambda: any(tmp_path.glob("*.part")))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []
