"""Run the evaluation: stock llama.cpp first, then one combination after the other.

One model is in memory at a time, and one text is read at a time; `continuation` stores what stock
predicts on disk. Figures that the log already contains are not measured again.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing

from entropykv.evaluation.combination import STOCK, Combination, EngineSettings
from entropykv.evaluation.reading import EvalPart, Item, Tick
from entropykv.evaluation.results import Record, ResultLog
from entropykv.evaluation.rows import EvalRow, summarize
from entropykv.policy.policy import AUTO


class Evaluation:
    """Measure the parts of an evaluation for every combination of policy, budget and other
    settings, and keep the figures in a log.
    """

    def __init__(
        self,
        engine: EngineSettings,
        combinations: Sequence[Combination],
        parts: Sequence[EvalPart],
        log: ResultLog,
    ) -> None:
        """Use parts and a log that the caller has made; nothing is measured yet."""
        self._engine = engine
        self._combinations = combinations
        self._parts = parts
        self._log = log

    def check(self) -> list[str]:
        """Open a session of every combination, with the budget for the shortest text.

        Returns notes for the user. Raises the errors of Session, before anything that takes long.
        """
        notes = []
        part = min(self._parts, key=_shortest)
        for combination in self._combinations:
            with combination.session(self._engine, part.n_ctx, _shortest(part)) as session:
                if session.config.fallback:
                    notes.append(
                        f"using the {session.cache.store} store instead:  {session.config.fallback}"
                    )
                notes += [
                    note for note in (session.cache.on_host, session.config.other_file()) if note
                ]
        return list(dict.fromkeys(notes))

    @property
    def n_steps(self) -> int:
        """Return how many tokens are still to be read or written."""
        keys = [combination.key for combination in self._combinations]
        return sum(
            item.n_steps
            for part in self._parts
            for missing in (self._needing_stock(part), *(self._missing(key, part) for key in keys))
            for item in missing
        )

    def run(self, tick: Tick) -> Iterator[EvalRow]:
        """Measure everything; yields a row when its figures are complete, that of stock first."""
        for part in self._parts:
            self._refer(part, tick)
        yield self._row(None)
        for combination in self._combinations:
            for part in self._parts:
                self._measure(combination, part, tick)
            yield self._row(combination)

    def rows(self) -> list[EvalRow]:
        """Return the rows of stock and of each combination, from the figures that are
        known so far.
        """
        return [self._row(combination) for combination in (None, *self._combinations)]

    def records(self) -> list[Record]:
        """Return all records that are known so far, in the order of the rows."""
        contestants = (None, *self._combinations)
        return [record for each in contestants for record in self._records(each)]

    def _row(self, combination: Combination | None) -> EvalRow:
        records = self._records(combination)
        if combination is None:
            row = summarize(STOCK, "f16", "full", records)
            n_tokens = statistics.fmean(len(item.tokens) for item in self._parts[0].items)
            full = n_tokens * self._engine.full_bytes_per_token
            return dataclasses.replace(row, kept=1.0, kv_bytes=full, kv_bytes_full=full)
        # The policy as the user gave it: records may name it without its parameters.
        policy = combination.policy
        if policy == AUTO and records:
            policy = f"{AUTO} ({records[0].values['policy']})"
        row = summarize(policy, combination.kv_type, str(combination.budget), records)
        return dataclasses.replace(row, score_relative=self._relative(row.score, records))

    def _relative(self, score: float | None, records: Sequence[Record]) -> float | None:
        """Return a suite's score divided by that of stock for the same prompts; None if one is
        missing.
        """
        digests = {record.digest for record in records}
        theirs = [record for record in self._records(None) if record.digest in digests]
        full = summarize(STOCK, "f16", "full", theirs).score
        return score / full if score is not None and full else None

    def _records(self, combination: Combination | None) -> list[Record]:
        key = STOCK if combination is None else combination.key
        found = (self._log.get(key, part.name, item) for part in self._parts for item in part.items)
        return [record for record in found if record is not None]

    def _missing(self, contestant: str, part: EvalPart) -> list[Item]:
        return [item for item in part.items if not self._log.get(contestant, part.name, item)]

    def _needing_stock(self, part: EvalPart) -> list[Item]:
        """Return the items that stock must measure, including those whose reference a combination
        needs.
        """
        missing = {item.digest for item in self._missing(STOCK, part)}
        for combination in self._combinations:
            lacking = self._missing(combination.key, part)
            missing |= {item.digest for item in lacking if part.needs_reference(item)}
        return [item for item in part.items if item.digest in missing]

    def _refer(self, part: EvalPart, tick: Tick) -> None:
        items = self._needing_stock(part)
        if not items:
            return
        with closing(self._engine.open_stock(part.n_ctx)) as stock:
            for item in items:
                values = part.reference(stock, item, tick)
                if self._log.get(STOCK, part.name, item) is None:
                    self._log.add(STOCK, part.name, item, values)

    def _measure(self, combination: Combination, part: EvalPart, tick: Tick) -> None:
        items = self._missing(combination.key, part)
        if not items:
            return
        shortest = min(len(item.tokens) for item in items)
        with combination.session(self._engine, part.n_ctx, shortest) as session:
            for item in items:
                combination.prepare(session, self._engine, len(item.tokens))
                values = part.measure(session, item, tick)
                self._log.add(combination.key, part.name, item, values)


def _shortest(part: EvalPart) -> int:
    return min(len(item.tokens) for item in part.items)
