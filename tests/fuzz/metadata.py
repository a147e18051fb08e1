"""Damage the metadata of GGUF files: no file may end the process.

python -m tests.fuzz.metadata [--files N] [--seed S]

One key of a real header is removed, or gets another type or an impossible value. Each file is
opened and read in a process of its own; it must work, or be refused by an EntropyKVError.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gguf import GGUFReader, GGUFValueType

from entropykv import Session
from entropykv.errors import EntropyKVError
from entropykv.model.shipped import DEMOS
from tests.support.tiny_models import write_bitnet, write_gemma, write_gpt2, write_llama

SECONDS = 20
"""The timeout of one file in seconds; an endless loop is a failure, too."""

_FORMATS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class Header:
    """Hold the parts of a GGUF file: the bytes of each key, of tensors' headers, and of data."""

    name: str
    version: int
    n_tensors: int
    keys: dict[str, bytes]
    """The bytes of each key together with its value, by the key's name."""
    tensors: bytes
    data: bytes
    alignment: int

    @classmethod
    def read(cls, path: Path) -> Header:
        """Split a file into its parts."""
        reader, content = GGUFReader(path), path.read_bytes()
        keys, end = {}, 24
        for field in reader.fields.values():
            if field.name.startswith("GGUF."):
                continue
            size = sum(int(part.nbytes) for part in field.parts)
            keys[field.name] = content[field.offset : field.offset + size]
            end = max(end, field.offset + size)
        infos = sum(int(part.nbytes) for t in reader.tensors for part in t.field.parts)
        version = struct.unpack_from("<I", content, 4)[0]
        return cls(
            path.stem,
            version,
            len(reader.tensors),
            keys,
            content[end : end + infos],
            content[reader.data_offset :],
            reader.alignment,
        )

    def with_key(self, name: str, value: bytes | None) -> bytes:
        """Return a file in which a key has this type and value, or is missing."""
        keys = [raw for key, raw in self.keys.items() if key != name]
        if value is not None:
            keys.append(struct.pack("<Q", len(name.encode())) + name.encode() + value)
        start = b"GGUF" + struct.pack("<IQQ", self.version, self.n_tensors, len(keys))
        head = start + b"".join(keys) + self.tensors
        return head + bytes(-len(head) % self.alignment) + self.data


def damaged_value(chance: random.Random) -> bytes:
    """Return the bytes of a type and a value that no sensible file has for a key."""
    kind = chance.choice(list(GGUFValueType))
    if kind == GGUFValueType.ARRAY:
        item = chance.choice([*_FORMATS, GGUFValueType.STRING])
        n = chance.choice((0, 1, 2, 1000))
        items = b"".join(_scalar(item, chance) for _ in range(n))
        return struct.pack("<IIQ", kind, item, n) + items
    return struct.pack("<I", kind) + _scalar(kind, chance)


def _scalar(kind: GGUFValueType, chance: random.Random) -> bytes:
    if kind == GGUFValueType.STRING:
        text = chance.choice((b"", b"x", b"\xff\xfe", b"llama", b"gpt2", b"none", b"a" * 5000))
        return struct.pack("<Q", len(text)) + text
    if kind == GGUFValueType.BOOL:
        return struct.pack("<?", chance.random() < 0.5)
    code = _FORMATS[kind]
    if code in "fd":
        values = (0.0, -1.0, 1e30, float("nan"), float("inf"), 1e-30)
        return struct.pack("<" + code, chance.choice(values))
    bits = 8 * struct.calcsize(code)
    low, high = (0, 2**bits - 1) if code.isupper() else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return struct.pack("<" + code, chance.choice((0, 1, 2, 3, 7, low, high, high // 2)))


def blown_up(raw: bytes, name: str, chance: random.Random) -> bytes:
    """Return a value of the key's own type; an array may get another length, too."""
    at = 8 + len(name.encode())
    kind = GGUFValueType(struct.unpack_from("<I", raw, at)[0])
    if kind != GGUFValueType.ARRAY:
        return struct.pack("<I", kind) + _scalar(kind, chance)
    item = GGUFValueType(struct.unpack_from("<I", raw, at + 4)[0])
    n = struct.unpack_from("<Q", raw, at + 8)[0]
    count = chance.choice((0, 1, n // 2, n, n + 1, 2 * n))
    items = b"".join(_scalar(item, chance) for _ in range(count))
    return struct.pack("<IIQ", kind, item, count) + items


def headers(folder: Path) -> list[Header]:
    """Write four tiny models to `folder`; return their headers and a shipped model's."""
    writers = {"llama": write_llama, "bitnet": write_bitnet, "gemma": write_gemma}
    for name, write in writers.items():
        write(folder / f"{name}.gguf")
    write_gpt2(folder / "gpt2.gguf", n_ctx_train=256)
    paths = [*sorted(folder.glob("*.gguf")), DEMOS["bitnet"].path]
    return [Header.read(path) for path in paths]


def cases(headers: list[Header], seed: int, *, removed: bool = True) -> Iterator[tuple[str, bytes]]:
    """Yield what was done to a file, and its bytes: first every key is removed once, then one key
    is damaged at random, without end.
    """
    chance = random.Random(seed)
    for header in headers:
        for key in header.keys if removed else ():
            yield f"{header.name}: {key} removed", header.with_key(key, None)
    number = 0
    while True:
        header = chance.choice(headers)
        key = chance.choice(list(header.keys))
        if chance.random() < 0.5:
            value = damaged_value(chance)
        else:
            value = blown_up(header.keys[key], key, chance)
        number += 1
        what = f"{header.name}: {key} = {value[:40]!r} (number {number} of seed {seed})"
        yield what, header.with_key(key, value)


def failure(path: Path) -> str | None:
    """Open a file and read from it, in a process of its own; returns what went wrong, or None."""
    child = os.fork()
    if child == 0:
        os._exit(_try(path))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    code = os.waitstatus_to_exitcode(status)
    return None if code == 0 else f"exit code {code}"


def _try(path: Path) -> int:
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    os.environ["GGML_NO_BACKTRACE"] = "1"
    signal.alarm(SECONDS)
    try:
        with Session(path, n_ctx=64, n_threads=1, n_ubatch=16) as session:
            session.model.chat_prompt("the cat")
            tokens = session.tokenize("the cat") or [1]
            for token in session.generate(tokens[:32], max_tokens=2):
                session.detokenize([token])
    except EntropyKVError:
        return 0
    except BaseException:  # Any other exception is not a refusal.
        return 1
    return 0


def failures(seed: int, n_files: int, *, removed: bool = True) -> Iterator[str]:
    """Yield the failures among n_files files; with `removed`, those that lack a key come first."""
    with tempfile.TemporaryDirectory(prefix="entropykv-metadata-") as name:
        folder = Path(name)
        found = headers(folder)
        path = folder / "damaged.gguf"
        for number, (what, content) in enumerate(cases(found, seed, removed=removed)):
            if number == n_files:
                return
            path.write_bytes(content)
            why = failure(path)
            if why is not None:
                yield f"{what}: {why}"


def main() -> int:
    """Print the failures; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    count = 0
    for what in failures(options.seed, options.files):
        count += 1
        print(what, flush=True)
    print(f"{count} of {options.files} files failed")
    return 1 if count else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
