"""Measure speed on a machine that is not idle, with stock llama.cpp for comparison.

A busy loop is pinned to one core, or a cgroup gives less than all cores. Every round measures all
numbers of threads in turn, each in a process of its own; ratios are to the first of --kinds (by
default one thread of entropykv) in the same round, under the same load:

python benchmarks/busy_machine.py [-m model.gguf] [--loads idle,busy,quota] [--clients 8]

The load `quota` needs the right to make a cgroup (as root has in most containers).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from entropykv import Pool, Session
from entropykv.evaluation.reading import read, write
from entropykv.evaluation.stock import StockSession
from inputs import find_model, read_texts

LOADS = ("idle", "busy", "quota")
QUOTA = 1.5
"""The cores that the load `quota` may use, of a machine with 2."""
_PERIOD = 100_000
"""The period of a cgroup's quota in microseconds; Linux has the same default."""
_CGROUPS = Path("/sys/fs/cgroup")

Speeds = tuple[float, float]
"""Tokens per second of prompts, and of what is written after them."""


@contextlib.contextmanager
def busy_loop(core: int) -> Iterator[None]:
    """Keep a core busy during the block."""
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as loop:
        time.sleep(0.3)
        try:
            yield
        finally:
            loop.kill()


@contextlib.contextmanager
def cgroup(cores: float) -> Iterator[Path]:
    """Make a cgroup with a quota of `cores` cores; yield the file that takes its processes."""
    quota = round(cores * _PERIOD)
    first = _CGROUPS / "cpu" / "cpu.cfs_quota_us"
    folder = (_CGROUPS / "cpu" if first.parent.is_dir() else _CGROUPS) / "entropykv-busy-machine"
    folder.mkdir()
    try:
        if first.parent.is_dir():
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (folder / "cpu.max").write_text(f"{quota} {_PERIOD}")
        yield folder / "cgroup.procs"
    finally:
        time.sleep(0.2)
        folder.rmdir()


def alone(options: argparse.Namespace) -> Speeds:
    """Read a prompt and write after it in one session; return the speeds."""
    sizes = {"n_ctx": options.tokens + options.written, "n_threads": options.threads}
    reader: Session | StockSession
    if options.stock:
        reader = StockSession(options.model, **sizes)
    else:
        reader = Session(options.model, kv_budget=0.2, **sizes)
    tokens = reader.tokenize(_text())[: options.tokens]
    logits, seconds = read(reader, tokens, lambda _: None)
    written = write(reader, logits, options.written, lambda _: None)
    reader.close()
    return len(tokens) / seconds, written.n_decoded / written.seconds


def as_a_server(options: argparse.Namespace) -> Speeds:
    """Let clients read prompts of their own and write, all at the same time, in one pool; return
    the speeds, both from the start on.
    """
    each, n = options.tokens // 4, options.clients
    starts: list[float] = []
    ends: list[float] = []
    with Pool(
        options.model,
        kv_budget=0.5,
        n_ctx=each + options.written,
        n_sequences=n,
        n_threads=options.threads,
    ) as pool:
        with pool.session() as session:
            tokens = session.tokenize(_text())

        def client(i: int) -> None:
            with pool.session() as session:
                prompt = tokens[i * each : (i + 1) * each]
                times = [
                    time.perf_counter()
                    for _ in session.generate(prompt, max_tokens=options.written, temperature=0)
                ]
                starts.append(times[0])
                ends.append(times[-1])

        begin = time.perf_counter()
        with ThreadPoolExecutor(n) as clients:
            list(clients.map(client, range(n)))
    read_all = max(starts)
    return n * each / (read_all - begin), n * options.written / (max(ends) - begin)


def _text() -> str:
    return "\n\n".join(read_texts("heldout_prose_*.txt").values())


def measured(options: argparse.Namespace, kind: str, load: str) -> Speeds:
    """Measure a kind, such as "stock 2", in another process under a load; return the speeds."""
    name, threads = kind.split()
    command = [sys.executable, __file__, "--measure", "-m", options.model, "-t", threads]
    command += ["--tokens", str(options.tokens), "--written", str(options.written)]
    command += ["--clients", str(options.clients)] + ["--stock"] * (name == "stock")
    with contextlib.ExitStack() as stack:
        if load == "busy":
            stack.enter_context(busy_loop(max(os.sched_getaffinity(0))))
        if load == "quota":
            entrance = stack.enter_context(cgroup(QUOTA))
            command = ["/bin/sh", "-c", f'echo $$ > {entrance}; exec "$@"', "sh", *command]
        found = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    prompt, decode = json.loads(found)
    return prompt, decode


def main() -> None:
    """Measure all kinds under all loads, in rounds, and print a table."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", help="GGUF file (default: SmolLM2)")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--written", type=int, default=128)
    parser.add_argument("--loads", default=",".join(LOADS), help=f"some of {', '.join(LOADS)}")
    parser.add_argument(
        "--kinds",
        default=f"entropykv 1,entropykv {cores},entropykv {2 * cores},stock 1,stock {cores}",
        help="what is measured, with its threads (0: the default)",
    )
    parser.add_argument("--clients", type=int, default=0, help="that many in a pool (0: a session)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stock", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-t", "--threads", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.model = find_model(options.model)
    if options.measure:
        print(json.dumps(as_a_server(options) if options.clients else alone(options)))
        return
    kinds = options.kinds.split(",")
    found: dict[tuple[str, str], list[Speeds]] = defaultdict(list)
    for _ in range(options.rounds):
        for load in options.loads.split(","):
            for kind in kinds:
                found[load, kind].append(measured(options, kind, load))
    print("| load | threads | prompt tok/s | ratio | decode tok/s | ratio |")
    print("|---|---|---|---|---|---|")
    for (load, kind), rounds in found.items():
        cells = []
        for part in (0, 1):
            speeds = [each[part] for each in rounds]
            of_one = [each[part] for each in found[load, kinds[0]]]
            ratios = [speed / one for speed, one in zip(speeds, of_one, strict=True)]
            cells += [f"{statistics.median(speeds):.0f}", f"{statistics.median(ratios):.2f}"]
        print(f"| {load} | {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
