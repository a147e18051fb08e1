"""Load crafted session files: each is refused in one sentence, or gives a session that works.

None of them may end the process, take long, or take memory that its size does not explain.
"""

from __future__ import annotations

import random
import resource
import time
from pathlib import Path

from entropykv import EntropyKVError, Pool, Session
from entropykv.errors import SessionFileError
from tests.fuzz.forgery import crafted
from tests.fuzz.models import FuzzModel, llama_model, random_model
from tests.fuzz.operations import topic
from tests.fuzz.options import random_options
from tests.fuzz.promises import check_refusal, require
from tests.fuzz.session_runs import possible_session, say

N_FILES = 60
MOST_SECONDS = 10.0
MOST_BYTES = 192 << 20
"""The most bytes that loading may add to the process's peak memory, besides ten times the file."""


def run_files(seed: int, folder: Path) -> str:
    """Load files made from a saved session; returns a line about them, or raises Broken."""
    chance = random.Random(f"file {seed}")
    if chance.random() < 0.3:
        return _in_pool(chance, folder)
    model = random_model(chance, folder)
    options, session, _ = possible_session(
        model, lambda: {**random_options(chance, model, folder), "store": "headwise"}
    )
    say(f"{model.name}: {options}")
    with session:
        return _load_all(chance, model, session)


def _in_pool(chance: random.Random, folder: Path) -> str:
    shape = {"n_layer": 2, "n_head": 4, "n_head_kv": 2, "head_dim": 16}
    model = llama_model(folder, **shape, weight_type="F32", n_ctx_train=2048)
    kv_budget = chance.choice((80, 200, "1MiB"))
    with Pool(model.path, n_ctx=400, n_sequences=2, kv_budget=kv_budget, n_threads=1) as pool:
        with pool.session() as other, pool.session() as session:
            other.decode(topic(chance, 60, model))
            other.rest()
            summary = _load_all(chance, model, session)
        require(pool.stats().live == 0, "what was loaded is gone with its session")
        return f"{summary}, in a pool"


def _load_all(chance: random.Random, model: FuzzModel, session: Session) -> str:
    recurrent = session.cache.store == "headwise" and session._slot.store._recurrent  # type: ignore[attr-defined]
    if session.cache.store == "flat" or recurrent:
        return f"nothing: llama.cpp reads parts of the state of {model.name}"
    n_tokens = min(session.config.n_ctx - 1, chance.randrange(1, 200))
    try:
        session.decode(topic(chance, max(1, n_tokens), model))
    except EntropyKVError as error:  # A measure may lack a predictor, for example.
        check_refusal(error)
        return f"refused: {model.name}"
    data = session.files.save_state()
    n_refused = 0
    for number in range(N_FILES):
        what, other = crafted(chance, data)
        say(f"{number}: {what}")
        n_refused += _is_refused(session, what, other)
        if session.text.held().is_whole and session.position < session.config.n_ctx:
            _goes_on(session, topic(chance, 1, model))
        if number % 10 == 9:
            session.files.load_state(data)
            require(session.files.save_state() == data, "the true state can be loaded again")
    return f"{n_refused} of {N_FILES} files refused, {model.name}"


def _is_refused(session: Session, what: str, data: bytes) -> bool:
    before, start = session.tokens, time.monotonic()
    memory = _most_memory()
    try:
        session.files.load_state(data)
        refused = False
    except EntropyKVError as error:
        check_refusal(error)
        require(session.tokens == before, f"what refuses changes nothing: {what}")
        require(
            isinstance(error, SessionFileError) or "room" in str(error) or "limit" in str(error),
            f"a file is refused as such: {error!r}",
        )
        refused = True
    seconds, more = time.monotonic() - start, _most_memory() - memory
    require(seconds < MOST_SECONDS, f"{what}: loading takes {seconds:.1f} s")
    require(more < MOST_BYTES + 10 * len(data), f"{what}: loading takes {more >> 20} MiB")
    return refused


def _goes_on(session: Session, tokens: tuple[int, ...]) -> None:
    try:
        session.decode(tokens)
        session.rest()
    except EntropyKVError as error:
        check_refusal(error)
        session.reset()


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
