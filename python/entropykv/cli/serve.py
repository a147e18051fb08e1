"""`entropykv serve`: run an OpenAI-compatible server of a model inside a KV budget."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from entropykv.cli.engine import device_parts
from entropykv.cli.options import (
    SERVE,
    add_fixed_threads_option,
    add_freeze_options,
    add_learn_option,
    add_option,
    add_protection_options,
    add_recovery_options,
    integer,
    spec_type,
    text_of_file,
)
from entropykv.cli.parser import CommandParser
from entropykv.cli.served_models import models_of, read_options
from entropykv.cli.terminal import say
from entropykv.errors import SettingsError
from entropykv.llamacpp.model_options import (
    LOAD_MODES,
    NUMA_STRATEGIES,
    ROPE_SCALINGS,
    SPLIT_MODES,
)
from entropykv.settings.cache_options import CHECKPOINTS, CacheOptions
from entropykv.settings.cores import too_many_threads
from entropykv.settings.flags import OF_SERVER, REPLICAS
from entropykv.settings.options import KV_TYPES, MOST_BYTES, declared

if TYPE_CHECKING:
    from entropykv.server import ModelCatalog, ModelOptions


_LLAMA_SERVER = {
    **{each.server_name: each.flags for each in declared(CacheOptions).values()},
    "model": ("-m",),
    "hf_repo": ("-hf", "-hfr"),
    "hf_file": ("-hff",),
    "mmproj": ("-mm",),
    **{name: flag.names for name, flag in OF_SERVER.items()},
    "n_batch": ("-b", "--batch-size"),
    "split_mode": ("-sm",),
    "tensor_split": ("-ts",),
    "main_gpu": ("-mg",),
    "kv_overrides": ("--override-kv",),
    "flash_attn": ("-fa",),
    "seed": ("-s",),
    "lora_path": ("--lora",),
    "ssl_keyfile": ("--ssl-key-file",),
    "ssl_certfile": ("--ssl-cert-file",),
    "root_path": ("--api-prefix",),
    "rope_scaling_type": ("--rope-scaling",),
    "verbose": ("-v", "--log-verbose"),
    "client_seconds": ("-to", "--timeout"),
    "web": ("--ui", "--webui"),
    "max_tokens": ("-n", "--predict", "--n-predict"),
    "temperature": ("--temp",),
    "mirostat_mode": ("--mirostat",),
    "mirostat_eta": ("--mirostat-lr",),
    "mirostat_tau": ("--mirostat-ent",),
    "stop": ("-r", "--reverse-prompt"),
}
"""llama-server's names for fields of llama_cpp.server's settings, or of ours."""


def _number_or(names: dict[str, int]) -> Callable[[str], int]:
    """Make an argparse type that reads one of the names, or the number that it means."""

    def parse(text: str) -> int:
        if text in names:
            return names[text]
        try:
            return int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is neither a number nor one of {', '.join(names)}"
            ) from None

    return parse


def _boolean(text: str) -> bool:
    """Read a switch as llama_cpp.server and llama-server do; auto means on."""
    word = text.lower()
    if word in ("1", "on", "t", "true", "y", "yes", "auto"):
        return True
    if word in ("0", "off", "f", "false", "n", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")


_TYPES: dict[str, Callable[[str], object]] = {
    "n_gpu_layers": _number_or({"all": -1, "auto": -1}),
    "split_mode": _number_or(SPLIT_MODES),
    "rope_scaling_type": _number_or(ROPE_SCALINGS),
    "numa": _number_or({**NUMA_STRATEGIES, "true": 1, "false": 0}),
    "max_tokens": int,
    "spec_type": spec_type,
}
"""Parsers of values that llama-server names, and llama_cpp.server numbers."""


class Spellings:
    """Collect options from llama_cpp.server's add_args_from_model(), and give them more names.

    Every option has its own name, the same with dashes, and llama-server's names. A switch needs no
    value to be on.
    """

    def __init__(self, group: argparse._ArgumentGroup) -> None:
        """Use the group that options are added to."""
        self._group = group

    def add_argument(self, name: str, **options: Any) -> argparse.Action:
        """Add an option under all of its names; only lists (model, stop and kv_overrides) may be
        given several times.
        """
        field = name[2:]
        names = (name, f"--{field.replace('_', '-')}", *_LLAMA_SERVER.get(field, ()))
        if field in OF_SERVER:
            options["metavar"] = OF_SERVER[field].metavar
        options["help"] = str(options.get("help")).replace("%", "%%")
        action: type[argparse.Action] = _Once
        if getattr(options.get("type"), "__name__", "") == "_parse_bool_arg":
            options.update(type=_boolean, nargs="?", const=True)
        if field in _TYPES:
            options.update(type=_TYPES[field], nargs=None, const=None)
        if field == "tensor_split":
            options["type"] = str
            action = _Parts
        if field == "model":
            action = _Several
            options["nargs"] = 1
        if field in ("kv_overrides", "stop"):
            options["type"] = str
            action = _Several
        return self._group.add_argument(*dict.fromkeys(names), action=action, **options)


class _Once(argparse.Action):
    """Store a value, and refuse a second one, which would silently replace the first."""

    def __call__(self, _parser: Any, namespace: Any, values: Any, _option: Any = None) -> None:
        """Store the value; raises ArgumentError if there is one already."""
        if getattr(namespace, self.dest, None) is not None:
            raise argparse.ArgumentError(self, "is given twice; give it once")
        setattr(namespace, self.dest, self.read(values))

    def read(self, values: Any) -> Any:
        """Return the value to store for the given values."""
        return values


class _Parts(_Once):
    """Read the parts of several devices, as 3,1 or as 3 1."""

    def read(self, values: Sequence[str]) -> list[float]:
        """Return the numbers; raises ArgumentError for other values."""
        try:
            return list(device_parts(",".join(values)))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None


class _Several(argparse.Action):
    """Collect the values of an option that may be given several times."""

    def __call__(self, _parser: Any, namespace: Any, values: Any, _option: Any = None) -> None:
        """Append the values to those of earlier uses of the option."""
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest, None) or ()), *values])


class _LoadMode(argparse.Action):
    """Read -lm as settings of memory mapping and locking."""

    def __call__(self, _parser: Any, namespace: Any, values: Any, _option: Any = None) -> None:
        """Store whether the file is mapped, and whether it is locked in memory."""
        namespace.use_mmap, namespace.use_mlock = LOAD_MODES[values]


def _whole(text: str, what: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -2
    if not -1 <= number <= MOST_BYTES >> 20:
        raise SettingsError(f"{what} cannot be {text!r}; give a whole number of -1 or more")
    return number


def _checkpoints(text: str) -> str:
    """Read llama-server's number of checkpoints: 0 keeps none, any other as many as fit."""
    return CHECKPOINTS if _whole(text, "--ctx-checkpoints") else "0"


def _swap_limit(text: str) -> str:
    """Read the MiB for idle conversations: -1 means no limit, 0 practically nothing."""
    mib = _whole(text, "--cache-ram")
    return f"{MOST_BYTES}B" if mib < 0 else f"{max(mib << 20, 1)}B"


def _ggml_type(text: str) -> int:
    from entropykv.llamacpp.context import GGML_TYPES  # noqa: PLC0415 - llama.cpp loads slowly

    if text not in GGML_TYPES:
        raise SettingsError(
            f"K or V in {text}: no store has this type; give --kv-type, as one of "
            f"{', '.join(KV_TYPES)}"
        )
    return GGML_TYPES[text]


def _rope_scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0.0 < scale < 1e9:
        raise SettingsError(f"--rope-scale cannot be {text!r}; give a number above 0")
    return 1.0 / scale


def add_llama_server_options(group: argparse._ArgumentGroup) -> None:
    """Add options of llama-server that express a field of the settings differently."""
    for names, dest, value in (
        (("--no-mmap",), "use_mmap", False),
        (("--mmap",), "use_mmap", True),
        (("--mlock",), "use_mlock", True),
        (("--no-shared-prefixes",), "shared_prefixes", False),
        (("--no-ui", "--no-webui"), "web", False),
        (("--no-models-autoload",), "models_autoload", False),
    ):
        same = f"the same as --{dest} {str(value).lower()}"
        group.add_argument(*names, dest=dest, action="store_const", const=value, help=same)
    group.add_argument(
        "-lm", "--load-mode", choices=LOAD_MODES, action=_LoadMode, help="both of use_mmap, mlock"
    )
    translated: tuple[tuple[tuple[str, ...], str, Callable[[str], Any], str], ...] = (
        (
            ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"),
            "checkpoints",
            _checkpoints,
            f"0: --checkpoints 0, other numbers: --checkpoints {CHECKPOINTS}",
        ),
        (("-cram", "--cache-ram"), "swap_limit", _swap_limit, "--swap-limit in MiB (-1: none)"),
        (("-ctk", "--cache-type-k"), "type_k", _ggml_type, "the type of K: a part of --kv-type"),
        (("-ctv", "--cache-type-v"), "type_v", _ggml_type, "the type of V: a part of --kv-type"),
        (("--rope-scale",), "rope_freq_scale", _rope_scale, "1 / --rope-freq-scale"),
        (("--chat-template-file",), "chat_template", text_of_file, "read it from a file"),
    )
    for spellings, dest, read, text in translated:
        group.add_argument(
            *spellings, dest=dest, action=_Once, type=read, metavar="VALUE", help=text
        )


_OF_REPLICAS = ("max_replicas", "scale_up_seconds", "scale_down_seconds", "sessions")
"""The options that only replicas have, by their names in ReplicaOptions."""


def add_serve(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the parser of `entropykv serve`. Options are added later, because those of
    llama_cpp.server come from packages that take long to load, and may not be installed.
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
    """Run `entropykv serve` until a signal; returns the exit code."""
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
    """Return the spelling of an option on the command line."""
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
    """Return the only model of replicas; raises SettingsError for several models, and for one that
    is unloaded while it is idle.
    """
    from entropykv.server import ModelOptions  # noqa: PLC0415

    if not isinstance(model, ModelOptions) or model.sleep_idle_seconds >= 0:
        raise SettingsError(
            "replicas have one model each, which stays loaded; leave --replicas out, or give one "
            "-m and no --sleep-idle-seconds"
        )
    return model
