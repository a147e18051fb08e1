"""What the options of the command line and of the server say of freezing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from entropykv.errors import SettingsError
from entropykv.policy.names import schedules
from entropykv.settings.freezing import RAM, Freezing

_OPTIONS = {
    "freeze_limit": "limit",
    "freeze_type": "kv_type",
    "recall_interval": "recall_interval",
}
_SCHEDULE_OPTIONS = {
    "freeze_window": "window",
    "freeze_threshold": "threshold",
    "freeze_rate": "rate",
    "freeze_history": "history",
}


def freezing_of(options: Any) -> Freezing | None:
    """What options say: those of the command line, or of the server.

    `options.policy` may be a list. Raises SettingsError for those that would change nothing.
    """
    policies = [options.policy] if isinstance(options.policy, str) else options.policy
    names = {**_OPTIONS, **_SCHEDULE_OPTIONS}
    given = {name: getattr(options, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    always = all(map(schedules, policies))
    if options.freeze is None and given and not always:
        raise SettingsError(
            f"{_option(given)} is of no use where nothing is frozen; give --freeze ram or --freeze "
            "disk:DIR, too"
        )
    useless = given.keys() & _SCHEDULE_OPTIONS.keys()
    if useless and not any(map(schedules, policies)):
        raise SettingsError(
            f"{_option(useless)} is of policy freeze's schedule; use --policy freeze, or leave it "
            "out"
        )
    if options.freeze is None and not always:
        return None
    where = RAM if options.freeze is None else options.freeze
    return Freezing(where, **{names[name]: given[name] for name in given})


def _option(names: Iterable[str]) -> str:
    return "--" + min(names).replace("_", "-")
