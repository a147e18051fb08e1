"""Declare the options of how a model is loaded, with llama-cli's names."""

from __future__ import annotations

import argparse
from typing import Any

from entropykv.cli.options import integer, utf8
from entropykv.errors import SettingsError
from entropykv.files import json_of, read_text
from entropykv.llamacpp.foreign_text import PARSE_SPECIAL
from entropykv.llamacpp.model_options import (
    LOAD_MODES,
    MOST_DEVICES,
    NUMA_STRATEGIES,
    ROPE_SCALINGS,
    SPLIT_MODES,
    LoadOptions,
    read_overrides,
)

_ROPE = {
    "--rope-freq-base": ("rope_freq_base", "base frequency of RoPE"),
    "--rope-freq-scale": ("rope_freq_scale", "its frequencies are multiplied by this"),
    "--yarn-ext-factor": ("yarn_ext_factor", "YaRN: how much is extrapolated"),
    "--yarn-attn-factor": ("yarn_attn_factor", "YaRN: scale of the attention"),
    "--yarn-beta-fast": ("yarn_beta_fast", "YaRN: low correction"),
    "--yarn-beta-slow": ("yarn_beta_slow", "YaRN: high correction"),
}


def add_model_tuning(parser: argparse.ArgumentParser) -> None:
    """Add options of memory, LoRA, RoPE and chat template; model_options_of() reads them."""
    group = parser.add_argument_group("model")
    group.add_argument("--no-mmap", action="store_true", help="read the weights into memory")
    group.add_argument("--mmap", dest="no_mmap", action="store_false", help=argparse.SUPPRESS)
    group.add_argument("--mlock", action="store_true", help="keep the weights in memory")
    group.add_argument(
        "-lm",
        "--load-mode",
        choices=LOAD_MODES,
        metavar="MODE",
        help="both by one name: " + ", ".join(LOAD_MODES),
    )
    group.add_argument("--numa", choices=NUMA_STRATEGIES, help="llama.cpp's strategy for NUMA")
    group.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="FILE",
        help="a LoRA adapter (GGUF), or several",
    )
    group.add_argument(
        "--lora-scaled",
        action="append",
        default=[],
        nargs="+",
        metavar="FILE:SCALE",
        help="a LoRA adapter with a scale, or several separated by commas",
    )
    group.add_argument(
        "--override-kv",
        action="append",
        default=[],
        metavar="KEY=TYPE:VALUE",
        help="what llama.cpp takes in the place of the file's metadata, such as "
        "tokenizer.ggml.add_bos_token=bool:false; budget and context go by the file",
    )
    group.add_argument(
        "--rope-scaling", choices=ROPE_SCALINGS, help="how RoPE is scaled (default: the model's)"
    )
    group.add_argument(
        "--rope-scale", type=float, metavar="N", help="the context is N times as long for RoPE"
    )
    group.add_argument(
        "--yarn-orig-ctx", type=int, metavar="N", help="YaRN: context that it was trained for"
    )
    for flag, (field, text) in _ROPE.items():
        group.add_argument(flag, dest=field, type=float, metavar="X", help=text)
    group.add_argument(
        "--chat-template",
        type=utf8,
        metavar="TEXT",
        help="Jinja, or a name such as chatml (default: its own)",
    )
    group.add_argument("--chat-template-file", metavar="FILE", help="read the template from a file")
    group.add_argument("--parse-special", action="store_true", help=PARSE_SPECIAL)
    add_template_arguments(group)


def add_template_arguments(group: argparse._ActionsContainer) -> None:
    """Add --chat-template-kwargs."""
    group.add_argument(
        "--chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help="what the chat template is told besides the messages, such as "
        """'{"enable_thinking": false}'""",
    )


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object, as an argparse type."""
    found = json_of(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(
            "it is not a JSON object; give one such as '{\"name\": 1}'"
        )
    return found


def add_split_options(group: argparse._ActionsContainer) -> None:
    """Add options of how several devices share a model."""
    group.add_argument(
        "-sm",
        "--split-mode",
        choices=SPLIT_MODES,
        metavar="MODE",
        help="how several GPUs share the model: " + ", ".join(SPLIT_MODES),
    )
    group.add_argument(
        "-ts",
        "--tensor-split",
        type=device_parts,
        default=(),
        metavar="N0,N1,...",
        help="the part of the model for each GPU, such as 3,1",
    )
    group.add_argument(
        "-mg",
        "--main-gpu",
        type=integer(0, MOST_DEVICES - 1),
        metavar="N",
        help="the GPU of the model with -sm none",
    )


def device_parts(text: str) -> tuple[float, ...]:
    """Read numbers such as 3,1 or 3/1, one for each device, as an argparse type."""
    try:
        parts = tuple(float(part) for part in text.replace("/", ",").split(","))
    except ValueError:
        parts = ()
    if not parts or not all(0.0 <= part < 1e9 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of parts such as 3,1")
    if len(parts) > MOST_DEVICES:
        raise argparse.ArgumentTypeError(f"there are at most {MOST_DEVICES} devices")
    return parts


def model_options_of(options: argparse.Namespace) -> LoadOptions:
    """Return LoadOptions; raises SettingsError for options that contradict each other."""
    template = options.chat_template
    if options.chat_template_file is not None:
        if template is not None:
            raise SettingsError("give --chat-template or --chat-template-file, not both")
        template = read_text(options.chat_template_file, SettingsError)
    adapters = [(path, 1.0) for text in options.lora for path in text.split(",")]
    adapters += [scaled for words in options.lora_scaled for scaled in _scaled(words)]
    use_mmap, use_mlock = not options.no_mmap, options.mlock
    if options.load_mode is not None:
        use_mmap, use_mlock = LOAD_MODES[options.load_mode]
    return LoadOptions(
        use_mmap=use_mmap,
        use_mlock=use_mlock,
        split_mode=options.split_mode,
        main_gpu=options.main_gpu,
        tensor_split=options.tensor_split,
        overrides=read_overrides(options.override_kv),
        template_arguments=options.chat_template_kwargs or {},
        numa=options.numa,
        adapters=adapters,
        rope=_rope_of(options),
        chat_template=template,
        parse_special=options.parse_special,
    )


def _scaled(words: list[str]) -> list[tuple[str, float]]:
    """Read FILE:SCALE, several separated by commas, or FILE SCALE as in earlier versions of
    llama.cpp.
    """
    pairs = [text.rpartition(":")[::2] for word in words for text in word.split(",")]
    if len(words) == 2 and not pairs[0][0]:
        pairs = [(words[0], words[1])]
    try:
        scaled = [(path, float(scale)) for path, scale in pairs]
    except ValueError:
        scaled = []
    if not scaled or not all(path for path, _ in scaled):
        raise SettingsError(f"--lora-scaled: {' '.join(words)!r} has no scale; give FILE:SCALE")
    return scaled


def _rope_of(options: argparse.Namespace) -> dict[str, float]:
    """Return the given fields of llama_context_params."""
    given = {field: getattr(options, field) for field, _ in _ROPE.values()}
    if options.rope_scale is not None:
        if given["rope_freq_scale"] is not None or options.rope_scale <= 0.0:
            raise SettingsError("--rope-scale is a number above 0, and 1 / --rope-freq-scale")
        given["rope_freq_scale"] = 1.0 / options.rope_scale
    given["yarn_orig_ctx"] = options.yarn_orig_ctx
    if options.rope_scaling is not None:
        given["rope_scaling_type"] = ROPE_SCALINGS[options.rope_scaling]
    return {name: value for name, value in given.items() if value is not None}
