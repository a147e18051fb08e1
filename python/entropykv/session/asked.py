"""Build cache settings from options of the command line and of the server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from entropykv.errors import SettingsError
from entropykv.policy.names import schedules
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.freezing import RAM, Freezing
from entropykv.settings.recovery import Recovery, Rung

RUNGS = {rung.name.lower(): rung for rung in Rung if rung}
"""The rungs of the recovery ladder, by their names in options."""
WITHOUT_REWALK = tuple(name for name, rung in RUNGS.items() if rung is not Rung.REWALK)
"""The rungs that never replace written tokens."""

_SAME = ("kv_budget", "policy", "kv_type", "store", "entropy_config", "recent_window")
"""Fields of CacheOptions that the options have under the same name."""
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
_RECOVERY_OPTIONS = {
    "recovery_deviations": "deviations",
    "recovery_window": "window",
    "rewalk": "rewalk",
}


def cache_options_of(
    options: Any, *, rungs: Sequence[str] = tuple(RUNGS), **others: Any
) -> CacheOptions:
    """Return the cache options that options of the command line or of the server ask for.

    `others` are fields of CacheOptions that command line and server name differently. `rungs` are
    the rungs of the recovery ladder that may be asked for.
    """
    same = {name: getattr(options, name) for name in _SAME}
    return CacheOptions(
        **{**same, **others},
        learn=bool(getattr(options, "learn", False)),
        n_sinks=options.sinks,
        freeze=freezing_of(options),
        recovery=recovery_of(options, rungs),
    )


def freezing_of(options: Any) -> Freezing | None:
    """Return the settings of freezing that options of the command line or of the server ask for.

    `options.policy` may be a list. Raises SettingsError for options that would have no effect.
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
            f"{_option(useless)} belongs to --policy rolling-freeze; use that policy, or leave it "
            "out"
        )
    if options.freeze is None and not always:
        return None
    where = RAM if options.freeze is None else options.freeze
    return Freezing(where, **{names[name]: given[name] for name in given})


def recovery_of(options: Any, rungs: Sequence[str] = tuple(RUNGS)) -> Recovery | None:
    """Return the recovery ladder if the options ask for one; raises SettingsError for its options
    without it.

    `rungs` are those that may be asked for; without the last one, options of a rewalk do not exist.
    """
    given: dict[str, Any]
    given = {name: getattr(options, option, None) for option, name in _RECOVERY_OPTIONS.items()}
    given = {name: value for name, value in given.items() if value is not None}
    if options.recovery is None:
        if given:
            choices = f"{', '.join(rungs[:-1])} or {rungs[-1]}"
            raise SettingsError(f"nothing is watched; give --recovery {choices}")
        return None
    return Recovery(highest=RUNGS[options.recovery], **given)


def _option(names: Iterable[str]) -> str:
    return "--" + min(names).replace("_", "-")
