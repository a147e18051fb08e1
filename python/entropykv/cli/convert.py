"""`entropykv convert`: convert a 1.58-bit model to a GGUF file that stock llama.cpp loads."""

from __future__ import annotations

import argparse
import shlex
import sys

from entropykv.cli.parser import CommandParser
from entropykv.cli.progress import ProgressBar
from entropykv.convert import ConversionSummary, convert
from entropykv.convert.conversion import Estimate
from entropykv.convert.outputs import EMBEDDING_TYPES, WEIGHT_TYPES
from entropykv.convert.ternary import I2S_LAYOUTS
from entropykv.model.geometry import ACTIVATIONS


def add_convert(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the parser of `entropykv convert`."""
    parser = commands.add_parser(
        "convert",
        description="Convert a 1.58-bit model (BitNet b1.58, Llama3-8B-1.58, Falcon3-1.58bit, "
        "Falcon-E and others: `entropykv models --known`), as an I2_S file of Microsoft's BitNet "
        "fork or as the directory of a Hugging Face checkpoint, to a GGUF file that stock "
        "llama.cpp loads. Ternary weights stay exact.",
    )
    parser.add_argument("source", metavar="IN", help="GGUF file, or Hugging Face directory")
    parser.add_argument("target", metavar="OUT.gguf", help="file to write")
    parser.add_argument(
        "--weight-type",
        choices=WEIGHT_TYPES,
        help="tq2_0: smallest; q4_0: reads prompts faster; f16, f32: for reference, and master "
        "weights of a Hugging Face checkpoint are not quantised (default: tq2_0, and the next "
        "that fits if a row is not a multiple of 256)",
    )
    parser.add_argument(
        "--embedding-type",
        choices=EMBEDDING_TYPES,
        help="type of the embedding and of a head of its own (default: the first that fits its "
        "rows; one that is quantised already is kept)",
    )
    parser.add_argument(
        "--i2s-layout",
        choices=I2S_LAYOUTS,
        default=I2S_LAYOUTS[0],
        help="where the I2_S file was quantised, which it does not say: try arm64 if the "
        "converted model writes nonsense (default: %(default)s)",
    )
    parser.add_argument(
        "--activation",
        choices=("auto", *ACTIVATIONS),
        default="auto",
        help="activation of the feed-forward gate (default: what the model says)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite OUT.gguf")
    parser.set_defaults(command=_convert)


def _convert(options: argparse.Namespace) -> int:
    with ProgressBar(desc="converting", unit="B", unit_scale=True, leave=False, delay=0.5) as bar:
        summary = convert(
            options.source,
            options.target,
            weight_type=options.weight_type,
            embedding_type=options.embedding_type,
            i2s_layout=options.i2s_layout,
            activation=options.activation,
            force=options.force,
            progress=bar.advance_to,
            started=lambda expected: print(format_estimate(expected), file=sys.stderr),
        )
    print(format_summary(summary), file=sys.stderr)
    if options.weight_type in (None, "tq2_0") and "Q4_0" in dict(summary.tensor_types):
        print("weights whose rows fill no blocks of 256 became Q4_0, as exactly", file=sys.stderr)
    return 0


def format_estimate(expected: Estimate) -> str:
    """Return one line about the time and memory that the conversion will need."""
    return (
        f"writing {expected.target_bytes / 2**20:,.1f} MiB: about {expected.seconds:.0f} s, and "
        f"{expected.memory_bytes / 2**20:.0f} MiB of memory for the weights"
    )


def format_summary(summary: ConversionSummary) -> str:
    """Return the table of results, and the command that runs the converted model."""
    types = ", ".join(f"{count} {kind}" for kind, count in summary.tensor_types)
    rows = [
        ("model", f"{summary.architecture}, activation {summary.activation}"),
        ("tensors", types),
        (
            "bytes",
            f"{summary.source_bytes / 2**20:.1f} MiB -> {summary.target_bytes / 2**20:.1f} MiB",
        ),
        ("run it", f"entropykv run -m {shlex.quote(str(summary.target))} -p 'Once upon a time'"),
    ]
    return "\n".join(f"{name:>10}  {value}" for name, value in rows)
