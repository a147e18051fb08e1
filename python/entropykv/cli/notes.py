"""Print notes to the user: sentences on stderr, beside what a command prints."""

from __future__ import annotations

import shutil
import sys
import textwrap


def say(text: str) -> None:
    """Print a note to stderr: one line, which ends between words where a terminal is too narrow."""
    note = f"entropykv: {text}"
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns
        note = textwrap.fill(note, columns, break_long_words=False, break_on_hyphens=False)
    print(note, file=sys.stderr)
