"""Accept option names of the previous release, and warn about them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

RENAMED = {"park": "swap", "park_limit": "swap_limit"}
"""Options that were renamed in version 0.2.0; the old names work for one more release."""


DEPRECATED = r".* is called .* since version "
"""The beginning of every warning about a deprecated name, as a regular expression."""


def with_current_names(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments under their current names; emits DeprecationWarning for old ones."""
    for name in RENAMED.keys() & arguments.keys():
        warn_of_name(name, RENAMED[name])
    return {RENAMED.get(name, name): value for name, value in arguments.items()}


def warn_of_name(old: str, new: str) -> None:
    """Warn the caller of our caller that `old` is named `new` since version 0.2.0."""
    message = f"{old} is called {new} since version 0.2.0, and goes with the next release"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
