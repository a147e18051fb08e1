"""Saved sessions that somebody changed, with digests that are right all the same."""

from __future__ import annotations

import hashlib
import random
import struct

_PREFIX_BYTES = 16
_DIGEST_BYTES = 16


def forged(chance: random.Random, data: bytes) -> bytes:
    """Change a few bytes of the sections, which are a store's own numbers."""
    start = _sections_start(data)
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        if len(data) - _DIGEST_BYTES <= start:
            break
        place = chance.randrange(start, len(data) - _DIGEST_BYTES)
        value = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        width = chance.choice((1, 1, 4))
        for i in range(place, min(place + width, len(data) - _DIGEST_BYTES)):
            changed[i] = value
    return _signed(bytes(changed))


def _sections_start(data: bytes) -> int:
    return _PREFIX_BYTES + int(struct.unpack_from("<I", data, 12)[0]) + _DIGEST_BYTES


def _signed(data: bytes) -> bytes:
    body = data[:-_DIGEST_BYTES]
    return body + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
