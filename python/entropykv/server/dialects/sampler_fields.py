"""Define the fields of requests that say how tokens are chosen, by llama-server's names."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from entropykv.server.dialects.fields import FIRST_ERROR, MOST_TOKENS
from entropykv.session.sampling import SAMPLERS

MOST_SAMPLERS = 32
"""The most samplers of a chain."""
MOST_BREAKERS, MOST_BREAKER = 64, 128
"""The most texts at which repetitions end, and characters of each."""
_LETTERS = dict(zip("edskypmxt", SAMPLERS, strict=True))
"""llama-server's letters of the samplers, whose order SAMPLERS has."""
_OTHER_NAMES = {"typical_p": "typ_p", "typ-p": "typ_p", "top-k": "top_k", "top-p": "top_p"}


def _names(given: Any) -> Any:
    """Return names of samplers for the letters that stand for them, and for their other names."""
    if isinstance(given, str):
        return [_LETTERS.get(letter, letter) for letter in given[: MOST_SAMPLERS + 1]]
    if isinstance(given, list):
        return [_OTHER_NAMES.get(each, each) if isinstance(each, str) else each for each in given]
    return given


def _known(name: str) -> str:
    """Refuse a sampler that does not exist."""
    if name not in SAMPLERS:
        names = {"names": ", ".join(SAMPLERS)}
        raise PydanticCustomError("unknown", "there is no such sampler; use some of {names}", names)
    return name


Samplers = Annotated[
    list[Annotated[str, AfterValidator(_known)]],
    Field(max_length=MOST_SAMPLERS),
    FIRST_ERROR,
    BeforeValidator(_names, json_schema_input_type=str | list[str]),
]
Breakers = Annotated[
    list[Annotated[str, Field(max_length=MOST_BREAKER)]],
    Field(min_length=1, max_length=MOST_BREAKERS),
    FIRST_ERROR,
]


class SamplerFields(BaseModel):
    """Hold the samplers besides those that OpenAI's requests know."""

    typical_p: float | None = Field(default=None, ge=0, le=1)
    top_n_sigma: float | None = Field(default=None, ge=-1, le=1000)
    xtc_probability: float | None = Field(default=None, ge=0, le=1)
    xtc_threshold: float | None = Field(default=None, ge=0, le=1)
    dynatemp_range: float | None = Field(default=None, ge=0, le=1000)
    dynatemp_exponent: float | None = Field(default=None, ge=0, le=1000)
    repeat_last_n: int | None = Field(default=None, ge=-1, le=MOST_TOKENS)
    dry_multiplier: float | None = Field(default=None, ge=0, le=1000)
    dry_base: float | None = Field(default=None, ge=1, le=1000)
    dry_allowed_length: int | None = Field(default=None, ge=0, le=MOST_TOKENS)
    dry_penalty_last_n: int | None = Field(default=None, ge=-1, le=MOST_TOKENS)
    dry_sequence_breakers: Breakers | None = None
    samplers: Samplers | None = Field(
        default=None, description="Which samplers there are, in their order, or their letters."
    )
    ignore_eos: bool = Field(default=False, description="Never end the text by a token.")
    cache_prompt: bool = Field(
        default=True, description="Whether a prompt goes on from what was read of it before."
    )
    id_slot: int | None = Field(
        default=None,
        ge=-1,
        le=MOST_TOKENS,
        description="Changes nothing: each request gets the slot that is free, and finds what was "
        "read of its text in whatever slot it was.",
    )
