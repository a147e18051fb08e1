"""The parser of every command: what it does not know is refused in one sentence.

argparse alone reads `-fa` as `-f a`. Users of llama.cpp type many flags of two letters; those that
have no meaning here say what to do instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from entropykv.errors import SettingsError

_ONE_MODEL = "give a GGUF file that is on this machine with -m"
_ONE_DEVICE = "leave it out: layers go to the device by -ngl"
_NO_CACHE_FILE = "use --save-session and --load-session"
_NO_DRAFT = "leave it out: a draft model is only for EntropyLlama (draft_model)"
_NO_IMAGES = "use llama.cpp for images: a KV budget holds text"
_NOT_NEEDED = "leave it out: it changes nothing here"
_SERVER = "use `entropykv serve`"

INSTEAD = {
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-hft"), _ONE_MODEL),
    **dict.fromkeys(("-mu", "--model-url", "-dr", "--docker-repo"), _ONE_MODEL),
    **dict.fromkeys(
        ("-dev", "--device", "-sm", "--split-mode", "-ts", "--tensor-split"), _ONE_DEVICE
    ),
    **dict.fromkeys(
        ("-mg", "--main-gpu", "-ot", "--override-tensor", "-fit", "--fit"), _ONE_DEVICE
    ),
    **dict.fromkeys(("-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", "--rpc"), _ONE_DEVICE),
    **dict.fromkeys(("--prompt-cache", "--prompt-cache-all", "--prompt-cache-ro"), _NO_CACHE_FILE),
    **dict.fromkeys(("-md", "--model-draft", "-ngld", "--draft-max", "--draft"), _NO_DRAFT),
    **dict.fromkeys(("-mm", "--mmproj", "--image", "--audio"), _NO_IMAGES),
    **dict.fromkeys(("-np", "--parallel", "-ns", "--sequences", "-cb", "--cont-batching"), _SERVER),
    **dict.fromkeys(("--host", "--port", "--api-key", "-a", "--alias"), _SERVER),
    **dict.fromkeys(("-co", "--color", "--simple-io", "-sp", "--special", "-dt"), _NOT_NEEDED),
    **dict.fromkeys(("--no-warmup", "--warmup", "--perf", "--no-perf", "-C", "-Cr"), _NOT_NEEDED),
    **dict.fromkeys(("--prio", "--poll", "-nr", "--no-repack", "--swa-full"), _NOT_NEEDED),
    "--check-tensors": "leave it out: files are checked by `entropykv plan`",
    "-i": "use `entropykv chat`",
    "--interactive": "use `entropykv chat`",
    "-if": "use `entropykv chat`",
    "-mli": 'use `entropykv chat`, and put several lines between two lines of """',
    "--multiline-input": 'use `entropykv chat`, and put several lines between two lines of """',
    "--in-prefix": "use --chat-template",
    "--in-suffix": "use --chat-template",
    "-bf": "use -f: text is read from it",
    "--binary-file": "use -f: text is read from it",
    "--keep": "use --sinks: first tokens that are never evicted",
    "--context-shift": _NOT_NEEDED,
    "--no-context-shift": _NOT_NEEDED,
    "-gan": "use -c longer than the model was trained for: positions are re-based",
    "--grp-attn-n": "use -c longer than the model was trained for: positions are re-based",
    "--defrag-thold": _NOT_NEEDED,
    "-lv": "use -v",
    "--log-file": "send standard error to a file: 2> FILE",
    "--log-disable": "send standard error to /dev/null: 2> /dev/null",
    "--override-kv": "change the file's metadata with gguf-py",
    "--control-vector": "leave it out: control vectors are not served",
    "--backend-sampling": _NOT_NEEDED,
    "-rea": _NOT_NEEDED,
}
"""Flags of llama.cpp's tools that have no equivalent here, and what to do."""


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that reads no flag as the beginning of another one."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Take what argparse takes; names of options are never completed."""
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Raise SettingsError for a flag of several letters that is not one of this command."""
        for argument in args or ():
            if argument == "--":
                break
            self._refuse_unknown(argument.partition("=")[0])
        return super().parse_known_args(args, namespace)

    def _refuse_unknown(self, flag: str) -> None:
        is_flag = flag.startswith("-") and not flag.startswith("---") and " " not in flag
        if not is_flag or flag in self._option_string_actions or len(flag) < 2:
            return
        if self._subparsers is not None:
            return  # of a command, which looks at it itself
        if flag in INSTEAD:
            raise SettingsError(f"{flag} is not an option of {self.prog}; {INSTEAD[flag]}")
        if flag.startswith("--") or (len(flag) > 2 and flag[1].isalpha() and not _has_number(flag)):
            raise SettingsError(f"{flag} is not an option of {self.prog}; see {self.prog} --help")

    def error(self, message: str) -> NoReturn:
        """Raise SettingsError: one sentence, without the usage, which is long."""
        raise SettingsError(f"{message}; see {self.prog} --help")


def _has_number(flag: str) -> bool:
    """Whether a value is written behind a flag of one letter, as in -n128."""
    return flag[2:].lstrip("-").replace(".", "", 1).isdigit()
