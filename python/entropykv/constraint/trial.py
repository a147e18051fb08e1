"""Compile a client's constraint in a process that can be ended, before it is compiled in this one.

Nothing can stop llguidance while it compiles, and its limits do not hold for all that a constraint
can ask for: the intersection of three regular expressions of 20 bytes, or of multiples of three
numbers, would take minutes and gigabytes.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from entropykv.constraint.constraint import Constraint
from entropykv.constraint.sampler import limits_of
from entropykv.errors import SettingsError

MOST_SECONDS = 5.0
"""The most seconds that a constraint may be compiled for."""
MOST_BYTES = 1 << 30
"""The most memory that compiling a constraint may need, where the system can limit it."""
_SURELY_CHEAP = 4_096
"""The most characters of a constraint that is compiled at once, without a trial."""
_COSTLY = ("multipleOf", "patternProperties", "&", "~", "%regex")
"""What may take long even in a short constraint."""
_POLL = 0.02
_MOST_KNOWN = 256
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
except (ImportError, ValueError, OSError):
    pass
import json
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
limits = LLParserLimits(**json.loads(sys.argv[3]))
LLMatcher(LLTokenizer("byte"), sys.stdin.buffer.read().decode(), log_level=0, limits=limits)
"""
"""The program of a child process: it compiles the constraint on its standard input within limited
memory, so that only the child dies of a costly one. It reports no errors, because this process
compiles the constraint once more and reports them in its own words.
"""


class Trials:
    """Try constraints, and remember those that were cheap enough."""

    def __init__(self) -> None:
        """Start with no constraint tried yet."""
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, constraint: Constraint, poll: Callable[[], object]) -> None:
        """Raise SettingsError for a constraint that takes too long, or too much memory, to compile,
        or that is no grammar; a short one is only tried if it has costly words.

        `poll` is called every 20 milliseconds; an exception that it raises ends the trial.
        """
        source = constraint.source
        if len(source) <= _SURELY_CHEAP and not any(word in source for word in _COSTLY):
            return
        key = hashlib.sha256(f"{constraint.kind}\0{source}".encode()).digest()
        with self._lock:
            is_known = key in self._known
        if not is_known:
            self._try(constraint, poll)
        with self._lock:
            self._known[key] = None
            self._known.move_to_end(key)
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)

    @staticmethod
    def _try(constraint: Constraint, poll: Callable[[], object]) -> None:
        import llguidance  # noqa: PLC0415  # Few texts need it.

        place = Path(llguidance.__file__).parent.parent
        arguments = [str(place), str(MOST_BYTES), json.dumps(limits_of(constraint.kind))]
        with tempfile.TemporaryFile() as source:
            source.write(constraint.alone().compiled(lambda _: 0).encode())
            source.seek(0)
            process = subprocess.Popen(  # noqa: S603  # Python itself, with a program of ours.
                [sys.executable, "-I", "-c", _PROGRAM, *arguments],
                stdin=source,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                _wait(process, constraint, poll)
            finally:
                process.kill()
                process.wait()


def _wait(
    process: subprocess.Popen[bytes], constraint: Constraint, poll: Callable[[], object]
) -> None:
    end = time.monotonic() + MOST_SECONDS
    while process.poll() is None:
        poll()
        if time.monotonic() > end:
            raise SettingsError(
                f"the {constraint.kind} takes more than {MOST_SECONDS:g} s to compile; make it "
                "smaller, or less ambiguous"
            )
        time.sleep(_POLL)
    if process.returncode != 0:
        raise SettingsError(
            f"the {constraint.kind} takes more than {MOST_BYTES >> 20:,} MiB to compile; make it "
            "smaller"
        )
