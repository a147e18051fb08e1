"""`entropykv profile`: show a profile, compare two profiles, or convert an old one."""

from __future__ import annotations

import argparse

from entropykv.cli.options import check_output
from entropykv.cli.parser import CommandParser
from entropykv.cli.plots import draw
from entropykv.cli.profile_table import compare, format_profile
from entropykv.profile.profile import EntropyProfile


def add_profile(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "profile",
        description="Show the entropies, head types and resulting budgets of a profile; with a "
        "second file, what differs.",
    )
    parser.add_argument("file", metavar="FILE", help="entropy profile (JSON)")
    parser.add_argument("other", nargs="?", metavar="FILE2", help="profile to compare it with")
    parser.add_argument("--convert", metavar="NEW", help="write the profile in format version 2")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the profile (.png or .svg; needs entropykv[plot])"
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    profile = EntropyProfile.load(options.file)
    other = EntropyProfile.load(options.other) if options.other else None
    text = format_profile(profile) if other is None else compare(profile, other)
    if options.convert:
        check_output(options.convert)
        profile.save(options.convert)
    if options.plot:
        draw(profile, options.plot)
    print(text)
    return 0
