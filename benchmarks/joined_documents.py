"""Compare two documents that were read one after the other with two that were read alone and
joined.

python benchmarks/joined_documents.py

Exact: the second document is read after the first. Joined: each is read alone, after the beginning
of the user's turn; then the keys of the second one are rotated to their positions after the first
one, and its first N tokens are read again there. Both are asked for facts of both documents. Stock
llama.cpp is used with a full cache in f16, whose cells can be copied and shifted between sequences,
so that nothing but the joining differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import llama_cpp
import numpy as np

from entropykv import Session
from entropykv.evaluation.passkeys import Case, Fact, make_cases
from inputs import find_model, read_texts

ANSWER_TOKENS = 12
MARK = "entropykv-document"
_EXACT, _SECOND, _JOINED, _ASKED = range(4)
"""The sequences: both documents in order, the second one alone, both joined, and a question."""


class Cells:
    """Hold the cells of a stock llama.cpp context, which sequences can share.

    The methods raise RuntimeError if llama.cpp cannot read or remove tokens.
    """

    def __init__(self, model: str, n_ctx: int, n_threads: int) -> None:
        """Load the model, and make a context of n_ctx cells for four sequences."""
        self.llama = llama_cpp.Llama(model, n_ctx=8, verbose=False)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = n_ctx
        parameters.n_batch = parameters.n_ubatch = 512
        parameters.n_seq_max = 4
        parameters.kv_unified = True
        parameters.n_threads = parameters.n_threads_batch = n_threads
        self.context = llama_cpp.llama_init_from_model(self.llama.model, parameters)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)

    def read(self, sequence: int, tokens: Sequence[int], position: int) -> int:
        """Read tokens from a position on; return the most likely next token."""
        for begin in range(0, len(tokens), 512):
            part = tokens[begin : begin + 512]
            for i, token in enumerate(part):
                self._batch.token[i] = token
                self._batch.pos[i] = position + begin + i
                self._batch.n_seq_id[i] = 1
                self._batch.seq_id[i][0] = sequence
                self._batch.logits[i] = i == len(part) - 1
            self._batch.n_tokens = len(part)
            if llama_cpp.llama_decode(self.context, self._batch) != 0:
                raise RuntimeError("llama.cpp cannot read the tokens")
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self.llama.n_vocab(),))))

    def copy(self, source: int, target: int, begin: int, end: int) -> None:
        """Let a sequence share the cells of another one from position `begin` to `end`."""
        llama_cpp.llama_memory_seq_cp(self.memory, source, target, begin, end)

    def shift(self, sequence: int, by: int) -> None:
        """Rotate the keys of a sequence to positions that are `by` later; no other sequence may
        share its cells.
        """
        llama_cpp.llama_memory_seq_add(self.memory, sequence, -1, -1, by)

    def remove(self, sequence: int, begin: int = -1, end: int = -1) -> None:
        """Remove positions `begin` to `end` of a sequence; -1: from the start, or to the end."""
        if not llama_cpp.llama_memory_seq_rm(self.memory, sequence, begin, end):
            raise RuntimeError("llama.cpp cannot remove the positions")

    def ask(self, sequence: int, fact: Fact, position: int) -> str:
        """Return how the model continues the question about a fact."""
        self.copy(sequence, _ASKED, -1, -1)
        tokens = self.llama.tokenize(fact.prompt.encode(), add_bos=False, special=True)
        written: list[int] = []
        for _ in range(ANSWER_TOKENS):
            token = self.read(_ASKED, tokens, position)
            position += len(tokens)
            written.append(token)
            tokens = [token]
        self.remove(_ASKED)
        return self.llama.detokenize(written).decode(errors="replace")


def compare(
    cells: Cells, frame: Sequence[int], first: Case, second: Case, again: Sequence[int]
) -> list[tuple[str, list[bool], float]]:
    """Return a row for exact reading, and one for each number of tokens that are read again.

    A row has its name, which facts are answered, and the seconds to make the second document ready
    after the first.
    """
    facts = [*first.facts, *second.facts]
    one, other = (
        cells.llama.tokenize(f"{case.text}\n".encode(), add_bos=False, special=True)
        for case in (first, second)
    )
    begin = len(frame) + len(one)
    end = begin + len(other)
    results = []

    def note(name: str, sequence: int, seconds: float) -> None:
        answers = [fact.is_answered_by(cells.ask(sequence, fact, end)) for fact in facts]
        results.append((name, answers, seconds))

    cells.read(_EXACT, [*frame, *one], 0)
    start = time.perf_counter()
    cells.read(_EXACT, other, begin)
    note("exact", _EXACT, time.perf_counter() - start)
    cells.remove(_EXACT, begin, -1)
    cells.read(_SECOND, [*frame, *other], 0)
    cells.remove(_SECOND, 0, len(frame))
    cells.shift(_SECOND, len(one))
    for n_again in again:
        start = time.perf_counter()
        cells.copy(_EXACT, _JOINED, -1, -1)
        if n_again:
            cells.read(_JOINED, other[:n_again], begin)
        cells.copy(_SECOND, _JOINED, begin + n_again, -1)
        note(f"joined, {n_again} read again", _JOINED, time.perf_counter() - start)
        cells.remove(_JOINED)
    cells.remove(_EXACT)
    cells.remove(_SECOND)
    return results


def main() -> None:
    """Compare several pairs of documents, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model")
    parser.add_argument("-n", "--tokens", type=int, default=750, help="tokens of each document")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--facts", type=int, default=5, help="facts of each document")
    parser.add_argument("--again", type=int, nargs="+", default=[0, 16, 64, 256])
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model = find_model(arguments.model)
    texts = list(read_texts("*.txt").values())
    with Session(model, n_ctx=512) as counting:
        prompt = counting.model.chat_prompt(MARK) or MARK
        add_bos = None if prompt == MARK else False
        frame = counting.tokenize(prompt.partition(MARK)[0], add_bos=add_bos)
        cases = make_cases(
            texts,
            lambda part: len(counting.tokenize(part, add_bos=False)),
            n_cases=2 * arguments.pairs,
            n_tokens=arguments.tokens,
            facts_per_text=arguments.facts,
            seed=arguments.seed,
        )
    cells = Cells(str(model), 4 * arguments.tokens + 1024, arguments.threads)
    names: dict[str, list[list[bool]]] = {}
    seconds: dict[str, float] = {}
    for first, second in zip(cases[::2], cases[1::2], strict=True):
        for name, answers, took in compare(cells, frame, first, second, arguments.again):
            names.setdefault(name, []).append(answers)
            seconds[name] = seconds.get(name, 0.0) + took
        sums = {name: sum(map(sum, rows)) for name, rows in names.items()}
        print(f"facts so far: {sums}", file=sys.stderr, flush=True)
    n = arguments.facts
    print("| second document | facts of the first | of the second | together | seconds a pair |")
    print("|---|---|---|---|---|")
    for name, rows in names.items():
        one, other = sum(sum(row[:n]) for row in rows), sum(sum(row[n:]) for row in rows)
        total = n * len(rows)
        print(
            f"| {name} | {one} of {total} | {other} of {total} | {one + other} of {2 * total} | "
            f"{seconds[name] / len(rows):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
