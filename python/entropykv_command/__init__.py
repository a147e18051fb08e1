"""The command `entropykv`.

It lies outside of the package because it must be able to say in one sentence why the package cannot
be imported: beside a llama-cpp-python of another release, importing it is what is refused.
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
