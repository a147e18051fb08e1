"""Hold conversations with `entropykv chat`, and compute the answers that it must give."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entropykv import Session
from entropykv.cli import main
from entropykv.llamacpp.model import NO_TEMPLATE

GREEDY = ("--temp", "0", "-t", "1", "-n", "12")
Chat = Callable[..., tuple[str, str]]


def piped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Return a function that runs `entropykv chat` with lines as its input, and returns stdout and
    stderr.
    """

    def run(model: Path, lines: str | bytes, *options: object) -> tuple[str, str]:
        data = lines if isinstance(lines, bytes) else lines.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()
        assert main(["chat", "-m", str(model), *GREEDY, *map(str, options)]) == 0
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return shown.out, shown.err

    return run


def plain(session: Session, *turns: str) -> list[str]:
    """Return a session's answers to turns without a template, 12 tokens each."""
    answers = []
    for text in turns:
        first = session.position == 0
        tokens = session.tokenize(text if first else f"\n{text}", add_bos=first)
        answers.append(answer_to(session, tokens))
    return answers


def answer_to(session: Session, tokens: list[int]) -> str:
    """Return the line that chat prints after these tokens; all tokens of the answer are read."""
    answer = list(session.generate(tokens, 12))
    if len(answer) == 12:
        session.decode(answer[-1:])
    return session.detokenize(answer) + "\n"


def open_plain(model: Path, **options: Any) -> Session:
    return Session(model, **{"n_ctx": 1_000_000, "kv_budget": 1024, "n_threads": 1, **options})


def sentences(errors: str) -> list[str]:
    """Return the notes that chat prints, except those about answers that were cut, and about the
    missing template of tiny models.
    """
    lines = [line for line in errors.splitlines() if line.startswith("entropykv: ")]
    notes = [line.removeprefix("entropykv: ") for line in lines if "raise -n" not in line]
    return [note for note in notes if note != NO_TEMPLATE]
