"""A text records its images, and by how much RoPE's positions are smaller after them."""

from __future__ import annotations

from entropykv.session.images import placeholders_of
from entropykv.session.second_readings import Echo
from entropykv.session.sequence import ImageSpans, TokenSequence, is_placeholder, text_before_image


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
