r"""Measure how well a predictor predicts after it was learnt from few tokens, and what learning
costs.

For each text, a predictor is fitted to its first tokens, chunk by chunk, as sessions do, and tested
with the other texts: Pearson's r of predicted and true logarithms, the mean over all KV heads. With
--texts, one predictor is learnt from eight texts, and tested after each of them. With --speed, a
prompt is read by `fast`, by `auto` in a session that learns, by `auto` in the next one, by stock
llama.cpp, and by `fast` once more; speeds are tokens per second of CPU time, multiplied by the
threads. --by selects some of these readers; CPU time hardly depends on the load, so that long
prompts can be measured in several runs.

python benchmarks/learning.py --model qwen-0.5b
python benchmarks/learning.py --model qwen-0.5b --texts
python benchmarks/learning.py --model qwen-1.5b --speed 2048 -t 2
python benchmarks/learning.py --model qwen-1.5b --speed 6144 --by auto
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from entropykv import Session
from entropykv.calibration.fitting import _EchoReader
from entropykv.evaluation.bench import history_tokens
from entropykv.evaluation.stock import StockSession
from entropykv.evaluation.texts import read_texts
from entropykv.policy.policy import AUTO
from entropykv.profile.growing import GrowingPredictor, _correlations, _moments
from entropykv.profile.predictor import Lessons
from entropykv.session.second_readings import LEAST_TEXTS
from inputs import find_model

ROOT = Path(__file__).parents[1]
STOCK = "stock"
READERS = ("fast", AUTO, STOCK, "fast")
"""The policies that read a prompt inside a budget, and stock llama.cpp with a full f16 cache."""
NAMES = ("tuning_prose_01", "04_python", "18_french", "03_dialogue")
TESTS = ("tuning_prose_01", "tuning_prose_03", "16_history", "18_french")
"""The texts with which a predictor of eight other texts is tested."""


def added(*parts: Lessons) -> Lessons:
    """Return the sum of lessons, layer by layer."""
    return [(sum(n for n, _ in layer), sum(s for _, s in layer)) for layer in zip(*parts)]  # noqa: B905


def measure(model: str, n_chunks: int) -> None:
    """Fit predictors to the first chunks of each text; print their correlation for other texts."""
    with _EchoReader(model, 256 * n_chunks, "q8_0", 1) as reader:
        lessons = {name: _lessons_of(reader, name, n_chunks) for name in NAMES}
        values = reader.value_features
    for name, chunks in lessons.items():
        others = added(*(part for other in NAMES if other != name for part in lessons[other]))
        for n in range(1, len(chunks) + 1):
            growing = GrowingPredictor(values, None)
            growing.grow(added(*chunks[:n]))
            print(f"{name}: {growing.predictor.n_tokens} tokens, r = {_r(growing, others):.3f}")


def _lessons_of(reader: _EchoReader, name: str, n_chunks: int) -> list[Lessons]:
    """Return the lessons of the first chunks of a text, chunk by chunk."""
    text = next(ROOT.glob(f"*/texts/{name}.txt")).read_text(encoding="utf-8")
    tokens = reader._model.tokenize(text, add_bos=True, special=False)  # noqa: SLF001
    chunk = reader._echo.chunk  # noqa: SLF001
    lessons = []
    for end in range(chunk, min(len(tokens), n_chunks * chunk) + 1, chunk):
        reader.read(tokens[:end], end - chunk)
        lessons.append(reader.take_lessons())
    return lessons


def measure_texts(model: str) -> None:
    """Print a predictor's correlation after each text: two chunks of the first one teach, and one
    of each later one.
    """
    with _EchoReader(model, 512, "q8_0", 1) as reader:
        growing = GrowingPredictor(reader.value_features, None)
        others = added(*(part for name in TESTS for part in _lessons_of(reader, name, 2)))
        for number, text in enumerate(read_texts()[:LEAST_TEXTS]):
            name = Path(text.name).stem
            growing.grow(added(*_lessons_of(reader, name, 1 if number else 2)))
            growing.settle()
            print(f"{name}: {growing.predictor.n_tokens} tokens, r = {_r(growing, others):.3f}")


def _r(growing: GrowingPredictor, others: Lessons) -> float:
    layers = zip(growing.predictor.weights, others, strict=True)
    return float(np.mean([r for w, (_, s) in layers for r in _correlations(_moments(w, s))]))


def measure_speed(model: str, n_tokens: int, n_threads: int, readers: Sequence[str]) -> None:
    """Print tokens per second of CPU time, times the threads, a line for each session of `readers`:
    policies or STOCK. The process then has a new cache directory.
    """
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    for reader in readers:
        for number, session in enumerate(_sessions(reader, model, n_tokens, n_threads)):
            with closing(session):
                tokens = history_tokens(session, n_tokens)
                before = time.process_time()
                session.decode(tokens)
                speed = n_tokens * n_threads / (time.process_time() - before)
            which = "" if reader != AUTO else ", second" if number else ", first"
            print(f"{reader}{which}: {speed:.1f} tokens/s", flush=True)


def _sessions(
    reader: str, model: str, n_tokens: int, n_threads: int
) -> Iterator[Session | StockSession]:
    """Yield a reader's session, which the caller closes; AUTO has a second, taught by the first."""
    if reader == STOCK:
        yield StockSession(model, n_ctx=n_tokens, n_threads=n_threads)
        return
    for _ in range(2 if reader == AUTO else 1):
        yield Session(
            model,
            n_ctx=n_tokens,
            kv_budget=0.2,
            n_threads=n_threads,
            fixed_threads=True,
            policy=reader,
            learn=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--texts", action="store_true", help="learn from one text after the other")
    parser.add_argument("--speed", type=int, metavar="TOKENS")
    parser.add_argument("--by", default=",".join(READERS), help="readers (%(default)s)")
    parser.add_argument("-t", type=int, default=1)
    options = parser.parse_args(arguments)
    model = find_model(options.model)
    if options.speed:
        measure_speed(model, options.speed, options.t, options.by.split(","))
    elif options.texts:
        measure_texts(model)
    else:
        measure(model, options.chunks)


if __name__ == "__main__":
    main()
