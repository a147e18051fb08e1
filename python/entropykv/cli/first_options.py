"""Say what --help shows of commands whose modules take long to load: it loads neither llama.cpp nor
numpy.

The options are declared again here where a module that needs these declares them; a test compares
both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from entropykv.cli.options import add_model_option, add_model_options, add_option
from entropykv.cli.parser import CommandParser
from entropykv.cli.prompt_options import add_prompt_options, add_system_options
from entropykv.settings.cache_options import CacheOptions

_CACHE = ("n_ctx", "kv_budget", "policy", "freeze", "n_threads")
_More = tuple[tuple[str, ...], str, str]
"""Flags, metavar and help of an option."""


@dataclass(frozen=True)
class FirstOptions:
    """Hold how a command introduces itself, and the options that its --help shows."""

    usage: str
    description: str
    shown: tuple[str, ...]
    example: str
    add: Callable[[CommandParser], None]

    def parser(self, prog: str) -> CommandParser:
        """Return a parser that only knows these options, to print them."""
        parser = CommandParser(prog=prog, usage=self.usage, description=self.description)
        self.add(parser)
        self.show_in(parser)
        return parser

    def show_in(self, parser: CommandParser) -> None:
        """Let --help of a parser show these options alone."""
        parser.show_first(*self.shown, example=self.example)


def _add_those_of_run(parser: CommandParser) -> None:
    add_model_options(parser)
    add_prompt_options(parser, "the prompt")
    add_system_options(parser, "the prompt")
    for name in _CACHE:
        add_option(parser, CacheOptions, name)
    layers = "layers on the GPU, or all; K and V follow them if --store allows it"
    add_option(parser, CacheOptions, "n_gpu_layers", help=layers)
    _add(
        parser,
        (
            ("-n", "--n-predict", "--predict"),
            "N",
            "most tokens of an answer (-1 or -2: until the model or the context ends; default: -1)",
        ),
        (("--temp", "--temperature"), "X", "0: greedy (default: 0.8)"),
        (
            ("--document",),
            "FILE",
            "ask about a document that `entropykv read` wrote, which is not read again; given "
            "several times, the texts of the later ones are read behind the first",
        ),
        (
            ("--save-session",),
            "FILE",
            "save the session at the end, after Ctrl-C too: what the KV cache holds, not the text",
        ),
        (("--stats-json",), "FILE", "write the final figures as JSON"),
    )


def _add_those_of_serve(parser: CommandParser) -> None:
    add_model_option(parser, parser.add_mutually_exclusive_group())
    for name in _CACHE:
        add_option(parser, CacheOptions, name)
    add_option(parser, CacheOptions, "n_gpu_layers")
    add_option(parser, CacheOptions, "n_sequences", default=1)
    _add(
        parser,
        (("-a", "--alias"), "NAME", "the model's name for clients (default: its file's name)"),
        (("--host",), "ADDRESS", "where to listen (default: 127.0.0.1, this machine alone)"),
        (("--port",), "N", "0: any free one (default: 8000)"),
        (("--api-key",), "KEY", "every request must bear it (also: ENTROPYKV_API_KEY)"),
        (("--documents",), "DIR", "documents that are read once, and asked by name"),
        (("--models-preset",), "FILE", "several models, each with its options (INI)"),
        (("--replicas",), "N", "so many processes under Ray Serve (needs the extra ray)"),
    )


def _add(parser: CommandParser, *options: _More) -> None:
    for flags, metavar, text in options:
        parser.add_argument(*flags, metavar=metavar, help=text)


RUN = FirstOptions(
    "%(prog)s (-m MODEL | -hf USER/MODEL | --demo NAME) [options]",
    "Read a prompt and generate text inside a KV budget. The text goes to stdout, progress and the "
    "final table to stderr.",
    (
        *("-m", "-hf", "--demo", "-p", "-f", "-sys", "-n", "--temp", "-c", "--kv-budget"),
        *("--policy", "--freeze", "-t", "-ngl", "--document", "--save-session", "--stats-json"),
    ),
    'entropykv run -m model.gguf -f long.txt -p "What happened?" --kv-budget 20%',
    _add_those_of_run,
)
SERVE = FirstOptions(
    "%(prog)s (-m MODEL | -hf USER/MODEL | --models-preset FILE) [options]",
    "Serve models to OpenAI's clients inside a KV budget, and a page to chat with them: "
    "llama_cpp.server's options, also as llama-server spells them, and the budget's. Every option "
    "may also come from an environment variable such as ENTROPYKV_API_KEY.",
    (
        *("-m", "-hf", "--kv-budget", "-c", "-np", "--policy", "--freeze", "-t", "-ngl", "-a"),
        *("--host", "--port", "--api-key", "--documents", "--models-preset", "--replicas"),
    ),
    "entropykv serve -m model.gguf --kv-budget 512MiB --parallel 4",
    _add_those_of_serve,
)
FIRST = {"run": RUN, "serve": SERVE}
"""The commands whose --help this module shows."""
