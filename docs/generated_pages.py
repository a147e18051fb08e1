"""Write the reference pages that are generated from code, whenever mkdocs builds the docs.

The options come from the command line's parser, the formats from JSON schemas and docstrings, the
flags of llama.cpp from the table by which the commands read them, and the architectures from what
`make architectures` measured. mkdocs calls `on_files` (see `hooks` in mkdocs.yml). The repository
has files with the same names, with the parts that people write, so that links work there, too.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import entropykv
from entropykv import cli
from entropykv.cli.llama_flags import (
    CLI,
    COMPLETION,
    FLAGS,
    SERVER,
    LlamaFlag,
    Treatment,
    Use,
    count_uses,
)
from entropykv.cli.models import format_architectures
from entropykv.model.architectures import checked_architectures
from entropykv.profile import learnt
from entropykv.server.options import ModelOptions
from entropykv.session import file as session_file
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.freezing import Freezing, Recovery
from entropykv.settings.options import declared

REFERENCE = Path(__file__).parent / "reference"
NOT_HERE = "<!-- generated from here on -->"
"""The line from which on a page shows readers of the repository what stands in place of a table."""

SCHEMA = Path(entropykv.__file__).parent / "schemas" / "entropy_profile.schema.json"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the pages that mkdocs found."""
    pages = {
        "reference/options.md": options_page,
        "reference/formats.md": formats_page,
        "reference/llama-flags.md": flags_page,
        "reference/architectures.md": architectures_page,
    }
    for path, page in pages.items():
        in_repository = files.get_file_from_path(path)
        if in_repository is not None:
            files.remove(in_repository)
        files.append(File.generated(config, path, content=page()))
    return files


def options_page() -> str:
    """Return one section for each command, with a table for each group of its options."""
    parts = ["# Options\n\nThis page comes from the same source as `--help-all`.", cache_options()]
    for name, command in cli.parsers_of(cli.COMMANDS).items():
        parts.append(f"## entropykv {name}\n\n{command.description}")
        for group in command._action_groups:  # argparse has no public list of groups.
            rows = [row(command, action) for action in group._group_actions if is_shown(action)]
            if rows:
                title = str(group.title)
                parts.append(f"**{title[0].upper()}{title[1:]}**\n\n{table(rows)}")
    return "\n\n".join(parts) + "\n"


def cache_options() -> str:
    """Return a table of the cache's options, with their names in Python and in other programs."""
    lines = [
        "## The cache, by keyword, flag and setting\n\nKeyword arguments belong to `Session`, "
        "`Pool`, `EntropyLlama` and `attach` (`CacheOptions`); those of `Freezing` and `Recovery` "
        "are in `freeze=` and `recovery=`. A setting of the server is a field of `ModelOptions`, "
        "an option of `entropykv serve`, and an environment variable `ENTROPYKV_...`.\n",
        "| in Python | command line | setting of the server | default | what it does |",
        "|---|---|---|---|---|",
    ]
    for owner in (CacheOptions, Freezing, Recovery):
        prefix = "" if owner is CacheOptions else f"{owner.__name__}."
        for name, option in declared(owner).items():
            flags = ", ".join(f"`{flag}`" for flag in option.flags)
            setting = option.server_name if option.server_name in ModelOptions.model_fields else ""
            default = option.shown_default
            at_server = option.server_default if owner is CacheOptions else None
            if at_server is not None and str(at_server) != str(option.default):
                default += f"; server: {at_server}"
            lines.append(
                f"| `{prefix}{name}` | {flags} | {setting and f'`{setting}`'} | "
                f"{cell(escaped(default))} | {cell(escaped(option.help))} |"
            )
    return "\n".join(lines)


def is_shown(action: argparse.Action) -> bool:
    """Tell whether --help shows an option; --help itself does not count."""
    return action.help is not argparse.SUPPRESS and not {"--help", "--help-all"} & {
        *action.option_strings
    }


def row(command: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str]:
    """Return an option's names with its value, and its help text."""
    formatter = command._get_formatter()
    value = "" if action.nargs == 0 else formatter._format_args(action, str(action.dest).upper())
    names = action.option_strings or [str(action.metavar or action.dest)]
    shown = ", ".join(f"`{name}`" for name in names)
    help_text = formatter._expand_help(action) if action.help else ""
    return f"{shown} `{value}`" if value and action.option_strings else shown, help_text


def table(rows: list[tuple[str, str]]) -> str:
    """Return a Markdown table of options, with pipes in cells escaped."""
    lines = ["| option | what it does |", "|---|---|"]
    lines += [f"| {cell(left)} | {cell(escaped(right))} |" for left, right in rows]
    return "\n".join(lines)


def cell(text: str) -> str:
    """Return text escaped for one cell of a table."""
    return " ".join(text.split()).replace("|", r"\|")


def escaped(text: str) -> str:
    """Return text with special characters of Markdown and HTML escaped, except in backquotes."""
    parts = text.split("`")
    for place in range(0, len(parts), 2):
        for character in ("\\", "*", "_", "[", "]"):
            parts[place] = parts[place].replace(character, f"\\{character}")
        parts[place] = parts[place].replace("<", "&lt;")
    return "`".join(parts)


def formats_page() -> str:
    """Return the formats of the files that entropykv writes: profiles, predictors and sessions."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return f"""# File formats

## Entropy profiles

{escaped(schema["description"])} The schema is `schemas/{SCHEMA.name}` in the package.
[Profiles](../background/profiles.md#what-the-file-holds) says what the numbers mean.

{schema_table(schema)}

## Learnt predictors

{inspect.getdoc(learnt)}

## Saved sessions

{inspect.getdoc(session_file)}

Version {session_file.VERSION} is written and read; other files are refused by name.
"""


def schema_table(schema: dict[str, Any]) -> str:
    """Return a table of all fields of a JSON schema; fields of inner objects have dotted names."""
    lines = ["| field | type | meaning |", "|---|---|---|"]
    for name, field, required in fields(schema):
        mark = "" if required else " (optional)"
        lines.append(
            f"| `{name}`{mark} | {kind(field)} | {cell(escaped(field.get('description', '')))} |"
        )
    return "\n".join(lines)


def fields(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield every field with its dotted path, its schema, and whether it is required."""
    for name, field in schema.get("properties", {}).items():
        yield prefix + name, field, name in schema.get("required", ())
        yield from fields(field, f"{prefix}{name}.")


def kind(field: dict[str, Any]) -> str:
    """Return the type of a field in words."""
    if "const" in field:
        return f"always {field['const']}"
    if "enum" in field:
        return "one of " + ", ".join(f"`{value}`" for value in field["enum"])
    types = field.get("type", "any")
    return types if isinstance(types, str) else " or ".join(types)


def flags_page() -> str:
    """Return the written part of the page about llama.cpp's flags, and a table of all flags."""
    return f"{written_part('llama-flags.md')}\n{flag_table()}"


def architectures_page() -> str:
    """Return the written part of the page about architectures, and a table of all architectures."""
    return f"{written_part('architectures.md')}\n{format_architectures(checked_architectures())}\n"


def written_part(page: str) -> str:
    """Return the written part of a page: all before the line NOT_HERE."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    return text.partition(NOT_HERE)[0]


def flag_table() -> str:
    """Return a table of counts, and one with a row for all flags that are treated equally."""
    counts = ["| flags of | at | taken | taken with a note | refused |", "|---|---|---|---|---|"]
    for tools, programs, command in (
        (CLI, "llama-cli", "run"),
        (CLI, "llama-cli", "chat"),
        (CLI + COMPLETION, "llama-cli, llama-completion", "run"),
        (SERVER, "llama-server", "serve"),
    ):
        uses = count_uses(tools, command)
        numbers = " | ".join(str(uses[use]) for use in Use)
        counts.append(f"| {programs} | `entropykv {command}` | {numbers} |")
    rows = ["| flags | `run` and `chat` | `serve` |", "|---|---|---|"]
    for (run, chat, serve), flags in itertools.groupby(FLAGS, treatments):
        names = ", ".join(f"`{' '.join(flag.names)}`" for flag in flags)
        here = told_of(run)
        if chat != run:
            here = f"run: {here}; chat: {told_of(chat)}"
        rows.append(f"| {names} | {here} | {told_of(serve)} |")
    return "\n".join([*counts, "", *rows, ""])


def treatments(flag: LlamaFlag) -> tuple[Treatment, Treatment, Treatment]:
    """Return what `run`, `chat` and `serve` do with a flag; flags that agree share a row."""
    return flag.run, flag.chat, flag.serve


def told_of(treatment: Treatment) -> str:
    """Return what a command does with a flag, in the words of its message."""
    if treatment.use is Use.TAKEN:
        return "taken"
    if treatment.use is Use.NOTED:
        return f"note: {treatment.why}"
    told = f"refused: {treatment.why}"
    if treatment.unless:
        told += f" (`{'`, `'.join(treatment.unless)}`: taken with a note)"
    if treatment.places_weights:
        told += " (without a GPU: taken with a note)"
    return told
