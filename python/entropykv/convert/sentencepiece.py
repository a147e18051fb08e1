"""Read the vocabulary of a sentencepiece tokenizer.model without the sentencepiece package.

The file is a protobuf message: ModelProto in sentencepiece_model.proto. Only its pieces are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # Wire types of values in a protobuf message.
_PIECES = 1  # Numbers of fields in ModelProto and SentencePiece.
_TRAINER = 2
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE = 3  # Number of a field in TrainerSpec.
_BPE = 2


class Piece(NamedTuple):
    """Hold a token of the vocabulary; `kind` has the numbers of gguf.TokenType."""

    text: str
    score: float
    kind: int


def read_pieces(content: bytes) -> list[Piece]:
    """Return the pieces by id; raises ValueError for a damaged file or a model that is not BPE."""
    pieces = []
    model_type: int | bytes = 1  # The default of the field is unigram.
    for number, value in _fields(content):
        if number == _PIECES and isinstance(value, bytes):
            pieces.append(_piece(value))
        elif number == _TRAINER and isinstance(value, bytes):
            model_type = next((v for n, v in _fields(value) if n == _MODEL_TYPE), model_type)
    if not pieces or model_type != _BPE:
        raise ValueError("it is not a BPE model of sentencepiece")
    return pieces


def _piece(message: bytes) -> Piece:
    fields = dict(_fields(message))
    text, score, kind = fields[_TEXT], fields.get(_SCORE, bytes(4)), fields.get(_KIND, 1)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or not isinstance(kind, int):
        raise ValueError("a piece has fields of other types")
    return Piece(text.decode("utf-8"), struct.unpack("<f", score)[0], kind)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a message; the value is an integer, or the bytes of another
    wire type.
    """
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            integer, offset = _varint(message, offset)
            yield number, integer
            continue
        if wire_type == _BYTES:
            size, offset = _varint(message, offset)
        else:
            # Any other wire type raises KeyError; no sentencepiece model has one.
            size = {_FIXED64: 8, _FIXED32: 4}[wire_type]
        if size > len(message) - offset:
            raise ValueError("it is truncated")
        yield number, message[offset : offset + size]
        offset += size


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    """Read an integer stored in 7 bits per byte, lowest first; returns it and the offset
    after it.
    """
    value = 0
    for index in range(10):
        if offset + index >= len(message):
            raise ValueError("it is truncated")
        byte = message[offset + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, offset + index + 1
    raise ValueError("an integer is too long")
