#!/usr/bin/env python3
"""Measure the attention entropy of a model's heads, by the command line of the BitNet document.

    python calibrate_entropy.py --model microsoft/bitnet-b1.58-2B-4T --output entropy_config.json
    python calibrate_entropy.py --model model.gguf
    python calibrate_entropy.py --from-results results.json --output entropy_config.json

It does the same as `entropykv calibrate`: a GGUF file runs in llama.cpp, as users run it; anything
else is a directory or name for transformers (entropykv[hf]).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from entropykv.cli import main as entropykv


def main(arguments: Sequence[str]) -> int:
    """Run `entropykv calibrate`, with --hf for a --model that is no GGUF file."""
    translated: list[str] = []
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        value = value if equals else next(iter(arguments[i + 1 : i + 2]), "")
        if name == "--model" and not value.lower().endswith(".gguf"):
            argument = "--hf" + equals + (value if equals else "")  # noqa: PLW2901
        translated.append(argument)
    return entropykv(["calibrate", *translated])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
