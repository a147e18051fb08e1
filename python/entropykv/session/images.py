"""Let a session read images: their placeholders among the tokens, and their embeddings for the
model.

An image becomes a run of placeholders in the tokens of a text: numbers below -1, computed from the
bytes of the image. So two texts have equal tokens only if they show the same images, and code that
compares or stores tokens (prefix cache, checkpoints, saved sessions) works without knowing about
images. Only decoding needs the embeddings, which an Images object holds.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv.errors import ContextError, ImageError
from entropykv.llamacpp.foreign_text import without_names
from entropykv.llamacpp.projector import ImageChunk, Projector, TextChunk
from entropykv.session.reuse import common_prefix
from entropykv.session.sequence import FIRST_PLACEHOLDER, ImageSpans
from entropykv.store.protocol import Embedded

FORMATS = "PNG, JPEG, BMP or GIF"
MOST_RATIO = 200
"""The largest allowed ratio of an image's longer to its shorter side."""
_SIZED_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""Markers of JPEG segments that contain the size of the image: those of all kinds of frames,
without the markers in the same range that begin tables.
"""
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
"""Markers of JPEG that stand alone, without a segment after them."""


def image_size(data: bytes, where: str) -> tuple[int, int]:
    """Return width and height of an image in pixels; raises ImageError, which names `where`.

    Only headers within the file are read, and nothing is decoded: llama.cpp decodes every file that
    it is given, and a file of a few kilobytes may hold an image of gigabytes. So a limit of pixels
    must be checked before. Formats that are not listed here are refused, including those of sound
    and video, which llama.cpp would pass to other decoders.
    """
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


HELD_BYTES = 256 << 20
"""The most bytes of embeddings that are kept in case the same images are read again."""
_MOST_NUMBER = (1 << 31) - 2


@dataclass(frozen=True)
class ImageLimits:
    """Hold the limits for the images of one prompt."""

    number: int = 16
    """The most images of a prompt."""
    file_bytes: int = 16 << 20
    """The most bytes of one image file."""
    pixels: int = 32 << 20
    """The most pixels of all images together; each takes 3 bytes while they are decoded."""


@dataclass(frozen=True, eq=False)
class ReadyImage:
    """Hold the embeddings of an image, or of a part of one, and everything needed to read them."""

    placeholders: list[int]
    """The tokens that stand for the image in a text, one for each row."""
    rows: npt.NDArray[np.float32]
    """The embeddings, (n_tokens, n_embd)."""
    positions: npt.NDArray[np.int32] | None
    moves: npt.NDArray[np.int32] | None
    sees_all: bool
    """True if every row attends to all rows of the image, also to later ones. `positions`, `moves`
    and `sees_all` are those of ImageChunk.
    """
    behind: int
    """By how much RoPE's position is less than the text position after the image: see ImageSpan."""
    owner: Hashable
    """The user who has sent the image: see Images.tokenize()."""

    @functools.cached_property
    def numbers(self) -> npt.NDArray[np.int32]:
        """Return the placeholders as an array, (n_tokens,)."""
        return np.array(self.placeholders, np.int32)

    @property
    def n_tokens(self) -> int:
        """Return how many tokens the image has, one for each row."""
        return len(self.placeholders)

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the embeddings."""
        return self.rows.nbytes

    def part(self, first: int, last: int, position: int) -> Embedded:
        """Return the rows [first, last) with what is needed to read them; `position`: where the
        image begins for RoPE.
        """
        positions = None
        if self.positions is not None and self.moves is not None:
            whole = self.positions + position * self.moves
            positions = np.ascontiguousarray(whole[:, first:last], np.int32)
        return Embedded(self.rows[first:last], positions, self.sees_all)


@dataclass(frozen=True, eq=False)
class ImagePart:
    """Hold the rows of an image that are read as one micro-batch."""

    embedded: Embedded
    first: int
    """The index of the first row in the image."""
    n_tokens: int
    behind: int
    """By how much RoPE's position is less than the text position after the whole image."""
    lag: int
    """By how much RoPE's position is less than the text position at the first token of
    the image.
    """


@dataclass(frozen=True)
class ImagePrompt:
    """Hold the tokens of a prompt and its images; it must be kept until the tokens are read."""

    tokens: list[int]
    """The tokens of the text, with placeholders, which are below -1, for each image."""
    images: tuple[ReadyImage, ...]
    """The images, in the order of the text."""


class Images:
    """Read prompts with images for the sessions of one model, and hold their embeddings.

    Any thread may call its methods. Embeddings of the last prompt are always held, and older ones
    up to HELD_BYTES. Those of an ImagePrompt are held at least until it is deleted.
    """

    def __init__(self, projector: Projector, limits: ImageLimits | None = None) -> None:
        """Use a projector, which close() closes. `limits` None: the defaults of ImageLimits."""
        self.projector = projector
        self.limits = limits or ImageLimits()
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[bytes, Hashable], ReadyImage] = OrderedDict()
        self._known: weakref.WeakSet[ReadyImage] = weakref.WeakSet()
        """All images that still exist, held by this object or by an ImagePrompt."""

    @property
    def marker(self) -> str:
        """Return the marker for an image in the text of a prompt."""
        return self.projector.marker

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the embeddings that this object holds."""
        with self._lock:
            return sum(image.n_bytes for image in self._held.values())

    def check(self, files: Sequence[bytes]) -> None:
        """Raise ImageError if the contents of image files exceed the limits or have an unsupported
        format.
        """
        limits = self.limits
        if len(files) > limits.number:
            raise ImageError(
                f"the prompt has {len(files)} images, and {limits.number} are the most; send fewer"
            )
        pixels = 0
        for number, data in enumerate(files, 1):
            if len(data) > limits.file_bytes:
                raise ImageError(
                    f"image {number} has {len(data):,} bytes, and {limits.file_bytes:,} are the "
                    "most; send a smaller one"
                )
            width, height = image_size(data, f"image {number}")
            pixels += width * height
        if pixels > limits.pixels:
            raise ImageError(
                f"the images have {pixels:,} pixels together, and {limits.pixels:,} are the most; "
                "send smaller ones, or fewer"
            )

    def tokenize(
        self,
        text: str,
        files: Sequence[bytes],
        *,
        add_bos: bool = True,
        most_tokens: int | None = None,
        owner: Hashable = None,
        poll: Callable[[], object] | None = None,
    ) -> ImagePrompt:
        """Return the tokens of a text in which `marker` stands for each of the images.

        `files`: the contents of image files, in the order of their markers. Names of control tokens
        in the text become control tokens. `add_bos`: put a BOS token first if the model wants one.
        An image is encoded once for each `owner`, so that response times do not reveal what another
        user has sent. `poll` is called repeatedly while images are encoded, and may raise an
        exception to stop that. Raises ImageError for images that cannot be read, ContextError for
        more than `most_tokens` tokens, and the other errors of Projector.tokenized().
        """
        text = without_names(text)
        if text.count(self.marker) != len(files):
            raise ImageError(
                f"the text has {text.count(self.marker)} places for {len(files)} images; give one "
                "place (Images.marker) for each"
            )
        self.check(files)
        digests = [hashlib.sha256(data).digest() for data in files]
        with self.projector.tokenized(text, files, add_bos=add_bos) as chunks:
            n_tokens = sum(
                len(c.tokens) if isinstance(c, TextChunk) else c.n_tokens for c in chunks
            )
            if most_tokens is not None and n_tokens > most_tokens:
                raise ContextError(
                    f"the prompt has {n_tokens} tokens with its images, more than the "
                    f"{most_tokens} that there is room for; shorten it, send fewer images, or "
                    "raise n_ctx"
                )
            tokens: list[int] = []
            images: list[ReadyImage] = []
            for number, chunk in enumerate(chunks):
                if isinstance(chunk, TextChunk):
                    tokens += chunk.tokens
                    continue
                earlier = sum(
                    isinstance(c, ImageChunk) and c.image == chunk.image for c in chunks[:number]
                )
                images.append(self._ready(chunk, digests[chunk.image], earlier, owner, poll))
                tokens += images[-1].placeholders
        self._drop_old(images)
        return ImagePrompt(tokens, tuple(images))

    def _ready(
        self,
        chunk: ImageChunk,
        digest: bytes,
        part: int,
        owner: Hashable,
        poll: Callable[[], object] | None,
    ) -> ReadyImage:
        """Return the embeddings of a chunk: held ones if possible, otherwise newly encoded ones."""
        key = hashlib.sha256(
            b"%s %s %d %d" % (self.projector.identity.encode(), digest, part, chunk.n_tokens)
        ).digest()
        placeholders = placeholders_of(key, chunk.n_tokens)
        own = (each for each in self._images() if each.owner == owner)
        held = next((each for each in own if each.placeholders == placeholders), None)
        if held is None:
            rows = self.projector.encode(chunk, poll)
            held = ReadyImage(
                placeholders,
                rows,
                chunk.positions,
                chunk.moves,
                chunk.sees_all,
                0 if chunk.positions is None else chunk.n_tokens - chunk.n_positions,
                owner,
            )
        with self._lock:
            self._held[key, owner] = held
            self._held.move_to_end((key, owner))
            self._known.add(held)
        return held

    def _drop_old(self, needed: Sequence[ReadyImage]) -> None:
        """Drop the least recently used images beyond HELD_BYTES, except those in `needed`."""
        with self._lock:
            n_bytes = sum(image.n_bytes for image in self._held.values())
            for key in list(self._held):
                if n_bytes <= HELD_BYTES:
                    return
                if self._held[key] not in needed:
                    n_bytes -= self._held.pop(key).n_bytes

    def at(self, tokens: Sequence[int]) -> tuple[ReadyImage, int, int]:
        """Return (image, row, n): the image that `tokens` begin with, the row of it that the first
        token stands for, and how many tokens are of this image.

        Raises ImageError if its embeddings are not held any more.
        """
        best: tuple[ReadyImage, int, int] | None = None
        for image in self._images():
            for first in np.flatnonzero(image.numbers == tokens[0]).tolist():
                following = image.placeholders[first : first + len(tokens)]
                n = common_prefix(following, tokens[: len(following)])
                if best is None or n > best[2]:
                    best = image, first, n
        if best is None:
            raise ImageError(
                "the text has an image whose embeddings are not held any more; send the image again"
            )
        return best

    def next_part(
        self,
        tokens: Sequence[int],
        position: int,
        before: ImageSpans,
        n_ubatch: int,
        most: Callable[[int], int],
    ) -> ImagePart:
        """Return the rows of an image that are read next, at a position of the text.

        `tokens` begin with placeholders of the image; `before` are the images that were read
        before. `most` takes a number of tokens and returns how many of them may be read at once. A
        micro-batch has room for `n_ubatch` tokens. Raises ImageError as at() does, and ContextError
        for an image that does not begin in this text, or that must be read whole and does not fit
        into a micro-batch.
        """
        image, first, n = self.at(tokens)
        if first > 0 and not before.ends_within(position, first):
            raise ContextError(
                f"an image is read from its beginning, and this text has it from row {first} on; "
                "give all of its tokens"
            )
        n_read = min(n, n_ubatch) if image.sees_all else most(n)
        if image.sees_all and n_read < image.n_tokens:
            raise ContextError(
                f"an image of {image.n_tokens} tokens, which all see each other, must be read at "
                f"once, and a micro-batch has room for {n_ubatch}; raise -ub (n_ubatch), or give "
                "the whole image"
            )
        start = position - first
        lag = before.lag_before(start)
        embedded = image.part(first, first + n_read, start - lag)
        return ImagePart(embedded, first, n_read, image.behind, lag)

    def _images(self) -> list[ReadyImage]:
        with self._lock:
            return list(self._known)

    def close(self) -> None:
        """Free the projector, and drop all embeddings."""
        with self._lock:
            self._held.clear()
        self.projector.close()


def placeholders_of(key: bytes, n_tokens: int) -> list[int]:
    """Return n_tokens tokens below -1 that stand for an image. Every `key`, such as a hash of the
    image, gives other tokens.
    """
    numbers: Any = np.frombuffer(hashlib.shake_256(key).digest(4 * n_tokens), "<u4")
    return [FIRST_PLACEHOLDER - int(number) % _MOST_NUMBER for number in numbers]


def no_projector() -> ImageError:
    """Return the error for a text with an image if no projector is open."""
    return ImageError(
        "the text has an image, and no projector is open here; open the model's with --mmproj FILE "
        "(Session.open_projector)"
    )
