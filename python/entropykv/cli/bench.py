"""`entropykv bench`: measure speed inside a budget, relative to stock llama.cpp in the same run."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence

from entropykv.cli.options import (
    add_draft_options,
    add_model_options,
    add_option,
    add_threads_option,
    check_writable,
    demo_of,
    fetch_named,
    fraction,
    integer,
    list_of,
    write_output,
)
from entropykv.cli.parser import CommandParser
from entropykv.cli.plots import check_plot, draw
from entropykv.cli.progress import ProgressBar
from entropykv.errors import SettingsError
from entropykv.evaluation.bench import BenchRow, BenchSettings, bench, bench_drafts, read_bandwidth
from entropykv.evaluation.metrics import disagreement_note
from entropykv.evaluation.texts import read_texts
from entropykv.model.geometry import read_geometry
from entropykv.policy.policy import policy_named
from entropykv.report.figures import bench_figure
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.options import KV_TYPES, of_group

_LENGTHS = (512, 2048, 6144)
_DRAFT_LENGTH = 2048
_HEADER = "| tokens | cache | prompt tok/s | ratio | decode tok/s | ratio | KV MiB | evicting |"


def add_bench(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the parser of `entropykv bench`."""
    parser = commands.add_parser(
        "bench",
        description="Read prompts and generate inside budgets, in alternation with stock "
        "llama.cpp (full f16 cache, with and without flash attention); medians, and ratios to "
        "stock flash attention. Run it on an otherwise idle machine.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--lengths",
        type=list_of(integer(16)),
        metavar="N,...",
        help="prompt lengths in tokens (default: 512,2048,6144 as far as the model was trained)",
    )
    budgets = ",".join(map(str, BenchSettings.budgets))
    parser.add_argument(
        "--budgets",
        type=list_of(fraction),
        default=[*BenchSettings.budgets],
        metavar="F,...",
        help=f"fractions of the prompt length (default: {budgets})",
    )
    parser.add_argument(
        "--kv-types",
        type=list_of(str),
        default=[*BenchSettings.kv_types],
        metavar="T,...",
        help=f"of {', '.join(KV_TYPES)} (default: {','.join(BenchSettings.kv_types)})",
    )
    add_option(parser, CacheOptions, "policy")
    parser.add_argument(
        *("-n", "--generate"),
        type=integer(16),
        default=BenchSettings.n_generate,
        help="tokens (default: %(default)s)",
    )
    rounds = BenchSettings.rounds
    parser.add_argument("--rounds", type=integer(1), default=rounds, help="default: %(default)s")
    add_threads_option(parser)
    parser.add_argument(
        "--spec",
        action="store_true",
        help="measure what guessing tokens ahead is worth instead, by --spec-type: copying and "
        "prose with prompts of the first length, in the last budget",
    )
    add_draft_options(parser)
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON, too")
    parser.add_argument("--plot", metavar="FILE", help="draw them (.png or .svg; extra plot)")
    parser.set_defaults(command=_bench)


def _bench(options: argparse.Namespace) -> int:
    demo_of(options)
    _check_drafts(options)
    if options.plot:
        check_plot(options.plot)
    check_writable(options.json)
    policy_named(options.policy, None, "headwise")
    fetch_named(options)
    trained = read_geometry(options.model).n_ctx_train
    threads = CacheOptions(n_threads=options.threads).threads
    if options.spec:
        return _bench_drafts(options, trained)
    settings = BenchSettings(
        lengths=options.lengths or [n for n in _LENGTHS if n <= trained] or [trained],
        budgets=options.budgets,
        kv_types=options.kv_types,
        policy=options.policy,
        n_threads=threads,
        n_generate=options.generate,
        rounds=options.rounds,
    )
    rows: list[BenchRow] = []
    with ProgressBar(desc="measuring", unit=" prompts", leave=False, delay=0.5) as bar:
        for row in bench(options.model, settings, bar.advance_to):
            bar.clear()
            if not rows:
                print(f"{_HEADER}\n|---|---|---|---|---|---|---|---|")
            rows.append(row)
            print(_line(row), flush=True)
    if note := disagreement_note(row.disagreement for row in rows):
        print(f"\n{note}")
    computed = ", ".join(f"{name} {kernels}" for name, kernels in rows[-1].products.items())
    print(f"\nproducts of weights, by type: {computed}")
    for line in works_table(rows):
        print(line)
    bandwidth = read_bandwidth(threads)
    shares = attention_bandwidth(rows)
    _print_bandwidths(threads, bandwidth, shares)
    if options.json:
        content = {
            "model": str(options.model),
            "threads": threads,
            "read_bandwidth": bandwidth,
            "attention_bandwidth": [
                {"length": n, "kv_type": t, "bytes_per_second": b} for (n, t), b in shares.items()
            ],
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        write_output(options.json, json.dumps(content, indent=2) + "\n")
    if options.plot:
        draw(lambda: bench_figure({"": rows}), options.plot)
    return 0


def _check_drafts(options: argparse.Namespace) -> None:
    """Raise SettingsError for options of drafts without --spec, or --spec without drafts."""
    if options.spec_draft_model is not None and not options.spec:
        raise SettingsError("--model-draft is measured with --spec; give that, too")
    if options.spec and options.spec_type == "none":
        raise SettingsError("--spec measures drafts, and --spec-type none reads none; use ngram")


_DRAFT_HEADER = "| task | tok/s without | with | times | tokens a step | accepted of drafted |"


def _bench_drafts(options: argparse.Namespace, trained: int) -> int:
    """Print what drafts are worth, write it to --json, if given, and return the exit code."""
    cache = CacheOptions(
        kv_budget=options.budgets[-1],
        policy=options.policy,
        learn=False,
        n_threads=options.threads,
        fixed_threads=True,
        spec_type=options.spec_type,
        **{name: getattr(options, name) for name in of_group(CacheOptions, "drafts")},
    )
    length = (options.lengths or [min(_DRAFT_LENGTH, trained // 2)])[0]
    print(f"{_DRAFT_HEADER}\n|---|---|---|---|---|---|")
    rows = []
    text = "\n\n".join(each.content for each in read_texts())
    for row in bench_drafts(
        options.model,
        cache,
        text,
        length=length,
        n_tokens=options.generate,
        rounds=options.rounds,
    ):
        rows.append(row)
        print(
            f"| {row.task} | {row.speed_without:.1f} | {row.speed_with:.1f} | {row.ratio:.2f} | "
            f"{row.tokens_per_step:.2f} | {row.accepted} of {row.drafted} |",
            flush=True,
        )
    if not all(row.same for row in rows):
        print("\nThe texts are not the same: llama.cpp computes products of weights, or attention.")
    if options.json:
        content = {
            "model": str(options.model),
            "length": length,
            "rows": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows],
        }
        write_output(options.json, json.dumps(content, indent=2) + "\n")
    return 0


def works_table(rows: Sequence[BenchRow]) -> list[str]:
    """Return the lines of a table with the kinds of work that were measured; at least its head."""
    lines = [
        "\nWeights and attention apart, every node of llama.cpp's graphs by itself; GOPS are 10^9",
        "operations a second; attention's are known where nothing is evicted:\n",
        "| tokens | cache | phase | work | share of time | GOPS | GB/s | ratio to stock |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for work in row.works:
            speeds = [
                f"{speed / 1e9:.1f}" if speed else ""
                for speed in (work.operations_per_second, work.bytes_per_second)
            ]
            lines.append(
                f"| {row.length} | {row.name} | {work.phase} | {work.work} | {work.share:.0%} "
                f"| {speeds[0]} | {speeds[1]} | {work.ratio:.2f} |"
            )
    return [*lines, ""]


def _print_bandwidths(
    threads: int, bandwidth: float, shares: Mapping[tuple[int, str], float]
) -> None:
    print(f"{threads} threads read {bandwidth / 1e9:.1f} GB/s of memory; attention of generated")
    print("tokens, from the difference between budgets:")
    for (length, kv_type), reached in shares.items():
        print(
            f"  {kv_type} at {length}: {reached / 1e9:.1f} GB/s, {reached / bandwidth:.0%} of that"
        )


def attention_bandwidth(rows: list[BenchRow]) -> dict[tuple[int, str], float]:
    """Return the bytes of cache that attention reads per second, by (length, type).

    This is the difference in bytes between the largest and the smallest budget, divided by the
    difference in time per token. Work that does not depend on the cache cancels out. There is no
    result where the larger cache was not slower.
    """
    groups: dict[tuple[int, str], list[BenchRow]] = {}
    for row in rows:
        if row.kv_bytes:
            groups.setdefault((row.length, row.name.split()[0]), []).append(row)
    result = {}
    for key, group in groups.items():
        small, large = (pick(group, key=lambda row: row.kv_bytes) for pick in (min, max))
        seconds = 1 / large.decode_speed - 1 / small.decode_speed
        if large.kv_bytes > small.kv_bytes and seconds > 0:
            result[key] = (large.kv_bytes - small.kv_bytes) / seconds
    return result


def _line(row: BenchRow) -> str:
    kv = f"{row.kv_bytes / 2**20:.1f} | {row.eviction_share:.2%}" if row.kv_bytes else " | "
    return (
        f"| {row.length} | {row.name} | {row.prompt_speed:.0f} | {row.prompt_ratio:.2f} "
        f"| {row.decode_speed:.0f} | {row.decode_ratio:.2f} | {kv} |"
    )
