"""Declare the options, besides those of the cache, that `run --help` and `serve --help` show, and
those that commands and server have alike: Flag.

Nothing here takes long to load, so that --help reads them here, as the modules that run a command
and the settings of the server do.
"""

from __future__ import annotations

from argparse import Action, _ActionsContainer
from typing import Any, NamedTuple


class Flag(NamedTuple):
    """Hold the names, the value and the help of an option."""

    names: tuple[str, ...]
    metavar: str
    help: str
    default: str = ""
    """The text about the default in --help; empty: none."""

    def add(self, group: _ActionsContainer, **more: Any) -> Action:
        """Add the option to a parser or a group."""
        text = f"{self.help} (default: {self.default})" if self.default else self.help
        return group.add_argument(*self.names, metavar=self.metavar, help=text, **more)

    @property
    def sentence(self) -> str:
        """Return the help as a sentence without the default, which a setting has itself."""
        return f"{self.help[0].upper()}{self.help[1:]}."


# These are options of `entropykv run`.
N_PREDICT = Flag(
    ("-n", "--n-predict", "--predict"),
    "N",
    "most tokens of an answer; -1 or -2: until the model ends it or the context is full",
    "-1",
)
DOCUMENT = Flag(
    ("--document",),
    "FILE",
    "ask about a document that `entropykv read` wrote, which is not read again; given several "
    "times, the texts of the later ones are read behind the first",
)
SAVE_SESSION = Flag(
    ("--save-session",),
    "FILE",
    "save the session at the end, after Ctrl-C too: what the KV cache holds, not the text",
)
STATS_JSON = Flag(("--stats-json",), "FILE", "write the final figures as JSON")

# These are options of `entropykv serve`.
ALIAS = Flag(
    ("-a", "--alias"),
    "NAME",
    "the name that clients use for the model, and others, separated by commas",
    "that of its file",
)
HOST = Flag(("--host",), "ADDRESS", "where to listen; 127.0.0.1: this machine alone", "127.0.0.1")
PORT = Flag(("--port",), "N", "where to listen; 0: any free one", "8000")
API_KEY = Flag(("--api-key",), "KEY", "every request must bear it (also: ENTROPYKV_API_KEY)")
DOCUMENTS = Flag(
    ("--documents",),
    "DIR",
    "directory, or an address such as s3://bucket/folder, of documents that POST /v1/documents "
    "has read once, and that requests ask by name; each API key has a folder of its own there",
)
MODELS_PRESET = Flag(
    ("--models-preset",),
    "FILE",
    "file in llama-server's INI format that names models and their options",
)
REASONING = Flag(
    ("-rea", "--reasoning"),
    "on|off|auto",
    "whether the chat template is told to let the model think; auto: nothing is told",
    "auto",
)
REASONING_BUDGET = Flag(
    ("--reasoning-budget",),
    "N",
    "tokens of a thought at most; 0 ends it at once, -1 never",
    "-1",
)
REASONING_MESSAGE = Flag(
    ("--reasoning-budget-message",), "TEXT", "text that ends a thought whose tokens are used up"
)
REASONING_EFFORT = Flag(
    ("--reasoning-effort",),
    "LEVEL",
    "what the chat template is told as reasoning_effort, such as low",
)
OF_SERVER = {
    "model_alias": ALIAS,
    "host": HOST,
    "port": PORT,
    "api_key": API_KEY,
    "documents": DOCUMENTS,
    "models_preset": MODELS_PRESET,
    "reasoning": REASONING,
    "reasoning_budget": REASONING_BUDGET,
    "reasoning_budget_message": REASONING_MESSAGE,
    "reasoning_effort": REASONING_EFFORT,
}
"""Options by the names of the server's settings."""
REPLICAS = Flag(
    ("--replicas",),
    "N",
    "so many processes under Ray Serve (needs the extra ray); SIGHUP restarts them in turn",
)
