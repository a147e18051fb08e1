"""Make CacheOptions of what users say at the command line, or in the settings of the server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from entropykv.errors import SettingsError
from entropykv.policy.names import schedules
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.declared import declared, of_group
from entropykv.settings.freezing import RAM, Freezing
from entropykv.settings.recovery import RUNGS, Recovery


def cache_options_of(
    options: Any, *, rungs: Sequence[str] = tuple(RUNGS), **others: Any
) -> CacheOptions:
    """Return the cache options that options of the command line or of the server ask for.

    A field is read where both name it alike; `others` are fields that they name differently, and
    those of a pool. `rungs` are the rungs of the recovery ladder that may be asked for.
    """
    alike = {
        field: getattr(options, each.name)
        for field, each in declared(CacheOptions).items()
        if each.name == each.server_name and each.group != "pool"
        if getattr(options, each.name, None) is not None
    }
    ladder = {"freeze": freezing_of(options), "recovery": recovery_of(options, rungs)}
    return CacheOptions(**{**alike, **ladder, **others})


def freezing_of(options: Any) -> Freezing | None:
    """Return the settings of freezing that options of the command line or of the server ask for.

    `options.policy` may be a list. Raises SettingsError for options that would have no effect.
    """
    policies = [options.policy] if isinstance(options.policy, str) else options.policy
    given = _given(Freezing, options)
    always = all(map(schedules, policies))
    if options.freeze is None and given and not always:
        raise SettingsError(
            f"{_flag(given)} is of no use where nothing is frozen; give --freeze ram or --freeze "
            "disk:DIR, too"
        )
    useless = [name for name in given if name in of_group(Freezing, "schedule")]
    if useless and not any(map(schedules, policies)):
        raise SettingsError(
            f"{_flag(useless)} belongs to --policy rolling-freeze; use that policy, or leave it out"
        )
    if "recall_prompt" in given and (always or given.get("recall_interval") == 0):
        raise SettingsError(
            "--recall-prompt is of no use with --policy rolling-freeze, which brings entries back "
            "by its schedule, and with --recall-interval 0, which brings none back; leave it out"
        )
    if options.freeze is None and not always:
        return None
    where = RAM if options.freeze is None else options.freeze
    return Freezing(where, **given)


def recovery_of(options: Any, rungs: Sequence[str] = tuple(RUNGS)) -> Recovery | None:
    """Return the recovery ladder if the options ask for one; raises SettingsError for its options
    without it.

    `rungs` are those that may be asked for; without the last one, options of a rewalk do not exist.
    """
    given = _given(Recovery, options)
    if options.recovery is None:
        if given:
            choices = f"{', '.join(rungs[:-1])} or {rungs[-1]}"
            raise SettingsError(f"nothing is watched; give --recovery {choices}")
        return None
    return Recovery(highest=RUNGS[options.recovery], **given)


def _given(kind: type[Freezing | Recovery], options: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that options say anything of."""
    values = {
        field: getattr(options, each.name, None)
        for field, each in declared(kind).items()
        if each.flags
    }
    return {field: value for field, value in values.items() if value is not None}


def _flag(fields: Iterable[str]) -> str:
    """Return the option that the first of these fields of Freezing has, in alphabetical order."""
    return min(declared(Freezing)[field].flags[0] for field in fields)
