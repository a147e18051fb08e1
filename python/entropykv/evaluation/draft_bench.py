"""Measure what guessing tokens ahead is worth: tokens written per second with and without it.

Three tasks copy: they give the model a document and the first words of something that repeats it.
The fourth lets it go on writing prose. Every text is written without drafts and with them, one
after the other in every round; the texts must be the same.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from entropykv.session.session import Session
from entropykv.settings.cache_options import CacheOptions

_LETTERS_PER_TOKEN = 3


@dataclass(frozen=True)
class DraftRow:
    """Hold the figures of one task: speeds are medians in tokens per second."""

    task: str
    speed_without: float
    speed_with: float
    tokens_per_step: float
    drafted: int
    accepted: int
    same: bool
    """Whether all texts are the same with drafts and without."""

    @property
    def ratio(self) -> float:
        """Return how many times as fast writing is with drafts."""
        return self.speed_with / self.speed_without


def draft_tasks(text: str, length: int) -> Iterator[tuple[str, str]]:
    """Yield names and prompts of about `length` tokens, from a text that is long enough."""
    text = text[: _LETTERS_PER_TOKEN * length]
    yield "copy", f"{text}\n\nThe same text once more:\n\n{text[:200]}"
    sentences = [part.strip() for part in text.split(". ") if part.strip()]
    turned = ". ".join(reversed(sentences))
    yield "quote", f"{text}\n\nIts sentences, the last one first:\n\n{turned[:400]}"
    rows = [{"id": i, "name": f"item {i}", "price": i * 7 % 100} for i in range(length // 24)]
    table = "\n".join(f"{row['id']};{row['name']};{row['price']}" for row in rows)
    yield (
        "table",
        f"id;name;price\n{table}\n\nAs JSON:\n\n" + json.dumps(rows[: len(rows) // 4])[:-1],
    )
    yield "prose", text


def bench_drafts(
    model: str | os.PathLike[str],
    options: CacheOptions,
    text: str,
    *,
    length: int,
    n_tokens: int,
    rounds: int,
) -> Iterator[DraftRow]:
    """Yield the figures of each task, with prompts of `length` tokens and `n_tokens` written ones.

    `options.spec_type` and those of the draft model say how tokens are guessed; n_ctx is set here.
    Raises the errors of Session.
    """
    options = replace(options, n_ctx=length + n_tokens + 1)
    without = replace(options, spec_type="none", spec_draft_model=None)
    with Session(model, without) as plain, Session(model, options) as drafting:
        for task, prompt in draft_tasks(text, length):
            tokens = plain.tokenize(prompt)[-length:]
            plain_speeds, speeds, same = [], [], True
            before = drafting.stats()
            for _ in range(rounds):
                expected, speed = write(plain, tokens, n_tokens)
                plain_speeds.append(speed)
                found, speed = write(drafting, tokens, n_tokens)
                speeds.append(speed)
                same = same and found == expected
            now = drafting.stats()
            accepted = now.accepted_drafts - before.accepted_drafts
            yield DraftRow(
                task=task,
                speed_without=statistics.median(plain_speeds),
                speed_with=statistics.median(speeds),
                tokens_per_step=1.0 + accepted / max(now.draft_steps - before.draft_steps, 1),
                drafted=now.drafted_tokens - before.drafted_tokens,
                accepted=accepted,
                same=same,
            )


def write(session: Session, tokens: Sequence[int], n: int) -> tuple[list[int], float]:
    """Read a prompt, then write n tokens; returns them, and the tokens per second of writing."""
    session.reset()
    session.decode(tokens)
    start = time.perf_counter()
    written = list(session.generate([], n))
    return written, len(written) / (time.perf_counter() - start)
