"""A long document and a question about it: the full cache against a budget of 0.2, side by side."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from entropykv import Session, SessionStats, models

HERE = Path(__file__).parent
N_CTX = 6144
MAX_TOKENS = 48


@dataclass
class Outcome:
    """What one run answered, and what it cost."""

    name: str
    answer: str
    stats: SessionStats
    seconds: float


def ask(name: str, kv_budget: float, kv_type: str) -> Outcome:
    """Read the document inside a budget and answer the question."""
    document = (HERE / "lighthouse.txt").read_text(encoding="utf-8")
    question = (HERE / "lighthouse.question.txt").read_text(encoding="utf-8").strip()
    print(f"\n{name}: reading the document ...", flush=True)
    start = time.perf_counter()
    with Session(
        models.smollm2().path, n_ctx=N_CTX, kv_budget=kv_budget, kv_type=kv_type
    ) as session:
        prompt = session.chat_prompt(f"{document}\n\n{question}") or document
        tokens = session.tokenize(prompt, add_bos=False)
        answer = session.detokenize(list(session.generate(tokens, max_tokens=MAX_TOKENS)))
        return Outcome(name, answer.strip(), session.stats(), time.perf_counter() - start)


def table(outcomes: list[Outcome]) -> str:
    """Both runs side by side."""
    rows = [
        ("", *(o.name for o in outcomes)),
        ("KV cache", *(f"{o.stats.kv_bytes_peak / 2**20:.1f} MiB" for o in outcomes)),
        ("entries kept", *(f"{o.stats.entries_kept / o.stats.entries_full:.0%}" for o in outcomes)),
        ("prompt", *(f"{o.stats.prompt_speed:.0f} tokens/s" for o in outcomes)),
        ("answer", *(f"{o.stats.decode_speed:.0f} tokens/s" for o in outcomes)),
        ("whole run", *(f"{o.seconds:.1f} s" for o in outcomes)),
    ]
    return "\n".join(f"{row[0]:<14}" + "".join(f"{cell:>18}" for cell in row[1:]) for row in rows)


def main() -> None:
    """Run both and print what was saved."""
    question = (HERE / "lighthouse.question.txt").read_text(encoding="utf-8").strip()
    outcomes = [ask("full cache", 1.0, "f16"), ask("budget 0.2", 0.2, "q8_0")]
    print(f"\nQuestion: {question}")
    for outcome in outcomes:
        print(f"{outcome.name:>12}: {outcome.answer}")
    print("\n" + table(outcomes))
    full, budget = outcomes
    ratio = full.stats.kv_bytes_peak / budget.stats.kv_bytes_peak
    print(f"\nThe budget keeps the KV cache {ratio:.1f} times smaller.")


if __name__ == "__main__":
    main()
