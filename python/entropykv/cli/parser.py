"""Parse all commands; an unknown flag is refused in one sentence.

argparse alone reads `-fa` as `-f a`. Users of llama.cpp paste whole command lines: llama_flags.py
lists which of llama.cpp's flags have no effect here, and what to use instead of the others.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from entropykv import _version
from entropykv.cli.llama_flags import LlamaFlag, Treatment, Use, flag_named
from entropykv.cli.terminal import say
from entropykv.errors import EntropyKVError, SettingsError

HELP = ("-h", "--help", "--usage")
"""The words that ask for the first options of a command."""
_MODEL_OPTIONS = {"-m", "--model", "-hf", "-hfr", "--hf-repo", "--demo"}
_IN_MEMORY = "all weights are in main memory: this llama-cpp-python is built without a GPU"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question about the known word that is most like `word`; empty if none is like it."""
    names = {name.lstrip("-"): name for name in known}
    like = difflib.get_close_matches(word.lstrip("-").replace("_", "-"), names, n=1)
    return f"; did you mean {names[like[0]]}?" if like else ""


class _HelpAll(argparse.Action):
    """Show all options and exit."""

    def __init__(self, **options: Any) -> None:
        """Take no value."""
        super().__init__(**options, nargs=0)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print the help that argparse alone would print."""
        print(parser.format_help(), end="")
        parser.exit()


class CommandParser(argparse.ArgumentParser):
    """Parse arguments, and never read one flag as an abbreviation of another.

    A command with many options shows only those of show_first() by --help, and all by --help-all.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Accept the arguments of argparse.ArgumentParser; names of options are never completed."""
        super().__init__(*arguments, **{"allow_abbrev": False, **options})
        self._first: tuple[str, ...] = ()
        self._example = ""
        self._later: Callable[[argparse.ArgumentParser], None] | None = None
        self.add_argument("--usage", action="help", help=argparse.SUPPRESS)
        self.add_argument(
            "--version",
            action="version",
            version=f"entropykv {_version.VERSION}",
            help="show the version and exit",
        )

    def show_first(self, *flags: str, example: str) -> None:
        """Let --help show these options and an example, and --help-all all options."""
        self._first, self._example = flags, example
        self.add_help_all()

    def add_help_all(self) -> None:
        """Add --help-all, which shows all options."""
        self.add_argument("--help-all", action=_HelpAll, help="show all options and exit")

    def add_later(self, add: Callable[[argparse.ArgumentParser], None]) -> None:
        """Let `add` add the options when a command line is parsed, because it takes long, or needs
        an extra; --help does without it: see FirstOptions in options.py.
        """
        self._later = add

    def add_now(self) -> None:
        """Add the options of add_later()."""
        if self._later is not None:
            add, self._later = self._later, None
            add(self)

    def print_help(self, file: Any = None) -> None:
        """Print the options of show_first() and the example, or all options without them."""
        text = self._format_first() if self._first else self.format_help()
        print(text, end="", file=file)

    def _format_first(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [], [])
        formatter.add_text(self.description)
        formatter.start_section("options")
        shown = (*self._first, "--help-all")
        formatter.add_arguments(self._option_string_actions[flag] for flag in shown)
        formatter.end_section()
        return f"{formatter.format_help()}\nexample:\n  {self._example}\n"

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments, and skip flags of llama.cpp that have no effect, naming them in one
        note.

        Raises SettingsError for words that this command does not have.
        """
        self.add_now()
        if "--help-all" not in self._option_string_actions:  # --help shows all options already.
            self.add_argument("--help-all", action=_HelpAll, help=argparse.SUPPRESS)
        notes: dict[str, str] = {}
        kept = self._without_noted(list(args or ()), notes)
        try:
            parsed = super().parse_known_args(kept, namespace)
        except SettingsError:
            if not _MODEL_OPTIONS.intersection(word.partition("=")[0] for word in kept):
                self._refuse_bare_model(kept)
            raise
        self._refuse_bare_model(parsed[1])
        # argparse's own error would name another --help.
        if parsed[1] and self._subparsers is None:
            self.error(f"unrecognized arguments: {' '.join(parsed[1])}")
        if len(notes) == 1:
            ((flag, why),) = notes.items()
            say(f"{flag} changes nothing here: {why}")
        elif notes:
            say(
                "these change nothing here: "
                + ", ".join(f"{flag} ({why})" for flag, why in notes.items())
            )
        return parsed

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Return a value by the type of its option; an EntropyKVError keeps its sentence, of which
        argparse would tell only that the value is invalid.
        """
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if isinstance(error.__context__, EntropyKVError):
                raise error.__context__ from None
            raise

    def _without_noted(self, given: list[str], notes: dict[str, str]) -> list[str]:
        """Remove flags without effect from the words, and add the reason for each to `notes`."""
        kept: list[str] = []
        at = 0
        while at < len(given):
            word = given[at]
            if word == "--":
                return kept + given[at:]
            at += 1
            name, equals, value = word.partition("=")
            flag = self._foreign(name)
            if flag is None:
                self._refuse_unknown(name)
                kept.append(word)
                continue
            n_values = 0 if equals else flag.count_values(given[at:])
            values = [value] if equals else given[at : at + n_values]
            notes[name] = self._why_noted(name, flag, values)
            at += n_values
        return kept

    def _foreign(self, name: str) -> LlamaFlag | None:
        """Return the flag of llama.cpp with this name, if this command runs a model and lacks the
        option, else None.
        """
        if name in self._option_string_actions or "-m" not in self._option_string_actions:
            return None
        flag = flag_named(name)
        return None if flag is None or self._treatment(flag).use is Use.TAKEN else flag

    def _treatment(self, flag: LlamaFlag) -> Treatment:
        return flag.at(self.prog.rpartition(" ")[2])

    def _why_noted(self, name: str, flag: LlamaFlag, values: Sequence[str]) -> str:
        """Return why a flag with these values has no effect; raises SettingsError if it has one."""
        treatment = self._treatment(flag)
        if treatment.use is Use.NOTED:
            return treatment.why
        if values and values[0] in treatment.unless:
            return "it is so anyway"
        if treatment.places_weights and not _has_device():
            return _IN_MEMORY
        raise SettingsError(f"{name} is not an option of {self.prog}; {treatment.why}")

    def _refuse_unknown(self, flag: str) -> None:
        is_flag = flag.startswith("-") and not flag.startswith("---") and " " not in flag
        if not is_flag or flag in self._option_string_actions or len(flag) < 2:
            return
        if self._subparsers is not None:
            return  # The parser of the command examines the word.
        if flag.startswith("--") or (len(flag) > 2 and flag[1].isalpha() and not _has_number(flag)):
            known = [name for name in self._option_string_actions if name.startswith("--")]
            way_out = did_you_mean(flag, known) or f"; see {self.prog} --help"
            raise SettingsError(f"{flag} is not an option of {self.prog}{way_out}")

    def _refuse_bare_model(self, words: Sequence[str]) -> None:
        """Raise SettingsError for a model file without an option before it, as other programs take
        it.
        """
        if "-m" not in self._option_string_actions:
            return
        for before, word in itertools.pairwise(("", *words)):
            if word.endswith(".gguf") and not word.startswith("-") and not before.startswith("-"):
                raise SettingsError(
                    f"{word} has no option before it; a model is given as -m {word}"
                )

    def error(self, message: str) -> NoReturn:
        """Raise SettingsError with one sentence, without the long usage text."""
        raise SettingsError(f"{message}; see {self.prog} --help")


def _has_number(flag: str) -> bool:
    """Tell whether a one-letter flag is directly followed by its value, as in -n128."""
    return flag[2:].lstrip("-").replace(".", "", 1).isdigit()


def _has_device() -> bool:
    """Tell whether there is a device besides main memory that weights could be placed on."""
    import llama_cpp  # noqa: PLC0415  (help and errors need not wait for it)

    return bool(llama_cpp.llama_supports_gpu_offload())
