"""Define what --help shows for commands whose modules take long to load, without loading llama.cpp
or numpy. The options are declared elsewhere; settings/flags.py has those that only such a module
would declare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from entropykv.cli.options import (
    add_model_option,
    add_model_options,
    add_option,
    add_prompt_options,
    add_system_options,
)
from entropykv.cli.parser import CommandParser
from entropykv.settings import flags
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.sampling import TEMPERATURE, Sampling

_CACHE = ("n_ctx", "kv_budget", "policy", "freeze", "n_threads")


@dataclass(frozen=True)
class FirstOptions:
    """Hold how a command introduces itself, and the options that its --help shows."""

    usage: str
    description: str
    shown: tuple[str, ...]
    example: str
    add: Callable[[CommandParser], None]

    def parser(self, prog: str) -> CommandParser:
        """Return a parser that knows only the options that this command's --help shows first, so
        that they can be printed without loading the modules of the command.
        """
        parser = CommandParser(prog=prog, usage=self.usage, description=self.description)
        self.add(parser)
        self.show_in(parser)
        return parser

    def show_in(self, parser: CommandParser) -> None:
        """Let --help of a parser show only the options in `shown`, with the example."""
        parser.show_first(*self.shown, example=self.example)


def _add_those_of_run(parser: CommandParser) -> None:
    add_model_options(parser)
    add_prompt_options(parser, "the prompt")
    add_system_options(parser, "the prompt")
    for name in _CACHE:
        add_option(parser, CacheOptions, name)
    layers = "layers on the GPU, or all; K and V follow them if --store allows it"
    add_option(parser, CacheOptions, "n_gpu_layers", help=layers)
    add_option(parser, Sampling, "temperature", default=TEMPERATURE)
    for flag in (flags.N_PREDICT, flags.DOCUMENT, flags.SAVE_SESSION, flags.STATS_JSON):
        flag.add(parser)


def _add_those_of_serve(parser: CommandParser) -> None:
    add_model_option(parser, parser.add_mutually_exclusive_group())
    for name in _CACHE:
        add_option(parser, CacheOptions, name)
    add_option(parser, CacheOptions, "n_gpu_layers")
    add_option(parser, CacheOptions, "n_sequences", default=1)
    for flag in (
        flags.ALIAS,
        flags.HOST,
        flags.PORT,
        flags.API_KEY,
        flags.DOCUMENTS,
        flags.MODELS_PRESET,
        flags.REPLICAS,
    ):
        flag.add(parser)


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
