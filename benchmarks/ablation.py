"""Measure what a part of the method is worth: run a command without it, or compare speeds with and
without it.

    python benchmarks/ablation.py centred-keys eval -m MODEL.gguf --policy fast ...
    python benchmarks/ablation.py attainable-budgets eval -m MODEL.gguf ...
    python benchmarks/ablation.py centred-keys speed -m MODEL.gguf

`eval` runs `entropykv eval` without the part, with the arguments that follow; `entropykv eval`
itself has the part. `speed` opens a session with the part and one without it. They read a prompt in
q8_0 and write after it in turn, block by block, so that both run under the same load. It prints
tokens per second of CPU time, the ratio of the medians, and the median of the ratios of prompts or
blocks that were processed one after the other.

centred-keys: keys of q8_0 are stored without their biases, in units of their channels
(docs/decisions/0013).
attainable-budgets: no KV head gets more of a budget than it can hold before it is shared again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from entropykv import Session
from entropykv.cli import main as entropykv
from entropykv.evaluation.bench import history_tokens
from entropykv.policy.online import OnlineBudgets
from entropykv.store.headwise_budgets import online_budgets
from inputs import find_model

CENTRED_KEYS, ATTAINABLE_BUDGETS = "centred-keys", "attainable-budgets"
BLOCK = 16
"""The number of tokens that one session writes before the other takes its turn."""


@contextmanager
def without(part: str) -> Iterator[None]:
    """Let sessions that are opened inside the block lack a part of the method."""

    def unlimited(*arguments: Any, **_: Any) -> OnlineBudgets | None:
        # With freezes=True, budgets have no limit of a KV head, because frozen entries can return.
        return online_budgets(*arguments, freezes=True)

    if part == CENTRED_KEYS:
        patched = mock.patch("entropykv.store.headwise.key_centres", return_value=[])
    else:
        patched = mock.patch("entropykv.store.headwise.online_budgets", unlimited)
    with patched:
        yield


class Times:
    """Measure a session: the CPU seconds of all threads for each prompt and block."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.prompts: list[float] = []
        self.blocks: list[float] = []

    def read(self, tokens: Sequence[int]) -> None:
        """Read a prompt from the beginning, and record its CPU seconds."""
        self.session.reset()
        start = time.process_time()
        self.session.decode(tokens)
        self.prompts.append(time.process_time() - start)

    def write(self, tokens: Sequence[int]) -> None:
        """Decode tokens one by one, and record their CPU seconds as a block."""
        start = time.process_time()
        for token in tokens:
            self.session.decode([token])
        self.blocks.append(time.process_time() - start)


def measure_speed(options: argparse.Namespace, budget: float) -> None:
    """Print a line of speeds for the prompt, and one for written tokens; exits without biases."""
    model, n_ctx = find_model(options.model), options.tokens + options.written
    settings = {"n_ctx": n_ctx, "kv_budget": budget, "kv_type": "q8_0", "policy": options.policy}
    settings |= {"n_threads": options.t, "fixed_threads": True, "store": "headwise"}
    with ExitStack() as stack:
        complete = Times(stack.enter_context(Session(model, **settings)))
        with without(CENTRED_KEYS):
            lacking = Times(stack.enter_context(Session(model, **settings)))
        if not complete.session.stats().centred_layers:
            raise SystemExit(f"{model}: stores keys as they are, because they have no biases")
        tokens = history_tokens(complete.session, n_ctx)
        for n in range(options.rounds):
            turns = (complete, lacking) if n % 2 == 0 else (lacking, complete)
            for times in turns:
                times.read(tokens[: options.tokens])
            for first in range(options.tokens, n_ctx, BLOCK):
                for times in turns:
                    times.write(tokens[first : first + BLOCK])
        for phase, n_tokens, ours, theirs in (
            ("prompt", options.tokens, complete.prompts, lacking.prompts),
            ("decode", BLOCK, complete.blocks, lacking.blocks),
        ):
            medians = statistics.median(ours), statistics.median(theirs)
            pairs = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
            print(
                f"budget {budget:g}, {phase}: {n_tokens / medians[0]:.1f} tokens/s with the part, "
                f"{n_tokens / medians[1]:.1f} without, ratio {medians[1] / medians[0]:.3f}, "
                f"median of ratios {pairs:.3f}",
                flush=True,
            )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=(CENTRED_KEYS, ATTAINABLE_BUDGETS))
    parser.add_argument("command", choices=("eval", "speed"))
    options = parser.parse_args(arguments[:2])
    if options.command == "eval":
        with without(options.part):
            return entropykv(arguments[1:])
    if options.part != CENTRED_KEYS:
        parser.error(f"speed is that of {CENTRED_KEYS}; use eval with {options.part}")
    speed = argparse.ArgumentParser(prog="ablation.py PART speed")
    speed.add_argument("-m", "--model", required=True)
    speed.add_argument("--budgets", default="1.0,0.2")
    speed.add_argument("--policy", default="fast")
    speed.add_argument("--tokens", type=int, default=1024, help="of the prompt")
    speed.add_argument("--written", type=int, default=128)
    speed.add_argument("--rounds", type=int, default=3)
    speed.add_argument("-t", type=int, default=1)
    of_speed = speed.parse_args(arguments[2:])
    for budget in of_speed.budgets.split(","):
        measure_speed(of_speed, float(budget))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
