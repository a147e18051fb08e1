"""The format and size of an image file are found without decoding it."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv.errors import ImageError
from entropykv.session.images import image_size
from tests.support.tiny_vision import png

JPEG_TABLES = b"\xff\xc4\x00\x04ab" + b"\xff\xe0\x00\x05abc" + b"\xff\xff\xd8"
FILES = {
    "png": png(64, 40),
    "gif": b"GIF89a" + struct.pack("<HH", 64, 40) + bytes(10),
    "bmp": b"BM" + bytes(12) + struct.pack("<Iii", 40, 64, -40) + bytes(10),
    "old bmp": b"BM" + bytes(12) + struct.pack("<Ihh", 12, 64, 40) + bytes(10),
    "jpeg": b"\xff\xd8" + JPEG_TABLES + b"\xff\xc2\x00\x11\x08" + struct.pack(">HH", 40, 64),
}


@pytest.mark.parametrize("kind", FILES)
def test_sizes_are_read(kind: str) -> None:
    assert image_size(FILES[kind], "it") == (64, 40)


@pytest.mark.parametrize("kind", FILES)
def test_files_that_are_cut_short_are_refused(kind: str) -> None:
    n_needed = {"png": 24, "gif": 10, "bmp": 26, "old bmp": 22, "jpeg": len(FILES[kind])}[kind]
    for size in range(n_needed):
        with pytest.raises(ImageError, match=r"^it: "):
            image_size(FILES[kind][:size], "it")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no image"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "give PNG, JPEG, BMP or GIF"),
        (b"ID3\x03" + bytes(50), "no image"),
        (b"\0\0\0\x18ftypmp42", "no image"),
        (png(1, 1)[:16] + struct.pack(">II", 10_000, 2) + bytes(20), "10000 x 2 pixels"),
        (b"GIF89a" + bytes(10), "0 x 0 pixels"),
        (b"\xff\xd8\xff" + b"\xe0\0\2" * 3, "cut short"),
    ],
)
def test_what_is_no_image_is_refused_by_name(data: bytes, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        image_size(data, "it")


@given(st.binary(max_size=200), st.sampled_from([b"", b"\xff\xd8\xff", b"BM", b"GIF87a"]))
def test_any_bytes_are_read_or_refused(data: bytes, start: bytes) -> None:
    try:
        width, height = image_size(start + data, "it")
    except ImageError:
        return
    assert width > 0
    assert height > 0
