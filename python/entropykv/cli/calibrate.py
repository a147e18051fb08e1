"""`entropykv calibrate`: measure what each head of a model needs, and write its profile."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from entropykv.calibration.hf import calibrate_hf
from entropykv.calibration.measure import QUICK, CalibrationSettings, Extent, calibrate
from entropykv.calibration.results import read_results
from entropykv.calibration.spread import Spread
from entropykv.cli.options import (
    add_model_option,
    add_threads_option,
    check_output,
    fetch_named,
    integer,
)
from entropykv.cli.parser import CommandParser
from entropykv.cli.plots import check_plot, draw
from entropykv.cli.profile import comparison_lines, summary_line
from entropykv.cli.terminal import EXIT_INTERRUPTED, InterruptionError, noted_interrupts, say
from entropykv.cluster import RAY_HELP, connected
from entropykv.errors import CalibrationError, SettingsError
from entropykv.evaluation.texts import read_texts
from entropykv.profile.find import SUFFIX, profile_beside
from entropykv.profile.parts import ROWS
from entropykv.profile.profile import EntropyProfile
from entropykv.report.figures import profile_figure
from entropykv.settings.cores import usable_cores
from entropykv.settings.options import KV_TYPES

_NO_MODEL = "entropy_config.json"
_DEFAULTS = CalibrationSettings()
_SIZES = {
    "n_sequences": (1, "texts to read"),
    "max_length": (4, "tokens to read of each text"),
    "seed": (0, "order of the texts"),
    "curve_texts": (0, "texts for curves and predictor; 0: none"),
    "curve_length": (64, "tokens of each of them"),
    "compared_texts": (0, "other texts, on which the ways to use the profile are compared"),
}
"""For each field of CalibrationSettings that an option sets: its least value, and the option's
help.
"""
_LONG = 20
"""A calibration that takes more seconds than this says so before it begins."""


def add_calibrate(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the parser of `entropykv calibrate`."""
    parser = commands.add_parser(
        "calibrate",
        description="Read texts with a model, and write a profile of what each of its heads "
        "needs. Beside the model, every command finds it; elsewhere, --entropy-config names it. At "
        "the end, budgets with and without the profile are compared, and the better ones are used. "
        "Progress goes to stderr.",
    )
    sources = parser.add_mutually_exclusive_group(required=True)
    add_model_option(parser, sources)
    sources.add_argument(
        "--hf",
        metavar="NAME",
        help="a model's directory or name for transformers, in float32 with eager attention "
        "(needs entropykv[hf]); without loss curves",
    )
    sources.add_argument(
        "--from-results", metavar="FILE", help="existing calibration results (JSON) to convert"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"where to write the profile (default: MODEL{SUFFIX} beside the model, where other "
        f"commands find it; without -m: {_NO_MODEL})",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace the file if it exists",
    )
    add_calibration_options(parser)
    group = parser.add_argument_group("long calibrations (with -m)")
    group.add_argument(
        "--resume",
        metavar="DIR",
        help="keep what is measured of each text in this directory, and continue from it",
    )
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        help=f"spread the texts over a Ray cluster: {RAY_HELP}; every node needs the model at the "
        "same path",
    )
    parser.set_defaults(command=run)


def add_calibration_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which texts are read for calibration, and how."""
    group = parser.add_argument_group("texts")
    group.add_argument(
        "--text",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="texts to read (default: those that come with entropykv)",
    )
    for field, (least, what) in _SIZES.items():
        usual, quick = getattr(_DEFAULTS, field), getattr(QUICK, field)
        group.add_argument(
            f"--{field.replace('_', '-')}",
            type=integer(least),
            metavar="N",
            help=f"{what} ({usual}{'' if usual == quick else f', with --quick {quick}'})",
        )
    group.add_argument(
        "--quick",
        action="store_true",
        help="read fewer and shorter texts, in about half of the time",
    )
    group.add_argument(
        "--rows",
        choices=ROWS,
        default=_DEFAULTS.rows,
        help="attention rows that a head's entropy is the mean of: those at 25, 50, 75 and 100 %% "
        "of a text, or all (default: %(default)s)",
    )
    engine = parser.add_argument_group("engine")
    add_threads_option(engine)
    engine.add_argument(
        "--kv-type", choices=KV_TYPES, default=_DEFAULTS.kv_type, help="(default: %(default)s)"
    )
    engine.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="for --hf (default: %(default)s)"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the profile (.png or .svg; needs entropykv[plot])"
    )


def run(options: argparse.Namespace) -> int:
    """Run `entropykv calibrate`; returns the exit code."""
    if options.plot:
        check_plot(options.plot)
    if options.output:
        check_output(options.output)
    fetch_named(options)
    output = options.output or str(profile_beside(options.model) if options.model else _NO_MODEL)
    check_output(output)
    if Path(output).exists() and not options.force:
        raise CalibrationError(
            f"{output}: exists already; use --force to replace it, or -o for another file"
        )
    if not options.model and (options.ray or options.resume):
        raise SettingsError("--ray and --resume are of a GGUF model; give -m, or leave them out")
    try:
        profile = _profile(options)
    except InterruptionError:
        kept = f"; the same command continues from {options.resume}" if options.resume else ""
        say(f"interrupted{kept}")
        return EXIT_INTERRUPTED
    profile.save(output)
    print(f"{output}: {summary_line(profile)}")
    if profile.comparison is not None:
        print("\n".join(["", *comparison_lines(profile.comparison)]))
    if options.plot:
        draw(lambda: profile_figure(profile), options.plot)
    return 0


def _profile(options: argparse.Namespace) -> EntropyProfile:
    if options.from_results:
        return read_results(options.from_results)
    texts = read_texts(options.text)
    settings = _settings(options)
    with ExitStack() as stack:
        interrupts = stack.enter_context(noted_interrupts())
        bar = stack.enter_context(tqdm(desc="calibrating", unit=" tokens", leave=False, delay=0.2))

        def start(extent: Extent) -> None:
            for note in _notes(extent, settings, options):
                say(note)
            bar.reset(extent.n_tokens)

        def advance(n: int) -> None:
            bar.update(n)
            interrupts.check()

        if options.hf:
            return calibrate_hf(options.hf, texts, settings, options.device, start, advance)

        cluster = None
        if options.ray is not None:
            settings = replace(settings, n_threads=settings.n_threads or usable_cores())
            cluster = stack.enter_context(connected(options.ray, interrupts.check))
        spread = Spread(cluster, options.resume)
        model = os.path.abspath(options.model)
        return calibrate(model, texts, settings, start, advance, spread)


def _settings(options: argparse.Namespace) -> CalibrationSettings:
    """Return the settings that the options ask for; those that are given replace --quick."""
    given = {name: getattr(options, name) for name in _SIZES}
    return replace(
        QUICK if options.quick else _DEFAULTS,
        rows=options.rows,
        kv_type=options.kv_type,
        n_threads=options.threads,
        **{name: value for name, value in given.items() if value is not None},
    )


def _notes(
    extent: Extent, settings: CalibrationSettings, options: argparse.Namespace
) -> Iterator[str]:
    """Yield notes for the user: what the loss curves lack if the texts are too short, and how long
    calibration will take.
    """
    wanted = settings.curve_texts * settings.curve_length
    if options.model and extent.curve_texts * extent.curve_length != wanted:
        yield (
            f"loss curves are of {extent.curve_texts} x {extent.curve_length} tokens, not of "
            f"{settings.curve_texts} x {settings.curve_length}: texts and the model's context "
            "allow no more; budgets of policy `profile` are less sure then"
        )
    if extent.seconds is not None and extent.seconds >= _LONG and options.ray is None:
        faster = "" if options.quick else "; --quick takes about half of it"
        yield f"this takes about {_duration(extent.seconds)}{faster}"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes} minutes" if minutes > 1 else f"{10 * round(seconds / 10)} seconds"
