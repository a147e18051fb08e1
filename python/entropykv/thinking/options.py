"""Hold what a user says of thoughts: where they are shown, and how long they may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

ThoughtFormat = Literal["auto", "none", "deepseek", "deepseek-legacy"]
FORMATS: tuple[ThoughtFormat, ...] = get_args(ThoughtFormat)
"""llama.cpp's names: `none` leaves thoughts in the answer, `auto` is as `deepseek`."""
MOST_MESSAGE = 4_096
"""Characters of the message that ends a thought."""


@dataclass(frozen=True)
class ThinkingOptions:
    """Say where thoughts are shown, and how many tokens one may have (-1: any number).

    `message` is written where the budget is used up, before the tag that ends the thought.
    """

    format: ThoughtFormat = "auto"
    budget: int = -1
    message: str = ""

    @property
    def separates(self) -> bool:
        """Tell whether thoughts are shown apart from the answer."""
        return self.format != "none"


def template_switch(*, thinks: bool) -> dict[str, Any]:
    """Return what tells a chat template to let its model think, or not, by the names in use."""
    return {"enable_thinking": thinks, "thinking": thinks}
