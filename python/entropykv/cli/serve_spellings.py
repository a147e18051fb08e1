"""Let users type the options of `entropykv serve` as at llama-server and llama_cpp.server."""

from __future__ import annotations

import argparse
from typing import Any

_LLAMA_SERVER = {
    "model": ("-m",),
    "hf_repo": ("-hf", "-hfr"),
    "hf_file": ("-hff",),
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
    "parallel": ("-np",),
    "ssl_keyfile": ("--ssl-key-file",),
    "ssl_certfile": ("--ssl-cert-file",),
    "root_path": ("--api-prefix",),
}
"""llama-server's name for a field of llama_cpp.server's settings."""


class Spellings:
    """Collect options for llama_cpp.server's add_args_from_model(), and give them more names.

    Every option has its own name, the same with dashes, and llama-server's names.
    """

    def __init__(self, group: argparse._ArgumentGroup) -> None:
        """Take the group that options are added to."""
        self._group = group

    def add_argument(self, name: str, **options: Any) -> argparse.Action:
        """Add an option under all of its names; an option may be given once."""
        names = (name, f"--{name[2:].replace('_', '-')}", *_LLAMA_SERVER.get(name[2:], ()))
        return self._group.add_argument(*dict.fromkeys(names), action=_Once, **options)


class _Once(argparse.Action):
    """Store a value, and refuse a second one, which would silently replace the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,  # noqa: ARG002
    ) -> None:
        """Store the value; raises SettingsError where there is one already."""
        if getattr(namespace, self.dest, None) is not None:
            raise argparse.ArgumentError(self, "is given twice; give it once")
        setattr(namespace, self.dest, values)


def add_llama_server_options(group: argparse._ArgumentGroup) -> None:
    """Add options without a value, as llama-server has them, for fields of the settings."""
    for name, dest, value in (
        ("--no-mmap", "use_mmap", False),
        ("--mlock", "use_mlock", True),
        ("-v", "verbose", True),
        ("--no-shared-prefixes", "shared_prefixes", False),
    ):
        same = f"the same as --{dest} {str(value).lower()}"
        group.add_argument(name, dest=dest, action="store_const", const=value, help=same)
    group.add_argument("--jinja", "--metrics", action="store_true", help="always so: accepted")
