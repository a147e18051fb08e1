"""Map every word of the facts to one token; any other text becomes byte tokens."""

from __future__ import annotations

from training.facts import vocabulary


def byte_characters() -> list[str]:
    """Return GPT-2's printable character for each of the 256 bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(moved)) for byte in range(256)]


class WordTokenizer:
    """Assign token ids: first to the special tokens, then to the words, then to the bytes."""

    def __init__(self) -> None:
        """Use the vocabulary of the documents."""
        characters = byte_characters()

        def written(text: str) -> str:
            return "".join(characters[byte] for byte in text.encode())

        words = vocabulary()
        tokens = [*words[:2], *map(written, words[2:]), *characters]
        self.tokens = list(dict.fromkeys(tokens))
        ids = {token: i for i, token in enumerate(self.tokens)}
        self._ids = {word: ids.get(word, ids.get(written(word), -1)) for word in words}
        self._ids |= {text: ids[written(text)] for text in (".", "?", "\n")}

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    def encode(self, document: list[str]) -> list[int]:
        """Return the ids of a document's words; raises KeyError for any other word."""
        return [self._ids[word] for word in document]
