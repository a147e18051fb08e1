"""Print notes on stderr, separately from a command's output."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator
from typing import TextIO

from entropykv.settings.renamed import DEPRECATED


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


@contextlib.contextmanager
def deprecations_as_notes() -> Iterator[None]:
    """Print each warning about a deprecated name once, as a note: Python itself shows commands
    none.
    """
    show, said = warnings.showwarning, set()

    def say_once(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category is not DeprecationWarning or not re.match(DEPRECATED, str(message)):
            show(message, category, filename, lineno, file, line)
        elif str(message) not in said:
            said.add(str(message))
            say(str(message))

    with warnings.catch_warnings():
        warnings.filterwarnings("always", DEPRECATED, DeprecationWarning)
        warnings.showwarning = say_once
        yield
