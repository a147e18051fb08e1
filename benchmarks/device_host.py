"""Measure the host's time for a step of the device store, on a device that computes nothing.

python benchmarks/device_host.py --length 32768
python benchmarks/device_host.py --length 8192 --sequences 8 --written 32
python benchmarks/device_host.py --length 32768 --node-us 6.5

The device, of tests/support/idle_device.py, takes 20 microseconds for every wait and every copy,
and computes nothing, so the time of a step is the host's alone. The model has the shape of an 8B
model and no weights. Prints for single tokens, and for the last micro-batches of a prompt: the
microseconds of a step, by how much they are more than those of llama.cpp's own full cache on the
same device (with --sequences: than those of the first policy), and what the step asked of the
device. With --node-us, the device is busy for so long with each node of a graph, and "unused" are
the microseconds of a step in which it had nothing to do. Figures are those of the fastest of
several rounds, since other processes make them larger.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from device import SHAPES, tokens_of
from entropykv import Pool, Session
from tests.support.idle_device import COUNTED, counted, use_idle_device
from tests.support.tiny_writer import FloatArray, TinyShape, TinyWriter, add_tokenizer

N_VOCAB = 4096
N_UBATCH = 512
ALIGNMENT = 32


class EmptyWriter(TinyWriter):
    """Write a file with matrices in a sparse region, which takes no room on the disk."""

    n_bytes = 0

    def write(self) -> None:
        """Write the header and, for the tensors, a hole."""
        self._add_metadata()
        add_tokenizer(self.writer, self.shape.n_vocab)
        self._add_tensors()
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_ti_data_to_file()
        (file,) = self.writer.fout or ()
        file.truncate(-(-file.tell() // ALIGNMENT) * ALIGNMENT + self.n_bytes)
        self.writer.close()

    def _normal(self, shape: Sequence[int], scale: float) -> FloatArray:
        del scale
        return np.broadcast_to(np.zeros(1, np.float32), tuple(shape))

    def _add_norm(self, name: str, size: int) -> None:
        self._add_hole(name, (size,), GGMLQuantizationType.F32)

    def _add_matrix(self, name: str, weights: FloatArray) -> None:
        self._add_hole(name, weights.shape, GGMLQuantizationType[self.shape.weight_type])

    def _add_hole(self, name: str, shape: Sequence[int], kind: GGMLQuantizationType) -> None:
        of_block, n_bytes = GGML_QUANT_SIZES[kind]
        size = int(np.prod(shape)) // of_block * n_bytes
        self.writer.add_tensor_info(
            f"{name}.weight", list(shape), np.dtype(np.float32), size, raw_dtype=kind
        )
        self.n_bytes += -(-size // ALIGNMENT) * ALIGNMENT


@contextmanager
def empty_model(shape: str, layers: int | None) -> Iterator[Path]:
    """Yield the path of a model without weights, which is removed at the end."""
    sizes = SHAPES[shape] | {"n_vocab": N_VOCAB} | ({"n_layer": layers} if layers else {})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "empty.gguf"
        kind = TinyShape(
            "llama", n_ctx_train=2**18, weight_type="Q4_0", rope_freq_base=500000.0, **sizes
        )
        EmptyWriter(path, kind, seed=0, activation=None).write()
        yield path


def least_of(step: Callable[[], object], rounds: int, steps: int) -> dict[str, float]:
    """Return the microseconds of a step and its counts, from the fastest of several rounds."""
    best: dict[str, float] = {}
    for _ in range(rounds):
        before, start = counted(), time.perf_counter()
        for _ in range(steps):
            step()
        host = 1e6 * (time.perf_counter() - start) / steps
        after = counted()
        of_step = {name: (after[name] - before[name]) / steps for name in COUNTED}
        of_step["unused"] /= 1e3
        if not best or host < best["host"]:
            best = {"host": host, **of_step}
    return best


def measure(sessions: Sequence[Session], options: argparse.Namespace) -> list[dict[str, float]]:
    """Return the figures of a prompt's last micro-batches, and then of tokens of all sessions."""
    prompt = tokens_of(N_UBATCH)
    chunks = options.rounds * options.chunks
    for session in sessions:
        for _ in range(options.length // N_UBATCH - chunks):
            session.decode(prompt)
    rows = [least_of(lambda: sessions[0].decode(prompt), options.rounds, options.chunks)]
    for session in sessions[1:]:
        for _ in range(chunks):
            session.decode(prompt)
    if len(sessions) == 1:

        def write() -> object:
            return sessions[0].decode([5])

        for _ in range(32):
            write()
        return [*rows, least_of(write, options.rounds, options.written)]

    def write_all(session: Session) -> None:
        for _ in range(options.written):
            session.decode([5])

    with ThreadPoolExecutor(len(sessions)) as threads:
        together = least_of(lambda: list(threads.map(write_all, sessions)), options.rounds + 1, 1)
    return [*rows, {name: n / options.written for name, n in together.items()}]


def opened(path: Path, options: argparse.Namespace, **store: Any) -> Any:
    """Return a session, or a pool if there are several sequences."""
    n_ctx = options.length + (options.rounds + 2) * options.written + 64
    common = {"n_ctx": n_ctx, "n_gpu_layers": -1, "n_ubatch": N_UBATCH, "kv_type": "f16", **store}
    if options.sequences == 1:
        return Session(path, **common)
    return Pool(path, n_sequences=options.sequences, **common)


def main() -> None:
    """Print rows for a micro-batch and for a token: of llama.cpp's own cache, if there is one
    sequence, and of every policy.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--policies", default="recency,uniform,auto")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--kv-budget", type=float, default=0.2)
    parser.add_argument("--written", type=int, default=64, help="tokens of a round")
    parser.add_argument("--chunks", type=int, default=3, help="micro-batches of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cost-us", type=float, default=20.0, help="of a wait or a copy")
    parser.add_argument("--node-us", type=float, default=0.0, help="of a node on the device")
    options = parser.parse_args()
    use_idle_device(1e-6 * options.cost_us, 1e-6 * options.node_us)
    print("store      step           us     more  waits copies graphs  nodes   unused us")
    stores = [("llama.cpp", {"store": "flat", "policy": "recency", "kv_budget": 1.0})]
    for policy in options.policies.split(","):
        ours = {"store": "device", "policy": policy, "kv_budget": options.kv_budget}
        stores.append((policy, ours))
    own: list[dict[str, float]] = []
    with empty_model(options.shape, options.layers) as path:
        for name, store in stores:
            if options.sequences > 1 and name == "llama.cpp":
                continue  # The flat store has no pools.
            with opened(path, options, **store) as holder:
                one = options.sequences == 1
                sessions = [holder] if one else [holder.session() for _ in range(options.sequences)]
                rows = measure(sessions, options)
            own = own or rows
            for step, row, first in zip(("micro-batch", "token"), rows, own, strict=True):
                print(
                    f"{name:10} {step:11} {row['host']:8.0f} {row['host'] - first['host']:8.0f}"
                    f" {row['waits']:6.2f} {row['copies']:6.2f} {row['graphs']:6.2f}"
                    f" {row['nodes']:6.0f} {row['unused']:11.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
