"""Keep the predictors that sessions have learnt in the user's cache directory, for later processes.

A model whose profile has no predictor teaches one to the process that reads its first texts. The
weights are kept under the model's identity, so that the next process, also with another
quantisation of the same weights, has them from its first token. Nothing here is needed: whatever is
missing, damaged or cannot be written is learnt again.

A file has a SHA-256 of its second line in hexadecimal, and that line: a JSON object with
`format_version` (1), the `model`'s name, `n_texts` and `n_tokens` that it was learnt from, the
`correlation` of its predictions with what later tokens showed (null before that), `complete`
(false: more texts still change it), the `shapes` of the weights, [KV heads, features] for every
layer, and all `weights` in base64 of float32, little-endian.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from entropykv import file_locks, system
from entropykv.errors import ProfileError
from entropykv.files import make_folder, new_file, open_regular
from entropykv.model.geometry import ModelGeometry
from entropykv.model.identity import identity_of, norms_of
from entropykv.profile.growing import are_possible
from entropykv.profile.json_fields import integer_in, number_in, object_in, text_in
from entropykv.profile.predictor import ScorePredictor, Weights

FORMAT_VERSION = 1
MOST_BYTES = 64 << 20
"""The largest file in bytes that is read; the predictor of an 8B model takes 451 KiB."""
_SUFFIX = ".predictor.json"
_FIELDS = (
    "format_version",
    "model",
    "complete",
    "n_texts",
    "n_tokens",
    "correlation",
    "shapes",
    "weights",
)
_DAMAGED = "is damaged, or of another version"
_MOST = 2**31 - 1
_MOST_LISTED = 1 << 16


@dataclass(frozen=True, eq=False)
class LearntPredictor:
    """Hold a predictor that was learnt, and whether more texts may still change it."""

    predictor: ScorePredictor
    model: str
    """The name of the model that the texts were read with."""
    n_texts: int
    """How many texts the predictor was learnt from."""
    complete: bool
    """True if the predictor is not changed any more."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object, without the checksum."""
        weights = self.predictor.weights
        flat = b"".join(of_layer.astype("<f4").tobytes() for of_layer in weights)
        return {
            "format_version": FORMAT_VERSION,
            "model": self.model,
            "complete": self.complete,
            "n_texts": self.n_texts,
            "n_tokens": self.predictor.n_tokens,
            "correlation": self.predictor.correlation,
            "shapes": [list(of_layer.shape) for of_layer in weights],
            "weights": base64.b64encode(flat).decode("ascii"),
        }

    @classmethod
    def from_json(cls, value: object, where: str) -> LearntPredictor:
        """Read the JSON object; raises ProfileError for impossible values."""
        data = object_in(value, where, "the file", _FIELDS)
        if data["format_version"] != FORMAT_VERSION:
            raise ProfileError(f"{where}: has another version of the format")
        if not isinstance(data["complete"], bool):
            raise ProfileError(f"{where}: complete must be true or false")
        weights = _weights_of(data["shapes"], data["weights"], where)
        if not are_possible(weights):
            raise ProfileError(f"{where}: has impossible weights")
        correlation = data["correlation"]
        if correlation is not None:
            correlation = number_in(correlation, where, "correlation", -1.0, 1.0)
        return cls(
            ScorePredictor(
                weights,
                integer_in(data["n_tokens"], where, "n_tokens", 1, _MOST),
                correlation,
            ),
            text_in(data["model"], where, "model"),
            integer_in(data["n_texts"], where, "n_texts", 1, _MOST),
            data["complete"],
        )


class LearntFile:
    """Read and write the file in which the predictor of one model is kept."""

    def __init__(self, path: Path) -> None:
        """Name a file, which may not exist."""
        self.path = path

    @classmethod
    def of(cls, geometry: ModelGeometry) -> LearntFile:
        """Return the file of a model: see _identity(). Raises OSError or RuntimeError if the user
        has no cache directory, and errors of the model's file.
        """
        return cls(folder() / f"{_identity(geometry)}{_SUFFIX}")

    def read(self) -> LearntPredictor | None:
        """Return the predictor; None if there is no file. Raises ProfileError if it is damaged, or
        cannot be read.
        """
        try:
            with open_regular(self.path) as file:
                data = file.read(MOST_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ProfileError(f"{self.path}: cannot be read ({error.strerror})") from None
        if len(data) > MOST_BYTES:
            raise ProfileError(f"{self.path}: is too large")
        return _parsed(data, str(self.path))

    def keep(
        self,
        learnt: LearntPredictor,
        known: LearntPredictor | None = None,
        is_complete: Callable[[LearntPredictor], bool] = lambda _: False,
    ) -> bool:
        """Add to the file what `learnt` has more than `known`, which is what the file held when
        this process read or wrote it last; None: nothing. So what other processes have added stays.

        `is_complete` tells whether the sum of both is complete. A complete predictor in the file is
        not changed; a damaged file is replaced. Returns whether the file was written. Raises
        OSError if it cannot be.
        """
        make_folder(self.path.parent)
        with _locked(self.path.parent):
            with contextlib.suppress(ProfileError):
                found = self.read()
                if found is not None and found.complete:
                    return False
                if found is not None:
                    learnt = _joined(found, learnt, known)
                    learnt = replace(learnt, complete=learnt.complete or is_complete(learnt))
            with new_file(self.path, private=True) as part:
                part.write_bytes(_with_checksum(learnt))
        return True


def remove_learnt(names: Sequence[str]) -> list[Path]:
    """Remove the files of these names, or of models of these names, or all files if there are no
    names; returns what was removed. Raises OSError if a file cannot be removed.
    """
    removed = []
    for file in learnt_files():
        known = {file.path.name}
        with contextlib.suppress(ProfileError):
            found = file.read()
            known.add("" if found is None else found.model)
        if not names or known & {*names}:
            file.path.unlink(missing_ok=True)
            removed.append(file.path)
    return removed


def folder() -> Path:
    """Return the folder of all learnt predictors, which may not exist.

    Raises RuntimeError if the user has no home directory.
    """
    return system.cache_folder() / "learnt"


def find_learnt(geometry: ModelGeometry) -> LearntPredictor | None:
    """Return what earlier processes have learnt of a model; None if nothing can be read. Raises
    ModelFileError if the model's file cannot be read.
    """
    try:
        return LearntFile.of(geometry).read()
    except (OSError, ProfileError, RuntimeError):
        return None


def learnt_files() -> Iterator[LearntFile]:
    """Yield the files of all predictors that were kept, in the order of their names."""
    with contextlib.suppress(OSError, RuntimeError):
        for path in sorted(folder().glob(f"*{_SUFFIX}"))[:_MOST_LISTED]:
            yield LearntFile(path)


def _identity(geometry: ModelGeometry) -> str:
    """Return a name of the model's weights, which all their quantisations share.

    It is made of the shape and of the norms, which quantisation does not change (norms_of()). Where
    norms do not tell models apart, it is a name of this file alone.
    """
    norms = norms_of(geometry.path)
    parts = {
        "architecture": geometry.architecture,
        "n_vocab": geometry.n_vocab,
        "head_dim_k": geometry.head_dim_k,
        "head_dim_v": geometry.head_dim_v,
        "kv_heads_per_layer": list(geometry.kv_heads_per_layer),
        "weights": identity_of(geometry) if norms is None else norms,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _weights_of(shapes: object, text: object, where: str) -> tuple[Weights, ...]:
    try:
        pairs = [(int(n_heads), int(n_features)) for n_heads, n_features in shapes]  # type: ignore
        flat = np.frombuffer(
            base64.b64decode(text_in(text, where, "weights"), validate=True), "<f4"
        )
        ends = np.cumsum([n_heads * n_features for n_heads, n_features in pairs])[:-1]
        parts = np.split(flat, ends)
        return tuple(part.reshape(pair) for part, pair in zip(parts, pairs, strict=True))
    except (binascii.Error, TypeError, ValueError):
        raise ProfileError(f"{where}: has weights of other shapes") from None


def _joined(
    found: LearntPredictor, learnt: LearntPredictor, known: LearntPredictor | None
) -> LearntPredictor:
    """Return the mean, weighted by tokens, of `found`, which a file holds, and of what `learnt` has
    more than `known`.

    Returns `learnt` where the file holds less than `known`, because another process began anew, and
    where the weights have other shapes or would be impossible.
    """
    parts = [(1, found), (1, learnt)] + ([] if known is None else [(-1, known)])
    n_tokens = sum(sign * part.predictor.n_tokens for sign, part in parts)
    n_texts = sum(sign * part.n_texts for sign, part in parts)
    shapes = {tuple(w.shape for w in part.predictor.weights) for _, part in parts}
    begun_anew = known is not None and found.predictor.n_tokens < known.predictor.n_tokens
    if len(shapes) > 1 or begun_anew or min(n_tokens, n_texts) < 1:
        return learnt
    shares = [sign * part.predictor.n_tokens / n_tokens for sign, part in parts]
    mean = tuple(
        np.einsum("p,phf->hf", shares, np.array(of_layer)).astype(np.float32)
        for of_layer in zip(*(part.predictor.weights for _, part in parts), strict=True)
    )
    if not are_possible(mean):
        return learnt
    newest = learnt.predictor.correlation
    correlation = found.predictor.correlation if newest is None else newest
    return replace(learnt, predictor=ScorePredictor(mean, n_tokens, correlation), n_texts=n_texts)


def _with_checksum(learnt: LearntPredictor) -> bytes:
    content = json.dumps(learnt.to_json(), separators=(",", ":")).encode()
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content + b"\n"


def _parsed(data: bytes, where: str) -> LearntPredictor:
    checksum, _, content = data.partition(b"\n")
    content = content.removesuffix(b"\n")
    if hashlib.sha256(content).hexdigest().encode() != checksum:
        raise ProfileError(f"{where}: {_DAMAGED}")
    try:
        return LearntPredictor.from_json(json.loads(content), where)
    except (ProfileError, ValueError, RecursionError):
        raise ProfileError(f"{where}: {_DAMAGED}") from None


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of the folder, so that one process at a time writes a predictor.

    Without the lock, or if another process keeps it for long, files are still replaced as a whole.
    """
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):
            file_locks.lock_patiently(descriptor)
        yield
    finally:
        os.close(descriptor)
