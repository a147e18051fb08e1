"""Show progress on stderr."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


class ProgressBar(tqdm):  # type: ignore[type-arg]
    """Offer tqdm's progress bar to callers that report (done, total)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Take the arguments of tqdm; a bar is shown on a terminal only."""
        super().__init__(*arguments, **{"disable": None, **options})

    def advance_to(self, done: int, total: int) -> None:
        """Set the bar to `done` of `total`."""
        self.total = total
        self.update(done - self.n)
