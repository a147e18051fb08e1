"""Read texts, given ones or those that entropykv ships, and split them into a tuning part and a
held-out part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from entropykv.errors import ContextError
from entropykv.files import read_text

PARTS = ("all", "tuning", "held-out")
_SHIPPED = Path(__file__).parents[1] / "calibration" / "texts"


@dataclass(frozen=True)
class Text:
    """Hold a text to read, and the name of its source."""

    name: str
    content: str

    @property
    def digest(self) -> str:
        """Return a hash of the content, which does not depend on the file's name or place."""
        return digest_of(self.content)


def digest_of(*parts: str) -> str:
    """Return a hash of all `parts` together."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode("utf-8") + b"\0")
    return digest.hexdigest()


def read_texts(files: Sequence[Path] | None = None) -> list[Text]:
    """Read the given files, or those that entropykv ships; raises ContextError for one that is
    unreadable, not text, empty, or given twice.
    """
    texts: dict[str, Text] = {}
    for path in sorted(_SHIPPED.glob("*.txt")) if files is None else files:
        content = read_text(path, ContextError)
        if "\0" in content:
            raise ContextError(f"{path}: not a text but a binary file; give a text file")
        if not content.strip():
            raise ContextError(f"{path}: is empty; give a text file")
        text = Text(path.name, content)
        if text.digest in texts:
            raise ContextError(
                f"{path}: has the same content as {texts[text.digest].name}; give each text once"
            )
        texts[text.digest] = text
    if files is None and not texts:
        raise ContextError(f"there are no texts in {_SHIPPED}; install entropykv again")
    return list(texts.values())


def is_tuning(text: Text, tuning_share: float) -> bool:
    """Tell by its content alone whether a text is in the tuning part, which gets a fraction
    `tuning_share` of all texts.
    """
    return int(text.digest, 16) < tuning_share * (1 << 4 * len(text.digest))


def part_of(texts: Sequence[Text], part: str, tuning_share: float) -> list[Text]:
    """Return the texts of part `all`, `tuning` or `held-out`; `tuning_share`: the fraction, from 0
    to 1, that is for tuning. Raises ContextError if no text is in one of the last two.
    """
    if part == "all":
        return list(texts)
    chosen = [text for text in texts if is_tuning(text, tuning_share) == (part == "tuning")]
    if not chosen:
        raise ContextError(
            f"none of the {len(texts)} texts is in the part {part} at a tuning share of "
            f"{tuning_share:g}; give more texts or another --tuning-share"
        )
    return chosen
