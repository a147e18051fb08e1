"""The default number of threads fits the machine, and a note warns of too many."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from entropykv import Session
from entropykv.cli import main
from entropykv.drop_in.arguments import split_arguments
from entropykv.llamacpp.threads import ThreadChoice, Threads, Way
from entropykv.server import ModelOptions
from entropykv.server.models.loading import cache_options
from entropykv.session.drafting import StepCosts
from entropykv.settings import cores
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.cores import OtherWork, usable_cores
from tests.support.logits import Logits, tokens_for
from tests.support.tiny_models import write_llama

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
    monkeypatch.setattr("entropykv.server.http.running.serve", lambda *_: None)
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


WAYS = (Way(1), Way(1, 2), Way(2), Way(2, 1), Way(3))


def test_steps_with_other_threads_and_helpers_compute_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "llama.gguf"
    write_llama(path, n_layer=2, n_head=6, n_head_kv=2, head_dim=64, weight_type="Q8_0")
    tokens = tokens_for(310)

    def read() -> Logits:
        with Session(path, n_ctx=512, kv_budget=0.5, n_ubatch=50, n_threads=3) as session:
            rows = [session.decode(tokens[:300], all_logits=True)]
            rows += [session.decode([token]) for token in tokens[300:]]
            return np.concatenate(rows)

    monkeypatch.setattr(ThreadChoice, "add", lambda *_: None)
    monkeypatch.setattr(ThreadChoice, "note_others", lambda *_: None)
    expected = read()
    used: list[Way] = []

    def add(choice: ThreadChoice, *_: object) -> None:
        used.append(choice.way)
        choice.way = WAYS[len(used) % len(WAYS)]

    monkeypatch.setattr(ThreadChoice, "add", add)
    assert np.array_equal(read(), expected)
    assert {*used} == {*WAYS}


@pytest.mark.parametrize("fixed", [False, True])
def test_a_switch_keeps_all_threads(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, fixed: bool
) -> None:
    counts: set[int] = set()
    set_threads = llama_cpp.llama_set_n_threads

    def note(context: object, single: int, several: int) -> None:
        counts.update((single, several))
        set_threads(context, single, several)

    monkeypatch.setattr(llama_cpp, "llama_set_n_threads", note)
    monkeypatch.setattr(OtherWork, "wanted", lambda *_: 9.0)
    with Session(tiny_llama, n_ctx=64, n_threads=3, fixed_threads=fixed) as session:
        session.decode(tokens_for(20))
    assert counts == (set() if fixed else {1})


@pytest.mark.parametrize("switch", [(), ("--fixed-threads",)])
def test_the_switch_of_the_command_line(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, switch: tuple[str, ...]
) -> None:
    fixed: list[bool] = []
    init = Threads.__init__

    def note(threads: Threads, options: CacheOptions, **more: Any) -> None:
        fixed.append(options.fixed_threads)
        init(threads, options, **more)

    monkeypatch.setattr(Threads, "__init__", note)
    command = ("run", "-m", str(tiny_llama), "-n", "1", "-c", "64", "-t", "1", "-p", "the")
    assert main([*command, *switch]) == 0
    assert fixed == [bool(switch)]


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("parallel", [1, 3])
def test_the_switch_of_the_server_and_of_llama(fixed: bool, parallel: int) -> None:
    asked = {"fixed_threads": True} if fixed else {}
    assert cache_options(ModelOptions(model="x", parallel=parallel, **asked)).fixed_threads == fixed
    assert split_arguments(None, asked)[0].fixed_threads == fixed


def test_steps_of_a_trial_say_nothing_of_what_drafts_cost(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[int] = []
    monkeypatch.setattr(StepCosts, "note", lambda _, n_tokens, __: noted.append(n_tokens))
    for tries, expected in ((True, []), (False, [1])):
        monkeypatch.setattr(ThreadChoice, "tries", tries)
        with Session(tiny_llama, n_ctx=64, n_threads=2, spec_type="ngram") as session:
            session.decode(tokens_for(20))
            noted.clear()
            session.decode([3])
        assert noted == expected
