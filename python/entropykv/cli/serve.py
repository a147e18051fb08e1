"""`entropykv serve`: run an OpenAI-compatible server of a model inside a KV budget."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from entropykv.cli.first_options import SERVE
from entropykv.cli.notes import say
from entropykv.cli.options import (
    add_fixed_threads_option,
    add_freeze_options,
    add_learn_option,
    add_option,
    add_protection_options,
    add_recovery_options,
    integer,
)
from entropykv.cli.parser import CommandParser
from entropykv.cli.serve_spellings import Spellings, add_llama_server_options
from entropykv.cli.served_models import models_of, read_options
from entropykv.errors import SettingsError
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.cores import too_many_threads
from entropykv.settings.flags import REPLICAS

if TYPE_CHECKING:
    from entropykv.server import ModelCatalog, ModelOptions

_OF_REPLICAS = ("max_replicas", "scale_up_seconds", "scale_down_seconds", "sessions")
"""The options that only replicas have, by their names in ReplicaOptions."""


def add_serve(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Register the command, whose options include those of llama_cpp.server: its packages take long
    to load, and may not be installed.
    """
    parser = commands.add_parser("serve", usage=SERVE.usage, description=SERVE.description)
    parser.set_defaults(command=run)
    parser.add_later(_add_options)


def _add_options(parser: argparse.ArgumentParser) -> None:
    from entropykv.server import ModelOptions, ServerOptions  # noqa: PLC0415

    cast(CommandParser, parser).add_help_all()
    budget = parser.add_argument_group("KV budget")
    # An option that is not given is None, because an environment variable may set it.
    for name in ("kv_budget", "policy", "kv_type", "store", "entropy_config"):
        add_option(budget, CacheOptions, name, default=None)
    add_learn_option(budget)
    add_protection_options(budget, default=None)
    add_freeze_options(parser)
    add_recovery_options(parser, rewalks=False)
    add_fixed_threads_option(parser.add_argument_group("threads"))
    ours = {action.dest for action in parser._actions}  # noqa: SLF001
    group = parser.add_argument_group("server")
    _add_fields(group, ServerOptions, {"max_body", "show_text"})
    show_text = ServerOptions.model_fields["show_text"].description
    group.add_argument(
        "--show-text", "--show_text", nargs="?", const="true", metavar="SHOW", help=show_text
    )
    group.add_argument(
        "--max-body",
        type=integer(1),
        metavar="BYTES",
        help="longest body of a request; 1 MiB is 250,000 tokens of English text (default: 1 MiB)",
    )
    group = parser.add_argument_group("model")
    _add_fields(group, ModelOptions, ours | {"embedding"})
    add_llama_server_options(group)
    group = parser.add_argument_group("replicas under Ray Serve (needs the extra ray)")
    REPLICAS.add(group, type=integer(1))
    group.add_argument(
        "--max-replicas", type=integer(1), metavar="M", help="at most, as requests queue up"
    )
    group.add_argument(
        "--scale-up-seconds",
        type=integer(0),
        metavar="S",
        help="how long too many requests must wait before a replica is added (default: 10)",
    )
    group.add_argument(
        "--scale-down-seconds",
        type=integer(0),
        metavar="S",
        help="how long fewer must be enough before a replica is removed (default: 600)",
    )
    group.add_argument("--sessions", metavar="DIR", help="saved conversations, shared by all")


def _add_fields(group: argparse._ArgumentGroup, options: Any, without: set[str]) -> None:
    """Add the options of llama_cpp.server by its own function, with our defaults and names."""
    from llama_cpp.server.cli import add_args_from_model  # noqa: PLC0415

    fields = {name: field for name, field in options.model_fields.items() if name not in without}
    model = SimpleNamespace(model_fields=fields)
    add_args_from_model(cast(Any, Spellings(group)), cast(Any, model))


def run(options: argparse.Namespace) -> int:
    """Run the command until a signal; returns the exit code."""
    from entropykv.server import ServerOptions  # noqa: PLC0415
    from entropykv.server.http.running import serve  # noqa: PLC0415

    server = read_options(ServerOptions, options)
    model = models_of(options, server, _parser_of_models())
    _warn_of_threads(model)
    if options.replicas is not None and server.slot_save_path is not None:
        raise SettingsError(
            "--slot-save-path is of one server: a request may reach any replica; use --sessions DIR"
        )
    told = {name: getattr(options, name) for name in _OF_REPLICAS}
    told = {name: value for name, value in told.items() if value is not None}
    if options.replicas is not None:
        for name in ("scale_up_seconds", "scale_down_seconds"):
            if name in told and options.max_replicas is None:
                raise SettingsError(
                    f"{_spelt(name)} needs --max-replicas; give it, or leave it out"
                )
        model = _for_replicas(model)
        from entropykv.server.replicas.ray_app import ReplicaOptions, run_replicas  # noqa: PLC0415

        run_replicas(model, server, ReplicaOptions(options.replicas, **told))
    elif told:
        raise SettingsError(
            f"{_spelt(next(iter(told)))} needs --replicas; give it, or leave it out"
        )
    else:
        serve(model, server)
    return 0


def _spelt(name: str) -> str:
    """Return an option as a command line has it."""
    return f"--{name.replace('_', '-')}"


def _parser_of_models() -> CommandParser:
    """Return the parser of a preset's options, which are options of this command."""
    parser = CommandParser(prog="entropykv serve")
    _add_options(parser)
    return parser


def _warn_of_threads(model: ModelOptions | ModelCatalog) -> None:
    from entropykv.server import ModelOptions  # noqa: PLC0415

    several = [model] if isinstance(model, ModelOptions) else [m.options for m in model.models]
    asked: dict[str, int] = {}
    for each in several:
        asked["n_threads"] = max(asked.get("n_threads", 0), each.n_threads)
        if each.n_threads_batch != each.n_threads:
            asked["n_threads_batch"] = max(asked.get("n_threads_batch", 0), each.n_threads_batch)
    for name, number in asked.items():
        if warning := too_many_threads(number, f"--{name}"):
            say(warning)


def _for_replicas(model: ModelOptions | ModelCatalog) -> ModelOptions:
    """Return the only model of replicas, which stays loaded; raises SettingsError for several."""
    from entropykv.server import ModelOptions  # noqa: PLC0415

    if not isinstance(model, ModelOptions) or model.sleep_idle_seconds >= 0:
        raise SettingsError(
            "replicas have one model each, which stays loaded; leave --replicas out, or give one "
            "-m and no --sleep-idle-seconds"
        )
    return model
