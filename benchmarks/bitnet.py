"""Speed of a mid-size BitNet with random weights: `entropykv bench` on a file made for it.

    python benchmarks/bitnet.py --folder build --lengths 256,2048

Every option but --folder is one of `entropykv bench`. The shape is that of no published model: 8
layers 1,536 wide, 16 heads of 96, so that the KV cache of a token is four times that of a
SmolLM2-135M. The vocabulary is that of the BitNet in the package.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from entropykv.cli import main as entropykv
from entropykv.convert import convert
from entropykv.model import shipped
from entropykv.model.geometry import read_geometry
from inputs import BitNetShape, write_bitnet


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=Path(), help="for two files, removed again")
    arguments, options = parser.parse_known_args()
    shape = BitNetShape(
        layers=8,
        width=1536,
        ffn=4096,
        heads=16,
        kv_heads=16,
        vocabulary=read_geometry(shipped.DEMOS["bitnet"].path).n_vocab,
        context=32768,
    )
    source, model = (arguments.folder / name for name in ("random-i2s.gguf", "random-tq2.gguf"))
    try:
        write_bitnet(source, shape)
        convert(source, model, force=True)
        return entropykv(["bench", "-m", str(model), *options])
    finally:
        source.unlink(missing_ok=True)
        model.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
