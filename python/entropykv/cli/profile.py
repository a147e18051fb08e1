"""`entropykv profile`: show a profile, compare two profiles, or convert an old one.

What is shown is a table, also at the end of `entropykv calibrate`.
"""

from __future__ import annotations

import argparse

import numpy as np

from entropykv.calibration.measure import correlation
from entropykv.cli.options import check_output
from entropykv.cli.parser import CommandParser
from entropykv.cli.plots import draw
from entropykv.errors import ProfileError
from entropykv.profile.json_fields import HEAD_TYPES, FloatArray
from entropykv.profile.predictor import LOOKUP_SHARE, ScorePredictor
from entropykv.profile.profile import EntropyProfile
from entropykv.profile.ways import NO_PROFILE, WayComparison
from entropykv.report.budgets import budget_tables
from entropykv.report.figures import profile_figure

_LETTERS = "sfmxd"
"""A letter for each of HEAD_TYPES, printed next to a head's entropy."""
_WIDTH = 92
_WAYS = {NO_PROFILE: "no profile"}
"""Names in the table for ways to use a profile that are not named by their policy."""


def summary_line(profile: EntropyProfile) -> str:
    """Return one line: heads, entropy, stability, and the quality of predicted scores."""
    text = (
        f"{profile.n_layer} x {profile.n_head} heads, mean entropy {profile.mean:.3f} bits, "
        + ", ".join(f"{count} {kind}" for kind, count in profile.head_types().items() if count)
    )
    measured = profile.measurement
    if measured is not None:
        stability = "unknown" if measured.stability is None else f"r = {measured.stability:.3f}"
        text += f"; {len(measured.texts)} texts, stability between two halves of them: {stability}"
    if profile.predictor is not None:
        text += f"; {_quality(profile.predictor)}"
    return text


def _quality(predictor: ScorePredictor) -> str:
    r = predictor.correlation
    quality = "no text was held back" if r is None else f"r = {r:.3f} in text that was held back"
    text = f"predictor of scores from {predictor.n_tokens:,} tokens, {quality}"
    if predictor.trust is not None:
        trusting = int(np.count_nonzero(predictor.trust))
        text += f", trusted by {trusting} of {sum(predictor.shape)} KV heads"
    return text


def format_profile(profile: EntropyProfile) -> str:
    """Return a table (layers x heads) with entropies and types, statistics, and budgets at 0.5, 0.2
    and 0.1.
    """
    letters = ", ".join(f"{c} {name}" for c, name in zip(_LETTERS, HEAD_TYPES, strict=True))
    lines = [
        f"{profile.model or 'unnamed model'}: {summary_line(profile)}",
        f"  std {profile.head_entropies.std():.3f}, {profile.head_entropies.min():.3f} to "
        f"{profile.head_entropies.max():.3f} bits, cv {profile.coefficient_of_variation:.3f}",
    ]
    if profile.source:
        lines.append(f"  source: {profile.source}")
    lines += ["", f"Entropy of every query head in bits ({letters}):", *_heads(profile)]
    for policy in ("entropy", "profile"):
        if policy == "entropy" or profile.curves is not None:
            lines += ["", *_budgets(profile, policy)]
    if profile.comparison is not None:
        lines += ["", *comparison_lines(profile.comparison)]
    if profile.predictor is not None and profile.predictor.lookups is not None:
        lines += ["", *_lookups(profile.predictor.lookups)]
    return "\n".join(lines)


def comparison_lines(comparison: WayComparison) -> list[str]:
    """Return what was lost with each way to use a profile, and which way policy auto goes."""
    if not comparison.compared:
        return [
            "The texts were too short to hold some back and compare budgets on them: "
            f"{_what_auto_does(comparison)}."
        ]
    lines = [
        f"What is lost inside budgets of {' and '.join(f'{b:.0%}' for b in comparison.budgets)} of "
        f"the bytes, in {comparison.n_texts} held-back texts of up to {comparison.n_tokens:,} "
        "tokens:",
        "KL in nats per token while a text goes on, and while it is repeated (the full cache",
        f"predicts {np.mean(comparison.repeats):.0%} of that); planted facts, of "
        f"{comparison.n_facts} that the full cache knows:",
        f"  {'':30}" + "".join(f"  {b:5.0%}: KL  repeated  facts" for b in comparison.budgets),
    ]
    for each in comparison.compared:
        figures = zip(each.divergences, each.repetitions, each.n_known, strict=True)
        cells = (
            f"{np.mean(kl):11.4f} {np.mean(repeated):9.4f} {known:6}"
            for kl, repeated, known in figures
        )
        mark = "*" if each.way == comparison.best else " "
        lines.append(f"{mark} {_WAYS.get(each.way, each.way):30}" + "".join(cells))
    return [*lines, f"* {_what_auto_does(comparison)}"]


def _what_auto_does(comparison: WayComparison) -> str:
    if comparison.best == NO_PROFILE:
        return "no way to use the profile loses less than none: policy auto does not use it"
    if comparison.uses_curves:
        return f"policy auto is {comparison.best}"
    return (
        "budgets by loss curves gain nothing that exceeds noise: policy auto is "
        f"{comparison.best}, with the predictor of the profile"
    )


def _heads(profile: EntropyProfile) -> list[str]:
    kinds, per_line = profile.kinds(), max(1, _WIDTH // 6)
    lines = ["  layer   mean  heads"]
    for layer, mean in enumerate(profile.layer_means()):
        cells = [
            f"{bits:5.2f}{_LETTERS[kind]}"
            for bits, kind in zip(profile.head_entropies[layer], kinds[layer], strict=True)
        ]
        for first in range(0, len(cells), per_line):
            start = f"  {layer:>5} {mean:6.2f} " if first == 0 else " " * 15
            lines.append(start + "".join(cells[first : first + per_line]))
    return lines


def _budgets(profile: EntropyProfile, policy: str) -> list[str]:
    tables = budget_tables(profile, policy)
    lines = [
        f"Entries per KV head, policy {policy}, context {profile.n_ctx}:",
        "  layer" + "".join(f"   {budget:>4}: mean   min   max" for budget in tables),
    ]
    for layer in range(profile.n_layer):
        rows = (table[layer] for table in tables.values())
        cells = (f"{row.mean():13.0f} {row.min():5} {row.max():5}" for row in rows)
        lines.append(f"  {layer:>5}" + "".join(cells))
    return lines


def _lookups(lookups: FloatArray) -> list[str]:
    lines = [
        f"KV heads that look facts up: % of a head's entries among those {LOOKUP_SHARE:.0%} of",
        "all entries with the highest predicted scores:",
        "  layer   mean  KV heads",
    ]
    per_line = max(1, _WIDTH // 6)
    for layer, shares in enumerate(lookups):
        cells = [f"{100 * share:5.0f} " for share in shares]
        for first in range(0, len(cells), per_line):
            start = f"  {layer:>5} {100 * shares.mean():6.0f} " if first == 0 else " " * 15
            lines.append((start + "".join(cells[first : first + per_line])).rstrip())
    return lines


def compare(first: EntropyProfile, second: EntropyProfile, most: int = 10) -> str:
    """Return correlation and mean difference of two profiles, and the `most` largest differences.

    Raises ProfileError if their shapes differ.
    """
    if first.head_entropies.shape != second.head_entropies.shape:
        raise ProfileError(
            f"head_entropies of the two profiles are {first.head_entropies.shape} and "
            f"{second.head_entropies.shape} heads; compare profiles of one model"
        )
    difference = second.head_entropies - first.head_entropies
    r = correlation(first.head_entropies, second.head_entropies)
    changed = int((first.kinds() != second.kinds()).sum())
    lines = [
        f"correlation {'undefined' if r is None else f'{r:.4f}'}, mean absolute difference "
        f"{np.abs(difference).mean():.4f} bits, {changed} of {difference.size} heads of another "
        "type",
        "largest differences in bits:",
    ]
    order = np.argsort(-np.abs(difference), axis=None, kind="stable")[:most]
    for layer, head in zip(*np.unravel_index(order, difference.shape), strict=True):
        lines.append(
            f"  L{layer}_H{head}: {first.head_entropies[layer, head]:.3f} -> "
            f"{second.head_entropies[layer, head]:.3f} ({difference[layer, head]:+.3f})"
        )
    return "\n".join(lines)


def add_profile(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the parser of `entropykv profile`."""
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
    """Run `entropykv profile`; returns the exit code."""
    profile = EntropyProfile.load(options.file)
    other = EntropyProfile.load(options.other) if options.other else None
    text = format_profile(profile) if other is None else compare(profile, other)
    if options.convert:
        check_output(options.convert)
        profile.save(options.convert)
    if options.plot:
        draw(lambda: profile_figure(profile), options.plot)
    print(text)
    return 0
