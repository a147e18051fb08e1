"""Measure what drafts are worth: tokens per second with and without, in turns, and with whom else.

    python benchmarks/drafts.py [-m MODEL] [--tokens 200] [--length 2048] [--kv-budget 0.2]

Copying tasks give the model a document and the first words of something that repeats it: the
document itself, its sentences in another order, a table as JSON. Prose lets it go on writing. Every
answer is written without drafts and with them (`--spec-type ngram`), one after the other in every
round; the medians and their ratio are printed, with tokens per step. The answers must be the same.
--stock adds llama_cpp.Llama with a full cache, and with its own prompt lookup. --sequences N also
lets N sessions of a pool write at the same time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from entropykv import Pool, Session
from entropykv.model import shipped

TEXTS = Path(__file__).parent / "texts"


def tasks(length: int) -> Iterator[tuple[str, str]]:
    """Yield names and prompts; about `length` tokens each, of four characters."""
    text = (TEXTS / "heldout_prose_03.txt").read_text(encoding="utf-8")[: 3 * length]
    yield "copy", f"{text}\n\nThe same text once more:\n\n{text[:200]}"
    sentences = [part.strip() for part in text.split(". ") if part.strip()]
    turned = ". ".join(reversed(sentences))
    yield "quote", f"{text}\n\nIts sentences, the last one first:\n\n{turned[:400]}"
    rows = [{"id": i, "name": f"item {i}", "price": i * 7 % 100} for i in range(length // 24)]
    table = "\n".join(f"{row['id']};{row['name']};{row['price']}" for row in rows)
    yield "table", f"id;name;price\n{table}\n\nAs JSON:\n\n" + json.dumps(rows[:3])[:-1]
    yield "prose", text


def write(session: Session, tokens: list[int], n: int) -> tuple[list[int], float]:
    """Read a prompt, then write n tokens; returns them, and the tokens per second of writing."""
    session.reset()
    session.decode(tokens)
    start = time.perf_counter()
    written = list(session.generate([], n))
    return written, len(written) / (time.perf_counter() - start)


def compare(options: argparse.Namespace, name: str, prompt: str) -> None:
    """Write one task with and without drafts, and print the medians."""
    common = {"n_ctx": options.length + options.tokens + 1024, "kv_budget": options.kv_budget}
    speeds: dict[str, list[float]] = {"none": [], "ngram": []}
    with (
        Session(options.model, spec_type="none", **common) as plain,
        Session(options.model, spec_type="ngram", **common) as drafting,
    ):
        tokens = plain.tokenize(prompt)[-options.length :]
        for _ in range(options.rounds):
            expected, speed = write(plain, tokens, options.tokens)
            speeds["none"].append(speed)
            found, speed = write(drafting, tokens, options.tokens)
            speeds["ngram"].append(speed)
            if found != expected:
                print(f"{name}: the texts differ")
        counts = drafting.drafting.counts if drafting.drafting else None
    none, ngram = (statistics.median(speeds[kind]) for kind in ("none", "ngram"))
    steps = counts.steps if counts else 0
    per_step = (steps + counts.accepted) / steps if counts and steps else 1.0
    print(
        f"{name:8} {none:7.1f} {ngram:7.1f} tokens/s, {ngram / none:.2f} times; {per_step:.2f} "
        f"tokens a step, {counts.accepted if counts else 0} of {counts.drafted if counts else 0}"
    )


def stock(options: argparse.Namespace, name: str, prompt: str) -> None:
    """Write one task with llama_cpp.Llama and a full cache, without and with prompt lookup."""
    medians = []
    for draft_model in (None, LlamaPromptLookupDecoding(num_pred_tokens=10)):
        llm = llama_cpp.Llama(
            str(options.model),
            n_ctx=options.length + options.tokens + 1024,
            draft_model=draft_model,
            logits_all=draft_model is not None,
            flash_attn=True,
            verbose=False,
        )
        tokens = llm.tokenize(prompt.encode())[-options.length :]
        speeds = []
        for _ in range(options.rounds):
            llm.reset()
            start, n = 0.0, 0
            for _ in llm.generate(tokens, temp=0.0):
                start = start or time.perf_counter()
                n += 1
                if n == options.tokens:
                    break
            speeds.append((n - 1) / (time.perf_counter() - start))
        medians.append(statistics.median(speeds))
        llm.close()
    print(
        f"{name:8} {medians[0]:7.1f} {medians[1]:7.1f} tokens/s of llama_cpp.Llama with a full "
        f"cache, without and with its prompt lookup"
    )


def together(options: argparse.Namespace, name: str, prompt: str) -> None:
    """Let several sessions of a pool write one task at the same time."""
    speeds = []
    for spec_type in ("none", "ngram"):
        n_ctx = options.length + options.tokens + 1024
        with Pool(
            options.model,
            n_ctx=n_ctx,
            kv_budget=options.kv_budget,
            n_sequences=options.sequences,
            spec_type=spec_type,
        ) as pool:
            sessions = [pool.session() for _ in range(options.sequences)]
            tokens = sessions[0].tokenize(prompt)[-options.length :]
            for session in sessions:
                session.decode(tokens)
            threads = [
                threading.Thread(target=list, args=(session.generate([], options.tokens),))
                for session in sessions
            ]
            start = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            written = sum(session.position - len(tokens) for session in sessions)
            speeds.append(written / (time.perf_counter() - start))
    print(
        f"{name:8} {speeds[0]:7.1f} {speeds[1]:7.1f} tokens/s of {options.sequences} sessions "
        f"together, {speeds[1] / speeds[0]:.2f} times"
    )


def main() -> None:
    """Run all tasks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, default=None)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--kv-budget", default="0.2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--sequences", type=int, default=0)
    options = parser.parse_args()
    options.model = options.model or shipped.smollm2().path
    for name, prompt in tasks(options.length):
        compare(options, name, prompt)
        if options.stock:
            stock(options, name, prompt)
        if options.sequences:
            together(options, name, prompt)


if __name__ == "__main__":
    main()
