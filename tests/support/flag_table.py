"""Write the table of llama.cpp's flags as Markdown: `python -m tests.support.flag_table`.

docs/reference/llama-flags.md contains the table between two comments; a test compares both.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

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

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "llama-flags.md"
_BEGIN, _END = "<!-- table -->\n", "<!-- end of the table -->\n"


def flag_table() -> str:
    """Return the counts, and one row for all flags that are treated equally."""
    counts = ["| flags of | at | taken | taken with a note | refused |", "|---|---|---|---|---|"]
    for tools, told, command in (
        (CLI, "llama-cli", "run"),
        (CLI, "llama-cli", "chat"),
        (CLI + COMPLETION, "llama-cli, llama-completion", "run"),
        (SERVER, "llama-server", "serve"),
    ):
        uses = count_uses(tools, command)
        numbers = " | ".join(str(uses[use]) for use in Use)
        counts.append(f"| {told} | `entropykv {command}` | {numbers} |")
    rows = ["| flags | `run` and `chat` | `serve` |", "|---|---|---|"]
    for (run, chat, serve), flags in itertools.groupby(FLAGS, _treatments):
        names = ", ".join(f"`{' '.join(flag.names)}`" for flag in flags)
        here = _told(run)
        if chat != run:
            here = f"run: {here}; chat: {_told(chat)}"
        rows.append(f"| {names} | {here} | {_told(serve)} |")
    return "\n".join([*counts, "", *rows, ""])


def _treatments(flag: LlamaFlag) -> tuple[Treatment, Treatment, Treatment]:
    return flag.run, flag.chat, flag.serve


def _told(treatment: Treatment) -> str:
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


def main() -> None:
    """Write the table into the page."""
    page = DOCS.read_text(encoding="utf-8")
    table = _BEGIN + "\n" + flag_table() + "\n" + _END
    pattern = re.escape(_BEGIN) + ".*" + re.escape(_END)
    DOCS.write_text(re.sub(pattern, lambda _: table, page, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
