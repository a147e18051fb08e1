"""Define the errors of the package; every message is one sentence that says what to do."""

from __future__ import annotations


class EntropyKVError(Exception):
    """Base class of all errors that this package raises on purpose.

    A message may quote a name from a file or a request. What does not print in it, such as a line
    break or the start of a terminal's command, is escaped as in a literal of Python.
    """

    def __init__(self, message: str = "") -> None:
        """Store the message, escaped to a single line."""
        shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        super().__init__("".join(shown))


class BudgetError(EntropyKVError, ValueError):
    """Raised for a KV budget that cannot be parsed, or that cannot hold the protected entries."""


class ProfileError(EntropyKVError, ValueError):
    """Raised for an entropy profile that is missing, damaged, or made for another model."""


class CalibrationError(EntropyKVError, ValueError):
    """Raised for texts or results that give no profile, or if a package for calibration is
    missing.
    """


class ModelFileError(EntropyKVError, ValueError):
    """Raised for a model file that is missing, truncated, damaged, or not a GGUF file."""


class HubError(EntropyKVError):
    """Raised if a model cannot be fetched from the Hugging Face Hub, or stored on this disk."""


class UnsupportedModelError(EntropyKVError):
    """Raised for a model that is intact but that the chosen store or llama.cpp cannot serve."""


class StepError(EntropyKVError):
    """Raised if a step could not be computed, for example because a device or the system has no
    memory or no threads left.
    """


class SessionFileError(EntropyKVError, ValueError):
    """Raised for a saved session that is missing, damaged, or of another model or settings."""


class DocumentBusyError(SessionFileError):
    """Raised if another process or thread is reading, using or removing a document."""


class StorageError(EntropyKVError):
    """Raised if object storage refuses something, or does not answer."""


class FreezeError(EntropyKVError):
    """Raised if cold storage cannot be made, or if another process has changed its file."""


class PoolError(EntropyKVError):
    """Raised if a pool has no room for another conversation, or if a decode was interrupted."""


class ContextError(EntropyKVError, ValueError):
    """Raised for a prompt that is empty, too long or no text, a position out of range, or a
    question without a document.

    `n_tokens` and `n_ctx`: how many tokens a prompt that is too long for the context, and the
    context, have; None for other errors.
    """

    def __init__(
        self, message: str, *, n_tokens: int | None = None, n_ctx: int | None = None
    ) -> None:
        """Store the message, and the two numbers of tokens if they are known."""
        super().__init__(message)
        self.n_tokens, self.n_ctx = n_tokens, n_ctx


class ImageError(EntropyKVError, ValueError):
    """Raised for an image that is damaged, too large or no longer held, or if there is no
    projector.
    """


class SettingsError(EntropyKVError, ValueError):
    """Raised for an option or argument that is unknown or has an impossible value."""


class VersionError(EntropyKVError, ImportError):
    """Raised if the version of llama-cpp-python or of the extension does not fit."""


class MissingExtraError(EntropyKVError, ImportError):
    """Raised if optional packages that a part of this package needs are not installed."""


def reason_of(error: Exception, most: int = 160) -> str:
    """Return the message of an error of another package, in one line of at most `most` characters,
    to quote it in a message of ours; the name of its type if the message is empty.
    """
    return " ".join(str(error).split())[:most] or type(error).__name__
