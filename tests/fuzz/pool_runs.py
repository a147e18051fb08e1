"""Run random operations on the sessions of a pool, and compare with fresh readings of the same
texts.

With a budget that holds everything, a session that was forked, swapped, saved, and restored from a
checkpoint must give the logits of one that has read its text from the start. With a small budget,
the logits of a token are computed over the entries that its KV heads hold: see oracle.py. At the
end no page, slot or byte may be left.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from entropykv import EntropyKVError, Pool, Session
from entropykv.errors import UnsupportedModelError
from tests.architectures import ARCHITECTURES
from tests.fuzz.models import FuzzModel, architecture_model, llama_model, random_model
from tests.fuzz.operations import topic
from tests.fuzz.options import random_drafts
from tests.fuzz.oracle import Oracle
from tests.fuzz.promises import check_refusal, require
from tests.fuzz.session_runs import say
from tests.support.logits import relative_error

N_CTX = 400
MOST_SESSIONS = 6
_LIMITS = ("0", "4KiB", "200KiB", "64MiB")
"""Limits of checkpoints: none, hardly one, some, all."""


def run_pool(seed: int, folder: Path) -> str:
    """Execute one run; returns a one-line description. Raises if a promise is broken."""
    chance = random.Random(f"pool {seed}")
    ample = chance.random() < 0.6
    model = random_model(chance, folder) if ample else _model_of_oracle(chance, folder)
    if chance.random() < 0.3:
        model = architecture_model(chance.choice(ARCHITECTURES["windowed"]), folder)
    options = _options(chance, model, folder, ample=ample)
    say(f"{model.name}: {options}")
    try:
        pool = Pool(model.path, **options)
    except UnsupportedModelError as error:
        check_refusal(error)
        return f"refused: {model.name}"
    # A budget may be too small for two conversations, for example.
    except EntropyKVError as error:
        check_refusal(error)
        return f"refused: {model.name}"
    with pool:
        run = _Run(chance, model, pool, options, ample=ample)
        for _ in range(chance.randrange(15, 60)):
            run.step()
        run.finish()
    return f"{run.n_done} operations, {run.n_refused} refusals, {run.n_compared} compared"


def _model_of_oracle(chance: random.Random, folder: Path) -> FuzzModel:
    shape = {"n_layer": chance.choice((1, 2)), "n_head": 4, "n_head_kv": chance.choice((1, 2))}
    return llama_model(folder, **shape, head_dim=16, weight_type="F32", n_ctx_train=2048)


def _options(
    chance: random.Random, model: FuzzModel, folder: Path, *, ample: bool
) -> dict[str, Any]:
    tight = chance.choice((60, 90, 150, 400, "40KiB"))
    return {
        "n_sequences": chance.choice((1, 2, 3)),
        "n_ctx": N_CTX,
        "kv_budget": "64MiB" if ample else tight,
        "n_ubatch": chance.choice((5, 16, 32)),
        "n_threads": chance.choice((1, 2)),
        "kv_type": chance.choice(("f16", "q8_0")),
        "policy": chance.choice(("uniform", "auto", "adaptive", "layer", "streaming")),
        "checkpoints": chance.choice(_LIMITS),
        "swap": chance.choice(("ram", f"disk:{folder}")),
        "swap_limit": chance.choice((None, None, "300KiB")),
        **random_drafts(chance, model.path),
    }


class _Run:
    """Hold a pool, its sessions, and the text that each has read."""

    def __init__(
        self,
        chance: random.Random,
        model: FuzzModel,
        pool: Pool,
        options: dict[str, Any],
        *,
        ample: bool,
    ) -> None:
        self._chance = chance
        self._model = model
        self._pool = pool
        self._sessions: list[Session] = []
        self._texts: dict[int, list[int]] = {}
        """For each session number, the text that it must report as read."""
        self._saved: list[tuple[list[int], bytes]] = []
        self._fresh: Session | None = None
        if ample:
            of_session = ("n_ctx", "n_ubatch", "n_threads", "kv_type", "policy")
            chosen = {name: options[name] for name in of_session}
            self._fresh = Session(model.path, kv_budget=1.0, store="headwise", **chosen)
        self.n_done = self.n_refused = self.n_compared = 0
        self._moved = False
        """True once keys of a session were moved to other positions."""

    def step(self) -> None:
        """Run a random operation and check all sessions; one that is left half-way is reset."""
        if not self._sessions:
            self._add(self._pool.session(), [])
        session = self._chance.choice(self._sessions)
        name = self._chance.choice(
            ("read",) * 6
            + ("write",) * 4
            + ("truncate", "truncate", "fork", "fork", "swap", "swap", "checkpoint", "checkpoint")
            + ("go back",) * 3
            + ("save", "load", "map", "new", "begin as another", "close", "resize", "reset")
            + ("leave the pool",) * 2
        )
        say(f"session {session.number} of {len(self._sessions)} at {session.position}: {name}")
        text = self._texts[session.number]
        try:
            getattr(self, "_" + name.replace(" ", "_"))(session, text)
        except EntropyKVError as error:
            check_refusal(error)
            self.n_refused += 1
            if not session.text.held().is_whole:
                session.reset()
                text.clear()
        else:
            self.n_done += 1
        self._check()

    def finish(self) -> None:
        """Close all sessions, drop the checkpoints, and check that nothing is left."""
        while self._sessions:
            self._close(self._sessions[-1], [])
        runner = self._pool.runner
        with runner.scheduler.between_steps():
            runner.kept_texts.drop_checkpoints()
        stats = self._pool.stats()
        left = (
            stats.sessions,
            stats.live,
            stats.swapped_out,
            stats.swapped_bytes,
            stats.kv_bytes_now,
        )
        require(left == (0,) * 5, f"sessions, live, swapped, its bytes, bytes of the pool: {left}")
        require(len(runner.shared._free_places) == runner.n_sequences, "places are free")
        if self._fresh is not None:
            self._fresh.close()

    def _add(self, session: Session, text: list[int]) -> None:
        self._sessions.append(session)
        self._texts[session.number] = text

    def _read(self, session: Session, text: list[int]) -> None:
        n_tokens = min(self._chance.randrange(1, 90), N_CTX - session.position)
        if n_tokens:
            self._decode(session, text, list(topic(self._chance, n_tokens, self._model)))

    def _write(self, session: Session, text: list[int]) -> None:
        for _ in range(self._chance.randrange(1, 6)):
            if session.position < N_CTX:
                token = list(topic(self._chance, 1, self._model))
                expected = self._by_oracle(session, token[0])
                self._decode(session, text, token)
                if expected is not None:
                    assert session.logits is not None
                    error = relative_error(session.logits, expected)
                    require(error < Oracle.rounding, f"{error:.3g} from the logits of the oracle")
                    self.n_compared += 1

    def _decode(self, session: Session, text: list[int], tokens: list[int]) -> None:
        before = session.position
        try:
            session.decode(tokens)
        finally:
            session.rest()
            text += tokens[: session.position - before]
        self._compare(session, text)

    def _truncate(self, session: Session, text: list[int]) -> None:
        position = self._chance.randrange(session.position + 1)
        if self._fresh is not None and not session.text.held().can_return_to(position):
            return
        session.text.truncate(position)
        del text[position:]

    def _fork(self, session: Session, text: list[int]) -> None:
        if len(self._sessions) < MOST_SESSIONS:
            self._add(session.fork(), list(text))

    def _swap(self, session: Session, text: list[int]) -> None:
        session.cache.swap_out()
        session.cache.pool_status()
        require(session.position == len(text), "swapping out changes no position")

    def _checkpoint(self, session: Session, text: list[int]) -> None:
        session.text.keep_checkpoint()
        require(session.position == len(text), "a checkpoint changes no position")

    def _go_back(self, session: Session, text: list[int]) -> None:
        other = self._texts[self._chance.choice(self._sessions).number]
        asked = other[: self._chance.randrange(len(other) + 1)]
        repeatable = self._chance.random() < 0.5
        if session.text.return_to_checkpoint(asked, repeatable=repeatable):
            text[:] = asked[: session.position]
            self._compare(session, text)
        elif session.position == 0:
            text.clear()

    def _begin_as_another(self, _session: Session, text: list[int]) -> None:
        if len(self._sessions) < MOST_SESSIONS:
            begun = self._pool.session_for(text)
            self._add(begun, text[: begun.position])

    def _save(self, session: Session, text: list[int]) -> None:
        if text:
            self._saved = [*self._saved[-3:], (list(text), session.files.save_state())]

    def _load(self, session: Session, text: list[int]) -> None:
        if self._saved:
            saved, data = self._chance.choice(self._saved)
            session.files.load_state(data)
            text[:] = saved
            self._compare(session, text)

    def _map(self, session: Session, text: list[int]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "session.kv"
            session.files.save(path)
            session.files.load(path)
        self._compare(session, text)

    def _leave_the_pool(self, _session: Session, _text: list[int]) -> None:
        """Let what is swapped out leave the pool, as if its pages were needed."""
        runner = self._pool.runner
        with runner.scheduler.between_steps():
            while self._chance.random() < 0.8 and runner.kept_texts.make_room():
                pass

    def _new(self, _session: Session, _text: list[int]) -> None:
        if len(self._sessions) < MOST_SESSIONS:
            self._add(self._pool.session(weight=self._chance.choice((0.5, 1.0, 2.0))), [])

    def _reset(self, session: Session, text: list[int]) -> None:
        session.reset()
        text.clear()

    def _close(self, session: Session, _text: list[int]) -> None:
        self._sessions.remove(session)
        del self._texts[session.number]
        session.close()

    def _resize(self, _session: Session, _text: list[int]) -> None:
        if self._fresh is None:
            self._pool.resize(self._chance.choice((60, 90, 150, 400, 1.0, "40KiB", "1MiB")))

    def _check(self) -> None:
        stats = self._pool.stats()
        require(stats.kv_bytes_now <= stats.kv_bytes_budget, f"bytes within the budget: {stats}")
        limit = self._pool.runner.kept_texts.checkpoint_limit
        require(stats.checkpoint_bytes <= limit, f"checkpoints within {limit} bytes: {stats}")
        require(stats.sessions == len(self._sessions), f"{len(self._sessions)} sessions: {stats}")
        for session in self._sessions:
            text = self._texts[session.number]
            require(session.tokens == text, f"session {session.number} has read what it was given")

    def _compare(self, session: Session, text: list[int]) -> None:
        """Compare the logits with those of a fresh reading, if nothing may be evicted.

        Once a text of the pool was longer than the trained context, this is not possible: keys that
        were moved and moved back are rounded, and tokens read meanwhile have seen them at other
        positions.
        """
        fresh = self._fresh
        if fresh is None or not text or session.logits is None or not self._model.gives_last_row:
            return
        self._moved |= any(each._slot.store.counters()["rebases"] > 0 for each in self._sessions)
        if len(text) > self._model.n_ctx_train or self._moved:
            return
        require(session.cache.evicted == 0, "a budget that holds everything evicts nothing")
        fresh.text.truncate(0)
        expected = fresh.decode(text)[-1]
        error = relative_error(session.logits, expected)
        limit = max(20 * self._model.rounding, 3e-2)
        require(error < limit, f"the logits are {error:.3g} from those of a fresh reading")
        self.n_compared += 1

    def _by_oracle(self, session: Session, token: int) -> Any:
        """Return the logits that the next token must have; None if no oracle can compute them."""
        if self._fresh is not None or not session.position:
            return None
        slot, runner = session._slot, session._runner
        slot.expected = max(slot.expected, session.position + 1)
        with runner.live_store(slot):
            runner.shared.note_growth(slot)  # The step does the same before it attends.
            oracle = Oracle.of(self._model, session)
            return None if oracle is None else oracle.next_logits(token)
