"""Read what a prompt is made of: the text of -p and -f, and the images of --image, which the
projector of --mmproj encodes; their names are those of llama-mtmd-cli.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from entropykv.cli.notes import say
from entropykv.errors import ContextError, ImageError, SettingsError
from entropykv.files import open_regular, read_standard_input, read_text
from entropykv.generation.prompt import Prompt, ShownImages, text_prompt
from entropykv.session.images import ImageLimits
from entropykv.session.session import Session

PLACE = "<__media__>"
"""The marker that llama-mtmd-cli uses for an image in a prompt."""


def read_prompt(options: argparse.Namespace) -> str:
    """Return the text of -f and -p, which may be empty; with -e, backslash escapes are replaced."""
    if options.escape:
        for name in ("prompt", "system"):
            if getattr(options, name) is not None:
                setattr(options, name, _unescaped(getattr(options, name)))
    parts = []
    if options.file == "-":
        parts.append(read_standard_input())
    elif options.file is not None:
        parts.append(read_text(options.file, ContextError))
    if options.prompt is not None:
        parts.append(options.prompt)
    return "\n".join(parts)


def _unescaped(text: str) -> str:
    """Replace backslash escapes as llama-cli does; unknown ones stay unchanged."""
    known = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'"}
    return re.sub(r"\\(.)", lambda found: known.get(found[1], found[0]), text)


def add_image_options(group: argparse._ActionsContainer, what: str) -> None:
    """Add --mmproj and --image; `what` names the text with the images for --help: the prompt, or
    the first turn.
    """
    group.add_argument(
        "-mm",
        "--mmproj",
        metavar="FILE",
        help="the model's projector, with which it reads images inside the budget",
    )
    group.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help=f"an image of {what}, or several (separated by commas, too): they come before the "
        f"text, or where it has {PLACE}",
    )


def open_projector(session: Session, options: argparse.Namespace, files: Sequence[bytes]) -> None:
    """Open the projector of --mmproj, and check the images that it will encode first.

    Raises SettingsError for images without a projector, and ImageError for files that are not
    images.
    """
    if options.mmproj is not None:
        images = session.open_projector(options.mmproj, use_gpu=options.n_gpu_layers != 0)
        images.check(files)
    elif options.image:
        raise SettingsError("--image needs the model's projector; give it with --mmproj FILE")


def image_files(given: Sequence[str]) -> list[bytes]:
    """Return the contents of the files given to --image, whose values may hold several paths
    separated by commas; raises ImageError.
    """
    paths: list[str] = []
    for text in given:
        paths += [text] if Path(text).exists() else text.split(",")
    return [image_file(path) for path in paths]


def image_file(path: str) -> bytes:
    """Return the content of an image file; raises ImageError if it cannot be read or is
    too large.
    """
    most = ImageLimits().file_bytes
    try:
        with open_regular(path) as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ImageError(f"{path}: {error.strerror}; give an image file") from None
    if len(data) > most:
        raise ImageError(f"{path}: has more than {most:,} bytes; give a smaller image")
    return data


def with_places(text: str, n_images: int) -> str:
    """Return a text with one marker for each image, put first if it has none; raises ImageError for
    another number of markers.
    """
    if PLACE not in text:
        return PLACE * n_images + text
    if text.count(PLACE) != n_images:
        raise ImageError(
            f"the text has {text.count(PLACE)} places ({PLACE}) for {n_images} images; give one "
            "for each, or none"
        )
    return text


def prompt_of(
    session: Session,
    text: str,
    files: Sequence[bytes],
    *,
    add_bos: bool | None,
    is_answer: bool = False,
    poll: Callable[[], object] | None = None,
) -> Prompt:
    """Encode the images of a prompt, and return it, with placeholders for each image.

    `is_answer`: the text is what the chat template has written. `poll` is called repeatedly while
    images are encoded, and may raise to stop that. Raises ImageError, and ContextError for more
    tokens than there is room for.
    """
    images, shown = session.images, None
    if files and images is not None:
        if text.count(PLACE) != len(files):
            raise ImageError("the model's chat template does not show the images; give --no-chat")
        say(f"encoding {len(files)} image{'s'[: len(files) - 1]}")
        room = session.config.n_ctx - session.position
        text = text.replace(PLACE, images.marker)
        shown = ShownImages(images, files, room, poll=poll)
    return text_prompt(session.model, text, add_bos=add_bos, shown=shown, is_answer=is_answer)
