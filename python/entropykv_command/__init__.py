"""Run the command `entropykv`, and report in one sentence if the command line cannot be imported.

This is a package of its own, because a module of entropykv could not report that entropykv itself
cannot be imported.
"""

from __future__ import annotations

import sys

EXIT_REFUSED = 2


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        from entropykv.cli import main as run  # noqa: PLC0415
    except ImportError as error:
        sys.stderr.write(f"entropykv: {error}\n")
        return EXIT_REFUSED
    return run()
