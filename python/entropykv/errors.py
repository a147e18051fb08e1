"""Typed errors of the package; every message is one sentence that names the way out."""

from __future__ import annotations


class EntropyKVError(Exception):
    """Base of every error that this package raises on purpose."""


class BudgetError(EntropyKVError, ValueError):
    """A KV budget that cannot be read, or that cannot hold what it must protect."""


class ProfileError(EntropyKVError, ValueError):
    """An entropy profile that is missing, damaged, or made for another model."""


class CalibrationError(EntropyKVError, ValueError):
    """Texts or results that no profile can be made of, or a package that calibration lacks."""


class ModelFileError(EntropyKVError, ValueError):
    """A model file that is missing, truncated, damaged, or not a GGUF file."""


class UnsupportedModelError(EntropyKVError):
    """A model that is intact but that the chosen store or llama.cpp cannot serve."""


class SessionFileError(EntropyKVError, ValueError):
    """A saved session that is missing, damaged, or of another model or other settings."""


class FreezeError(EntropyKVError):
    """Cold storage that cannot be made, or whose file is not any more as it was written."""


class PoolError(EntropyKVError):
    """A pool that has no room for another conversation, or a decode that was called off."""


class ContextError(EntropyKVError, ValueError):
    """An empty prompt, a prompt longer than the context, or a position out of range."""


class SettingsError(EntropyKVError, ValueError):
    """An option with an impossible value."""


class VersionError(EntropyKVError, ImportError):
    """An installed llama-cpp-python or extension of a version that does not fit."""


class MissingExtraError(EntropyKVError, ImportError):
    """A part of this package whose optional packages are not installed."""
