"""Print notes on stderr, separately from a command's output."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap


def say(text: str) -> None:
    """Print a note to stderr, wrapped between words at the width of the terminal.

    A progress bar makes room for it.
    """
    note = f"entropykv: {text}"
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns
        note = textwrap.fill(note, columns, break_long_words=False, break_on_hyphens=False)
    bars = sys.modules.get("tqdm")  # Without a bar, the library need not be loaded.
    beside = contextlib.nullcontext() if bars is None else bars.tqdm.external_write_mode(sys.stderr)
    with beside:
        print(note, file=sys.stderr)
