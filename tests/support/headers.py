"""Change bytes in the header of a GGUF file."""

from __future__ import annotations

from pathlib import Path


def patched(source: Path, target: Path, offset: int, value: bytes) -> Path:
    content = bytearray(source.read_bytes())
    content[offset : offset + len(value)] = value
    target.write_bytes(content)
    return target
