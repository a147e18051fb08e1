"""The bar on stderr of commands that know what they have done of how much."""

from __future__ import annotations

from tqdm import tqdm


class ProgressBar(tqdm):  # type: ignore[type-arg]
    """A tqdm bar for callbacks that are told (done, in all)."""

    def advance_to(self, done: int, total: int) -> None:
        """Show so much of so much."""
        self.total = total
        self.update(done - self.n)
