"""Measure entropykv against stock llama.cpp with its full f16 cache."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.peers.answers import longest, score
from benchmarks.peers.protocol import AGREEMENT, FACTS, GREEDY, RULER, SPEED, Method, Passage
from entropykv import Session
from entropykv.evaluation.metrics import compare
from entropykv.evaluation.reading import grow
from entropykv.evaluation.stock import StockSession
from entropykv.llamacpp.distributions import Logits
from entropykv.settings.options import Budget

EQUAL_BYTES = ", equal bytes"
"""The ending of the names of methods that keep as many entries as fit into the same bytes.

These bytes are the keep ratio's share of the full cache in f16.
"""

STOCK = "stock llama.cpp, full cache"
"""The name of the method with which the speeds and scores of all other methods are compared."""


@dataclass(frozen=True)
class Run:
    """Hold the settings that all sessions of a run have in common."""

    model: str
    n_ctx: int
    n_threads: int
    entropy_config: str | None

    def session(self, policy: str, kv_type: str) -> Session:
        """Open a session with the headwise store that keeps everything until it is resized."""
        return Session(
            self.model,
            n_ctx=self.n_ctx,
            policy=policy,
            kv_type=kv_type,
            store="headwise",
            entropy_config=self.entropy_config,
            n_threads=self.n_threads,
        )


class StockReference:
    """Run stock llama.cpp, and remember the logits and the greedy tokens of the last passage."""

    def __init__(self, run: Run) -> None:
        """Load the model."""
        self.session = StockSession(run.model, n_ctx=run.n_ctx, n_threads=run.n_threads)
        self._logits: tuple[Passage, Logits] | None = None
        self._greedy: tuple[Passage, list[int]] | None = None

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, without BOS."""
        return self.session.tokenize(text)

    def logits(self, passage: Passage) -> Logits:
        """Return the logits of the continuation, (tokens, n_vocab)."""
        if self._logits is None or self._logits[0] != passage:
            self.session.reset()
            self.session.decode(passage.prompt)
            self._logits = passage, self.session.decode(passage.continuation, all_logits=True)
        return self._logits[1]

    def score(self, passage: Passage) -> dict[str, float]:
        """Read the prompt; return the mean score of the answers, and 1.0 as `kept` and `bytes`."""
        self.session.reset()
        self.session.decode(passage.prompt)
        return {"score": score(self.session, passage.questions), "kept": 1.0, "bytes": 1.0}

    def speed(self, passage: Passage, n_tokens: int) -> dict[str, float]:
        """Return the speeds of reading the prompt and of writing, as speed() does."""
        self.session.reset()
        return speed(self.session, passage, n_tokens)

    def greedy(self, passage: Passage, n_tokens: int) -> list[int]:
        """Return the first `n_tokens` tokens that the model writes greedily after the prompt."""
        if self._greedy is None or self._greedy[0] != passage:
            self.session.reset()
            logits = self.session.decode(passage.prompt)
            tokens = []
            while len(tokens) < n_tokens:
                tokens.append(int(logits[-1].argmax()))
                logits = self.session.decode(tokens[-1:])
            self._greedy = passage, tokens
        return self._greedy[1]


def speed(session: Session | StockSession, passage: Passage, n_tokens: int) -> dict[str, float]:
    """Return the tokens per second of reading the prompt, and of writing greedily after it."""
    start = time.perf_counter()
    logits = session.decode(passage.prompt)
    read = time.perf_counter()
    for _ in range(n_tokens):
        logits = session.decode([int(logits[-1].argmax())])
    written = time.perf_counter()
    return {
        "prompt_speed": len(passage.prompt) / (read - start),
        "decode_speed": n_tokens / (written - read),
    }


class Ours:
    """Run sessions that read the prompt inside their budget, in micro-batches of 512."""

    name = "entropykv"

    def __init__(
        self,
        run: Run,
        reference: StockReference,
        policies: Sequence[str],
        kv_types: Sequence[str],
        keeps: Sequence[float],
        n_greedy: int,
    ) -> None:
        """List all policies, types and keep ratios as methods; types smaller than f16 also at equal
        bytes.

        Scores of answers take long, and are measured only at equal bytes.
        """
        self._run, self._reference, self._n_greedy = run, reference, n_greedy
        plain = [(policy, kv_type) for policy in policies for kv_type in kv_types]
        smaller = [(p + EQUAL_BYTES, kv_type) for p, kv_type in plain if kv_type != "f16"]
        of_f16 = [(policy, kv_type) for policy, kv_type in plain if kv_type == "f16"]
        continuing = (AGREEMENT, *((GREEDY, SPEED) if n_greedy else ()))
        names = dict.fromkeys(continuing, plain + smaller)
        names |= dict.fromkeys((FACTS, RULER), of_f16 + smaller)
        self.methods = [
            *(
                Method(measure, self.name, STOCK, "f16", 1.0)
                for measure in names
                if measure not in (AGREEMENT, GREEDY)
            ),
            *(
                Method(measure, self.name, name, kv_type, keep)
                for measure, chosen in names.items()
                for name, kv_type in chosen
                for keep in keeps
            ),
        ]

    def measure(
        self, passage: Passage, wanted: Sequence[Method]
    ) -> Iterator[tuple[Method, dict[str, float]]]:
        """Yield the figures of the wanted methods for one text."""
        for method in wanted:
            yield method, self._figures(passage, method)

    def _figures(self, passage: Passage, method: Method) -> dict[str, float]:
        if method.name == STOCK:
            if method.measure == SPEED:
                return self._reference.speed(passage, self._n_greedy)
            return self._reference.score(passage)
        policy = method.name.removesuffix(EQUAL_BYTES)
        entries = int(method.keep * len(passage.prompt))
        with self._run.session(policy, method.kv_type) as session:
            if policy != method.name:
                full = bytes_per_token(session, passage.prompt[0]) * len(passage.prompt)
                entries = entries_in(session, int(method.keep * full))
            session.cache.resize(entries)
            if method.measure == SPEED:
                return speed(session, passage, self._n_greedy)
            if method.measure == GREEDY:
                return self._greedy(session, passage)
            session.decode(passage.prompt)
            kept = kept_shares(session)
            if method.measure in (FACTS, RULER):
                grow(session, longest(passage.questions))
                return {"score": score(session, passage.questions)} | kept
            session.cache.resize(entries + len(passage.continuation))
            logits = session.decode(passage.continuation, all_logits=True)
        agreement = compare(self._reference.logits(passage), logits, passage.continuation)
        return asdict(agreement) | kept

    def _greedy(self, session: Session, passage: Passage) -> dict[str, float]:
        expected = self._reference.greedy(passage, self._n_greedy)
        logits, tokens = session.decode(passage.prompt), list[int]()
        kept = kept_shares(session)
        while len(tokens) < self._n_greedy:
            tokens.append(int(logits[-1].argmax()))
            logits = session.decode(tokens[-1:])
        return equality(expected, tokens) | kept


def kept_shares(session: Session) -> dict[str, float]:
    """Return the share of entries that are kept, and the pool's share of the f16 bytes."""
    stats = session.stats()
    return {
        "kept": stats.entries_kept / stats.entries_full,
        "bytes": stats.kv_bytes_budget / stats.kv_bytes_full,
    }


def bytes_per_token(session: Session, token: int) -> int:
    """Return the bytes of a token's K and V in f16, for all KV heads; resets the session."""
    session.decode([token])
    n_bytes = session.stats().kv_bytes_full
    session.reset()
    return n_bytes


def entries_in(session: Session, n_bytes: int) -> int:
    """Return the mean number of entries per KV head for which n_bytes bytes are enough; resizes the
    session.
    """
    session.cache.resize(Budget("bytes", n_bytes))
    return int(np.mean([entries for layer in session.cache.budgets() for entries in layer]))


def equality(expected: Sequence[int], tokens: Sequence[int]) -> dict[str, float]:
    """Return the share of tokens that are as expected, and the index of the first one that is not
    (their number if all are).
    """
    equal = [a == b for a, b in zip(expected, tokens, strict=True)]
    return {
        "equal": sum(equal) / len(equal),
        "first_difference": float(equal.index(False) if False in equal else len(equal)),
    }
