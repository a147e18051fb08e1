"""Typed errors of the package; every message is one sentence that names the way out."""

from __future__ import annotations


class EntropyKVError(Exception):
    """The base of every error that this package raises on purpose."""


class BudgetError(EntropyKVError, ValueError):
    """Raised for a KV budget that cannot be read, or that cannot hold what it must protect."""


class ProfileError(EntropyKVError, ValueError):
    """Raised for an entropy profile that is missing, damaged, or made for another model."""


class CalibrationError(EntropyKVError, ValueError):
    """Raised for texts or results that make no profile, or where calibration lacks a package."""


class ModelFileError(EntropyKVError, ValueError):
    """Raised for a model file that is missing, truncated, damaged, or not a GGUF file."""


class HubError(EntropyKVError):
    """Raised where a model cannot be had from the Hugging Face Hub, or not be kept on this disk."""


class UnsupportedModelError(EntropyKVError):
    """Raised for a model that is intact but that the chosen store or llama.cpp cannot serve."""


class SessionFileError(EntropyKVError, ValueError):
    """Raised for a saved session that is missing, damaged, or of another model or settings."""


class FreezeError(EntropyKVError):
    """Raised where cold storage cannot be made, or its file is no longer as it was written."""


class PoolError(EntropyKVError):
    """Raised where a pool has no room for another conversation, or a decode was called off."""


class ContextError(EntropyKVError, ValueError):
    """Raised for an empty prompt, a prompt longer than the context, or a position out of range."""


class ImageError(EntropyKVError, ValueError):
    """Raised for an image that is damaged, too large or not held any more, or that nobody reads."""


class SettingsError(EntropyKVError, ValueError):
    """Raised for an option with an impossible value."""


class VersionError(EntropyKVError, ImportError):
    """Raised where llama-cpp-python or the extension is of a version that does not fit."""


class MissingExtraError(EntropyKVError, ImportError):
    """Raised where the optional packages of a part of this package are not installed."""
