"""The size of an image is found without decoding it; a text records its images, and by how much
RoPE's positions are smaller after them.
"""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv.errors import ImageError
from entropykv.session.images import image_size, placeholders_of
from entropykv.session.second_readings import Echo
from entropykv.session.sequence import ImageSpans, TokenSequence, is_placeholder, text_before_image
from tests.support.tiny_vision import png


def test_spans_grow_are_cut_and_copied() -> None:
    spans = ImageSpans()
    spans.note(5, 0, 8, behind=6)
    spans.note(13, 8, 4, behind=6)  # These tokens are the rest of the same image.
    spans.note(20, 0, 12, behind=8)
    assert [(span.start, span.end) for span in spans] == [(5, 17), (20, 32)]
    assert (spans.lag, spans.lag_before(20), spans.lag_before(5)) == (14, 6, 0)
    copy = spans.copy()
    spans.truncate(22)
    assert [(span.start, span.end, span.lag) for span in spans] == [(5, 17, 6), (20, 22, 1)]
    assert spans.ends_within(22, 2)
    assert not spans.ends_within(22, 3)
    spans.truncate(5)
    assert (len(spans), len(copy), copy.lag) == (0, 2, 14)
    assert not spans.ends_within(5, 1)


def test_images_without_mrope_leave_rope_with_the_text() -> None:
    spans = ImageSpans()
    spans.note(5, 0, 8, behind=0)
    spans.truncate(7)
    assert spans.lag == 0


def test_placeholders_follow_from_the_key_and_are_no_tokens() -> None:
    one, same, other = (placeholders_of(key, 64) for key in (b"a", b"a", b"b"))
    assert one == same != other
    assert placeholders_of(b"a", 8) == one[:8]
    assert all(-(2**31) < token < -1 for token in one + other)
    assert not set(one) & set(other)
    assert not is_placeholder(-1)


def test_texts_are_cut_where_images_begin_and_end() -> None:
    tokens = [1, 2, -5, -6, -7, 3]
    assert text_before_image(tokens, 6) == 2
    assert text_before_image(tokens, 1) == 1
    assert text_before_image([4, 5], 9) == 2


def test_an_echo_repeats_what_is_said_and_no_image() -> None:
    echo = Echo(lambda _: [7, 8], 128)
    assert echo.of([1, -5, 2], [3, -6, 4]) == [7, 8, 1, 2, 3, 4]
    assert echo.of([1, 2], [-6, -7]) == []


def test_an_image_counts_as_echoed_where_all_before_it_is() -> None:
    sequence = TokenSequence(64)
    sequence.add([1, 2], None, is_prompt=True)
    sequence.add_image(0, 3, 0)
    sequence.add([-5, -6, -7], None, is_prompt=True)
    assert sequence.echoed == 0
    sequence.echoed = 5
    sequence.add_image(0, 2, 0)
    assert sequence.echoed == 7


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
