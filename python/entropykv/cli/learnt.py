"""Print and remove what sessions have learnt of models: `entropykv models --learnt`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from entropykv.cli.notes import say
from entropykv.errors import ProfileError, SettingsError
from entropykv.profile.learnt import LearntFile, learnt_files, remove_learnt


def list_learnt(*, as_json: bool) -> int:
    """Print one predictor a line, or all as JSON; returns the exit code."""
    rows = [_describe(file) for file in learnt_files()]
    if as_json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        print("nothing was learnt, or what was learnt was removed")
    else:
        print("\n".join(map(_text, rows)))
    return 0


def remove(names: Sequence[str]) -> int:
    """Remove the predictors of these names, or all; returns the exit code."""
    try:
        removed = remove_learnt(names)
    except OSError as error:
        raise SettingsError(f"{error.filename}: cannot be removed ({error.strerror})") from None
    for path in removed:
        print(f"{path}: removed")
    if names and not removed:
        say(f"nothing was learnt of {', '.join(names)}; `entropykv models --learnt` lists all")
        return 1
    return 0


def _describe(file: LearntFile) -> dict[str, Any]:
    row: dict[str, Any] = {"path": str(file.path)}
    try:
        learnt = file.read()
    except ProfileError as error:
        return {**row, "damage": str(error)}
    if learnt is None:  # Another process has removed it meanwhile.
        return {**row, "damage": f"{file.path}: no such file"}
    return {
        **row,
        "model": learnt.model,
        "n_tokens": learnt.predictor.n_tokens,
        "n_texts": learnt.n_texts,
        "correlation": learnt.predictor.correlation,
        "complete": learnt.complete,
    }


def _text(row: dict[str, Any]) -> str:
    if "damage" in row:
        return f"{row['damage']}; it is learnt again, or remove it"
    r = row["correlation"]
    quality = "not tested yet" if r is None else f"r = {r:.2f}"
    state = "" if row["complete"] else ", more texts improve it"
    return (
        f"{row['model']}: learnt from {row['n_tokens']} tokens ({quality}{state})\n  {row['path']}"
    )
