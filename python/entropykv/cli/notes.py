"""Print notes and progress on stderr, separately from a command's output."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap

from tqdm import tqdm


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


class ProgressBar(tqdm):  # type: ignore[type-arg]
    """Offer tqdm's progress bar to callers that report (done, total)."""

    def advance_to(self, done: int, total: int) -> None:
        """Set the bar to `done` of `total`."""
        self.total = total
        self.update(done - self.n)
