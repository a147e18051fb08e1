"""The default number of threads fits the machine, and a note warns of too many."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest

from entropykv import Session
from entropykv.cli import main
from entropykv.drop_in.arguments import split_arguments
from entropykv.llamacpp.threads import ThreadChoice
from entropykv.server import ModelOptions
from entropykv.settings import cores
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.cores import usable_cores
from tests.support.logits import Logits, tokens_for

TOLD = "entropykv: 2 threads were asked for, but 1 core is there for this process"


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 1)


@pytest.mark.parametrize("command", ["run", "chat"])
@pytest.mark.parametrize(("threads", "times"), [("2", 1), ("1", 0), ("0", 0)])
def test_more_threads_than_cores(
    tiny_llama: Path,
    one_core: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    threads: str,
    times: int,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the\n"), encoding="utf-8"))
    prompt = ("-p", "the") if command == "run" else ()
    options = ("-m", str(tiny_llama), "-n", "3", "-c", "64", "-t", threads, *prompt)
    assert main([command, *options]) == 0
    assert capsys.readouterr().err.count(TOLD) == times


def test_the_server_says_it_too(
    tiny_llama: Path,
    one_core: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("entropykv.server.running.serve", lambda *_: None)
    model = ("serve", "--model", str(tiny_llama), "--n_threads_batch", "1")
    for threads, times in (("2", 1), ("1", 0)):
        assert main([*model, "--n_threads", threads]) == 0
        errors = capsys.readouterr().err
        assert errors.count(TOLD) == times
        assert ("use --n_threads 1, or leave it out" in errors) == bool(times)


def test_without_an_option_the_number_of_threads_is_chosen() -> None:
    cache, here = CacheOptions(), usable_cores()
    of_llama, arguments = split_arguments(None, {})
    options = ModelOptions(model="x")
    for found in (
        (cache.threads, cache.threads_batch),
        (of_llama.threads, of_llama.threads_batch),
        (arguments["n_threads"], arguments["n_threads_batch"]),
        (options.n_threads, options.n_threads_batch),
    ):
        assert found == (here, here)
    assert split_arguments(None, {"n_threads": 7})[0].threads == 7


def test_steps_with_other_numbers_of_threads_compute_the_same(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_for(90)

    def read() -> Logits:
        with Session(tiny_llama, n_ctx=128, kv_budget=0.5, n_ubatch=16, n_threads=3) as session:
            rows = [session.decode(tokens[:80], all_logits=True)]
            rows += [session.decode([token]) for token in tokens[80:]]
            return np.concatenate(rows)

    expected = read()
    used: set[int] = set()

    def add(choice: ThreadChoice, *_: object) -> None:
        used.add(choice.n)
        choice.n = choice.n % choice.most + 1

    monkeypatch.setattr(ThreadChoice, "add", add)
    assert np.array_equal(read(), expected)
    assert used == {1, 2, 3}
