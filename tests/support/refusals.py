"""Check conversions that must be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entropykv.convert import convert
from entropykv.errors import EntropyKVError, ModelFileError


def refused(
    source: Path,
    target: Path,
    message: str,
    kind: type[EntropyKVError] = ModelFileError,
    **options: Any,
) -> None:
    """Assert a refusal with this message, in one sentence, that leaves the directory unchanged."""
    before = sorted(target.parent.iterdir()) if target.parent.is_dir() else []
    with pytest.raises(kind, match=message) as caught:
        convert(source, target, **options)
    assert "\n" not in str(caught.value)
    assert before == (sorted(target.parent.iterdir()) if target.parent.is_dir() else [])
