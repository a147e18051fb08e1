"""Reject metadata for which llama.cpp would end the process, before a file is loaded."""

from __future__ import annotations

import math

from gguf import GGUFValueType

from entropykv.errors import ModelFileError
from entropykv.model.header import AGAIN, HeaderReader, number, text_value

_PREFIX = "tokenizer.ggml."
_STRINGS = (GGUFValueType.STRING,)
_NUMBERS_OF_TOKENS = {
    "scores": (GGUFValueType.FLOAT32,),
    "token_type": (GGUFValueType.INT32, GGUFValueType.UINT32),
}
_BYTES = (GGUFValueType.UINT8, GGUFValueType.INT8)
_EPSILONS = ("layer_norm_epsilon", "layer_norm_rms_epsilon", "group_norm_epsilon")
_ROTATED = ("dimension_count", "dimension_count_swa")
_NONE = ("none", "no_vocab")


def check_loadable(reader: HeaderReader, architecture: str) -> None:
    """Raise ModelFileError for a file that llama.cpp cannot load, or ValueError if it is
    damaged.
    """
    _check_tokenizer(reader)
    for name in _ROTATED:
        key = f"{architecture}.rope.{name}"
        if (number(reader, key) or 0) % 2:
            raise ValueError(f"{key} is odd: values are rotated in pairs")
    for name in _EPSILONS:
        key = f"{architecture}.attention.{name}"
        field = reader.get_field(key)
        if field is None or field.types != [GGUFValueType.FLOAT32]:
            continue  # llama.cpp itself refuses other types.
        value = float(field.contents())
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{key} is {value}")


def _check_tokenizer(reader: HeaderReader) -> None:
    kind = text_value(reader, _PREFIX + "model")
    n_tokens = _length(reader, "tokens", _STRINGS)
    if kind is None or kind in _NONE or not n_tokens:
        raise ModelFileError(
            f"{reader.path}: has no tokenizer, so no text can be read; take a file that has one, "
            "or convert the model from a directory with its tokenizer files"
        )
    for name, kinds in _NUMBERS_OF_TOKENS.items():
        length = _length(reader, name, kinds)
        if length is not None and length < n_tokens:
            raise ValueError(f"{_PREFIX}{name} has {length} values for {n_tokens} tokens")
    n_merges = _length(reader, "merges", _STRINGS)
    if kind == "gpt2" and n_merges is None:
        raise ModelFileError(f"{reader.path}: lacks {_PREFIX}merges; {AGAIN}")
    _length(reader, "precompiled_charsmap", _BYTES)
    tokens = [token for token in reader.texts(_PREFIX + "tokens") if token]
    distinct = set(tokens)
    if len(distinct) < len(tokens):
        raise ValueError(f"{_PREFIX}tokens has a token twice")
    if kind == "llama":
        _check_bytes(distinct)


def _check_bytes(tokens: set[bytes]) -> None:
    """Raise ValueError if a byte that sentencepiece may fall back to has no token."""
    for byte in range(256):
        name = f"<0x{byte:02X}>"
        if name.encode() not in tokens and bytes([byte]) not in tokens:
            raise ValueError(f"{_PREFIX}tokens lacks {name}, which other text needs")


def _length(reader: HeaderReader, name: str, kinds: tuple[GGUFValueType, ...]) -> int | None:
    """Return the length of an array of one of these kinds; None if there is none."""
    field = reader.get_field(_PREFIX + name)
    if field is None:
        return None
    if field.types[0] != GGUFValueType.ARRAY or field.types[-1] not in kinds:
        wanted = " or ".join(kind.name.lower() for kind in kinds)
        raise ValueError(f"{_PREFIX}{name} is not an array of {wanted}")
    return int(field.parts[4][0])
