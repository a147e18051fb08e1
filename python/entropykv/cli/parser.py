"""Parse every command: a flag that it does not know is refused in one sentence.

argparse alone reads `-fa` as `-f a`. Users of llama.cpp type many flags of two letters; those that
have no meaning here say what to do instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from entropykv.cli.instead import what_instead
from entropykv.errors import SettingsError


class CommandParser(argparse.ArgumentParser):
    """Parse arguments, and never read a flag as the beginning of another one."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Take what argparse takes; names of options are never completed."""
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Raise SettingsError for a flag of several letters that is not one of this command."""
        for argument in args or ():
            if argument == "--":
                break
            self._refuse_unknown(argument.partition("=")[0])
        return super().parse_known_args(args, namespace)

    def _refuse_unknown(self, flag: str) -> None:
        is_flag = flag.startswith("-") and not flag.startswith("---") and " " not in flag
        if not is_flag or flag in self._option_string_actions or len(flag) < 2:
            return
        if self._subparsers is not None:
            return  # the command looks at the word itself
        advice = what_instead(flag, self.prog.rpartition(" ")[2])
        if advice is not None:
            raise SettingsError(f"{flag} is not an option of {self.prog}; {advice}")
        if flag.startswith("--") or (len(flag) > 2 and flag[1].isalpha() and not _has_number(flag)):
            raise SettingsError(f"{flag} is not an option of {self.prog}; see {self.prog} --help")

    def error(self, message: str) -> NoReturn:
        """Raise SettingsError with one sentence, without the usage, which is long."""
        raise SettingsError(f"{message}; see {self.prog} --help")


def _has_number(flag: str) -> bool:
    """Tell whether a value is written behind a flag of one letter, as in -n128."""
    return flag[2:].lstrip("-").replace(".", "", 1).isdigit()
