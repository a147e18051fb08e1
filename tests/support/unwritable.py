"""Make folders that nobody can write to, not even root."""

from __future__ import annotations

import os

import pytest


def make_folders_unwritable(monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
