"""Print notes to the user on stderr, separately from a command's output."""

from __future__ import annotations

import shutil
import sys
import textwrap


def say(text: str) -> None:
    """Print a note to stderr, wrapped between words at the width of the terminal."""
    note = f"entropykv: {text}"
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns
        note = textwrap.fill(note, columns, break_long_words=False, break_on_hyphens=False)
    print(note, file=sys.stderr)
