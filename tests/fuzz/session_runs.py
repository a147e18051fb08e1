"""Execute a run of one session: a model, a session, operations, and checks, all from one seed."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from entropykv import EntropyKVError, Session, SessionFileError
from entropykv.evaluation.stock import StockSession
from tests.fuzz.forgery import forged
from tests.fuzz.models import FuzzModel, llama_model, random_model
from tests.fuzz.operations import Operation, random_operation, topic
from tests.fuzz.options import LONGEST, long_options, random_options
from tests.fuzz.oracle import Oracle
from tests.fuzz.promises import Broken, Watch, check_refusal, observable, require, same_bits
from tests.support.logits import Logits, relative_error

LONG_SHARE = 0.04
"""The share of runs with heads of thousands of entries, which take longer."""
_ATTEMPTS = 400
_MOST_STOCK_TOKENS = 700


def run_seed(seed: int, folder: Path) -> str:
    """Execute one run; returns a one-line description. Raises if a promise is broken."""
    chance = random.Random(seed)
    if chance.random() < LONG_SHARE:
        return _long_run(chance, folder)
    model = random_model(chance, folder)
    options, session, n_refused = possible_session(
        model, lambda: random_options(chance, model, folder)
    )
    say(f"{model.name}: {_shown(options)}")
    with session:
        run = Run(chance, model, options, session)
        run.operations(chance.randrange(4, 26))
        run.finish()
        return f"{run.n_done} operations, {n_refused + run.n_refused} refusals, {model.name}"


def say(text: str) -> None:
    """Report the next action, so that it is known after a crash."""
    print(f"  {text}", file=sys.stderr, flush=True)


def possible_session(
    model: FuzzModel, draw: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], Session, int]:
    """Open a session with the first of the drawn settings that is not refused.

    Returns the settings, the session, and how many were refused before; Broken is raised if all
    are.
    """
    for n_refused in range(_ATTEMPTS):
        options = {"store": "auto", **draw()}
        if options["n_ctx"] == LONGEST and options["store"] == "flat":
            options["n_ctx"] = 4096  # Its context has a cell for every token.
        try:
            return options, Session(model.path, **options), n_refused
        except EntropyKVError as error:
            check_refusal(error)
        except BaseException:
            say(f"{model.name}: {_shown(options)}")
            raise
    raise Broken(f"none of {_ATTEMPTS} settings is possible with {model.name}")


def _long_run(chance: random.Random, folder: Path) -> str:
    """Read two topics of thousands of entries, then tokens of the first one."""
    shape = {"n_layer": 1, "n_head": 4, "n_head_kv": chance.choice((1, 2)), "head_dim": 16}
    model = llama_model(folder, **shape, n_ctx_train=2**20, weight_type="F32")
    options, opened, _ = possible_session(model, lambda: long_options(chance, folder))
    say(f"{model.name}: {_shown(options)}")
    with opened as session:
        run = Run(chance, model, options, session)
        first, second = (topic(chance, options["kv_budget"] + 1000, model) for _ in range(2))
        for tokens in (first, second[: session.config.n_ctx - len(first) - 200], first[:20]):
            run.do(Operation("decode", (tokens, False)))
        run.operations(5)
        run.finish()
        return f"{run.n_done} operations, {session.position} tokens, {model.name}"


class Run:
    """Hold a session, the operations that it has executed, and what must hold."""

    def __init__(
        self, chance: random.Random, model: FuzzModel, options: dict[str, Any], session: Session
    ) -> None:
        """Start without any operation."""
        self.chance = chance
        self.model = model
        self.options = options
        self.session = session
        self.watch = Watch(session)
        self.done: list[Operation] = []
        self.n_refused = 0
        self.oracle = Oracle.of(model, session)

    @property
    def n_done(self) -> int:
        """Return the number of successful operations."""
        return len(self.done)

    def operations(self, n: int) -> None:
        """Execute random operations, about half of them followed by a comparison or bad input."""
        for _ in range(n):
            self.do(random_operation(self.chance, self.model, self.session))
            kind = self.chance.random()
            if kind < 0.12:
                self._compare_with_saved()
            elif kind < 0.2:
                self._take_nonsense()
            elif kind < 0.26:
                self._take_forgery()
            elif kind < 0.4 and self.oracle:
                self._compare_with_oracle()
            elif kind < 0.5:
                self._compare_with_drafts()

    def do(self, operation: Operation) -> None:
        """Execute an operation, and check the promises; a refused one must change nothing."""
        say(str(operation))
        self.watch.before(operation)
        before = observable(self.session)
        try:
            operation.do(self.session)
        except EntropyKVError as error:
            self.watch.refused(operation, error)
            require(observable(self.session) == before, f"what refuses changes nothing: {error}")
            self.n_refused += 1
            return
        self.done.append(operation)
        self.watch.after(operation)

    def finish(self) -> None:
        """Compare with stock llama.cpp, sometimes with another number of threads; close twice."""
        self._compare_with_stock()
        if self.session.cache.store == "headwise" and self.chance.random() < 0.4:
            self._compare_with_threads()
        position = self.session.position
        self.session.close()
        self.session.close()
        try:
            self.session.decode([5])
        except EntropyKVError as error:
            check_refusal(error)
        else:
            raise Broken("a closed session does not read")
        require(self.session.position == position, "closing changes no position")

    def _next_tokens(self) -> tuple[int, ...]:
        session = self.session
        room = session.config.n_ctx - session.position
        n_tokens = min(self.chance.choice((1, 1, 2, session.config.n_ubatch)), room, 64)
        return topic(self.chance, n_tokens, self.model)

    def _compare_with_saved(self) -> None:
        """Check that a session that loads this one continues with the same bits."""
        say("compare with a loaded session")
        session = self.session
        tokens = self._next_tokens()
        data = session.files.save_state()
        with self._another() as loaded:
            loaded.files.load_state(data)
            require(loaded.files.save_state() == data, "what is loaded is saved again as it was")
            ours, theirs = observable(session)[:6], observable(loaded)[:6]
            require(ours == theirs, "what is loaded is what was saved")
            if not tokens or not self._reads(tokens):
                return
            loaded.decode(tokens)
            same = same_bits(loaded.logits, session.logits)
            require(same, "a loaded session goes on with the same logits")
            require(
                observable(loaded)[:6] == observable(session)[:6],
                "a loaded session goes on with the same entries",
            )

    def _another(self) -> Session:
        """Open a session with the settings that this one has now."""
        options = {**self.options, "kv_budget": str(self.session._runner.budget)}
        # `auto` could choose another type with this budget.
        options["kv_type"] = self.session.stats().kv_type
        return Session(self.model.path, **options)

    def _compare_with_drafts(self) -> None:
        """Check that right drafts leave what single tokens leave, where pages stay in a file."""
        session, chance = self.session, self.chance
        tokens = topic(chance, chance.randrange(2, 12), self.model)
        if session.position + len(tokens) > session.config.n_ctx or not _computes_all_products(
            session
        ):
            return
        say(f"compare with {len(tokens) - 1} drafts")
        right = chance.randrange(len(tokens))
        n_right, states = 0, []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "session.kv"
            session.files.save(path)
            for drafts in (tokens[1:], ()):
                with self._another() as other:
                    other.files.load(path)
                    if drafts:
                        n_right = other.reader.read_drafts(
                            tokens[0], drafts, lambda rows: min(right, len(rows) - 1)
                        )
                    else:
                        for token in tokens[: n_right + 1]:
                            other.decode([token])
                    states.append((other.cache.evicted, other.files.save_state()))
        require(states[0] == states[1], f"{n_right} right drafts leave what single tokens leave")

    def _reads(self, tokens: tuple[int, ...]) -> bool:
        n_refused = self.n_refused
        self.do(Operation("decode", (tokens, False)))
        return self.n_refused == n_refused

    def _take_nonsense(self) -> None:
        """Check that impossible arguments are refused; budgets of 1 and 1e300 may be possible."""
        session, chance = self.session, self.chance
        beyond = session.config.n_ctx - session.position + 1
        nonsense = chance.choice(
            (
                Operation("decode", ((), False)),
                Operation("decode", ((session.model.n_vocab,), False)),
                Operation("decode", ((-1,), False)),
                Operation("truncate", (session.position + 1,)),
                Operation("truncate", (-1,)),
                Operation("resize", (chance.choice((0, 1, -3, 1.5, "many", "0B", 1e300)),)),
                *((Operation("decode", ((5,) * beyond, False)),) if beyond < 10_000 else ()),
            )
        )
        n_done = self.n_done
        self.do(nonsense)
        budget_that_fits = nonsense.name == "resize" and nonsense.values[0] in (1e300, 1)
        require(self.n_done == n_done or budget_that_fits, f"{nonsense} is refused")

    def _take_forgery(self) -> None:
        """Check that a changed file is refused, or gives a session that reads or refuses tokens."""
        session = self.session
        if session.cache.store == "flat" or session._slot.store._recurrent:  # type: ignore[attr-defined]
            return  # llama.cpp itself reads parts of the file.
        data = session.files.save_state()
        other = forged(self.chance, data)
        say("load a forgery")
        before = observable(session)
        try:
            session.files.load_state(other)
        except SessionFileError as error:
            check_refusal(error)
            require(observable(session) == before, f"what refuses changes nothing: {error}")
        else:
            tokens = self._next_tokens()
            if tokens and session.position + len(tokens) <= session.config.n_ctx:
                self._decode_whatever(tokens)
        session.files.load_state(data)
        require(session.files.save_state() == data, "the true state can be loaded again")

    def _decode_whatever(self, tokens: tuple[int, ...]) -> None:
        try:
            self.session.decode(tokens)
        except EntropyKVError as error:
            check_refusal(error)
            self.session.reset()

    def _compare_with_oracle(self) -> None:
        """Check that one token's logits are computed over exactly the entries that are kept."""
        session, oracle = self.session, self.oracle
        if oracle is None or session.position == 0 or session.position >= session.config.n_ctx:
            return
        say("compare with the oracle")
        token = topic(self.chance, 1, self.model)
        expected = oracle.next_logits(token[0])
        if expected is None or not self._reads(token):
            return
        logits = session.logits
        assert logits is not None
        error = relative_error(logits, expected)
        require(error < oracle.rounding, f"the logits are {error:.3g} from those of the oracle")

    def _compare_with_stock(self) -> None:
        """Compare with the logits of stock llama.cpp, if all of a short text is kept in f16."""
        session, stats = self.session, self.session.stats()
        whole = stats.entries_kept == stats.entries_full and stats.rebases == 0
        ends = min(self.model.n_ctx_train, _MOST_STOCK_TOKENS)
        if not whole or session.logits is None or stats.kv_type != "f16" or session.position > ends:
            return
        if not self.model.gives_last_row or stats.entries_frozen:
            return  # Tokens that were read meanwhile did not attend to frozen entries.
        say("compare with stock llama.cpp")
        plain, flash = (self._stock_logits(flash=flash) for flash in (False, True))
        expected = flash if session.cache.store == "flat" else plain
        # The two attention implementations of llama.cpp show how much rounding changes the logits.
        limit = max(10 * self.model.rounding, 2 * relative_error(flash, plain))
        error = relative_error(session.logits, expected)
        require(error < limit, f"the logits are {error:.3g} from those of stock llama.cpp")

    def _stock_logits(self, *, flash: bool) -> Logits:
        """Return the logits of stock llama.cpp after the session's tokens."""
        stock = StockSession(self.model.path, n_ctx=768, n_threads=1, flash=flash)
        logits: Logits = stock.decode(self.session.tokens)[-1]
        stock.close()
        return logits

    def _compare_with_threads(self) -> None:
        """Check that another number of threads gives the same bits for the same operations."""
        ours = self.session
        if ours.reader.drafting is not None and not _computes_all_products(ours):
            return  # How much is drafted depends on time, and bits on what is drafted.
        n_threads = self.chance.choice([n for n in (1, 2, 3, 5) if n != self.options["n_threads"]])
        is_busy = self.chance.random() < 0.3
        say(f"compare with {n_threads} threads{' of a busy machine' if is_busy else ''}")
        options = {**self.options, "n_threads": n_threads, "n_threads_batch": 0}
        with Session(self.model.path, **options) as other, busy_machine(is_busy):
            for operation in self.done:
                operation.do(other)
            require(same_bits(ours.logits, other.logits), "any number of threads, the same logits")
            require(
                observable(ours)[:6] == observable(other)[:6],
                "any number of threads, the same entries",
            )


def _computes_all_products(session: Session) -> bool:
    """Tell whether a session drafts, and a token has the same bits among drafts as alone."""
    by = session.stats().products.values()  # Products that were not computed yet are not in it.
    known = bool(by) and not any("llama.cpp" in name for name in by)
    return session.reader.drafting is not None and known


@contextlib.contextmanager
def busy_machine(is_busy: bool) -> Iterator[None]:
    """Let another process take the time of a core, if `is_busy`."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        if is_busy:
            stack.callback(stack.enter_context(subprocess.Popen(command)).kill)
        yield


def _shown(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_value(value)}" for name, value in options.items())


def _value(value: Any) -> str:
    return "profile" if type(value).__name__ == "EntropyProfile" else repr(value)
