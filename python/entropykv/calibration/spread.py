"""Run the steps of a calibration: here, one text after the other, or spread over a Ray cluster.

A step measures texts, each by itself, and returns arrays for each. The caller combines them in the
order of the texts, so that a profile does not depend on where they were measured, or in which
order. What was measured may be kept in a directory, from which a later run continues.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv import _version
from entropykv.cluster import Cluster, TaskKind
from entropykv.errors import CalibrationError, SettingsError
from entropykv.files import new_file
from entropykv.model.geometry import read_geometry
from entropykv.model.identity import identity_of
from entropykv.profile.predictor import ScorePredictor
from entropykv.profile.profile import EntropyProfile

Arrays = tuple[npt.NDArray[Any], ...]
"""What a step measures in one piece of work."""
Progress = Callable[[int], None]
"""Called with the number of tokens that were read since the last call."""


@dataclass(frozen=True)
class TextWork:
    """Hold the tokens that a step measures together, and what it measures of them."""

    what: str
    texts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StepSettings:
    """Hold what all work of a step has in common."""

    path: str
    """The model's file; on a cluster, every node has the same file at this path."""
    identity: Mapping[str, Any]
    """What identity_of() says of the model."""
    kv_type: str
    n_threads: int
    n_ctx: int
    """The longest text, in tokens."""
    profile: EntropyProfile | None = None
    """The profile of what earlier steps measured, for steps that need it."""
    learnt: ScorePredictor | None = None
    """What the model learns from texts without the profile, for the step that compares ways to use
    the profile with none.
    """

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        *,
        n_ctx: int,
        kv_type: str = "f16",
        n_threads: int = 0,
        profile: EntropyProfile | None = None,
    ) -> StepSettings:
        """Return the settings for a model, whose identity is read from its file; raises the errors
        of read_geometry().
        """
        identity = identity_of(read_geometry(path))
        return cls(os.fspath(path), identity, kv_type, n_threads, n_ctx, profile)


Step = Callable[[StepSettings, Sequence[TextWork], Progress], Iterator[Arrays]]
"""A function of a module, so that it can be pickled: yields the arrays of each piece of work."""


@dataclass(frozen=True)
class _Measured:
    n_tokens: int
    """How many tokens were read for the work."""
    arrays: Arrays


class Spread:
    """Run steps; without a cluster, on this machine.

    `directory`: where what was measured is kept, and looked up before anything is measured. Raises
    SettingsError if it cannot be made.
    """

    def __init__(
        self, cluster: Cluster | None = None, directory: str | os.PathLike[str] | None = None
    ) -> None:
        """Use a connected cluster, if there is one."""
        self._cluster = cluster
        self._directory = None if directory is None else Path(directory)
        if self._directory is not None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SettingsError(
                    f"{directory}: results cannot be kept there ({error.strerror}); give another "
                    "directory"
                ) from None

    def run(
        self, step: Step, settings: StepSettings, work: Sequence[TextWork], on_progress: Progress
    ) -> list[Arrays]:
        """Return what a step measures, in the order of `work`.

        Raises the errors of the step and of the cluster, and CalibrationError if a result cannot be
        kept.
        """
        common = _digest_of(step.__name__, settings)
        found = [self._look_up(_name_of(common, each)) for each in work]
        missing = [number for number, measured in enumerate(found) if measured is None]
        for measured in found:
            if measured is not None:
                on_progress(measured.n_tokens)

        def receive(number: int, measured: _Measured) -> None:
            found[number] = measured
            self._keep(_name_of(common, work[number]), measured)

        if self._cluster is None:
            rest = [work[number] for number in missing]
            for number, measured in zip(
                missing, _measured(step, settings, rest, on_progress), strict=True
            ):
                receive(number, measured)
        else:
            kind = TaskKind(
                _measure_one,
                (step, settings),
                lambda task: f"{step.__name__}, text {task[0] + 1}",
                max(1, settings.n_threads),
            )

            def receive_and_tell(task: tuple[int, TextWork], measured: _Measured) -> None:
                receive(task[0], measured)
                on_progress(measured.n_tokens)

            self._cluster.run(
                kind, [(number, work[number]) for number in missing], receive_and_tell
            )
        return [measured.arrays for measured in found if measured is not None]

    def _look_up(self, name: str) -> _Measured | None:
        if self._directory is None:
            return None
        try:
            with np.load(self._directory / name, allow_pickle=False) as file:
                arrays = [file[f"arr_{number}"] for number in range(len(file.files))]
        except (OSError, ValueError, KeyError):  # Measure again what is not there or damaged.
            return None
        return _Measured(int(arrays[0]), tuple(arrays[1:]))

    def _keep(self, name: str, measured: _Measured) -> None:
        if self._directory is None:
            return
        data = io.BytesIO()
        np.savez(data, np.array(measured.n_tokens), *measured.arrays)
        try:
            with new_file(self._directory / name) as file:
                file.write_bytes(data.getvalue())
        except OSError as error:
            raise CalibrationError(
                f"{self._directory}: a result cannot be kept ({error.strerror}); make room, and "
                "run the same command again"
            ) from None


def _measured(
    step: Step, settings: StepSettings, work: Sequence[TextWork], on_progress: Progress
) -> Iterator[_Measured]:
    n_tokens = 0

    def count(n: int) -> None:
        nonlocal n_tokens
        n_tokens += n
        on_progress(n)

    if work:
        for arrays in step(settings, work, count):
            yield _Measured(n_tokens, arrays)
            n_tokens = 0


def _measure_one(common: tuple[Step, StepSettings], task: tuple[int, TextWork]) -> _Measured:
    """Run one task of a calibration step on a node of a cluster; raises SettingsError if the file
    at the path is another model there.
    """
    step, settings = common
    if identity_of(read_geometry(settings.path)) != settings.identity:
        raise SettingsError(
            f"{settings.path}: a node of the cluster has another model at this path; put the same "
            "file there on every node"
        )
    (measured,) = _measured(step, settings, [task[1]], lambda _: None)
    return measured


def _digest_of(step: str, settings: StepSettings) -> bytes:
    profile = None if settings.profile is None else settings.profile.to_dict()
    learnt = None if settings.learnt is None else settings.learnt.to_json()
    about = (
        *(_version.VERSION, step, sorted(settings.identity.items()), settings.kv_type),
        *(profile, learnt),
    )
    return hashlib.blake2b(repr(about).encode(), digest_size=16).digest()


def _name_of(common: bytes, work: TextWork) -> str:
    digest = hashlib.blake2b(common, digest_size=16)
    digest.update(repr((work.what, work.texts)).encode())
    return f"{digest.hexdigest()}.npz"
