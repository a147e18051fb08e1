"""Read the header of a GGUF file, metadata and tensor infos, without trusting any number in it."""

from __future__ import annotations

import math
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField

from entropykv.errors import EntropyKVError, ModelFileError, UnsupportedModelError, reason_of
from entropykv.files import NotRegularError, open_regular

I2_S_TYPE = 36
"""The tensor type of Microsoft's BitNet fork, which stock llama.cpp no longer knows."""
_TABLE_TYPES = {38: "TL1", 39: "TL2"}
"""Two more types of Microsoft's BitNet fork. llama.cpp uses the second number for MXFP4, which has
no separate scale tensors.
"""

_SUPPORTED_VERSIONS = (2, 3)
_PREFIX = struct.Struct("<4sIQQ")  # Magic, version, number of tensors, number of keys.
_LENGTH = struct.Struct("<Q")
# Limits far above any real model: a damaged count must not cost seconds or gigabytes.
MAX_LAYERS = 512  # llama.cpp calls it LLAMA_MAX_LAYERS.
_MAX_ENTRIES = 1 << 16  # The most keys of a file, and the most tensors.
_MAX_STRINGS = 1 << 22  # The most tokens of a vocabulary, and the most merges.
_MAX_STRING_BYTES = 1 << 24
_MAX_DIMENSIONS = 4  # ggml calls it GGML_MAX_DIMS.
_MAX_NUMBER = (1 << 31) - 1
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(?<!\.gguf)(:\w+)?")
"""The form of a model's name at the Hugging Face Hub, with a quantisation or without."""
AGAIN = "download or convert it again"
_OF_MEMORY = ("mmap failed", "allocate", "out of memory")
"""Words in errors, whatever their case, that mean that there is too little memory."""


def way_out_of(reason: str, otherwise: str) -> str:
    """Return what to do about an error of reading a file, as its words tell: free memory, or
    `otherwise`.
    """
    is_memory = any(word in reason.lower() for word in _OF_MEMORY)
    return "free memory, or raise the limit of this process (ulimit -v)" if is_memory else otherwise


class I2sFileError(UnsupportedModelError):
    """Raised for an intact I2_S file, which `entropykv convert` turns into a file that can be
    loaded.
    """


def is_i2s(path: str | os.PathLike[str]) -> bool:
    """Tell whether a GGUF file has I2_S tensors, and must be converted; raises the errors of
    read_geometry() for a file that cannot be read.
    """
    try:
        read_header(path)
    except I2sFileError:
        return True
    return False


def read_header(path: str | os.PathLike[str]) -> bytes:
    """Read all bytes before the tensor data: metadata and tensor infos. Raises ModelFileError for
    an unreadable or damaged file, I2sFileError for I2_S tensors, and UnsupportedModelError for
    weights in lookup tables.
    """
    path = Path(path)
    check_prefix(path)
    with damage_named(path):
        reader = HeaderReader(path)
        return reader.data[: int(reader.data_offset)].tobytes()


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Convert errors of reading a header in the `with` block to a ModelFileError: those of gguf and
    numpy for a damaged one, and those of the system. An EntropyKVError stays as it is.
    """
    try:
        yield
    except EntropyKVError:
        raise
    except (MemoryError, OSError) as error:
        raise ModelFileError(
            f"{path}: cannot be read ({error}); {way_out_of(str(error), AGAIN)}"
        ) from error
    except Exception as error:
        raise ModelFileError(
            f"{path}: is truncated or damaged ({reason_of(error)}); {AGAIN}"
        ) from error


def _is_directory(path: Path) -> bool:
    with suppress(OSError, ValueError):
        return path.is_dir()
    return False


def _missing(path: Path) -> ModelFileError:
    """Return the error about a file that is not there, which may be a name of the hub, or a name
    of a model that a package brings.
    """
    way_out = "give the path of a GGUF file"
    if _HUB_NAME.fullmatch(path.as_posix()):
        way_out += f", or fetch the model of the Hugging Face Hub with -hf {path.as_posix()}"
    elif path.as_posix() == path.name and path.suffix != ".gguf":
        way_out += ", or one of those that `entropykv models` lists"
    return ModelFileError(f"{path}: no such file; {way_out}")


def _directory(path: Path) -> ModelFileError:
    way_out = "give the path of a GGUF file"
    files = sorted(path.glob("*.gguf"))
    if files:
        way_out = f"give the file in it, such as {files[0]}"
    elif (path / "config.json").exists():
        way_out = f"make a GGUF file of it with `entropykv convert {path} OUT.gguf`"
    return ModelFileError(f"{path}: is a directory; {way_out}")


def check_prefix(path: Path) -> int:
    """Check magic, version and counts in the first 24 bytes; returns the size of the file in bytes.
    Raises ModelFileError for wrong ones, and for what is no readable file.
    """
    if _is_directory(path):
        raise _directory(path)
    try:
        with open_regular(path) as file:
            prefix = file.read(_PREFIX.size)
            file_bytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise _missing(path) from None
    except NotRegularError as error:
        raise ModelFileError(f"{path}: {error.strerror}; give the path of a GGUF file") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"{path}: cannot be read ({error}); give the path of a GGUF file"
        ) from error
    if not prefix:
        raise ModelFileError(f"{path}: is empty; {AGAIN}")
    if not prefix.startswith(b"GGUF"[: len(prefix)]):
        raise ModelFileError(f"{path}: is not a GGUF file; give a model converted to GGUF")
    if len(prefix) < _PREFIX.size:
        raise ModelFileError(f"{path}: is truncated after {len(prefix)} bytes; {AGAIN}")
    _, version, n_tensors, n_keys = _PREFIX.unpack(prefix)
    if version not in _SUPPORTED_VERSIONS:
        raise ModelFileError(
            f"{path}: has GGUF version {version}, but only little-endian files of version 2 or 3 "
            "can be read; convert the model again"
        )
    if max(n_tensors, n_keys) > _MAX_ENTRIES:
        raise ModelFileError(
            f"{path}: is damaged (it declares {n_tensors} tensors and {n_keys} keys); {AGAIN}"
        )
    return file_bytes


@dataclass(frozen=True)
class TensorPlace:
    """Hold the type of a tensor, its shape in GGUF's order (values of a row first), and its offset
    and size in bytes in the file.
    """

    type: GGMLQuantizationType
    dims: tuple[int, ...]
    offset: int
    n_bytes: int


class HeaderReader(GGUFReader):
    """Read a header as GGUFReader does, but never beyond the file's end, and without array
    elements.

    The base class makes numpy objects for every element of an array, which takes seconds for a
    vocabulary. `places` says where each tensor lies.
    """

    def __init__(self, path: Path) -> None:
        """Read the header; raises KeyError, ValueError and others if it is damaged."""
        self.path = path
        self.type_bytes: Counter[str] = Counter()
        self.places: dict[str, TensorPlace] = {}
        super().__init__(path)

    def _check_end(self, end: int) -> None:
        if end > len(self.data):
            raise ValueError(f"its header asks for byte {end} of {len(self.data)}")

    def _get(
        self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None
    ) -> npt.NDArray[Any]:
        self._check_end(int(offset) + int(count) * np.dtype(dtype).itemsize)
        return super()._get(offset, dtype, count, override_order)

    def _get_str(self, offset: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint8]]:
        length = int(self._get(offset, np.uint64)[0])
        if length > _MAX_STRING_BYTES:
            raise ValueError(f"a text of {length} bytes in the header")
        return super()._get_str(offset)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        raw_item, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        item, count, start = GGUFValueType(raw_item[0]), int(length[0]), orig_offs + 12
        types = [GGUFValueType.ARRAY, item]
        if item == GGUFValueType.STRING:
            return 12 + self._strings_bytes(start, count), [raw_item, length], [], types
        # Raises KeyError for an array of arrays.
        items = self._get(start, self.gguf_scalar_to_np[item], count)
        return 12 + items.nbytes, [raw_item, length, items], [2], types

    def _strings_bytes(self, start: int, count: int) -> int:
        """Return the size in bytes of `count` strings at offset `start`."""
        if count > _MAX_STRINGS:
            raise ValueError(f"an array of {count} texts in the header")
        offset, end = start, len(self.data)
        size, length_at = _LENGTH.size, _LENGTH.unpack_from
        with self.data.data as view:
            # The check is inlined, because there are up to millions of strings.
            for _ in range(count):
                if offset + size > end:
                    break
                offset += size + length_at(view, offset)[0]
            else:
                self._check_end(offset)
                return offset - start
        raise ValueError(f"its header asks for byte {offset + size} of {end}")

    def floats(self, name: str) -> npt.NDArray[np.float32] | None:
        """Return the values of a tensor in F32, flat; None if it is missing or of another type."""
        place = self.places.get(name)
        if place is None or place.type != GGMLQuantizationType.F32:
            return None
        data: npt.NDArray[np.uint8] = self.data[place.offset : place.offset + place.n_bytes]
        return np.frombuffer(data.tobytes(), "<f4").astype(np.float32)

    def texts(self, key: str) -> list[bytes]:
        """Return the texts of the array under a key, which must exist."""
        field = self.fields[key]
        offset = field.offset + sum(int(part.nbytes) for part in field.parts)
        found = []
        with self.data.data as view:
            for _ in range(int(field.parts[4][0])):
                end = offset + _LENGTH.size + _LENGTH.unpack_from(view, offset)[0]
                found.append(bytes(view[offset + _LENGTH.size : end]))
                offset = end
        return found

    def _get_tensor_info_field(self, orig_offs: int) -> ReaderField:
        field = super()._get_tensor_info_field(orig_offs)
        n_dims = int(field.parts[2][0])
        # A damaged header is often all zeros, so stop early.
        if not 1 <= n_dims <= _MAX_DIMENSIONS or not field.name:
            raise ValueError(f"tensor {field.name!r} has {n_dims} dimensions")
        return field

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        """Sum the bytes of every tensor type, and check that no tensor ends beyond the file."""
        self._refuse_tables(fields)
        end = 0
        for field in fields:
            _, _, _, dims, raw_type, offset = field.parts
            kind, n_bytes = self._tensor_bytes(field.name, int(raw_type[0]), dims.tolist())
            self.type_bytes[kind.name] += n_bytes
            start = int(start_offs) + int(offset[0])
            self.places[field.name] = TensorPlace(kind, tuple(dims.tolist()), start, n_bytes)
            end = max(end, start + n_bytes)
        if end > len(self.data):
            raise ModelFileError(
                f"{self.path}: is truncated, {end - len(self.data)} of at least {end} bytes "
                f"are missing; {AGAIN}"
            )

    def _refuse_tables(self, fields: list[ReaderField]) -> None:
        """Raise UnsupportedModelError for weights in lookup tables (TL1, TL2), because no file
        tells the order, which depends on the machine.
        """
        names = {field.name for field in fields}
        for field in fields:
            kind = _TABLE_TYPES.get(int(field.parts[4][0]))
            if kind is not None and f"{field.name}_scale" in names:
                raise UnsupportedModelError(
                    f"{self.path}: is a {kind} file of Microsoft's BitNet fork, whose order of "
                    "weights depends on the kernels it was made for; convert the I2_S file or the "
                    "Hugging Face directory of the same model"
                )

    def _tensor_bytes(
        self, name: str, raw_type: int, dims: list[int]
    ) -> tuple[GGMLQuantizationType, int]:
        """Return type and size in bytes of one tensor of `dims` elements."""
        if raw_type == I2_S_TYPE:
            raise I2sFileError(
                f"{self.path}: is an I2_S file of Microsoft's BitNet fork, which stock llama.cpp "
                f"cannot load; make one that it can with `entropykv convert {self.path} OUT.gguf`"
            )
        try:
            kind = GGMLQuantizationType(raw_type)
        except ValueError:
            raise ValueError(f"tensor {name} has the unknown type {raw_type}") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if min(dims) < 1 or dims[0] % block != 0:
            raise ValueError(f"tensor {name} of type {kind.name} has shape {dims}")
        return kind, math.prod(dims) // block * block_bytes


def text_value(reader: HeaderReader, key: str) -> str | None:
    """Return the text under a key, or None if the key is missing; raises ValueError if the value is
    not text.
    """
    field = reader.get_field(key)
    if field is None:
        return None
    if field.types != [GGUFValueType.STRING]:
        raise ValueError(f"{key} is not a text")
    return str(field.contents())


def integers(reader: HeaderReader, key: str) -> npt.NDArray[Any] | None:
    """Return the integer or integers under a key, each between 0 and 2^31 - 1; None if the key is
    missing. Raises ValueError for other values.
    """
    field = reader.get_field(key)
    if field is None:
        return None
    values = field.parts[field.data[0]] if field.data else np.empty(0)
    if values.dtype.kind not in "iu" or GGUFValueType.STRING in field.types:
        raise ValueError(f"{key} is not an integer")
    if values.size == 0 or values.min() < 0 or values.max() > _MAX_NUMBER:
        raise ValueError(f"{key} has impossible values")
    return values


def number(reader: HeaderReader, key: str) -> int | None:
    """Return the one integer under a key, from 0 to 2^31 - 1, or None if the key is missing; raises
    ValueError for other values.
    """
    values = integers(reader, key)
    if values is None:
        return None
    if values.size != 1:
        raise ValueError(f"{key} has {values.size} values, not one")
    return int(values[0])


def required(reader: HeaderReader, key: str) -> int:
    """Return the positive integer under a key; raises ModelFileError if the key is missing, and
    ValueError for other values.
    """
    value = number(reader, key)
    if value is None:
        raise ModelFileError(f"{reader.path}: lacks {key}; {AGAIN}")
    if value == 0:
        raise ValueError(f"{key} is 0")
    return value


def per_layer(reader: HeaderReader, key: str, n_layer: int) -> tuple[int, ...] | None:
    """Return one integer per layer, from one number for all layers or from an array; None if the
    key is missing. Raises ValueError for other values.
    """
    values = integers(reader, key)
    if values is None:
        return None
    field = reader.fields[key]
    if field.types[0] != GGUFValueType.ARRAY:
        return (int(values[0]),) * n_layer
    if values.size != n_layer:
        raise ValueError(f"{key} has {values.size} values for {n_layer} layers")
    return tuple(int(value) for value in values)
