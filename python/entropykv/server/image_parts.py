"""Take the images out of a chat's messages, which bear them as data: URLs.

Addresses of other machines are refused: whoever may ask the server would have it fetch what only it
can reach, and nobody knows how long that takes, or how much comes.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from entropykv.errors import ImageError
from entropykv.server.errors import RequestError
from entropykv.server.loading import ServedLlama
from entropykv.session.images import Images

KINDS = ("image_url", "input_image")
"""Types of content parts that bear an image: of chat completions, and of responses."""


class ImageParts:
    """Collect the files of a request's images, in the order in which the model is shown them."""

    def __init__(self, images: Images | None) -> None:
        """Collect for a model; None: it has no projector."""
        self._images = images
        self.files: list[bytes] = []

    def take(self, part: dict[str, Any], place: str) -> str:
        """Take the image of a content part in, and return what stands for it in the text.

        Raises RequestError, which names the `place`.
        """
        images = self._images
        if images is None:
            raise RequestError(
                400,
                f"{place}: no images are read here; start the server with --mmproj FILE, the "
                "model's projector, or send text",
                param=place,
            )
        if len(self.files) >= images.limits.number:
            raise RequestError(
                400,
                f"{place}: the request has more than {images.limits.number} images (--max-images); "
                "send fewer",
                param=place,
            )
        self.files.append(_file_of(part, place, images.limits.file_bytes))
        return images.marker

    @contextmanager
    def shown(self, llama: ServedLlama) -> Iterator[None]:
        """Let a model read a text with these images; raises RequestError for one it cannot."""
        llama.files = self.files
        try:
            yield
            llama.check_files_shown()
        except ImageError as error:
            raise RequestError(400, str(error), param="messages") from None
        finally:
            llama.files = ()


def _file_of(part: dict[str, Any], place: str, most: int) -> bytes:
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str):
        raise RequestError(400, f"{place}: it has no image_url", param=place)
    scheme = url[:16].partition(":")[0].lower()
    if scheme != "data":
        raise RequestError(
            400,
            f"{place}: images are not fetched from addresses ({scheme}:); send the file itself as "
            "data:image/png;base64,...",
            param=place,
        )
    head, found, data = url.partition(",")
    if not found or not head.lower().endswith(";base64"):
        raise RequestError(
            400, f"{place}: it is no data:image/png;base64,... with a file in base64", param=place
        )
    try:
        # What is too long is not decoded: its beginning is enough to say so.
        file = base64.b64decode(data[: (most // 3 + 1) * 4], validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(400, f"{place}: its base64 is damaged", param=place) from None
    if len(file) > most or len(data) > (most // 3 + 1) * 4:
        raise RequestError(
            400,
            f"{place}: the image has more than {most:,} bytes (--max-image-bytes); send a smaller "
            "one",
            param=place,
        )
    return file
