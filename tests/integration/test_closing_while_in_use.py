"""Using an object that another thread has closed raises an exception, as does using one in a forked
process; neither ends the process.

Tests with threads run in a process of their own, because a failure could end the process.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from entropykv import EntropyKVError, EntropyLlama, Pool, Session, attach, detach
from entropykv.llamacpp.model import Model, Weights
from tests.support.command import python
from tests.support.llamas import QUIET
from tests.support.logits import tokens_for
from tests.support.pools import pool_of

ROUNDS = 12
RACE = r"""
import random, sys, threading, time
from entropykv import EntropyKVError, EntropyLlama, Pool, Session

path, mode, n_rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
chance = random.Random(7)
TEXT = [5 + i % 200 for i in range(200)]
COMMON = {"n_ctx": 512, "n_ubatch": 8, "n_threads": 1}

def decodes(session):
    session.text.truncate(0)
    session.decode(TEXT)

def generates(session):
    session.text.truncate(0)
    for token in session.generate([5, 6, 7, 8], max_tokens=200, temperature=0.8):
        session.token_bytes(token)

def forks(session):
    decodes(session)
    with session.fork() as fork:
        fork.decode([5])
    session.cache.swap_out()
    session.cache.pool_status()

def answers(llama):
    for _ in llama("the king", max_tokens=60, stream=True, temperature=0.8):
        llama.tokenize(b"the cat")
    llama.eval(TEXT)

def saves(session):
    decodes(session)
    session.files.load_state(session.files.save_state())

def made():
    "What is closed, and what threads do meanwhile."
    if mode.startswith("pool"):
        pool = Pool(path, n_sequences=3, kv_budget=0.5 / 3, **COMMON)
        call = {"decode": decodes, "generate": generates, "fork": forks, "save": saves}
        work = call[mode.split()[1]]
        def of_pool():
            session = pool.session()
            while True:
                work(session)
        return pool, [of_pool] * 4
    if mode == "session of a pool":
        pool = Pool(path, n_sequences=3, kv_budget=0.5 / 3, **COMMON)
        session = pool.session()
        session.keeps = pool
        return session, [lambda: [generates(session) for _ in iter(int, 1)]]
    if mode == "session":
        session = Session(path, kv_budget=0.5, **COMMON)
        return session, [lambda: [generates(session) for _ in iter(int, 1)]]
    if mode == "llama":
        llama = EntropyLlama(path, verbose=False, **COMMON)
        return llama, [lambda: [answers(llama) for _ in iter(int, 1)]]
    first = EntropyLlama(path, n_sequences=3, verbose=False, **COMMON)
    others = [first.another() for _ in range(2)]
    class All:
        def close(self):
            for each in (first, *others):
                each.close()
    return All(), [lambda m=m: [answers(m) for _ in iter(int, 1)] for m in (first, *others)]

for _ in range(n_rounds):
    closed, calls = made()
    said = []
    def run(call):
        try:
            call()
        except EntropyKVError as error:
            said.append(str(error))
    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    time.sleep(chance.uniform(0.0, 0.15))
    closed.close()
    for thread in threads:
        thread.join(20)
    if any(thread.is_alive() for thread in threads):
        sys.exit("a thread waits for ever")
    if len(said) != len(calls) or not all("closed" in text for text in said):
        sys.exit(f"not every thread was told: {said}")
    if mode == "session of a pool":
        pool = closed.keeps
        if pool.stats().live or pool.stats().sessions:
            sys.exit("a closed session holds a slot of the pool")
        pool.close()
print("fine")
"""
MODES = (
    "pool decode",
    "pool generate",
    "pool fork",
    "pool save",
    "session of a pool",
    "session",
    "llama",
    "llamas of a pool",
)


@pytest.mark.parametrize("mode", MODES)
def test_closing_beside_threads_ends_their_calls_and_not_the_process(
    tiny_llama: Path, mode: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", RACE, str(tiny_llama), mode, str(ROUNDS)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr[-2000:]


def test_another_one_lives_on_when_the_first_is_closed(tiny_llama: Path) -> None:
    first = EntropyLlama(str(tiny_llama), n_ctx=256, n_sequences=2, **QUIET)
    second = first.another()
    expected = second("the king", max_tokens=6, temperature=0.0)["choices"][0]["text"]
    stream = second("the king", max_tokens=6, temperature=0.0, stream=True)
    next(stream)
    first.close()
    first.close()
    for _ in stream:
        pass
    assert second("the king", max_tokens=6, temperature=0.0)["choices"][0]["text"] == expected
    assert second.token_bos() == 1
    with pytest.raises(EntropyKVError, match="closed"):
        first.another()
    with pytest.raises(EntropyKVError, match="closed"):
        first.tokenize(b"the king")
    third = second.another()
    second.close()
    assert third.detokenize(third.tokenize(b"the king")).strip() == b"the king"
    pool = third.pool
    third.close()
    assert pool is not None
    assert pool.runner.closed


def test_everything_of_a_closed_model_says_so(tiny_llama: Path) -> None:
    first = EntropyLlama(str(tiny_llama), n_ctx=256, n_sequences=2, **QUIET)
    second = first.another()
    stream = second("the king", max_tokens=30, stream=True)
    next(stream)
    first.close()
    second.close()
    calls = (
        lambda: next(stream),
        lambda: second.tokenize(b"the king"),
        lambda: second.detokenize([5, 6], special=True),
        second.token_bos,
        second.n_vocab,
        second.kv_stats,
        second.save_state,
        second.sample,
        lambda: second("the king", max_tokens=2),
        lambda: second.create_chat_completion([{"role": "user", "content": "hi"}], max_tokens=2),
    )
    for call in calls:
        with pytest.raises(EntropyKVError, match="closed"):
            call()


def test_texts_of_a_closed_session_are_refused(tiny_llama: Path) -> None:
    session = Session(tiny_llama, n_ctx=64)
    stream = session.generate([5], max_tokens=9)
    next(stream)
    session.close()
    calls = (
        lambda: session.tokenize("the king"),
        lambda: session.detokenize([5]),
        lambda: session.model.is_end(5),
        lambda: session.model.chat_prompt("hi"),
        lambda: next(stream),
        session.files.save_state,
        session.reset,
    )
    for call in calls:
        with pytest.raises(EntropyKVError, match="closed"):
            call()
    assert session.position == 1


def test_a_pool_lives_as_long_as_one_of_its_sessions(tiny_llama: Path) -> None:
    session = pool_of(tiny_llama).session()
    gc.collect()
    fork = session.fork() if session.decode([5, 6]) is not None else session
    runner = session._runner
    del session
    gc.collect()
    assert fork.decode([7]).shape == (1, fork.model.n_vocab)
    assert len(runner.slots) == 1
    del fork
    gc.collect()
    assert runner.closed


def test_garbage_that_is_found_within_a_step_waits_for_its_end(tiny_llama: Path) -> None:
    pool: list[Pool] = [pool_of(tiny_llama)]
    reader = pool[0].session()
    garbage = [pool[0].session()]
    garbage[0].decode([5, 6, 7])
    scheduler = pool[0].runner.scheduler
    run, seen = scheduler._run, []

    def step(works: list[object]) -> None:
        runner = reader._runner
        runner._in_step = True
        garbage.clear()
        seen.append(len(runner.slots))
        runner.close()
        seen.append(runner.closed)
        runner._in_step = False
        run(works)  # type: ignore[arg-type]

    scheduler._run = step  # type: ignore[assignment]
    reader.decode([5])
    assert seen == [2, False]
    assert reader._runner.closed
    with pytest.raises(EntropyKVError, match="closed"):
        reader.decode([5])


def test_detaching_and_attaching_beside_calls(tiny_llama: Path) -> None:
    llm = EntropyLlama(str(tiny_llama), n_ctx=256, **QUIET)
    inside, go_on = threading.Event(), threading.Event()

    def busy(_ids: object, logits: object) -> object:
        inside.set()
        assert go_on.wait(30)
        return logits

    def answer() -> None:
        llm.create_completion(tokens_for(9), max_tokens=2, logits_processor=[busy])

    one = threading.Thread(target=answer)
    one.start()
    assert inside.wait(30)
    with pytest.raises(EntropyKVError, match="another thread"):
        detach(llm)
    go_on.set()
    one.join(30)
    left = llm.generate(tokens_for(9), temp=0.0)
    next(left)
    stock = detach(llm)
    with pytest.raises(EntropyKVError, match="detached"):
        next(left)
    assert stock("the king", max_tokens=2)["choices"]
    again = attach(stock)
    assert again("the king", max_tokens=2)["choices"]
    again.close()
    with pytest.raises(EntropyKVError, match="closed"):
        attach(detach(again))


def test_weights_are_freed_by_who_ends_last() -> None:
    freed: list[int] = []
    weights = Weights(lambda: freed.append(1))
    other = weights.share()
    weights.release()
    with weights:
        other.release()
        assert not freed
        with pytest.raises(EntropyKVError, match="closed"):
            weights.share()
    assert freed == [1]
    with pytest.raises(EntropyKVError, match="closed"), weights:
        pass
    assert freed == [1]


def test_sessions_of_one_model_are_closed_one_by_one(tiny_llama: Path) -> None:
    model = Model(tiny_llama, n_gpu_layers=0, verbose=False)
    with Session(model.share(), n_ctx=64, n_threads=1) as session:
        model.close()
        expected = session.decode(tokens_for(16))
        with Session(session.model.share(), n_ctx=64, n_threads=1) as other:
            assert (other.decode(tokens_for(16)) == expected).all()
        assert session.model.tokenize("the", add_bos=False, special=False)
        session.decode([5])
    with pytest.raises(EntropyKVError, match="closed"):
        model.share()


CHILD = """
import os, sys
from entropykv import EntropyKVError, Pool, Session

def refused(action):
    try:
        action()
    except EntropyKVError as error:
        assert "start processes by spawn" in str(error), error
        return
    raise AssertionError("nothing was refused")

options = {"n_ctx": 256, "n_threads": 2}
with Session(sys.argv[1], **options) as session, Pool(sys.argv[1], **options) as pool:
    session.decode(list(range(5, 40)))
    of_pool = pool.session()
    of_pool.decode(list(range(5, 40)))
    held = pool.runner.scheduler.between_steps()
    held.__enter__()  # as another thread of the parent may do at that moment
    child = os.fork()
    if child == 0:
        for each in (session, of_pool):
            refused(lambda: each.decode([7]))
            refused(lambda: each.text.truncate(3))
            each.close()
        refused(pool.session)
        pool.close()
        os._exit(17)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    held.__exit__(None, None, None)
    for each in (session, of_pool):
        each.decode([7])
"""


@pytest.mark.needs("os.fork")
def test_a_forked_process_is_told_and_the_parent_goes_on(tiny_llama: Path) -> None:
    python(CHILD, tiny_llama)
