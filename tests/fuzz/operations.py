"""Choose random operations of a session, and execute them; the same list can be executed again."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropykv import Session
from entropykv.errors import ContextError
from entropykv.settings.freezing import Rung
from tests.fuzz.models import FuzzModel
from tests.fuzz.options import random_budget

FIRST_TOKEN = 3
"""Lower ids are control tokens."""


@dataclass(frozen=True)
class Operation:
    """Hold the name of one of OPERATIONS, and its arguments."""

    name: str
    values: tuple[Any, ...] = ()

    def __str__(self) -> str:
        """Return a short text: only the number of tokens is shown."""
        shown = [
            f"{len(value)} tokens" if isinstance(value, tuple) else repr(value)
            for value in self.values
        ]
        return f"{self.name}({', '.join(shown)})"

    def do(self, session: Session) -> None:
        """Call the session; its errors are not caught."""
        OPERATIONS[self.name](session, *self.values)


def _decode(session: Session, tokens: tuple[int, ...], all_logits: bool) -> None:
    rows = session.decode(tokens, all_logits=all_logits)
    assert rows.shape == (len(tokens) if all_logits else 1, session.model.n_vocab)


def _generate(session: Session, n: int, temperature: float, stop_early: bool) -> None:
    """Generate tokens; the last one that is yielded has not been read yet."""
    if session.logits is None:
        return
    generator = session.generate([], n, temperature=temperature, seed=n)
    n_yielded = 0
    with contextlib.closing(generator):
        try:
            for count, _ in enumerate(generator):
                n_yielded = count + 1
                if stop_early and count == n // 2:
                    break
        except ContextError:
            # The text has reached the trained length, and the last token that was yielded cannot be
            # read.
            if n_yielded == 0:
                raise


def _freeze_and_restore(session: Session) -> None:
    """Freeze everything and restore it; nothing may be lost."""
    core = session._slot.store.core  # type: ignore[attr-defined]
    before = core.entries, core.frozen
    core.freeze_all(session.position - 1)
    core.restore(session.position - 1, frozen_after=session.position - 2)
    assert core.entries + core.frozen == sum(before), (before, core.entries, core.frozen)


def _map(session: Session) -> None:
    """Save the session to a file, and load it into itself: its pages stay in the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session.kv"
        session.files.save(path)
        session.files.load(path)


def _reload(session: Session) -> None:
    """Save the session, and load it into itself."""
    session.files.load_state(session.files.save_state())


OPERATIONS: dict[str, Callable[..., None]] = {
    "decode": _decode,
    "generate": _generate,
    "resize": lambda session, budget: session.cache.resize(budget),
    "truncate": lambda session, position: session.text.truncate(position),
    "reset": lambda session: session.reset(),
    "thaw": lambda session, rung, window: session.cache.thaw(rung, window),
    "freeze_and_restore": _freeze_and_restore,
    "reload": _reload,
    "map": _map,
}


def random_operation(chance: random.Random, model: FuzzModel, session: Session) -> Operation:
    """Return an operation that a session may be asked for at its position; it can be refused."""
    kinds = ["decode"] * 8 + ["generate"] * 3 + ["resize"] * 2 + ["truncate"] * 2
    kinds += ["reload", "map"]
    kinds += ["reset"] if chance.random() < 0.2 else []
    kinds += ["thaw"] * 2 if session.config.freezing else []
    if session.config.freezing and session.config.freezing.limit is None:
        kinds.append("freeze_and_restore")
    kind = chance.choice(kinds)
    if kind == "decode" or (kind == "generate" and session.logits is None):
        return _reading(chance, model, session)
    arguments: tuple[Any, ...] = ()
    if kind == "generate":
        arguments = (chance.randrange(1, 24), chance.choice((0.0, 0.9)), chance.random() < 0.5)
    if kind == "resize":
        arguments = (random_budget(chance, session.config.n_ctx),)
    if kind == "truncate":
        arguments = (_place_to_return_to(chance, session),)
    if kind == "thaw":
        arguments = (chance.choice((Rung.SOFT, Rung.WINDOW, Rung.FULL)), chance.randrange(0, 40))
    return Operation(kind, arguments)


def _reading(chance: random.Random, model: FuzzModel, session: Session) -> Operation:
    n_tokens = min(_tokens_to_read(chance, session), session.config.n_ctx - session.position)
    if n_tokens < 1:
        return Operation("truncate", (session.position // 2,))
    return Operation("decode", (topic(chance, n_tokens, model), chance.random() < 0.2))


def topic(chance: random.Random, n_tokens: int, model: FuzzModel) -> tuple[int, ...]:
    """Return random tokens out of a few, as in a text about one subject."""
    width = chance.choice((1, 8, 40, 300))
    first = chance.randrange(FIRST_TOKEN, max(FIRST_TOKEN + 1, model.n_vocab - width))
    last = min(first + width, model.n_vocab - 1)
    return tuple(chance.randint(first, last) for _ in range(n_tokens))


def _tokens_to_read(chance: random.Random, session: Session) -> int:
    n_ubatch = session.config.n_ubatch
    kind = chance.random()
    if kind < 0.35:
        return chance.randrange(1, 6)
    if kind < 0.6:
        return chance.randrange(1, n_ubatch + 1)
    return min(chance.randrange(1, 4 * n_ubatch + 2), 300)


def _place_to_return_to(chance: random.Random, session: Session) -> int:
    position = session.position
    if chance.random() < 0.5:
        return max(0, position - chance.randrange(0, 40))
    return chance.randrange(0, position + 1)
