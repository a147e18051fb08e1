"""Time and memory of `entropykv convert` on a random I2_S file of any size.

The default has the shape of microsoft/bitnet-b1.58-2B-4T: 1.2 GB.

    python benchmarks/convert.py --folder build
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from entropykv.gguf_header import I2_S_TYPE

_CONVERT = """
import sys
from entropykv.cli import main
from entropykv.stats import peak_rss_bytes
before = peak_rss_bytes()
code = main(["convert", *sys.argv[1:]])
print(f"memory: {(peak_rss_bytes() - before) / 2**20:.0f} MiB more than Python and the package")
sys.exit(code)
"""


def write_random(path: Path, arguments: argparse.Namespace) -> None:
    """Norms are 1; every byte of four codes is as good as any other."""
    random = np.random.default_rng(0)
    n_embd, n_ff, heads = arguments.width, arguments.ffn, arguments.heads
    n_kv = n_embd // heads * arguments.kv_heads
    writer = GGUFWriter(path, "bitnet-b1.58")
    writer.add_block_count(arguments.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv(arguments.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_vocab_size(arguments.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    writer.add_tensor(
        "token_embd.weight",
        random.standard_normal((arguments.vocabulary, n_embd), dtype=np.float32).astype(np.float16),
    )
    shapes = {
        "attn_q": (n_embd, n_embd),
        "attn_k": (n_kv, n_embd),
        "attn_v": (n_kv, n_embd),
        "attn_output": (n_embd, n_embd),
        "ffn_gate": (n_ff, n_embd),
        "ffn_up": (n_ff, n_embd),
        "ffn_down": (n_embd, n_ff),
    }
    norms = {"attn_norm": n_embd, "attn_sub_norm": n_embd, "ffn_norm": n_embd, "ffn_sub_norm": n_ff}
    for layer in range(arguments.layers):
        for name, (rows, columns) in shapes.items():
            codes = random.integers(0, 256, rows * columns // 4, dtype=np.uint8)
            tail = np.frombuffer(np.float32(0.02).tobytes() + bytes(28), dtype=np.uint8)
            data = np.concatenate([codes, tail])
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=Path(), help="for two files, removed again")
    for name, default in (
        *(("--layers", 30), ("--width", 2560), ("--ffn", 6912), ("--heads", 20)),
        *(("--kv-heads", 5), ("--vocabulary", 128256)),
    ):
        parser.add_argument(name, type=int, default=default, help="(%(default)s)")
    arguments, options = parser.parse_known_args()
    source, target = (arguments.folder / name for name in ("random-i2s.gguf", "random-tq2.gguf"))
    try:
        write_random(source, arguments)
        print(f"source: {source.stat().st_size / 1e6:.0f} MB", flush=True)
        start = time.perf_counter()
        command = [sys.executable, "-c", _CONVERT, str(source), str(target), "--force", *options]
        subprocess.run(command, check=True)  # noqa: S603
        print(f"time: {time.perf_counter() - start:.1f} s, the start of Python included")
    finally:
        source.unlink(missing_ok=True)
        target.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
