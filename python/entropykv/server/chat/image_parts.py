"""Collect the images in a chat's messages, which contain them as data: URLs.

URLs of other machines are refused: the server would fetch them with its own access to the network,
for an unknown time and in an unknown size.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from entropykv.server.http.errors import RequestError
from entropykv.session.images import Images

KINDS = ("image_url", "input_image")
"""Types of content parts that contain an image: in chat completions, and in responses."""


class ImageParts:
    """Collect the image files of a request, in the order in which the model reads them."""

    def __init__(self, images: Images | None) -> None:
        """Start without images. `images`: the model's image reader; None: it has no projector."""
        self._images = images
        self.files: list[bytes] = []

    def take(self, part: dict[str, Any], place: str) -> str:
        """Store the image of a content part, and return its marker for the text.

        Raises RequestError, which names the `place` of the part in the request.
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
            400,
            f"{place}: it is not a data:image/png;base64,... URL with a file in base64",
            param=place,
        )
    try:
        # Decode only one byte more than allowed, which is enough to refuse the file.
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
