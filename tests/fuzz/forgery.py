"""Change saved sessions at random, with correct sizes and digests.

forged() changes bytes of the sections, which are a store's own numbers. crafted() can also give a
field of the header any value, change the number of sections and their sizes, or change the file as
a whole, with wrong digests.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from dataclasses import dataclass
from typing import Any

from entropykv.session.file import DIGEST_BYTES, PREFIX

_NUMBERS = (0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, -(2**31), 10**30)
_VALUES: tuple[Any, ...] = (
    *_NUMBERS,
    0.5,
    float("nan"),
    float("inf"),
    None,
    True,
    "",
    "headwise",
    "9" * 5000,
    [],
    [[]],
    [0] * 1000,
    [[2**31 - 1]],
    {},
    {"a": {"b": []}},
)
_FLOATS = (float("nan"), float("inf"), float("-inf"), -0.0, 1e-45, 3e38)


def forged(chance: random.Random, data: bytes) -> bytes:
    """Change a few bytes of the sections, which are a store's own numbers."""
    start = _sections_start(data)
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        if len(data) - DIGEST_BYTES <= start:
            break
        place = chance.randrange(start, len(data) - DIGEST_BYTES)
        value = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        width = chance.choice((1, 1, 4))
        for i in range(place, min(place + width, len(data) - DIGEST_BYTES)):
            changed[i] = value
    return _signed(bytes(changed))


def crafted(chance: random.Random, data: bytes) -> tuple[str, bytes]:
    """Change any part of a saved session; returns what was done, and the bytes."""
    file = _File.of(data)
    change = chance.choice(
        (_bytes, _field, _field, _field, _number, _number, _section, _section, _floats, _raw)
    )
    what = change(chance, file)
    if chance.random() < 0.2:
        what += ", " + _field(chance, file)
    return what, file.put_together()


@dataclass
class _File:
    """Hold the parts of a saved session."""

    magic: bytes
    version: int
    header: Any
    sections: list[bytes]
    raw: bytes | None = None
    """The bytes to write, if the file is not assembled from the parts."""
    nested: str | None = None
    """JSON that replaces the header."""

    @staticmethod
    def of(data: bytes) -> _File:
        magic, version, size = PREFIX.unpack_from(data)
        header = json.loads(data[PREFIX.size : PREFIX.size + size])
        contents = header["contents"]
        sizes = [4 * contents["n_tokens"], 4 * contents["n_logits"], *contents["sections"]]
        sections, start = [], _sections_start(data)
        for n in sizes:
            sections.append(data[start : start + n])
            start += n
        return _File(magic, version, header, sections)

    def put_together(self) -> bytes:
        if self.raw is not None:
            return self.raw
        text = json.dumps(self.header) if self.nested is None else self.nested
        header = text.encode()
        start = PREFIX.pack(self.magic, self.version, len(header)) + header
        start += hashlib.blake2b(start, digest_size=DIGEST_BYTES).digest()
        return _signed(start + b"".join(self.sections) + bytes(DIGEST_BYTES))


def _field(chance: random.Random, file: _File) -> str:
    """Change, remove or add a field of the header, or replace more of it; sections stay."""
    part = chance.choice(("settings", "contents", "contents"))
    fields = file.header.get(part)
    if not isinstance(fields, dict) or not fields:
        return "nothing"
    name = chance.choice(list(fields))
    kind = chance.random()
    if kind < 0.08:
        del fields[name]
        return f"no {name}"
    if kind < 0.14:
        fields["more"] = chance.choice(_VALUES)
        return "a field more"
    if kind < 0.18:
        file.header[part] = chance.choice(_VALUES)
        return f"{part} is {file.header[part]!r}"[:60]
    if kind < 0.22:
        depth = chance.choice((10, 900, 100_000))
        file.nested = "[" * depth + "]" * depth
        return f"a header of {depth} lists within each other"
    fields[name] = chance.choice(_VALUES)
    return f"{name} is {fields[name]!r}"[:60]


def _number(chance: random.Random, file: _File) -> str:
    """Change a count of the contents, or one of its lists."""
    contents = file.header["contents"]
    names = [name for name, value in contents.items() if isinstance(value, int | list)]
    name = chance.choice(names)
    step = chance.choice((-2, -1, 1, 2, 16, 1000, 2**20))
    value = contents[name]
    if isinstance(value, list):
        rows = value if name == "entries" and value else [value]
        row = chance.choice(rows)
        if row:
            place = chance.randrange(len(row))
            row[place] = max(0, row[place] + step)
        elif chance.random() < 0.5:
            value.append(0)
    else:
        contents[name] = max(0, int(value) + step)
    return f"{name} moved by {step}"


def _section(chance: random.Random, file: _File) -> str:
    """Lengthen, shorten, swap, add or drop a section; the header states the sizes after that."""
    contents = file.header["contents"]
    own, kind = file.sections, chance.choice(("longer", "shorter", "swapped", "added", "dropped"))
    place = chance.randrange(2, len(own)) if len(own) > 2 else 0
    if place == 0 or kind == "added":
        own.append(chance.choice((b"", bytes(4), chance.randbytes(64))))
    elif kind == "longer":
        own[place] += bytes(chance.choice((1, 4, 8, 4096)))
    elif kind == "shorter":
        own[place] = own[place][: -chance.choice((1, 4, 8))]
    elif kind == "swapped":
        other = chance.randrange(2, len(own))
        own[place], own[other] = own[other], own[place]
    else:
        del own[place]
    contents["sections"] = [len(section) for section in own[2:]]
    return f"a section {kind}"


def _floats(chance: random.Random, file: _File) -> str:
    """Write special numbers (such as NaN) into fields of 4 bytes."""
    full = [i for i, section in enumerate(file.sections) if len(section) >= 4]
    if not full:
        return "nothing"
    place = chance.choice(full)
    changed = bytearray(file.sections[place])
    for _ in range(chance.choice((1, 3, 20))):
        value = struct.pack("<f", chance.choice(_FLOATS))
        if chance.random() < 0.4:
            value = struct.pack("<i", chance.choice((-1, -(2**31), 2**31 - 1, 10**6)))
        at = chance.randrange(len(changed) // 4) * 4
        changed[at : at + 4] = value
    file.sections[place] = bytes(changed)
    return f"special numbers in section {place}"


def _bytes(chance: random.Random, file: _File) -> str:
    file.raw = forged(chance, file.put_together())
    return "bytes of sections"


def _raw(chance: random.Random, file: _File) -> str:
    """Cut, lengthen or empty the file, flip a bit, or change magic, version or header size."""
    data = bytearray(file.put_together())
    kind = chance.choice(("cut", "longer", "flipped", "magic", "version", "header size", "empty"))
    if kind == "cut":
        del data[chance.randrange(len(data)) :]
    elif kind == "longer":
        data += chance.randbytes(chance.choice((1, 100)))
    elif kind == "flipped":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == "magic":
        data[chance.randrange(8)] = chance.randrange(256)
    elif kind == "version":
        data[8:12] = struct.pack("<I", chance.choice((0, 4, 5, 6, 8, 2**32 - 1)))
    elif kind == "header size":
        data[12:16] = struct.pack("<I", chance.choice((0, 1, 2**26, 2**26 + 1, 2**32 - 1)))
    else:
        data.clear()
    file.raw = bytes(data)
    return f"file {kind}"


def _sections_start(data: bytes) -> int:
    return PREFIX.size + int(struct.unpack_from("<I", data, 12)[0]) + DIGEST_BYTES


def _signed(data: bytes) -> bytes:
    body = data[:-DIGEST_BYTES]
    return body + hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()
