"""A step on a device waits rarely: a device that computes nothing counts how often."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entropykv.settings.cores import allowed_cpus
from tests.support.command import python
from tests.support.plain_memory_device import is_known
from tests.support.tiny_models import write_llama

pytestmark = pytest.mark.skipif(not is_known(), reason="ggml's structures may be others")

N_PROMPT = 192
N_WRITTEN = 32
COUNT = f"""
import json, sys
from tests.support.idle_device import counted, use_idle_device
use_idle_device()
from entropykv import Session
path, options = sys.argv[1], json.loads(sys.argv[2])
rows = []
with Session(path, n_ctx=1024, n_ubatch=64, n_gpu_layers=99, kv_type="f16", **options) as session:
    session.decode([3 + i % 250 for i in range(2 * {N_PROMPT})])
    before = counted()
    session.decode([3 + i % 250 for i in range({N_PROMPT})])
    rows.append((before, counted()))
    for _ in range({N_WRITTEN}):
        session.decode([5])
    before = counted()
    for _ in range({N_WRITTEN}):
        session.decode([5])
    rows.append((before, counted()))
print(json.dumps([{{name: b[name] - a[name] for name in a}} for a, b in rows]))
"""


COUNT_TOGETHER = f"""
import json, sys
from tests.support.idle_device import counted, use_idle_device
use_idle_device()
from entropykv import Pool
from tests.support.pools import read_in_one_step
path, options = sys.argv[1], json.loads(sys.argv[2])
with Pool(path, n_ctx=512, n_ubatch=64, n_gpu_layers=99, kv_type="f16", **options) as pool:
    sessions = [pool.session() for _ in range(options["n_sequences"])]
    for n, session in enumerate(sessions):
        session.decode([3 + i % 250 for i in range(100 + 3 * n)])
    for _ in range({N_WRITTEN}):
        read_in_one_step(pool, sessions, [5] * len(sessions))
    before = counted()
    for _ in range({N_WRITTEN}):
        read_in_one_step(pool, sessions, [5] * len(sessions))
    after = counted()
print(json.dumps({{name: after[name] - before[name] for name in before}}))
"""


def printed_by(program: str, path: Path, options: dict[str, Any]) -> Any:
    """Return what a Python program prints as JSON in its last line."""
    return json.loads(python(program, path, json.dumps(options)).stdout.splitlines()[-1])


def counts_together(path: Path, **options: Any) -> dict[str, float]:
    """Return how many waits, graphs and copies one step takes in which `n_sequences` conversations
    read a token each, by name.
    """
    counts = printed_by(COUNT_TOGETHER, path, options)
    return {name: n / N_WRITTEN for name, n in counts.items()}


@pytest.fixture(scope="module")
def by_layers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return the files of models with few layers and with many, by the number of layers."""
    folder = tmp_path_factory.mktemp("layers")
    paths = {n_layer: folder / f"{n_layer}.gguf" for n_layer in (2, 9)}
    for n_layer, path in paths.items():
        write_llama(path, n_layer=n_layer, head_dim=64)
    return paths


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        # In addition to llama.cpp's own graph and copies: moves of each conversation once in 16
        # tokens.
        ("recency", {"waits": 0.7, "graphs": 0.7, "copies": 1.6}),
        # In addition to those of `recency`: every fourth token, whose query is observed, sends the
        # numbers of nearby rows that it does not score, and before a conversation evicts, the sums
        # of attention are read.
        ("uniform", {"waits": 3, "graphs": 2.4, "copies": 5.7}),
    ],
)
def test_conversations_that_write_at_once_wait_as_often_for_many_layers_as_for_few(
    tmp_path: Path, by_layers: dict[int, Path], policy: str, most: dict[str, float]
) -> None:
    path = tmp_path / "model.gguf"
    write_llama(path, n_layer=5, head_dim=64)
    _, stock = counts_of(path, store="flat", policy="recency", kv_budget=1.0)
    few, many = (
        counts_together(path, store="device", policy=policy, kv_budget=0.12, n_sequences=8)
        for path in by_layers.values()
    )
    for name, n in most.items():
        assert many[name] == few[name]
        assert many[name] - stock[name] <= n + (name == "waits"), (name, many, stock)


COUNT_SAVED = """
import json, sys
from tests.support.idle_device import counted, use_idle_device
use_idle_device()
from entropykv import Session
path, options = sys.argv[1], json.loads(sys.argv[2])
with Session(path, n_ctx=512, n_gpu_layers=99, kv_type="f16", **options) as session:
    session.decode([3 + i % 250 for i in range(300)])
    session.files.save(path + ".1.ekv")
    before = counted()
    session.files.save(path + ".2.ekv")
    print(json.dumps({"waits": counted()["waits"] - before["waits"]}))
"""


def test_saving_waits_once_for_all_heads_of_a_layer(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf", n_layer=5, head_dim=64)
    # If every copy were waited for, there would be more than one wait per layer: a layer has K and
    # V of two KV heads.
    options = {"store": "device", "kv_budget": 0.5}
    assert printed_by(COUNT_SAVED, tmp_path / "model.gguf", options)["waits"] == 5


def test_conversations_find_out_in_as_many_operations_for_many_layers_as_for_few(
    by_layers: dict[int, Path],
) -> None:
    more = []
    for n_layer, path in by_layers.items():
        plain, observing = (
            counts_together(path, store="device", policy=policy, kv_budget=0.12, n_sequences=8)
            for policy in ("recency", "uniform")
        )
        copies_of_queries = n_layer
        more.append(observing["nodes"] - plain["nodes"] - copies_of_queries)
    assert more[0] == more[1]


def counts_of(path: Path, **options: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Return the counts per micro-batch of the prompt, and per written token; the program runs in a
    process of its own.
    """
    prompt, written = printed_by(COUNT, path, options)
    return (
        {name: 64 * n / N_PROMPT for name, n in prompt.items()},
        {name: n / N_WRITTEN for name, n in written.items()},
    )


THREADS = """
import json, sys
import llama_cpp
from tests.support.idle_device import use_idle_device
use_idle_device()
from entropykv import Session
path, options = sys.argv[1], json.loads(sys.argv[2])
counts, set_threads = [], llama_cpp.llama_set_n_threads
def note(context, single, several):
    counts.append((single, several))
    set_threads(context, single, several)
llama_cpp.llama_set_n_threads = note
with Session(path, n_ctx=128, n_ubatch=64, n_threads=3, store="device", **options) as session:
    for n in (64, 31, 1):
        session.decode([5] * n)
print(json.dumps(counts))
"""
MANY = min(3, allowed_cpus())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"n_gpu_layers": 99}, [[1, MANY], [1, 1], [1, 1]]),
        ({"n_gpu_layers": 3}, [[1, MANY], [1, 1], [1, 1]]),  # The output counts as the third layer.
        ({"n_gpu_layers": 2}, []),
        ({"n_gpu_layers": 99, "fixed_threads": True}, []),
    ],
    ids=str,
)
def test_one_thread_looks_up_the_embeddings_of_few_tokens(
    tmp_path: Path, options: dict[str, Any], expected: list[list[int]]
) -> None:
    path = tmp_path / "model.gguf"
    write_llama(path, n_layer=2, head_dim=64)
    assert printed_by(THREADS, path, options) == expected


def test_the_host_waits_as_often_for_many_layers_as_for_few(by_layers: dict[int, Path]) -> None:
    counts = [
        counts_of(path, store="device", policy="uniform", kv_budget=0.25)
        for path in by_layers.values()
    ]
    for few, many in zip(*counts, strict=True):
        assert many["waits"] == few["waits"]
        assert many["copies"] == few["copies"]
        assert many["graphs"] == few["graphs"]


def test_what_a_token_finds_out_takes_as_many_operations_for_many_layers_as_for_few(
    by_layers: dict[int, Path],
) -> None:
    more = []
    for n_layer, path in by_layers.items():
        _, stock = counts_of(path, store="flat", policy="recency", kv_budget=1.0)
        _, ours = counts_of(path, store="device", policy="uniform", kv_budget=0.25)
        copies_of_queries = n_layer
        more.append(ours["nodes"] - stock["nodes"] - copies_of_queries)
    assert more[0] == more[1] <= 5


@pytest.mark.parametrize(
    ("policy", "of_chunk", "of_token"),
    [
        # After a chunk, one graph moves rows; the mask is that of the chunk before. The inputs of
        # a token take one copy, and once in 16 tokens, rows move.
        ("recency", {"waits": 1, "graphs": 1}, {"waits": 0.2, "graphs": 0.2, "copies": 1.2}),
        # In addition, attention weights are read: those of every fourth token, for 16 tokens at
        # once. All queries of so small a chunk are observed, which needs the positions of their
        # neighbours.
        ("uniform", {"waits": 2.5, "graphs": 3}, {"waits": 0.5, "graphs": 0.5, "copies": 1.5}),
    ],
)
def test_a_step_waits_for_little_more_than_llama_cpps_graph(
    tmp_path: Path, policy: str, of_chunk: dict[str, float], of_token: dict[str, float]
) -> None:
    path = tmp_path / "model.gguf"
    write_llama(path, n_layer=5, head_dim=64)
    stock = counts_of(path, store="flat", policy="recency", kv_budget=1.0)
    ours = counts_of(path, store="device", policy=policy, kv_budget=0.25)
    for most, own, counted in zip((of_chunk, of_token), stock, ours, strict=True):
        # llama.cpp also waits for its own graph if a callback looks at its nodes.
        more = {name: counted[name] - own[name] for name in counted}
        assert all(more[name] <= n + (name == "waits") for name, n in most.items()), more
