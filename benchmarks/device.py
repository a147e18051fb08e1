"""Measure prompt and decode of the device store against llama.cpp's own full cache on that device.

python benchmarks/device.py --lengths 2048,8192,32768
python benchmarks/device.py --shape 8b --lengths 2048,32768,131072 --policies recency,auto
python benchmarks/device.py --shape 8b --lengths 8192 --sequences 8
PYTHONPATH=. build/device/bin/python benchmarks/device.py --rpc --lengths 512

Both run in one process, one after the other, with all layers on the device and the same
micro-batches. Prints for each length and policy: tokens per second of the prompt and of single
tokens after it, the ratio to llama.cpp's own cache, the bytes that the device store holds on the
device, how much of them are rows beyond the budget and one micro-batch, and for each of the single
tokens, how many graphs the store computed on the device and how many copies it made between host
and device. With --sequences, only single tokens are measured, of so many sequences that each have
read a prompt and then read a token each in every step; the first tokens, with which a pool keeps
the prompts as checkpoints, are not timed. With --shape, the model has random weights
of that shape, whose rows repeat. With --rpc, the device is a process on this machine's CPU, whose
figures say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from entropykv import Pool, Session
from entropykv.llamacpp.model import Model
from entropykv.session import model_runner
from entropykv.store.step import BatchPart, MicroBatch, Part, decode_parts
from inputs import find_model
from tests.support.rpc_device import use_rpc_device
from tests.support.tiny_writer import FloatArray, TinyShape, TinyWriter

SHAPES: dict[str, dict[str, Any]] = {
    "135m": {
        "n_layer": 30,
        "n_head": 9,
        "n_head_kv": 3,
        "head_dim": 64,
        "n_ff": 1536,
        "n_vocab": 49152,
    },
    "8b": {
        "n_layer": 32,
        "n_head": 32,
        "n_head_kv": 8,
        "head_dim": 128,
        "n_ff": 14336,
        "n_vocab": 128256,
    },
}
DRAWN_ROWS = 64
N_NOT_TIMED = 4  # single tokens of several sequences that are read before the time is taken
# tokens of a prompt that load the kernels of its operations before the time is taken
N_WARMED_UP = 1024


class RepeatingWriter(TinyWriter):
    """Draw and quantise a few rows of each matrix and repeat them, so 8B weights take seconds."""

    def _normal(self, shape: Sequence[int], scale: float) -> FloatArray:
        if len(shape) == 1:
            return super()._normal(shape, scale)
        rows = super()._normal((DRAWN_ROWS, shape[1]), scale)
        return np.broadcast_to(rows, (shape[0] // DRAWN_ROWS, *rows.shape))

    def _add_matrix(self, name: str, weights: FloatArray) -> None:
        kind = GGMLQuantizationType[self.shape.weight_type]
        rows = np.tile(quantize(weights[0], kind), (len(weights), 1))
        self.writer.add_tensor(f"{name}.weight", rows, raw_dtype=kind)


@contextmanager
def model_of(options: argparse.Namespace) -> Iterator[Path]:
    """Yield the path of the model; one with random weights is removed at the end."""
    if options.shape is None:
        yield Path(find_model(options.model))
        return
    shape = SHAPES[options.shape] | ({"n_layer": options.layers} if options.layers else {})
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "random.gguf"
        kind = TinyShape(
            "llama", n_ctx_train=2**18, weight_type="Q4_0", rope_freq_base=500000.0, **shape
        )
        RepeatingWriter(path, kind, seed=0, activation=None).write()
        yield path


def tokens_of(length: int) -> list[int]:
    """Return a prompt of `length` tokens."""
    return [3 + i * 7 % 250 for i in range(length)]


def measure(session: Session, length: int, written: int) -> tuple[float, float, dict[str, float]]:
    """Return tokens per second of a prompt and of single tokens after it, and counts per single
    token.

    The counts say what the device store did: graphs on the device, and copies between host and
    device.
    """
    tokens = tokens_of(length)
    session.decode(tokens[:N_WARMED_UP])
    session.reset()
    start = time.perf_counter()
    session.decode(tokens)
    read = time.perf_counter()
    before = session.stats().device_traffic
    for token in tokens[:written]:
        session.decode([token])
    end = time.perf_counter()
    after = session.stats().device_traffic
    traffic = {name: (after[name] - before[name]) / written for name in after}
    return length / (read - start), written / (end - read), traffic


def padding_of(session: Session, n_ubatch: int) -> float:
    """Return the fraction by which rows on the device exceed the budgets and one micro-batch."""
    stats = session.stats()
    n_entries = sum(map(sum, session.cache.budgets()))
    n_heads = sum(map(len, session.cache.budgets()))
    rows = stats.kv_bytes_budget * (1 + n_heads * n_ubatch / n_entries)
    return (stats.kv_bytes_budget + stats.kv_bytes_staging) / rows - 1


def measure_together(sessions: Sequence[Session], length: int, written: int) -> tuple[float, float]:
    """Return the tokens per second of sessions that read single tokens at the same time, and how
    many a step reads on average.

    Each session first reads a prompt of `length` tokens, which is not timed.
    """
    for session in sessions:
        session.decode(tokens_of(length))

    def write(session: Session, n_tokens: int) -> None:
        for token in tokens_of(n_tokens):
            session.decode([token])

    sizes = []

    def decode(parts: Sequence[Part], *others: Any) -> None:
        sizes.append(len(parts))
        decode_parts(parts, *others)

    with (
        patch.object(model_runner, "decode_parts", decode),
        ThreadPoolExecutor(len(sessions)) as threads,
    ):
        list(threads.map(write, sessions, [N_NOT_TIMED] * len(sessions)))
        sizes.clear()
        start = time.perf_counter()
        list(threads.map(write, sessions, [written] * len(sessions)))
        end = time.perf_counter()
    return sum(sizes) / (end - start), sum(sizes) / len(sizes)


def measure_own_together(path: Path, options: argparse.Namespace, length: int) -> float:
    """Return the tokens per second of llama.cpp's own cache, whose sequences read a token each in
    one step.
    """
    model = Model(path, n_gpu_layers=-1, verbose=False)
    parameters = model.context_defaults()
    n, n_ubatch = options.sequences, options.n_ubatch
    n_written = N_NOT_TIMED + options.written
    parameters.n_ctx = n * (-(-(length + n_written) // 256) * 256)
    parameters.n_batch = parameters.n_ubatch = n_ubatch
    parameters.n_seq_max, parameters.kv_unified = n, False
    parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    context = model.new_context(parameters)
    batch = MicroBatch(n_ubatch, model.n_vocab)
    tokens = tokens_of(length)
    for i in range(n):
        for first in range(0, length, n_ubatch):
            part = tokens[first : first + n_ubatch]
            batch.decode_together(context, [BatchPart(part, first, 0, sequence=i)])
    start = 0.0
    for step, token in enumerate(tokens_of(n_written)):
        if step == N_NOT_TIMED:
            start = time.perf_counter()
        batch.decode_together(
            context, [BatchPart([token], length + step, 1, sequence=i) for i in range(n)]
        )
    speed = n * options.written / (time.perf_counter() - start)
    batch.close()
    llama_cpp.llama_free(context)
    model.close()
    return speed


def compare_together(path: Path, options: argparse.Namespace, length: int) -> None:
    """Print a row for every policy about several sequences that decode at the same time."""
    own = measure_own_together(path, options, length)
    for policy in options.policies.split(","):
        with Pool(
            path,
            store="device",
            policy=policy,
            n_sequences=options.sequences,
            **common_options(options, length + N_NOT_TIMED, options.kv_budget),
        ) as pool:
            sessions = [pool.session() for _ in range(options.sequences)]
            ours, of_step = measure_together(sessions, length, options.written)
        print(
            f"{length:8} {policy:10} {options.sequences} sequences {ours:12.1f}"
            f" ({own:.1f}, {ours / own:.2f}x), {of_step:.1f} in a step",
            flush=True,
        )


def common_options(options: argparse.Namespace, length: int, kv_budget: float) -> dict[str, Any]:
    """Return the options that all sessions and pools have in common."""
    return {
        "kv_budget": kv_budget,
        "n_ctx": length + options.written,
        "n_gpu_layers": -1,
        "n_ubatch": options.n_ubatch,
        "kv_type": "f16",
    }


def compare(path: Path, options: argparse.Namespace, length: int) -> None:
    """Print a row for every policy about one sequence."""
    with Session(
        path, store="flat", policy="recency", **common_options(options, length, 1.0)
    ) as own:
        prompt, decode, _ = measure(own, length, options.written)
    for policy in options.policies.split(","):
        with Session(
            path,
            store="device",
            policy=policy,
            **common_options(options, length, options.kv_budget),
        ) as ours:
            our_prompt, our_decode, traffic = measure(ours, length, options.written)
            held = sum(ours.stats().kv_bytes_on_devices.values()) / 2**20
            padding = padding_of(ours, options.n_ubatch)
        print(
            f"{length:8} {policy:10} {our_prompt:9.1f} ({prompt:.1f}, {our_prompt / prompt:.2f}x)"
            f" {our_decode:12.1f} ({decode:.1f}, {our_decode / decode:.2f}x) {held:12.1f}"
            f" {padding:17.1%}   " + ", ".join(f"{n:.2f}" for _, n in sorted(traffic.items())),
            flush=True,
        )


def main() -> None:
    """Measure prompts of every length, and print a row for each policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--folder", help="where a random model is written")
    parser.add_argument("--lengths", default="2048,8192,32768")
    parser.add_argument("--policies", default="uniform")
    parser.add_argument("--sequences", type=int, default=1, help="that decode at the same time")
    parser.add_argument("--kv-budget", type=float, default=0.2)
    parser.add_argument("--written", type=int, default=64)
    parser.add_argument("--n-ubatch", type=int, default=512)
    parser.add_argument("--rpc", action="store_true")
    options = parser.parse_args()
    if options.rpc:
        use_rpc_device()
    if options.sequences == 1:
        print(
            "  tokens policy     prompt, tok/s (own, ratio)   decode, tok/s (own, ratio)"
            "   MiB on the device   padding   graphs, downloads, uploads a token"
        )
    with model_of(options) as path:
        for length in map(int, options.lengths.split(",")):
            if options.sequences > 1:
                compare_together(path, options, length)
            else:
                compare(path, options, length)


if __name__ == "__main__":
    main()
