r"""Measure time and memory of `entropykv convert` on a random I2_S file of any size.

The default has the shape of microsoft/bitnet-b1.58-2B-4T: 1.2 GB. The second command has the shape
of Falcon3-10B-1.58bit, 3.9 GB:

python benchmarks/convert.py --folder build
python benchmarks/convert.py --folder build --architecture llama --layers 40 --width 3072 \
    --ffn 23040 --heads 12 --kv-heads 4 --vocabulary 131072 --context 32768

`--keep` does not delete the converted file, so that `entropykv run` can use it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

from inputs import BitNetShape, write_bitnet

_CONVERT = """
import sys
from entropykv.cli import main
from entropykv.system import peak_rss_bytes
before = peak_rss_bytes()
code = main(["convert", *sys.argv[1:]])
print(f"memory: {(peak_rss_bytes() - before) / 2**20:.0f} MiB more than Python and the package")
sys.exit(code)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=Path(), help="for two files, removed again")
    for name, default in asdict(BitNetShape()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default, help="(%(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave the converted file")
    arguments, options = parser.parse_known_args()
    shape = BitNetShape(**{f.name: getattr(arguments, f.name) for f in fields(BitNetShape)})
    source, target = (arguments.folder / name for name in ("random-i2s.gguf", "random-tq2.gguf"))
    try:
        write_bitnet(source, shape)
        print(f"source: {source.stat().st_size / 1e6:.0f} MB", flush=True)
        start = time.perf_counter()
        command = [sys.executable, "-c", _CONVERT, str(source), str(target), "--force", *options]
        subprocess.run(command, check=True)
        print(f"time: {time.perf_counter() - start:.1f} s, the start of Python included")
    finally:
        source.unlink(missing_ok=True)
        if not arguments.keep:
            target.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
