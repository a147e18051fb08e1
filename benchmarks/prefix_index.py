"""Measure the time to find the text that a prompt continues from, by the index and by a scan.

python benchmarks/prefix_index.py [--length 32768] [--texts 1,64,1000]

Every text was read in micro-batches of 512 tokens, nothing of it was evicted, and it shares
nothing, half, or all but the last 100 tokens with the prompt. The scan compares the prompt with
every text and decides what of it can be reused, as the index does with those that it finds. Prints
the milliseconds of one lookup, the best of 5, and of adding and removing one text.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Callable

from entropykv.session.reuse import Demand, HeldText, PrefixIndex, reuse_of
from entropykv.session.sequence import TokenSequence

N_UBATCH = 512
N_VOCAB = 50_000
TIMES = 5
RANDOM = random.Random(1)  # noqa: S311


def numbers(n: int) -> array[int]:
    """Return n random tokens."""
    return array("i", (RANDOM.randrange(N_VOCAB) for _ in range(n)))


def read(tokens: array[int]) -> HeldText:
    """Return a text as if a session had read these tokens."""
    text = TokenSequence(N_UBATCH, tokens)
    for begin in range(0, len(tokens), N_UBATCH):
        text.parts.note(begin, min(N_UBATCH, len(tokens) - begin), None, is_prompt=True)
    return HeldText(text, lambda _: True)


def milliseconds(call: Callable[[], object]) -> float:
    """Return the shortest time of several calls, in milliseconds."""
    times = []
    for _ in range(TIMES):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def measure(length: int, n_texts: int, common: int) -> None:
    """Print the times of lookups among texts that share `common` tokens with a prompt; exits if
    index and scan disagree.
    """
    beginning, demand = numbers(common), Demand()
    end = numbers(length - common - min(64, length - common))
    texts = {
        number: read(beginning + numbers(length - common - len(end)) + end)
        for number in range(n_texts)
    }
    prompt = beginning + numbers(length - common)
    index = PrefixIndex()
    for number, text in texts.items():
        index.add(number, text.tokens)

    def scan() -> int:
        return max(reuse_of(text, prompt, demand).position for text in texts.values())

    def look_up() -> int:
        def saved(number: int, shared: int) -> int:
            return reuse_of(texts[number], prompt, demand, shared).position

        return index.nearest(int, prompt, None, saved)[1]

    def change() -> None:
        index.add(-1, prompt)
        index.remove(-1)

    if scan() != look_up():
        raise SystemExit("the index found another text than the scan")
    times = (milliseconds(scan), milliseconds(look_up), milliseconds(change))
    print(f"{n_texts:6} {common:6}  " + "".join(f"{each:12.3f}" for each in times), flush=True)


def main() -> None:
    """Measure every number of texts with every common beginning."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--texts", default="1,64,1000")
    options = parser.parse_args()
    print(" texts common        scan       index  add, remove")
    for n_texts in map(int, options.texts.split(",")):
        for common in (0, options.length // 2, options.length - 100):
            measure(options.length, n_texts, common)


if __name__ == "__main__":
    main()
