"""Count tokens, seconds and climbs since a session began."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SessionCounts:
    """Count what a session does; SessionStats shows it."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    decode_seconds: float = 0.0
    climbs: dict[str, int] = field(default_factory=dict)
    """How often the recovery ladder was climbed, by rung."""
