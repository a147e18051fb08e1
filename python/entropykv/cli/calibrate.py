"""`entropykv calibrate`: measure the attention entropy of every head of a model."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from entropykv.calibration.basis import Basis, refuse_worse
from entropykv.calibration.hf import calibrate_hf
from entropykv.calibration.measure import CalibrationSettings, calibrate
from entropykv.calibration.results import read_results
from entropykv.calibration.spread import Spread
from entropykv.calibration.texts import read_texts
from entropykv.cli.interrupts import InterruptionError, noted_interrupts
from entropykv.cli.notes import say
from entropykv.cli.options import (
    add_model_option,
    add_threads_option,
    check_output,
    fetch_named,
    integer,
)
from entropykv.cli.plots import check_plot, draw
from entropykv.cli.profile_table import summary_line
from entropykv.cli.run import EXIT_INTERRUPTED
from entropykv.cluster import RAY_HELP, connected
from entropykv.errors import SettingsError
from entropykv.profile.find import SUFFIX, profile_beside
from entropykv.profile.parts import ROWS
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.cores import usable_cores
from entropykv.settings.options import KV_TYPES

_NO_MODEL = "entropy_config.json"
_DEFAULTS = CalibrationSettings()


def add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "calibrate",
        help="measure the attention entropy of every head of a model",
        description="Read texts with a model and write the entropy profile of its heads, for "
        "--entropy-config. Progress goes to stderr.",
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
        help="replace a profile that rests on more text, or has loss curves where this one has "
        "none",
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
    """Add options of which texts are read to calibrate, and how."""
    group = parser.add_argument_group("texts")
    group.add_argument(
        "--text",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="texts to read (default: those that come with entropykv)",
    )
    for name, least, default, what in (
        ("--n-sequences", 1, _DEFAULTS.n_sequences, "texts to read"),
        ("--max-length", 4, _DEFAULTS.max_length, "tokens to read of each text"),
        ("--seed", 0, _DEFAULTS.seed, "order of the texts"),
        ("--curve-texts", 0, _DEFAULTS.curve_texts, "texts for curves and predictor; 0: none"),
        ("--curve-length", 64, _DEFAULTS.curve_length, "tokens of each of them"),
    ):
        group.add_argument(
            name, type=integer(least), default=default, metavar="N", help=f"{what} (%(default)s)"
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
    """Run the command; returns the exit code."""
    if options.plot:
        check_plot(options.plot)
    if options.output:
        check_output(options.output)
    fetch_named(options)
    output = options.output or str(profile_beside(options.model) if options.model else _NO_MODEL)
    check_output(output)

    def check(basis: Basis) -> None:
        if not options.force:
            refuse_worse(output, basis)

    if not options.model and (options.ray or options.resume):
        raise SettingsError("--ray and --resume are of a GGUF model; give -m, or leave them out")
    try:
        profile = _profile(options, check)
    except InterruptionError:
        kept = f"; the same command continues from {options.resume}" if options.resume else ""
        say(f"interrupted{kept}")
        return EXIT_INTERRUPTED
    check(Basis.of(profile))
    profile.save(output)
    print(f"{output}: {summary_line(profile)}")
    if options.plot:
        draw(profile, options.plot)
    return 0


def _profile(options: argparse.Namespace, check: Callable[[Basis], None]) -> EntropyProfile:
    if options.from_results:
        return read_results(options.from_results)
    texts = read_texts(options.text)
    settings = CalibrationSettings(
        n_sequences=options.n_sequences,
        max_length=options.max_length,
        seed=options.seed,
        rows=options.rows,
        kv_type=options.kv_type,
        n_threads=options.threads,
        curve_length=options.curve_length,
        curve_texts=options.curve_texts,
    )
    with ExitStack() as stack:
        interrupts = stack.enter_context(noted_interrupts())
        bar = stack.enter_context(tqdm(desc="calibrating", unit=" tokens", leave=False, delay=0.2))

        def start(total: int) -> None:
            bar.reset(total)

        def advance(n: int) -> None:
            bar.update(n)
            interrupts.check()

        if options.hf:
            return calibrate_hf(options.hf, texts, settings, options.device, start, advance)

        def check_and_tell(basis: Basis) -> None:
            check(basis)
            if note := _shortage(basis, options):
                say(note)

        cluster = None
        if options.ray is not None:
            settings = replace(settings, n_threads=settings.n_threads or usable_cores())
            cluster = stack.enter_context(connected(options.ray, interrupts.check))
        spread = Spread(cluster, options.resume)
        model = os.path.abspath(options.model)
        return calibrate(model, texts, settings, start, advance, check_and_tell, spread)


def _shortage(basis: Basis, options: argparse.Namespace) -> str | None:
    """Say what the loss curves lack if the texts are too short for them; None if nothing is
    missing.
    """
    wanted = options.curve_texts * options.curve_length
    found = basis.curve_texts * basis.curve_length
    if found == wanted:
        return None
    return (
        f"loss curves are of {basis.curve_texts} x {basis.curve_length} tokens, not of "
        f"{options.curve_texts} x {options.curve_length}: texts and the model's context allow no "
        "more; budgets of policy `profile` are less sure then"
    )
