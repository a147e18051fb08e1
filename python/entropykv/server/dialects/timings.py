"""Tell how long an answer took, in llama-server's words."""

from __future__ import annotations

from typing import Any

from entropykv.server.engine.answering import Answering


def timings_of(job: Answering) -> dict[str, Any]:
    """Return numbers of tokens and times of a job, so far; what cannot be divided is 0.

    The first token follows from the prompt, so that one less was computed for the answer.
    """
    n_steps = max(0, job.n_written - 1)
    timings = {
        "cache_n": job.n_cached,
        "prompt_n": job.n_read,
        **_rates("prompt", job.n_read, job.prompt_seconds),
        "predicted_n": job.n_written,
        **_rates("predicted", n_steps, job.answer_seconds),
    }
    if job.n_drafted:
        timings |= {"draft_n": job.n_drafted, "draft_n_accepted": job.n_accepted}
    return timings


def _rates(name: str, n: int, seconds: float) -> dict[str, float]:
    ms = 1000.0 * seconds
    return {
        f"{name}_ms": ms,
        f"{name}_per_token_ms": ms / n if n else 0.0,
        f"{name}_per_second": 1000.0 * n / ms if ms else 0.0,
    }
