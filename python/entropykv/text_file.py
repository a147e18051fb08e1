"""Texts that users name."""

from __future__ import annotations

import os
from pathlib import Path

from entropykv.errors import EntropyKVError


def read_text(path: str | os.PathLike[str], refusal: type[EntropyKVError]) -> str:
    """Content of a UTF-8 file; `refusal`, in one sentence, for any other file or none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise refusal(f"{path}: {error.strerror}; give a text file") from None
    except UnicodeDecodeError:
        raise refusal(f"{path}: not a text in UTF-8; convert it first") from None
