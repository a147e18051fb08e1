"""Record where a text has images, which are runs of placeholders among its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

FIRST_PLACEHOLDER = -2
"""The largest token that is a placeholder for a part of an image; -1 is llama.cpp's "no token"."""


@dataclass(frozen=True)
class ImageSpan:
    """Hold the place of an image in a text, as far as it was read."""

    start: int
    """The position of its first token in the text."""
    n_tokens: int
    """How many of its tokens were read."""
    behind: int
    """By how much RoPE's position is less than the text position after the whole image: 0 without
    M-RoPE.
    """

    @property
    def end(self) -> int:
        """Return the text position after its last token that was read."""
        return self.start + self.n_tokens

    @property
    def lag(self) -> int:
        """Return by how much RoPE's position is less than the text position after the tokens that
        were read.
        """
        return min(self.behind, self.n_tokens - 1)


class ImageSpans:
    """Hold the places of all images of a text, in their order."""

    def __init__(self, spans: Sequence[ImageSpan] = ()) -> None:
        """Store spans that do not overlap, in the order of the text."""
        self._spans = list(spans)

    def __iter__(self) -> Iterator[ImageSpan]:
        """Iterate over the spans, in the order of the text."""
        return iter(self._spans)

    def __len__(self) -> int:
        """Return how many images the text has."""
        return len(self._spans)

    @property
    def lag(self) -> int:
        """Return by how much RoPE's position of the next token is less than its position in the
        text.
        """
        return sum(span.lag for span in self._spans)

    def lag_before(self, start: int) -> int:
        """Return by how much RoPE's position is less than `start`, where an image begins."""
        return sum(span.lag for span in self._spans if span.start < start)

    def ends_within(self, position: int, first: int) -> bool:
        """Tell whether the text ends at `position` after exactly `first` rows of an image."""
        last = self._spans[-1] if self._spans else None
        return last is not None and (last.end, last.n_tokens) == (position, first)

    def note(self, position: int, first: int, n_tokens: int, behind: int) -> None:
        """Record that rows of an image, from row `first` on, were read at a position of
        the text.
        """
        start = position - first
        if first > 0 and self._spans and self._spans[-1].start == start:
            self._spans.pop()
        self._spans.append(ImageSpan(start, first + n_tokens, behind))

    def truncate(self, position: int) -> None:
        """Remove the images at and beyond a position, and the end of an image that crosses it."""
        self._spans = [
            span if span.end <= position else replace(span, n_tokens=position - span.start)
            for span in self._spans
            if span.start < position
        ]

    def copy(self) -> ImageSpans:
        """Return a copy for another text with the same beginning."""
        return ImageSpans(self._spans)


def is_placeholder(token: int) -> bool:
    """Tell whether a token is a placeholder for a part of an image."""
    return token <= FIRST_PLACEHOLDER


def text_before_image(tokens: Sequence[int], most: int) -> int:
    """Return how many of the first `most` tokens come before the first image among them."""
    first = next((i for i, token in enumerate(tokens[:most]) if is_placeholder(token)), most)
    return min(first, len(tokens))
