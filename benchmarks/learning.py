r"""Measure how well a predictor predicts that was learnt from few tokens, and what learning costs.

For each text, a predictor is fitted to its first tokens, chunk by chunk, as sessions do, and tested
with the other texts: Pearson's r of predicted and true logarithms, the mean over all KV heads. With
--speed, a prompt is read by `fast`, by `auto` in a session that learns, and by `auto` in the next
one; speeds are tokens per second of CPU time, times the threads.

python benchmarks/learning.py --model qwen-0.5b.gguf
python benchmarks/learning.py --model qwen-1.5b.gguf --speed 1536 -t 2
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from entropykv import Session
from entropykv.calibration.fitting import _EchoReader
from entropykv.profile.growing import GrowingPredictor, _correlations, _moments
from entropykv.profile.predictor import Lessons
from entropykv.session.predictor_fit import value_features
from inputs import find_model, read_texts

ROOT = Path(__file__).parents[1]
NAMES = ("tuning_prose_01", "04_python", "18_french", "03_dialogue")


def added(*parts: Lessons) -> Lessons:
    """Return the sum of lessons."""
    return [(sum(n for n, _ in layer), sum(s for _, s in layer)) for layer in zip(*parts)]  # noqa: B905


def measure(model: str, n_chunks: int) -> None:
    """Print a line for every text and number of chunks."""
    with _EchoReader(model, 256 * n_chunks, "q8_0", 1) as reader:
        lessons: dict[str, list[Lessons]] = {}
        for name in NAMES:
            text = next(ROOT.glob(f"*/texts/{name}.txt")).read_text(encoding="utf-8")
            tokens = reader._model.tokenize(text, add_bos=True, special=False)  # noqa: SLF001
            chunk = reader._echo.chunk  # noqa: SLF001
            lessons[name] = []
            for end in range(chunk, min(len(tokens), n_chunks * chunk) + 1, chunk):
                reader.read(tokens[:end], end - chunk)
                lessons[name].append(reader.take_lessons())
        values = value_features(reader._store.layers)  # noqa: SLF001
    for name, chunks in lessons.items():
        others = added(*(part for other in NAMES if other != name for part in lessons[other]))
        for n in range(1, len(chunks) + 1):
            growing = GrowingPredictor(values, None)
            growing.grow(added(*chunks[:n]))
            print(f"{name}: {growing.predictor.n_tokens} tokens, r = {_r(growing, others):.3f}")


def _r(growing: GrowingPredictor, others: Lessons) -> float:
    layers = zip(growing.predictor.weights, others, strict=True)
    return float(np.mean([r for w, (_, s) in layers for r in _correlations(_moments(w, s))]))


def measure_speed(model: str, n_tokens: int, n_threads: int) -> None:
    """Print tokens per second of CPU time of all threads."""
    text = "\n".join(read_texts("tuning_*").values())
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    for what in ("fast", "auto, first", "auto, second", "fast"):
        options = {"n_ctx": n_tokens, "kv_budget": 0.2, "n_threads": n_threads, "learn": True}
        with Session(model, policy=what.partition(",")[0], **options) as session:
            tokens = session.tokenize(text)[:n_tokens]
            before = time.process_time()
            session.decode(tokens)
            speed = n_tokens * n_threads / (time.process_time() - before)
        print(f"{what}: {speed:.1f} tokens/s", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--speed", type=int, metavar="TOKENS")
    parser.add_argument("-t", type=int, default=1)
    options = parser.parse_args(arguments)
    model = find_model(options.model)
    if options.speed:
        measure_speed(model, options.speed, options.t)
    else:
        measure(model, options.chunks)


if __name__ == "__main__":
    main()
