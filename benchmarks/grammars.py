"""Measure what a constraint costs per token, by llguidance and by llama.cpp's own sampler.

python benchmarks/grammars.py [-m model.gguf] [-n 60]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_grammar

from entropykv.constraint.constraint import Constraint
from entropykv.constraint.sampler import CANDIDATE, ConstraintSampler
from entropykv.llamacpp.model import Model
from entropykv.model import shipped

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "address": {"type": "object", "properties": {"street": {"type": "string"}}},
    },
    "required": ["name", "age"],
}
SHORT = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 1000}}}


def rows(model: Model, constraint: Constraint, gbnf: str, n: int) -> Iterator[tuple[float, float]]:
    """Yield the seconds of both samplers for every token of a random text, of up to `n` tokens that
    both allow.
    """
    ours = ConstraintSampler(constraint, model.token_texts())
    theirs = llama_cpp.llama_sampler_init_grammar(model.vocabulary, gbnf.encode(), b"root")
    samplers = (ours.handle(), theirs)
    choose = random.Random(1)  # noqa: S311
    for _ in range(n):
        seconds, allowed = zip(*(step(each, model.n_vocab) for each in samplers), strict=True)
        ours.check()
        yield seconds
        choices = sorted(t for t in allowed[0] & allowed[1] if not model.is_end(t))
        if not choices:
            break
        token = choose.choice(choices)
        for each in samplers:
            llama_cpp.llama_sampler_accept(each, token)
    for each in samplers:
        llama_cpp.llama_sampler_free(each)


def step(sampler: Any, n_vocab: int) -> tuple[float, set[int]]:
    """Return the seconds that a sampler takes to find the allowed tokens, and these tokens."""
    data = np.zeros(n_vocab, CANDIDATE)
    data["id"] = np.arange(n_vocab)
    pointer = data.ctypes.data_as(llama_cpp.llama_token_data_p)
    array = llama_cpp.llama_token_data_array(pointer, n_vocab, -1, False)
    start = time.thread_time()
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    seconds = time.thread_time() - start
    return seconds, set(np.flatnonzero(data["logit"] == 0.0).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default=None, help="default: SmolLM2, where installed")
    parser.add_argument("-n", type=int, default=60, help="tokens of each text (default: 60)")
    options = parser.parse_args()
    path = options.model or shipped.smollm2().path
    grammars = {"any JSON": llama_grammar.JSON_GBNF, "C": llama_grammar.C_GBNF}
    grammars["arithmetic"] = llama_grammar.ARITHMETIC_GBNF
    both = {name: (Constraint.gbnf(text), text) for name, text in grammars.items()}
    for name, schema in {"a schema": SCHEMA, "maxLength 1000": SHORT}.items():
        gbnf = llama_grammar.json_schema_to_gbnf(json.dumps(schema))
        both[name] = (Constraint.json_schema(schema), gbnf)
    with closing(Model(path, n_gpu_layers=0, verbose=False)) as model:
        start = time.perf_counter()
        model.token_texts()
        print(f"{model.n_vocab:,} tokens, read in {time.perf_counter() - start:.1f} s, once")
        print("| constraint | ms a token, ours | slowest | llama.cpp's | slowest |")
        print("|---|---|---|---|---|")
        for name, (constraint, gbnf) in both.items():
            ours, theirs = zip(*rows(model, constraint, gbnf, options.n), strict=True)
            cells = [1e3 * f(each) for each in (ours, theirs) for f in (statistics.median, max)]
            print(f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")


if __name__ == "__main__":
    main()
