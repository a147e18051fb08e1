"""Print notes on stderr, separately from a command's output."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
from typing import TextIO


def say(text: str) -> None:
    """Print a note to stderr, wrapped between words at the width of the terminal.

    A progress bar makes room for it.
    """
    note = f"entropykv: {text}"
    if (columns := columns_of(sys.stderr)) is not None:
        note = textwrap.fill(note, columns, break_long_words=False, break_on_hyphens=False)
    bars = sys.modules.get("tqdm")  # Without a bar, the library need not be loaded.
    beside = contextlib.nullcontext() if bars is None else bars.tqdm.external_write_mode(sys.stderr)
    with beside:
        print(note, file=sys.stderr)


def columns_of(stream: TextIO) -> int | None:
    """Return how many columns the terminal of a stream has; None for a file or a pipe."""
    return shutil.get_terminal_size().columns if stream.isatty() else None
