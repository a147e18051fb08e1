"""Add the options that several commands share, most of which are declared in settings/, and say
which options --help shows first: FirstOptions.

Nothing here loads llama.cpp or numpy, which take long, so that --help can show the first options
of a command without its module.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropykv.cli.parser import CommandParser
from entropykv.cli.terminal import say
from entropykv.errors import SettingsError
from entropykv.files import NOT_UTF8, new_file, read_text
from entropykv.model.shipped import DEMOS, Demo, path_of_model
from entropykv.settings import flags
from entropykv.settings.cache_options import SWITCH, CacheOptions
from entropykv.settings.freezing import RUNGS, WITHOUT_REWALK, Freezing, Recovery
from entropykv.settings.options import MOST_THREADS, MOST_TOKENS, of_group
from entropykv.settings.options import declared as declared_options
from entropykv.settings.sampling import TEMPERATURE, Sampling

_DEFAULTS = CacheOptions()
CONTEXT = 1_000_000
"""The most tokens of a conversation or a document, unless -c says otherwise. Memory depends on the
entries that are kept, not on this number.
"""


def integer(least: int, most: int = MOST_TOKENS) -> Callable[[str], int]:
    """Make an argparse type that reads an integer from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of {least} or more")
        if value > most:
            raise argparse.ArgumentTypeError(f"{text} is too much; give {most} or less")
        return value

    return parse


def list_of(parse: Callable[[str], object]) -> Callable[[str], list[object]]:
    """Make an argparse type that reads values separated by commas."""

    def parse_list(text: str) -> list[object]:
        return [parse(part) for part in text.split(",")]

    return parse_list


class _Keep(argparse.Action):
    """Read llama.cpp's --keep as --sinks, and require a few sinks, without which a model does not
    work.
    """

    def __call__(self, _parser: Any, namespace: Any, values: Any, _option: Any = None) -> None:
        """Set the number of sinks; raises ArgumentError for -1, the whole prompt."""
        if values < 0:
            raise argparse.ArgumentError(
                self, "the length of the prompt is not known before the budget is; give a number"
            )
        namespace.sinks = max(values, _DEFAULTS.n_sinks)


def add_keep(group: argparse._ActionsContainer) -> None:
    """Add --keep, llama.cpp's name of --sinks."""
    group.add_argument(
        "--keep",
        dest="sinks",
        action=_Keep,
        default=argparse.SUPPRESS,
        type=integer(-1),
        metavar="N",
        help=f"--sinks by llama.cpp's name, and never fewer than {_DEFAULTS.n_sinks}",
    )


def fraction(text: str) -> float:
    """Read a number in (0, 1], as an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction in (0, 1]")
    return value


def add_model_options(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add -m, with --demo and -hf as alternatives: see demo_of() and fetch_named().

    Returns their group, for a command that has a further alternative.
    """
    model = parser.add_mutually_exclusive_group(required=True)
    add_model_option(parser, model)
    model.add_argument(
        "--demo",
        choices=DEMOS,
        help="a model that comes with entropykv, and its profile (see `entropykv models`)",
    )
    return model


def add_model_option(
    parser: argparse.ArgumentParser, group: argparse._MutuallyExclusiveGroup
) -> None:
    """Add -m, and -hf with --hf-file; other options of the group are alternatives to both."""
    group.add_argument(
        "-m",
        "--model",
        type=_model,
        metavar="FILE",
        help="GGUF model, or the name of one that `entropykv models` lists",
    )
    group.add_argument(
        "-hf",
        "-hfr",
        "--hf-repo",
        metavar="USER/MODEL[:QUANT]",
        help="a model of the Hugging Face Hub, which is fetched once (default of QUANT: Q4_K_M, "
        "else Q8_0, else the first; needs the extra hub)",
    )
    parser.add_argument(
        "-hff",
        "--hf-file",
        metavar="FILE",
        help="with -hf: the model's file in the repository, or a pattern of its name",
    )


def _model(text: str) -> str:
    """Read the path or the name of a model, as an argparse type."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; give the path of a GGUF file")
    return path_of_model(text)


def add_option(
    group: argparse._ActionsContainer,
    owner: type[CacheOptions | Freezing | Recovery | Sampling],
    name: str,
    **other: Any,
) -> None:
    """Add the option that the field `name` of a dataclass declares: settings/options.py.

    `other` replaces arguments of add_argument(). Options of CacheOptions and Sampling have the
    default of their field; all others default to None, for values that are not given.
    """
    declared = declared_options(owner)[name]
    said: dict[str, Any] = {"help": declared.help, "metavar": declared.metavar}
    said["default"] = None if owner in (Freezing, Recovery) else declared.default
    said["dest"] = declared.name
    if declared.choices:
        said["choices"] = declared.choices
    elif declared.kind is int:
        said["type"] = integer(int(declared.least or 0), int(declared.most))
    elif declared.kind is not str:
        said["type"] = declared.kind
    shown = other.pop("shown_default", None)
    said |= other
    if shown is None:
        shown = other.get("default")
    said["help"] += f" (default: {declared.shown_default if shown is None else shown})"
    said["help"] = said["help"].replace("%", "%%")
    group.add_argument(*declared.flags, **said)


def add_budget_options(
    parser: argparse.ArgumentParser,
    *,
    endless: bool = False,
    kv_budget: str = str(_DEFAULTS.kv_budget),
) -> argparse._MutuallyExclusiveGroup:
    """Add the model, the context and the budget; returns the group of the model.

    `endless`: without -c, the context is None, and open_engine() takes CONTEXT.
    """
    model = add_model_options(parser)
    if endless:
        add_option(
            parser,
            CacheOptions,
            "n_ctx",
            default=None,
            shown_default=f"{CONTEXT:,}, and fractions of what the model was trained for",
            help="longest text in tokens, of which a fraction as --kv-budget is taken; 0: what the "
            "model was trained for",
        )
    else:
        add_option(parser, CacheOptions, "n_ctx")
    group = parser.add_argument_group("KV budget")
    add_option(group, CacheOptions, "kv_budget", default=kv_budget)
    add_option(group, CacheOptions, "policy")
    add_option(group, CacheOptions, "entropy_config")
    add_option(group, CacheOptions, "kv_type")
    add_protection_options(group)
    return model


def add_protection_options(group: argparse._ArgumentGroup, **other: Any) -> None:
    """Add --sinks and --recent-window: entries that are protected from eviction."""
    add_option(group, CacheOptions, "n_sinks", **other)
    add_keep(group)
    add_option(group, CacheOptions, "recent_window")


def add_store_options(group: argparse._ArgumentGroup) -> None:
    """Add options of the store, the numbers of threads, and how much of a prompt is read
    at a time.
    """
    add_option(group, CacheOptions, "store")
    add_threads_option(group)
    add_option(group, CacheOptions, "n_ubatch", default=_DEFAULTS.micro_batch)
    add_draft_options(group)


def add_draft_options(group: argparse._ActionsContainer) -> None:
    """Add the options of drafts: how tokens are guessed ahead, and how many."""
    add_option(group, CacheOptions, "spec_type", type=spec_type)
    for name in of_group(CacheOptions, "drafts"):
        add_option(group, CacheOptions, name)


def spec_type(text: str) -> str:
    """Read --spec-type, as an argparse type; llama.cpp's kinds of n-grams are one kind here."""
    if text == "draft-simple":
        return "draft"
    return "ngram" if text.startswith("ngram-") else text


def add_threads_option(group: argparse._ActionsContainer, name: str = "n_threads") -> None:
    """Add -t, or -tb for `n_threads_batch`."""
    add_option(group, CacheOptions, name, type=threads)


def utf8(text: str) -> str:
    """Check that an argument is a text, as an argparse type; names of files may be any bytes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(NOT_UTF8) from None
    return text


def add_fixed_threads_option(group: argparse._ActionsContainer) -> None:
    """Add --fixed-threads, which is None if it is not given."""
    declared = declared_options(CacheOptions)["fixed_threads"]
    group.add_argument(*declared.flags, action="store_const", const=True, help=declared.help)


def threads(text: str) -> int:
    """Read a number of threads, as an argparse type; llama.cpp's -1 means 0."""
    return max(0, integer(-1, MOST_THREADS)(text))


def add_learn_option(group: argparse._ActionsContainer) -> None:
    """Add --learn, which alone means on."""
    add_option(group, CacheOptions, "learn", nargs="?", const=True, type=_on_or_off)


def _on_or_off(text: str) -> bool:
    """Read a switch, as an argparse type."""
    if text not in SWITCH:
        raise argparse.ArgumentTypeError(f"cannot be {text!r}; use on or off")
    return SWITCH[text]


def add_freeze_options(parser: argparse.ArgumentParser) -> None:
    """Add options of where evicted entries are kept, and of policy rolling-freeze's schedule."""
    group = parser.add_argument_group("freezing (headwise store)")
    add_option(group, CacheOptions, "freeze")
    schedule = parser.add_argument_group("schedule of policy rolling-freeze")
    for name, declared in declared_options(Freezing).items():
        add_option(schedule if declared.group == "schedule" else group, Freezing, name)


_REWALK = ", rewalk (and write the last tokens again; as many are held back)"


def add_recovery_options(parser: argparse.ArgumentParser, *, rewalks: bool = True) -> None:
    """Add options of what is done when the output becomes uncertain.

    Without `rewalks`, written tokens are never replaced, so the options of rewalks are left out.
    """
    group = parser.add_argument_group("recovery (where entries are frozen)")
    add_option(
        group,
        CacheOptions,
        "recovery",
        choices=tuple(RUNGS) if rewalks else WITHOUT_REWALK,
        help=declared_options(CacheOptions)["recovery"].help
        + ": soft (what would stay frozen for more than a step), window (what the last steps "
        f"froze), full (all){_REWALK * rewalks}",
    )
    add_option(group, Recovery, "deviations")
    add_option(group, Recovery, "window")
    if rewalks:
        add_option(group, Recovery, "rewalk", type=integer(1))


def add_no_chat(group: argparse._ActionsContainer) -> None:
    """Add --no-chat, and llama-cli's name for it."""
    group.add_argument(
        "--no-chat",
        "-no-cnv",
        "--no-conversation",
        dest="no_chat",
        action="store_true",
        help="plain text, without the model's chat template",
    )


def add_prompt_options(group: argparse._ActionsContainer, what: str) -> None:
    """Add -p, -f and -e; `what` describes their text: the prompt, or the first turn."""
    group.add_argument(
        *("-p", "--prompt"), type=utf8, metavar="TEXT", help=f"{what}; after -f's text if both"
    )
    group.add_argument(
        "-f", "--file", metavar="FILE", help=f"read {what} from a file (-: standard input)"
    )
    group.add_argument(
        "-e", "--escape", action="store_true", help=r"read \n, \t, \" and \\ in -p and -sys"
    )


def add_system_options(group: argparse._ActionsContainer, where: str) -> None:
    """Add -sys and -sysf; `where` names the text that the system message precedes."""
    group.add_argument(
        "-sys",
        "--system",
        "--system-prompt",
        type=utf8,
        metavar="TEXT",
        help=f"text before {where}, in the model's chat template",
    )
    group.add_argument(
        "-sysf",
        "--system-prompt-file",
        dest="system",
        type=text_of_file,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="read it from a file",
    )


def text_of_file(path: str) -> str:
    """Read the text of a file, as an argparse type; raises SettingsError if it cannot be read."""
    return read_text(path, SettingsError)


def demo_of(options: argparse.Namespace) -> Demo | None:
    """Return the model of --demo, and set its path as that of -m; None without --demo."""
    if options.demo is None:
        return None
    demo = DEMOS[options.demo]
    options.model = str(demo.path)
    return demo


def fetch_named(options: argparse.Namespace) -> None:
    """Fetch the model of -hf, if that is given, and set its path as that of -m.

    Fetching may take long, so all other checks of the options come before. Raises HubError if that
    fails, MissingExtraError without the extra hub, and SettingsError for --hf-file without -hf.
    """
    if options.hf_repo is None:
        if options.hf_file is not None:
            raise SettingsError("--hf-file names a file of a repository; give that with -hf")
        return
    from entropykv.hub import fetch_model  # noqa: PLC0415  # it needs the extra hub

    try:
        options.model = str(fetch_model(options.hf_repo, options.hf_file, tell=say))
    except KeyboardInterrupt:
        say("interrupted: the downloaded part is kept, and the same command continues from there")
        raise


def check_writable(path: str | None) -> None:
    """Raise SettingsError unless a file can be written: before an hour of work instead of after it.

    An empty file is created if there is none. `path` None: nothing is checked.
    """
    if path is None:
        return
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; give a file that can be written") from None


def check_output(path: str) -> None:
    """Raise SettingsError unless a path can be written, but create nothing: the file is written at
    the end, at once.
    """
    folder = Path(path).resolve().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SettingsError(f"{path}: cannot be written; give a file in a writable directory")


def write_output(path: str, text: str) -> None:
    """Write a text file at once; raises SettingsError if that fails."""
    try:
        with new_file(path) as file:
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; give a file that can be written") from None


_FIRST_OF_CACHE = ("n_ctx", "kv_budget", "policy", "freeze", "n_threads")


@dataclass(frozen=True)
class FirstOptions:
    """Hold how a command introduces itself, and the options that its --help shows."""

    usage: str
    description: str
    shown: tuple[str, ...]
    example: str
    add: Callable[[CommandParser], None]

    def parser(self, prog: str) -> CommandParser:
        """Return a parser that knows only the options that this command's --help shows first, so
        that they can be printed without loading the modules of the command.
        """
        parser = CommandParser(prog=prog, usage=self.usage, description=self.description)
        self.add(parser)
        self.show_in(parser)
        return parser

    def show_in(self, parser: CommandParser) -> None:
        """Let --help of a parser show only the options in `shown`, with the example."""
        parser.show_first(*self.shown, example=self.example)


def _add_those_of_run(parser: CommandParser) -> None:
    add_model_options(parser)
    add_prompt_options(parser, "the prompt")
    add_system_options(parser, "the prompt")
    for name in _FIRST_OF_CACHE:
        add_option(parser, CacheOptions, name)
    layers = "layers on the GPU, or all; K and V follow them if --store allows it"
    add_option(parser, CacheOptions, "n_gpu_layers", help=layers)
    add_option(parser, Sampling, "temperature", default=TEMPERATURE)
    for flag in (flags.N_PREDICT, flags.DOCUMENT, flags.SAVE_SESSION, flags.STATS_JSON):
        flag.add(parser)


def _add_those_of_serve(parser: CommandParser) -> None:
    add_model_option(parser, parser.add_mutually_exclusive_group())
    for name in _FIRST_OF_CACHE:
        add_option(parser, CacheOptions, name)
    add_option(parser, CacheOptions, "n_gpu_layers")
    add_option(parser, CacheOptions, "n_sequences", default=1)
    for flag in (
        flags.ALIAS,
        flags.HOST,
        flags.PORT,
        flags.API_KEY,
        flags.DOCUMENTS,
        flags.MODELS_PRESET,
        flags.REPLICAS,
    ):
        flag.add(parser)


RUN = FirstOptions(
    "%(prog)s (-m MODEL | -hf USER/MODEL | --demo NAME) [options]",
    "Read a prompt and generate text inside a KV budget. The text goes to stdout, progress and the "
    "final table to stderr.",
    (
        *("-m", "-hf", "--demo", "-p", "-f", "-sys", "-n", "--temp", "-c", "--kv-budget"),
        *("--policy", "--freeze", "-t", "-ngl", "--document", "--save-session", "--stats-json"),
    ),
    'entropykv run -m model.gguf -f long.txt -p "What happened?" --kv-budget 20%',
    _add_those_of_run,
)
SERVE = FirstOptions(
    "%(prog)s (-m MODEL | -hf USER/MODEL | --models-preset FILE) [options]",
    "Serve models to OpenAI's clients inside a KV budget, and a page to chat with them: "
    "llama_cpp.server's options, also as llama-server spells them, and the budget's. Every option "
    "may also come from an environment variable such as ENTROPYKV_API_KEY.",
    (
        *("-m", "-hf", "--kv-budget", "-c", "-np", "--policy", "--freeze", "-t", "-ngl", "-a"),
        *("--host", "--port", "--api-key", "--documents", "--models-preset", "--replicas"),
    ),
    "entropykv serve -m model.gguf --kv-budget 512MiB --parallel 4",
    _add_those_of_serve,
)
FIRST = {"run": RUN, "serve": SERVE}
"""The commands whose --help this module shows."""
