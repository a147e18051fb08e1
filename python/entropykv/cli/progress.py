"""Show progress on stderr."""

from __future__ import annotations

from tqdm import tqdm


class ProgressBar(tqdm):  # type: ignore[type-arg]
    """Offer tqdm's progress bar to callers that report (done, total)."""

    def advance_to(self, done: int, total: int) -> None:
        """Set the bar to `done` of `total`."""
        self.total = total
        self.update(done - self.n)
