"""Ask for ten facts of one document after reading it, to see what a small KV cache still knows.

The facts are planted into a long text, and nothing tells a cache during reading what will be asked.
Stock llama.cpp with its full cache is the reference: it shows which facts the model can know at
all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from entropykv import Session
from entropykv.evaluation.passkeys import RecallItem, RecallPart, recall_items
from entropykv.evaluation.reading import read, write
from entropykv.evaluation.stock import StockSession
from entropykv.evaluation.texts import Text
from entropykv.llamacpp.model import Model
from entropykv.model import shipped
from entropykv.model.geometry import read_geometry

DOCUMENT = Path(__file__).parent / "lighthouse.txt"
PASSAGE_TOKENS = 2048
FACTS = 10
SEED = 0
WRITTEN_TOKENS = 48
"""The number of tokens that are written after the document, to measure the speed of decoding."""

STOCK = "stock llama.cpp, full cache"
CACHES: dict[str, dict[str, Any]] = {
    STOCK: {},
    "--kv-budget 0.2": {"kv_budget": 0.2},
    "--kv-budget 0.1 --freeze ram": {"kv_budget": 0.1, "freeze": "ram"},
    "--kv-budget 0.2 --policy recency": {"kv_budget": 0.2, "policy": "recency"},
}
"""For each cache, by its options on the command line, the arguments of Session."""


@dataclass(frozen=True)
class Outcome:
    """Hold which facts one cache still knew, and its speed and bytes."""

    right: list[bool]
    bytes_in_attention: int
    bytes_frozen: int
    prompt_speed: float
    decode_speed: float


def plant(path: Path) -> RecallItem:
    """Plant the facts into the document, and return it with the questions."""
    model = Model(path, n_gpu_layers=0, verbose=False)
    text = Text(DOCUMENT.name, DOCUMENT.read_text(encoding="utf-8"))
    items = recall_items(
        [text], model, n_cases=1, n_tokens=PASSAGE_TOKENS, facts_per_text=FACTS, seed=SEED
    )
    model.close()
    return items[0]


def examine(
    reader: Session | StockSession, item: RecallItem, tick: Callable[[int], object]
) -> tuple[list[bool], float, float]:
    """Read the document and ask for every fact; return which facts were known, and tokens per
    second of reading and writing.
    """
    logits, seconds = read(reader, item.tokens, tick)
    state = reader.files.save_state()
    written = write(reader, logits, WRITTEN_TOKENS, tick)
    reader.files.load_state(state)
    right = RecallPart([item]).answer(reader, logits, item, tick)["right"]
    return right, len(item.tokens) / seconds, written.n_decoded / written.seconds


def outcome_of(cache: str, path: Path, item: RecallItem, tick: Callable[[int], object]) -> Outcome:
    """Return what one cache knew and cost; all have the same context, model, text and questions."""
    n_ctx = max(RecallPart([item]).n_ctx, len(item.tokens) + WRITTEN_TOKENS)
    if cache == STOCK:
        stock = StockSession(path, n_ctx=n_ctx, n_threads=0)
        figures = examine(stock, item, tick)
        n_bytes = 2 * read_geometry(path).cached_values * len(item.tokens)
        stock.close()
        return Outcome(figures[0], n_bytes, 0, *figures[1:])
    with Session(path, n_ctx=n_ctx, **CACHES[cache]) as session:
        figures = examine(session, item, tick)
        stats = session.stats()
    cold = stats.frozen_bytes_peak + stats.frozen_sketch_bytes
    return Outcome(figures[0], stats.kv_bytes_peak, cold, *figures[1:])


def facts_table(item: RecallItem, outcomes: dict[str, Outcome]) -> str:
    """Return a table of which facts each cache knew."""
    lines = [f"{'':<54}" + "".join(f"{f'({i})':>5}" for i in range(1, len(outcomes) + 1))]
    for number, (fact, depth) in enumerate(zip(item.case.facts, item.case.depths, strict=True)):
        known = ("yes" if outcome.right[number] else "-" for outcome in outcomes.values())
        lines.append(f"{depth:>4.0%}  {fact.statement:<48}" + "".join(f"{k:>5}" for k in known))
    return "\n".join(lines)


def costs_table(outcomes: dict[str, Outcome]) -> str:
    """Return a table of how many facts each cache knew, its bytes and its speeds."""
    head = ("", "right", "in attention", "frozen", "prompt", "decode")
    rows = [
        (
            f"({number}) {cache}",
            f"{sum(o.right)} of {len(o.right)}",
            f"{o.bytes_in_attention / 2**20:.1f} MiB",
            f"{o.bytes_frozen / 2**20:.1f} MiB" if o.bytes_frozen else "",
            f"{o.prompt_speed:.0f} tok/s",
            f"{o.decode_speed:.0f} tok/s",
        )
        for number, (cache, o) in enumerate(outcomes.items(), 1)
    ]
    return "\n".join(
        f"{row[0]:<38}{row[1]:>9}" + "".join(f"{cell:>14}" for cell in row[2:])
        for row in (head, *rows)
    )


def main() -> None:
    """Run every cache in turn, and print which facts it knew."""
    start = time.perf_counter()
    path = shipped.smollm2().path
    item = plant(path)
    steps = item.n_steps + WRITTEN_TOKENS
    outcomes = {}
    for cache in CACHES:
        with tqdm(total=steps, desc=f"{cache:<33}", unit="tok", leave=True) as bar:
            outcomes[cache] = outcome_of(cache, path, item, bar.update)
    print(f"\n{FACTS} facts in {len(item.tokens)} tokens of {DOCUMENT.name}, and how far in:\n")
    print(facts_table(item, outcomes), costs_table(outcomes), sep="\n\n")
    print(f"\nSmolLM2-135M-Instruct, {time.perf_counter() - start:.0f} s in all.")


if __name__ == "__main__":
    main()
