"""Show a bar on stderr for commands that know how much of their work is done."""

from __future__ import annotations

from tqdm import tqdm


class ProgressBar(tqdm):  # type: ignore[type-arg]
    """Show progress to callbacks that are told (done, in all), as tqdm does."""

    def advance_to(self, done: int, total: int) -> None:
        """Show that `done` of `total` is done."""
        self.total = total
        self.update(done - self.n)
