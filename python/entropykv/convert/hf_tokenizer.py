"""Write the tokenizer of a Hugging Face checkpoint into a GGUF file."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGUFWriter, SpecialVocab, TokenType

from entropykv.errors import ModelFileError, UnsupportedModelError, reason_of

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # Wire types of values in a protobuf message.
_PIECES = 1  # Numbers of fields in ModelProto and SentencePiece.
_TRAINER = 2
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE = 3  # TrainerSpec has it in this field.
_BPE = 2


class Piece(NamedTuple):
    """Hold a token of the vocabulary; `kind` has the numbers of gguf.TokenType."""

    text: str
    score: float
    kind: int


def read_pieces(content: bytes) -> list[Piece]:
    """Return the pieces of a sentencepiece tokenizer.model by id; raises ValueError for a damaged
    file or a model that is not BPE.

    The file is a protobuf message, ModelProto in sentencepiece_model.proto, of which only the
    pieces are read. No sentencepiece package is needed.
    """
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


# A tokenizer.json first splits a text by regular expressions, for which llama.cpp has names.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAME_OF_SPLIT = {_SPLIT % "{1,3}": "llama-bpe", _SPLIT % "": "qwen2"}
_TII_TOKEN = ">>ABSTRACT<<"  # noqa: S105 - of every vocabulary of the Falcon series
_FALCON_1_SPLIT = "[0-9][0-9][0-9]"
_FILES = ("tokenizer.json", "tokenizer.model")


def check_tokenizer(directory: Path) -> None:
    """Raise ModelFileError if a directory has no tokenizer, because the model could not read a
    text.
    """
    if not any((directory / name).is_file() for name in _FILES):
        raise ModelFileError(
            f"{directory}: has no tokenizer ({' or '.join(_FILES)}), so that the model could read "
            "no text; put the tokenizer files of the same model into the directory, and convert it "
            "then"
        )


def add_tokenizer(writer: GGUFWriter, directory: Path, n_vocab: int) -> None:
    """Add the vocabulary, merges, special tokens and chat template to a GGUF file.

    Reads a tokenizer.json of byte-level BPE, or else the tokenizer.model of sentencepiece;
    check_tokenizer() has found one of them. Raises UnsupportedModelError for another kind of
    tokenizer, and ModelFileError for one that is damaged or cannot be read.
    """
    bpe, sentencepiece = (directory / name for name in _FILES)
    path = sentencepiece
    try:
        if bpe.is_file():
            path = bpe
            tokenizer = json.loads(bpe.read_text(encoding="utf-8"))
            split = _split_name(tokenizer)
            if split is not None:
                _add_bpe(writer, tokenizer, split, n_vocab)
                _add_special(writer, directory, n_vocab, load_merges=True)
                return
            if not sentencepiece.is_file():
                raise UnsupportedModelError(
                    f"{bpe}: is not the byte-level BPE of Llama 3, Falcon 3, Qwen 2 or GPT-2, "
                    "which alone are converted; put the tokenizer.model of the same model beside "
                    "it, if there is one, or convert an I2_S file, which carries its tokenizer"
                )
        path = sentencepiece
        _add_sentencepiece(writer, directory, read_pieces(path.read_bytes()), n_vocab)
        _add_special(writer, directory, n_vocab, load_merges=False)
    except OSError as error:
        raise ModelFileError(
            f"{error.filename or path}: cannot be read ({error.strerror or error})"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelFileError(
            f"{path}: is damaged ({reason_of(error)}); download it again"
        ) from error


def _add_special(writer: GGUFWriter, directory: Path, n_vocab: int, *, load_merges: bool) -> None:
    special = SpecialVocab(directory, load_merges=load_merges, n_vocab=n_vocab)
    special.add_to_gguf(writer, quiet=True)


def _add_bpe(writer: GGUFWriter, tokenizer: dict[str, Any], split: str, n_vocab: int) -> None:
    tokens, types = _vocabulary(tokenizer, n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)


def _add_sentencepiece(
    writer: GGUFWriter, directory: Path, pieces: list[Piece], n_vocab: int
) -> None:
    """Add the pieces of a sentencepiece model, and the special tokens of tokenizer_config.json."""
    if len(pieces) > n_vocab:
        raise ValueError(f"it has {len(pieces)} tokens for a vocabulary of {n_vocab}")
    unused = (Piece(f"[PAD{index}]", 0.0, TokenType.UNUSED) for index in range(n_vocab))
    pieces = pieces + list(unused)[len(pieces) :]
    path = directory / "tokenizer_config.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(config.get("add_prefix_space"), bool):
            writer.add_add_space_prefix(config["add_prefix_space"])
        added = config.get("added_tokens_decoder") or {}
        for key, token in added.items():
            index = int(key)
            if not 0 <= index < n_vocab:
                raise ValueError(f"token {token['content']!r} has id {index} of {n_vocab}")
            kind = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
            if pieces[index].text != token["content"] or pieces[index].kind == TokenType.NORMAL:
                pieces[index] = Piece(token["content"], 0.0, kind)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece.text for piece in pieces])
    writer.add_token_scores([piece.score for piece in pieces])
    writer.add_token_types([int(piece.kind) for piece in pieces])


def _vocabulary(tokenizer: dict[str, Any], n_vocab: int) -> tuple[list[str], list[int]]:
    """Return the tokens and their types, ordered by id; an id without a token gets an
    unused token.
    """
    tokens = [f"[PAD{index}]" for index in range(n_vocab)]
    types = [TokenType.UNUSED] * n_vocab
    added = {token["id"]: token for token in tokenizer.get("added_tokens") or []}
    entries = [(index, token) for token, index in tokenizer["model"]["vocab"].items()]
    entries += [(index, token["content"]) for index, token in added.items()]
    for index, token in entries:
        if not isinstance(token, str) or not 0 <= index < n_vocab:
            raise ValueError(f"token {token!r} has id {index} in a vocabulary of {n_vocab}")
        tokens[index] = token
        types[index] = TokenType.NORMAL
    for index, token in added.items():
        types[index] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    return tokens, [int(kind) for kind in types]


def _split_name(tokenizer: dict[str, Any]) -> str | None:
    """Return llama.cpp's name of the regular expression that splits a text; None if there is none.

    An unknown expression of the Falcon series is called falcon3: llama.cpp's converter does so for
    Falcon 3, and ik_llama.cpp was seen to run Falcon-E with it.
    """
    splits = tokenizer.get("pre_tokenizer") or {}
    steps = splits.get("pretokenizers", [splits])
    kinds = [step.get("type") for step in steps]
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    model = tokenizer["model"]
    if model.get("type") != "BPE" or kinds.count("ByteLevel") != 1:
        return None
    if kinds == ["Split", "ByteLevel"] and patterns[0] in _NAME_OF_SPLIT:
        return _NAME_OF_SPLIT[patterns[0]]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    added = {token["content"] for token in tokenizer.get("added_tokens") or []}
    if _TII_TOKEN in added or _TII_TOKEN in model["vocab"]:
        return "falcon" if patterns == [_FALCON_1_SPLIT] else "falcon3"
    return None
