"""Find the tensors of a safetensors checkpoint, in one file or several, and check them
before use.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from gguf.utility import SafetensorsLocal

from entropykv.convert.source import read_bytes
from entropykv.convert.ternary import Bytes
from entropykv.errors import ModelFileError, reason_of

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 << 20  # The safetensors library allows 100,000,000.
_ITEM_BYTES = {"U8": 1, "I8": 1, "BOOL": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8, "I64": 8}
_AGAIN = "download it again"


@dataclass(frozen=True)
class StoredTensor:
    """Say where a tensor is stored: at byte `offset` of the file `path`, as safetensors type
    `dtype`.
    """

    path: Path
    offset: int
    n_bytes: int
    dtype: str
    shape: tuple[int, ...]

    def rows(self, first: int, count: int) -> Bytes:
        """Read `count` rows of a matrix from `first` on; returns (count, bytes of a row)."""
        row_bytes = self.n_bytes // self.shape[0]
        data = read_bytes(self.path, self.offset + first * row_bytes, count * row_bytes)
        return data.reshape(count, row_bytes)


def read_safetensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of every shard, by name.

    Raises ModelFileError for a shard that is missing, damaged or of another model.
    """
    tensors: dict[str, StoredTensor] = {}
    for path, expected in _shards(directory).items():
        found = _read(path)
        if expected is not None and found.keys() != expected:
            odd = min(found.keys() ^ expected)
            what = "has no" if odd in expected else "has a"
            raise ModelFileError(
                f"{path}: is a shard of another model ({what} tensor {odd}, unlike {_INDEX} says); "
                f"{_AGAIN}"
            )
        tensors |= found
    return tensors


def _shards(directory: Path) -> dict[Path, set[str] | None]:
    """Return the files of a checkpoint, each with the tensor names that its index lists; None
    without an index.
    """
    index = directory / _INDEX
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[Path, set[str] | None] = {}
        for name in sorted(set(weight_map.values())):
            shards[directory / Path(name).name] = {k for k, v in weight_map.items() if v == name}
        for shard in shards:
            if not shard.is_file():
                raise ModelFileError(
                    f"{shard}: no such file, but {_INDEX} names it; download the missing part"
                )
        return shards
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelFileError(
            f"{directory}: has no *.safetensors; download them (pytorch_model.bin cannot be read)"
        )
    if len(files) > 1:
        raise ModelFileError(
            f"{directory}: has {len(files)} *.safetensors but no {_INDEX}; download that too"
        )
    return {files[0]: None}


def _read(path: Path) -> dict[str, StoredTensor]:
    file_bytes = path.stat().st_size
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
    if file_bytes < 8 or header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
        raise ModelFileError(f"{path}: is truncated or no safetensors file; {_AGAIN}")
    try:
        found = SafetensorsLocal(path).tensors
        tensors = {
            name: StoredTensor(
                path,
                tensor.data_range.offset,
                tensor.data_range.size,
                tensor.dtype,
                tensor.shape,
            )
            for name, tensor in found.items()
        }
        for name, tensor in tensors.items():
            _check(name, tensor, 8 + header_bytes, file_bytes)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelFileError(f"{path}: is damaged ({reason_of(error)}); {_AGAIN}") from error
    return tensors


def _check(name: str, tensor: StoredTensor, start: int, file_bytes: int) -> None:
    end = tensor.offset + tensor.n_bytes
    if tensor.dtype not in _ITEM_BYTES:
        raise ValueError(f"tensor {name} has the unknown type {tensor.dtype}")
    if not all(isinstance(size, int) and size > 0 for size in tensor.shape):
        raise ValueError(f"tensor {name} has shape {list(tensor.shape)}")
    if math.prod(tensor.shape) * _ITEM_BYTES[tensor.dtype] != tensor.n_bytes:
        raise ValueError(f"tensor {name} has {tensor.n_bytes} bytes for {list(tensor.shape)}")
    if tensor.offset < start:
        raise ValueError(f"tensor {name} overlaps the header")
    if end > file_bytes:
        raise ModelFileError(
            f"{tensor.path}: is truncated, {end - file_bytes} bytes of tensor {name} are missing; "
            f"{_AGAIN}"
        )
