"""Ask a process to end in good order: by SIGTERM, or by Ctrl-Break on Windows."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

from entropykv import system


def creation_flags() -> int:
    """Return the `creationflags` for the subprocess.Popen of a process that ask_to_end() ends.

    Windows sends Ctrl-Break to a whole group of processes, so this process needs one of its own.
    Such a process gets no Ctrl-C.
    """
    return subprocess.CREATE_NEW_PROCESS_GROUP if system.WINDOWS else 0


def ask_to_end(process: subprocess.Popen[Any]) -> None:
    """Ask a process to end in good order; on Windows by Ctrl-Break, because SIGTERM would end it at
    once with exit code 1.
    """
    process.send_signal(signal.CTRL_BREAK_EVENT if system.WINDOWS else signal.SIGTERM)
