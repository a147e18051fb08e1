"""Compare asking about a document from its file with reading the text again, and with llama.cpp's
saved state.

python benchmarks/documents.py

Prints the time from an empty session to the first token of an answer about prose: from the file of
`entropykv read`, after reading the text, and from the state of stock llama.cpp
(llama_state_seq_save_file), which holds the full cache. Then prints how many facts of documents are
answered correctly just after reading, and from the file in another session. Loading weights is not
part of any time.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np

from entropykv import Session
from entropykv.evaluation.passkeys import Case, Fact, make_cases
from entropykv.session.document import read_document
from inputs import find_model, read_texts

QUESTION = "Who tells this story?"
ANSWER_TOKENS = 12


def first_token(session: Session) -> int:
    """Return the first token of the answer to QUESTION."""
    return next(session.generate(session.question(QUESTION), 1, temperature=0.0))


def compare(model: str, text: str, options: dict[str, float], folder: Path) -> None:
    """Print the times to the first token, and the bytes on disk."""
    path = folder / "book.kv"
    rows = []
    with Session(model, **options) as session:
        start = time.perf_counter()
        read_document(session, text, path)
        written = time.perf_counter() - start
        n_tokens = session.position
        session.reset()
        start = time.perf_counter()
        tokens = session.tokenize(session.model.chat_prompt(f"{text}\n{QUESTION}"), add_bos=False)
        next(session.generate(tokens, 1, temperature=0.0))
        rows.append(("the text is read", time.perf_counter() - start, len(text.encode())))
    with Session(model, **options) as session:
        document = session.tokenize(session.model.chat_prompt(text), add_bos=False)[:n_tokens]
        question = session.question(QUESTION)
        # Before time is taken, the weights must be in memory, as for the other ways.
        session.decode(question)
        session.reset()
        start = time.perf_counter()
        session.files.open_document(path)
        first_token(session)
        rows.append(("the document's file", time.perf_counter() - start, path.stat().st_size))
    rows.append(stock(model, document, question, int(options["n_threads"]), folder))
    print(f"{n_tokens} tokens; reading them and writing the file took {written:.1f} s\n")
    print("| from | first token s | bytes on disk MiB |\n|---|---|---|")
    for name, seconds, size in rows:
        print(f"| {name} | {seconds:.2f} | {size / 2**20:.2f} |", flush=True)


def stock(
    model: str, document: Sequence[int], question: Sequence[int], n_threads: int, folder: Path
) -> tuple[str, float, int]:
    """Return the row of stock llama.cpp, which restores its state and reads the question: name,
    seconds, bytes on disk. Raises RuntimeError if the state is not restored.
    """
    name = os.fsencode(folder / "state.bin")

    def llama() -> llama_cpp.Llama:
        n_ctx = len(document) + len(question) + 8
        return llama_cpp.Llama(
            model,
            n_ctx=n_ctx,
            n_threads=n_threads,
            n_threads_batch=n_threads,
            flash_attn=True,
            verbose=False,
        )

    array = (llama_cpp.llama_token * len(document))(*document)
    first = llama()
    first.eval(document)
    llama_cpp.llama_state_seq_save_file(first.ctx, name, 0, array, len(document))
    first.close()
    second = llama()
    second.eval(question)
    n_read = ctypes.c_size_t(0)
    start = time.perf_counter()
    size = llama_cpp.llama_state_seq_load_file(
        second.ctx, name, 0, array, len(document), ctypes.byref(n_read)
    )
    second.n_tokens = len(document)
    second.eval(question)
    int(np.argmax(llama_cpp.llama_get_logits_ith(second.ctx, -1)[: second.n_vocab()]))
    seconds = time.perf_counter() - start
    second.close()
    if not size or n_read.value != len(document):
        raise RuntimeError("llama.cpp did not restore its state")
    return "llama.cpp's state (f16, full)", seconds, os.path.getsize(name)


def answer(session: Session, fact: Fact) -> str:
    """Return how the session continues the question about a fact."""
    tokens = session.tokenize(fact.prompt, add_bos=False)
    return session.detokenize(list(session.generate(tokens, ANSWER_TOKENS, temperature=0.0)))


def facts(model: str, cases: Sequence[Case], options: dict[str, float], folder: Path) -> None:
    """Print how many facts are answered correctly just after a document was read, and after it was
    opened from its file, and whether both answers are equal.
    """
    just_read: list[str] = []
    from_file: list[str] = []
    asked = [fact for case in cases for fact in case.facts]
    for number, case in enumerate(cases):
        path = folder / f"{number}.kv"
        with Session(model, **options) as session:
            read_document(session, case.text, path)
            state = session.files.save_state()
            for fact in case.facts:
                just_read.append(answer(session, fact))
                session.files.load_state(state)
        with Session(model, **options) as session:
            for fact in case.facts:
                session.files.open_document(path)
                from_file.append(answer(session, fact))
    for name, answers in (("right after reading", just_read), ("from the file", from_file)):
        right = sum(map(Fact.is_answered_by, asked, answers))
        print(f"{name}: {right} of {len(asked)} facts")
    print(f"equal answers: {'all' if just_read == from_file else 'NO'}")


def main() -> None:
    """Compare times to the first token, and count answered facts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model")
    parser.add_argument("-n", "--tokens", type=int, default=6000)
    parser.add_argument("--fact-tokens", type=int, default=1500)
    parser.add_argument("-b", "--budget", type=float, default=0.2)
    parser.add_argument("-t", "--threads", type=int, default=2)
    arguments = parser.parse_args()
    model = find_model(arguments.model)
    texts = list(read_texts("*.txt").values())
    options = {"kv_budget": arguments.budget, "n_threads": arguments.threads}
    with tempfile.TemporaryDirectory() as folder, Session(model, n_ctx=512) as counting:
        start = counting.tokenize("\n".join(texts), add_bos=False)[: arguments.tokens]
        text = counting.detokenize(start)
        compare(model, text, {**options, "n_ctx": arguments.tokens + 256}, Path(folder))
        cases = make_cases(
            texts,
            lambda part: len(counting.tokenize(part, add_bos=False)),
            n_cases=4,
            n_tokens=arguments.fact_tokens,
            facts_per_text=10,
            seed=0,
        )
        facts(model, cases, {**options, "n_ctx": arguments.fact_tokens + 256}, Path(folder))


if __name__ == "__main__":
    main()
