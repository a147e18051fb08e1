"""`entropykv eval --recovery` climbs the recovery ladder as a session does while it writes an
answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entropykv import Freezing, Session
from entropykv.evaluation.reading import read, write
from entropykv.session.recovery import Climb
from entropykv.settings.recovery import Recovery, Rung
from tests.support.eval_command import Command
from tests.support.logits import tokens_for

LADDER = Recovery(
    highest=Rung.FULL, smooth=1, deviations=0.01, warm_up=2, memory=8, refractory=0, calm=100
)
N_TOKENS = 24


def session_of(model: Path, climbs: list[Climb]) -> Session:
    options: dict[str, Any] = {"policy": "uniform", "freeze": Freezing("ram", recall_interval=0)}
    return Session(
        model,
        n_ctx=256,
        n_threads=1,
        kv_budget=40,
        recovery=LADDER,
        on_climb=climbs.append,
        **options,
    )


def test_a_text_is_the_one_that_a_session_generates(uneven_llama: Path) -> None:
    prompt = tokens_for(120)
    generated: list[Climb] = []
    with session_of(uneven_llama, generated) as session:
        expected = list(session.generate(prompt, N_TOKENS))
    climbs: list[Climb] = []
    with session_of(uneven_llama, climbs) as session:
        logits, _ = read(session, prompt, lambda _: None)
        written = write(session, logits, N_TOKENS, lambda _: None)
    assert written.tokens == expected
    assert climbs == generated
    assert sum(climb.restored for climb in climbs) > 0


def test_the_ladder_reaches_every_session(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Recovery | None] = []
    original = Session.__init__

    def noting(self: Session, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        seen.append(self.recovery)

    monkeypatch.setattr(Session, "__init__", noting)
    text = tmp_path / "text.txt"
    text.write_text("the and of to in on at. " * 20, encoding="utf-8")
    short = ("--text", text, "--prompt", 40, "--continuation", 4, "--greedy", 4)
    command = Command(tiny_llama, tmp_path)
    frozen = ("--kv-budget", "20", "--policy", "uniform", "--freeze", "ram")
    command.rows(*short, *frozen, "--recovery", "window", "--recovery-deviations", 1.5)
    assert set(seen) == {Recovery(highest=Rung.WINDOW, deviations=1.5)}
    assert command.result()["settings"]["recovery"]["deviations"] == 1.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--recovery", "full"), "recovery restores what is frozen"),
        (("--recovery", "rewalk", "--freeze", "ram"), "rewalk"),
        (("--recovery-window", 4, "--freeze", "ram"), "soft, window or full"),
    ],
)
def test_a_ladder_of_no_use_is_refused(
    tiny_llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[object, ...],
    words: str,
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the and of to in on at. " * 20, encoding="utf-8")
    short = ("--text", text, "--prompt", 40, "--continuation", 4)
    assert Command(tiny_llama, tmp_path).code(*short, *options) == 2
    errors = capsys.readouterr().err
    assert words in errors
    assert errors.count("\n") == 1
