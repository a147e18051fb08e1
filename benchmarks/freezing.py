"""Run the stress test of Metinov et al.: 500 tokens after each prompt, frozen by their schedule.

python benchmarks/freezing.py [-m MODEL] [--plot FILE]

Stock llama.cpp (flash attention, full f16 cache) and policy rolling-freeze take turns with the same
prompts, sampled as in the paper (temperature 0.7, top-k 40, top-p 0.9; the token that ends a
text is ignored). Active entries are those in attention after each generated token, as a share of a
full cache: the mean over the tokens, and the value at the end. The paper reports 66.9 % fewer, in
5.2 times the time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv import Session
from entropykv.cli.plots import draw
from entropykv.evaluation.stock import StockSession
from entropykv.report.figures import trajectory_figure
from entropykv.session.generate import generate_tokens
from entropykv.session.stats import SessionCounts
from entropykv.settings.sampling import Sampling
from inputs import find_model

PROMPTS = (
    "Write a long story about a lighthouse keeper and the sea.",
    "Explain how a steam engine works, with all its parts.",
    "Tell me everything about the history of bread.",
)
N_CTX = 1024
AS_IN_DOCUMENT = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.0}


@dataclass(frozen=True)
class Run:
    """Hold the figures of one answer: seconds, and the shares of entries that were not active."""

    seconds: float
    fewer: float = 0.0
    fewer_at_end: float = 0.0


class Stock(StockSession):
    """Run stock llama.cpp with the interface that the generation loop needs."""

    recovery = drafting = None

    def __init__(self, path: str, n_threads: int) -> None:
        """Load the model; nothing is read yet."""
        super().__init__(path, n_ctx=N_CTX, n_threads=n_threads)
        self.config = SimpleNamespace(n_ctx=N_CTX)
        self.counts = SessionCounts()
        self.tokens: list[int] = []
        self.logits: npt.NDArray[np.float32] | None = None

    @property
    def text(self) -> Stock:
        """Return the object itself, which also has the methods of a session's text."""
        return self

    def read(
        self, tokens: Sequence[int], all_logits: bool, **_: object
    ) -> Iterator[npt.NDArray[np.float32] | None]:
        """Decode tokens as StockSession does, and store the last logits."""
        for logits in super().read(tokens, all_logits):
            self.logits = None if logits is None else logits[-1].copy()
            yield logits

    def truncate(self, position: int) -> None:  # noqa: ARG002
        """Clear the whole sequence; the generation loop truncates to position 0 only."""
        self.reset()


def timed(session: Any, prompt: Sequence[int], n_tokens: int, seed: int) -> float:
    """Return the seconds that an answer takes after its first token."""
    session.text.truncate(0)
    stream = generate_tokens(session, prompt, n_tokens, Sampling(**AS_IN_DOCUMENT, seed=seed))
    next(stream)
    start = time.perf_counter()
    for _ in stream:
        pass
    return time.perf_counter() - start


def frozen_run(session: Session, prompt: Sequence[int], n_tokens: int, seed: int) -> Run:
    """Write an answer under a freezing schedule; returns its figures. Exits if nothing freezes."""
    session.reset()
    seconds = timed(session, prompt, n_tokens, seed)
    trajectory = session.cache.trajectory
    if trajectory is None:
        raise SystemExit(
            "the policy freezes nothing; use rolling-freeze or rolling-freeze:products"
        )
    positions = np.array(trajectory.positions)
    active = np.array(trajectory.hot) / sum(map(len, session.cache.budgets()))
    new = positions > len(prompt)
    fewer = 1.0 - active[new].sum() / positions[new].sum()
    return Run(seconds, fewer, 1.0 - active[-1] / positions[-1])


def main() -> None:
    """Print a table of the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model")
    parser.add_argument("-n", type=int, default=500, help="tokens of an answer")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policy", default="rolling-freeze,rolling-freeze:products")
    parser.add_argument("--plot", metavar="FILE", help="the last trajectory")
    options = parser.parse_args()
    path = find_model(options.model)
    print("policy           active entries fewer (mean)  at the end  time / stock")
    for policy in options.policy.split(","):
        stock = Stock(path, options.threads)
        with Session(
            path, n_ctx=N_CTX, kv_type="f16", policy=policy, n_threads=options.threads
        ) as session:
            for writer in (stock, session):  # A token that ends a text is ignored.
                writer.model.is_end = lambda _: False  # type: ignore[method-assign]
            runs, ratios = [], []
            for seed in range(options.rounds):
                for text in PROMPTS:
                    prompt = session.tokenize(
                        session.model.chat_prompt(text) or text, add_bos=False
                    )
                    of_stock = timed(stock, prompt, options.n, seed)
                    runs.append(frozen_run(session, prompt, options.n, seed))
                    ratios.append(runs[-1].seconds / of_stock)
            fewer, at_end = (
                statistics.mean(getattr(r, f) for r in runs) for f in ("fewer", "fewer_at_end")
            )
            print(f"{policy:16} {fewer:27.1%} {at_end:11.1%} {statistics.median(ratios):12.2f}x")
            if options.plot and session.cache.trajectory:
                trajectory = session.cache.trajectory.to_json()
                draw(lambda course=trajectory: trajectory_figure({"": course}), options.plot)
        stock.close()


if __name__ == "__main__":
    main()
