"""The options of `entropykv serve` as users of llama-server and of llama_cpp.server type them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, cast

from entropykv.cli.options import integer

_LLAMA_SERVER = {
    "model": ("-m",),
    "model_alias": ("-a", "--alias"),
    "n_ctx": ("-c", "--ctx-size"),
    "n_batch": ("-b", "--batch-size"),
    "n_ubatch": ("-ub", "--ubatch-size"),
    "n_threads": ("-t", "--threads"),
    "n_threads_batch": ("-tb", "--threads-batch"),
    "n_gpu_layers": ("-ngl", "--gpu-layers"),
    "main_gpu": ("-mg",),
    "flash_attn": ("-fa",),
    "seed": ("-s",),
    "lora_path": ("--lora",),
    "ssl_keyfile": ("--ssl-key-file",),
    "ssl_certfile": ("--ssl-cert-file",),
    "root_path": ("--api-prefix",),
}
"""Field of llama_cpp.server's settings -> what llama-server calls it."""

_OF_REQUESTS = "requests say it themselves; leave it out here"
_INSTEAD = {
    ("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"): "K and V have one type; use --kv-type",
    ("-hf", "-hfr", "--hf-repo"): "download the file and give it to -m, or use --hf_model_repo_id",
    ("-cb", "--cont-batching"): "requests take turns; use --replicas to answer several at a time",
    ("-mm", "--mmproj"): "images are not possible inside a KV budget; use llama-server for them",
    ("-md", "--model-draft"): "use --draft_model prompt-lookup-decoding, with a full budget",
    (
        "--embeddings",
        "--reranking",
    ): "that needs no KV cache; use llama-server",
    ("--slot-save-path",): "use --sessions DIR, with --replicas",
    ("--chat-template", "--chat-template-file"): "use --chat_format, or a model that has one",
    ("--api-key-file",): "set the variable ENTROPYKV_API_KEY, or use --api-key",
    ("-n", "--predict", "--n-predict"): _OF_REQUESTS,
    ("--temp", "--top-k", "--top-p", "--min-p", "--repeat-penalty"): _OF_REQUESTS,
}
"""Options of llama-server that there are not -> what to do about it."""


class Spellings:
    """A group of options for llama_cpp.server's add_args_from_model(), which adds more names.

    Every option has its own name, the same with dashes, and llama-server's names.
    """

    def __init__(self, group: argparse._ArgumentGroup) -> None:
        """Add to this group."""
        self._group = group

    def add_argument(self, name: str, **options: Any) -> argparse.Action:
        """Add an option under all of its names; an option may be given once."""
        names = (name, f"--{name[2:].replace('_', '-')}", *_LLAMA_SERVER.get(name[2:], ()))
        return self._group.add_argument(*dict.fromkeys(names), action=_Once, **options)


class _Once(argparse.Action):
    """Stores a value; refuses a second one, which would silently take the place of the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,  # noqa: ARG002
    ) -> None:
        """Store the value."""
        if getattr(namespace, self.dest, None) is not None:
            raise argparse.ArgumentError(self, "is given twice; give it once")
        setattr(namespace, self.dest, values)


class _Instead(argparse.Action):
    """Refuses an option, and says what to do instead."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,  # noqa: ARG002
        values: str | Sequence[Any] | None,  # noqa: ARG002
        option: str | None = None,
    ) -> None:
        """Refuse it."""
        reason = cast(str, self.const)
        raise argparse.ArgumentError(None, f"serve has no {option}: {reason}")


def add_llama_server_options(group: argparse._ArgumentGroup) -> None:
    """Add switches of llama-server that have no value, and refuse by name what there is not."""
    group.add_argument(
        "-np",
        "--parallel",
        type=integer(1),
        metavar="N",
        help="conversations that the model holds: 1, as requests take turns (see --replicas)",
    )
    for name, dest, value in (
        ("--no-mmap", "use_mmap", False),
        ("--mlock", "use_mlock", True),
        ("-v", "verbose", True),
    ):
        same = f"the same as --{dest} {str(value).lower()}"
        group.add_argument(name, dest=dest, action="store_const", const=value, help=same)
    group.add_argument("--jinja", "--metrics", action="store_true", help="always so: accepted")
    options: tuple[str, ...]
    for options, reason in _INSTEAD.items():
        group.add_argument(
            *options,
            nargs="?",
            action=_Instead,
            const=reason,
            dest="refused",
            help=argparse.SUPPRESS,
        )
