"""Declare the options that several commands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from entropykv.cli.notes import say
from entropykv.errors import SettingsError
from entropykv.model.shipped import DEMOS, Demo, path_of_model
from entropykv.policy.names import AUTO, POLICY_SYNTAX, policy_help
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.options import (
    KV_CHOICES,
    MOST_MICRO_BATCH,
    MOST_THREADS,
    MOST_TOKENS,
    STORES,
)

_DEFAULTS = CacheOptions()


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
    """Read llama.cpp's --keep as --sinks, of which a model needs a few to work at all."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,  # noqa: ARG002
    ) -> None:
        """Protect so many first tokens; raises ArgumentError for -1, the whole prompt."""
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


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add -m, and --demo or -hf in its place: see demo_of() and fetch_named()."""
    model = parser.add_mutually_exclusive_group(required=True)
    add_model_option(parser, model)
    model.add_argument(
        "--demo",
        choices=DEMOS,
        help="a model that comes with entropykv, and its profile (see `entropykv models`)",
    )


def add_model_option(
    parser: argparse.ArgumentParser, group: argparse._MutuallyExclusiveGroup
) -> None:
    """Add -m, and -hf with --hf-file; others of the group may take the place of both."""
    group.add_argument(
        "-m",
        "--model",
        type=path_of_model,
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


def add_budget_options(
    parser: argparse.ArgumentParser, *, n_ctx: int = _DEFAULTS.n_ctx, kv_budget: str = "1.0"
) -> None:
    """Add the model, the context and the budget."""
    add_model_options(parser)
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=integer(0),
        default=n_ctx,
        metavar="N",
        help="longest sequence in tokens; it may be longer than what the model was trained for "
        "(0: just that; default: %(default)s)",
    )
    group = parser.add_argument_group("KV budget")
    group.add_argument(
        "--kv-budget",
        default=kv_budget,
        metavar="B",
        help="fraction of the context in (0, 1], tokens per KV head, or bytes such as 64MiB; for "
        "several conversations: a fraction of what all their contexts take, or the tokens or bytes "
        "of all (default: %(default)s)",
    )
    group.add_argument(
        "--policy",
        default=AUTO,
        metavar=POLICY_SYNTAX,
        help=policy_help() + " (default: %(default)s)",
    )
    add_entropy_config(group)
    group.add_argument(
        "--kv-type",
        choices=KV_CHOICES,
        default=_DEFAULTS.kv_type,
        help="how K and V are stored; auto: f16 where a budget in bytes holds the whole context, "
        "else q8_0 (default: %(default)s)",
    )
    add_protection_options(group)


def add_entropy_config(group: argparse._ArgumentGroup) -> None:
    """Add --entropy-config."""
    group.add_argument(
        "--entropy-config",
        metavar="FILE",
        help="entropy profile of the model's heads, JSON (default: what `entropykv calibrate` left "
        "beside the model)",
    )


def add_protection_options(group: argparse._ArgumentGroup) -> None:
    """Add --sinks and --recent-window: entries that no eviction takes."""
    group.add_argument(
        "--sinks",
        type=integer(0),
        default=_DEFAULTS.n_sinks,
        metavar="N",
        help="first tokens that are never evicted (default: %(default)s)",
    )
    add_keep(group)
    group.add_argument(
        "--recent-window",
        type=integer(1),
        metavar="N",
        help="newest tokens that every KV head keeps (default: half of the mean budget; policies "
        "layer and layer-range: half of each layer's own budget, sinks included)",
    )


def add_store_options(group: argparse._ArgumentGroup) -> None:
    """Add options of which store, how many threads, and how much of a prompt is read at a time."""
    group.add_argument(
        "--store",
        choices=STORES,
        default=_DEFAULTS.store,
        help="headwise: per KV head, on the CPU; flat: llama.cpp's own cache, any model and "
        "backend; auto: headwise where it can serve the model (default: %(default)s)",
    )
    add_threads_option(group)
    group.add_argument(
        "-ub",
        "--ubatch-size",
        type=integer(1, MOST_MICRO_BATCH),
        default=_DEFAULTS.micro_batch,
        help=f"tokens of the prompt read at a time (default: {_DEFAULTS.micro_batch})",
    )


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


def threads(text: str) -> int:
    """Read a number of threads, as an argparse type; -1 is llama.cpp's word for 0."""
    return max(0, integer(-1, MOST_THREADS)(text))


def add_threads_option(group: argparse._ActionsContainer) -> None:
    """Add -t."""
    group.add_argument(
        "-t",
        "--threads",
        type=threads,
        default=0,
        help="0, the default: one for every core that this process may use (physical cores, "
        "affinity, CPU quota of the cgroup)",
    )


def demo_of(options: argparse.Namespace) -> Demo | None:
    """Return the model of --demo, and put its path in the place of -m's."""
    if options.demo is None:
        return None
    demo = DEMOS[options.demo]
    options.model = str(demo.path)
    return demo


def fetch_named(options: argparse.Namespace) -> None:
    """Fetch the model of -hf, and put its path in the place of -m's; raises HubError.

    It may take long: whatever else can be wrong with the options is checked before.
    """
    if options.hf_repo is None:
        if options.hf_file is not None:
            raise SettingsError("--hf-file names a file of a repository; give that with -hf")
        return
    from entropykv.hub import fetch_model  # noqa: PLC0415  # it needs the extra hub

    try:
        options.model = str(fetch_model(options.hf_repo, options.hf_file, tell=say))
    except KeyboardInterrupt:
        say("interrupted: what has come is kept, and the same command goes on from there")
        raise


def check_writable(path: str | None) -> None:
    """Find out whether a file can be written before an hour of work, not after it."""
    if path is None:
        return
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; give a file that can be written") from None


def check_output(path: str) -> None:
    """Check as check_writable() does, but create nothing: the file appears in the end, at once."""
    folder = Path(path).resolve().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SettingsError(f"{path}: cannot be written; give a file in a writable directory")
