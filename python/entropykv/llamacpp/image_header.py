"""Find the format and size of an image in the first bytes of its file, without decoding it.

llama.cpp decodes every file that it is given, and a file of a few kilobytes may hold an image of
gigabytes. So a limit of pixels must be checked before. Formats that are not listed here are
refused, including those of sound and video, which llama.cpp would pass to other decoders.
"""

from __future__ import annotations

import struct

from entropykv.errors import ImageError

FORMATS = "PNG, JPEG, BMP or GIF"
MOST_RATIO = 200
"""The largest allowed ratio of an image's longer to its shorter side."""
_SIZED_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""Markers of the JPEG segments that contain the size: those of all kinds of frames, but not of
tables.
"""
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
"""Markers of JPEG that have no segment."""


def image_size(data: bytes, where: str) -> tuple[int, int]:
    """Return width and height of an image in pixels; raises ImageError, which names `where`."""
    try:
        size = _size(data)
    except (struct.error, IndexError):
        raise ImageError(f"{where}: is cut short; send the whole image") from None
    if size is None:
        raise ImageError(f"{where}: is no image that can be read here; give {FORMATS}")
    width, height = size
    if min(size) < 1 or max(size) > MOST_RATIO * min(size):
        raise ImageError(
            f"{where}: an image of {width} x {height} pixels cannot be read; one side may be "
            f"{MOST_RATIO} times as long as the other"
        )
    return size


def _size(data: bytes) -> tuple[int, int] | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _pair(">II", data, 16)
    if data.startswith(b"\xff\xd8\xff"):
        return _jpeg_size(data)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return _pair("<HH", data, 6)
    if data.startswith(b"BM"):
        (header,) = struct.unpack_from("<I", data, 14)
        width, height = _pair("<hh" if header == 12 else "<ii", data, 18)
        return width, abs(height)  # A negative height means that the first row is the top one.
    return None


def _pair(layout: str, data: bytes, offset: int) -> tuple[int, int]:
    first, second = struct.unpack_from(layout, data, offset)
    return int(first), int(second)


def _jpeg_size(data: bytes) -> tuple[int, int]:
    """Follow the segments of a JPEG file to its first frame, and return the size in it; raises
    IndexError without a frame.
    """
    at = 2
    while True:
        while data[at] != 0xFF:  # Decoders skip bytes between two segments.
            at += 1
        while data[at] == 0xFF:
            at += 1
        marker, at = data[at], at + 1
        if marker in _SIZED_FRAMES:
            height, width = _pair(">HH", data, at + 3)
            return width, height
        if marker not in _ALONE:
            (length,) = struct.unpack_from(">H", data, at)
            at += max(length, 2)
