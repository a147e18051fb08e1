"""Measure the memory and the time that loading a document takes, in one process and in two.

`python benchmarks/shared_documents.py [-m MODEL] [--tokens 6000] [--kv-budget 1.0]`

Two processes open the same document with the budget that it was read with, one after the other, and
each asks a question. Their memory is read from /proc: the resident set (rss), the part of it that
no file backs (anonymous), and the proportional set (pss), which counts half of a page for each of
two processes that share it. All figures are MiB above what the process had before it opened the
document; weights are mapped, and were read before. `peak` is the largest resident set while it
opened.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from entropykv import Session
from entropykv.session.document import read_document
from inputs import find_model, memory_mib, read_texts

MIB = 2**20
N_CTX = 8192
N_PROCESSES = 2
QUESTION = "Who tells this story?"
ANSWER_TOKENS = 16
N_TURNS = 5
SPEED_TOKENS = 150


def memory(name: str) -> float:
    """Return a figure of this process from smaps_rollup, in MiB."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> None:
    """Let the system measure the largest resident set again from now on."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def ask(model: str, document: str, budget: str) -> None:
    """Open a document and ask about it; wait for a line of input before every step."""
    names = ("Rss", "Anonymous", "Pss")
    with Session(model, n_ctx=N_CTX, kv_budget=budget) as session:
        session.decode(session.tokenize("The weights are read here."))
        session.reset()
        print("started", flush=True)
        sys.stdin.readline()
        before = {name: memory(name) for name in names}
        forget_peak()
        start = time.perf_counter()
        session.files.load(document)
        seconds = time.perf_counter() - start
        print(
            f"opened in {seconds:.3f} s, peak {memory_mib('VmHWM') - before['Rss']:.1f}", flush=True
        )

        def figures() -> None:
            values = (f"{name.lower()} {memory(name) - before[name]:.1f}" for name in names)
            print(", ".join(values), flush=True)

        sys.stdin.readline()
        figures()
        sys.stdin.readline()
        start = time.perf_counter()
        tokens = list(session.generate(session.question(QUESTION), ANSWER_TOKENS, temperature=0.0))
        print(f"answered in {time.perf_counter() - start:.3f} s: {tokens}", flush=True)
        sys.stdin.readline()
        figures()
        sys.stdin.readline()


class Asking:
    """Run a process that opens a document step by step, and prints its memory."""

    def __init__(self, model: str, document: Path, budget: str) -> None:
        """Start the process."""
        command = [sys.executable, __file__, "-m", model, "--kv-budget", budget]
        command += ["--ask", str(document)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def listen(self) -> None:
        """Print the next line of the process."""
        said = self._process.stdout.readline() if self._process.stdout else ""
        print(f"process {self._process.pid}: {said.rstrip()}")

    def go_on(self) -> None:
        """Let the process do its next step."""
        if self._process.stdin:
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """Let the process end, and wait for it."""
        self.go_on()
        self._process.wait()


def measure(model: str, document: Path, budget: str) -> None:
    """Let processes open a document and ask about it, in turns, and print their memory."""
    print(f"{document}: {document.stat().st_size / MIB:.1f} MiB")
    running = [Asking(model, document, budget) for _ in range(N_PROCESSES)]
    for process in running:
        process.listen()
    for _ in range(4):
        for process in running:
            process.go_on()
            process.listen()
    for process in running:
        process.end()


def compare_speeds(model: str, documents: list[str]) -> None:
    """Print the tokens per second after loading each document, in turns, with room for all."""
    with Session(model, n_ctx=N_CTX, kv_budget="1.0") as session:
        for _ in range(N_TURNS):
            for document in documents:
                start = time.perf_counter()
                session.files.load(document)
                loaded = time.perf_counter()
                session.decode(session.question(QUESTION))
                asked = time.perf_counter()
                for _ in range(SPEED_TOKENS):
                    session.decode([5])
                seconds = time.perf_counter() - asked
                print(
                    f"{document}: loaded in {loaded - start:.3f} s, {SPEED_TOKENS / seconds:.1f}/s"
                )


def write(model: str, n_tokens: int, budget: str, path: Path) -> None:
    """Read a document of about `n_tokens` tokens, and write it to `path`; raises SystemExit if the
    texts are too short.
    """
    with Session(model, n_ctx=N_CTX, kv_budget=budget) as session:
        tokens = session.tokenize("\n".join(read_texts("*").values()), add_bos=False)
        if len(tokens) < n_tokens:
            raise SystemExit(f"benchmarks/texts have {len(tokens)} tokens, less than {n_tokens}")
        text = session.detokenize(tokens[:n_tokens])
        read_document(session, text, path)


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-m", "--model", help="GGUF file (default: SmolLM2)")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--kv-budget", default="1.0")
    parser.add_argument("--document", help="a document of this model (default: one is read)")
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    parser.add_argument(
        "--speed", nargs="+", metavar="FILE", help="only compare decoding after these documents"
    )
    options = parser.parse_args()
    model = str(find_model(options.model))
    if options.speed:
        compare_speeds(model, options.speed)
        return
    if options.ask:
        ask(model, options.ask, options.kv_budget)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.document) if options.document else Path(folder) / "book.kv"
        if not path.exists():
            write(model, options.tokens, options.kv_budget, path)
        measure(model, path, options.kv_budget)


if __name__ == "__main__":
    main()
