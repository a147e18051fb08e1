"""Define the options of thoughts: where they are shown, and how long they may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

ThoughtFormat = Literal["auto", "none", "deepseek", "deepseek-legacy"]
FORMATS: tuple[ThoughtFormat, ...] = get_args(ThoughtFormat)
"""llama.cpp's names: `none` leaves thoughts in the answer, `auto` means `deepseek`."""
MOST_MESSAGE = 4_096
"""The most characters of the message that ends a thought."""


@dataclass(frozen=True)
class ThinkingOptions:
    """Hold where thoughts are shown, and how many tokens one may have (-1: no limit).

    `message` is written when the budget is used up, before the tag that ends the thought.
    """

    format: ThoughtFormat = "auto"
    budget: int = -1
    message: str = ""


def template_switch(*, thinks: bool) -> dict[str, Any]:
    """Return the template variables that switch thinking on or off, under all names in use."""
    return {"enable_thinking": thinks, "thinking": thinks}


def template_variables(
    given: dict[str, Any] | None, reasoning: str, effort: str | None
) -> dict[str, Any]:
    """Return the variables of the chat template, by `given` and the options about thoughts.

    `reasoning`: auto, on or off; `effort`: low, for example; None and "default" say nothing.
    """
    switch = {} if reasoning == "auto" else template_switch(thinks=reasoning == "on")
    degree = {} if effort in (None, "default") else {"reasoning_effort": effort}
    return {**(given or {}), **switch, **degree}
