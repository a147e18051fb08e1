"""Declare options of how a model is loaded, by llama-cli's names."""

from __future__ import annotations

import argparse

from entropykv.errors import SettingsError
from entropykv.files import read_text
from entropykv.llamacpp.model_options import NUMA_STRATEGIES, ROPE_SCALINGS, LoadOptions

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
    group.add_argument("--mlock", action="store_true", help="keep the weights in memory")
    group.add_argument("--numa", choices=NUMA_STRATEGIES, help="llama.cpp's strategy for NUMA")
    group.add_argument(
        "--lora", action="append", default=[], metavar="FILE", help="a LoRA adapter (GGUF)"
    )
    group.add_argument(
        "--lora-scaled",
        action="append",
        default=[],
        nargs=2,
        metavar=("FILE", "SCALE"),
        help="a LoRA adapter with a scale",
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
        "--chat-template", metavar="TEXT", help="Jinja, or a name such as chatml (default: its own)"
    )
    group.add_argument("--chat-template-file", metavar="FILE", help="read the template from a file")
    group.add_argument("--jinja", action="store_true", help="changes nothing: templates are Jinja")


def model_options_of(options: argparse.Namespace) -> LoadOptions:
    """Make LoadOptions; raises SettingsError for options that contradict each other."""
    template = options.chat_template
    if options.chat_template_file is not None:
        if template is not None:
            raise SettingsError("give --chat-template or --chat-template-file, not both")
        template = read_text(options.chat_template_file, SettingsError)
    adapters = [(path, 1.0) for path in options.lora]
    adapters += [(path, _number(scale)) for path, scale in options.lora_scaled]
    return LoadOptions(
        use_mmap=not options.no_mmap,
        use_mlock=options.mlock,
        numa=options.numa,
        adapters=adapters,
        rope=_rope_of(options),
        chat_template=template,
    )


def _number(scale: str) -> float:
    try:
        return float(scale)
    except ValueError:
        raise SettingsError(f"--lora-scaled: {scale!r} is no number; give FILE and SCALE") from None


def _rope_of(options: argparse.Namespace) -> dict[str, float]:
    """Return the fields of llama_context_params that were given."""
    given = {field: getattr(options, field) for field, _ in _ROPE.values()}
    if options.rope_scale is not None:
        if given["rope_freq_scale"] is not None or options.rope_scale <= 0.0:
            raise SettingsError("--rope-scale is a number above 0, and 1 / --rope-freq-scale")
        given["rope_freq_scale"] = 1.0 / options.rope_scale
    given["yarn_orig_ctx"] = options.yarn_orig_ctx
    if options.rope_scaling is not None:
        given["rope_scaling_type"] = ROPE_SCALINGS[options.rope_scaling]
    return {name: value for name, value in given.items() if value is not None}
