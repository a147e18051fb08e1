"""Check which texts a constraint allows, over a vocabulary of single bytes."""

from __future__ import annotations

import functools
import time
from typing import Any

from llguidance import LLTokenizer

from entropykv.constraint.constraint import Constraint
from entropykv.constraint.sampler import compiled
from entropykv.constraint.vocabulary import TokenTexts


@functools.cache
def byte_texts() -> TokenTexts:
    """Return a vocabulary of all bytes, and a token that ends a text."""
    return TokenTexts(LLTokenizer("byte"), lambda _: None)


def takes(constraint: Constraint, *given: str, texts: TokenTexts | None = None) -> list[bool]:
    """Return for each text whether the constraint allows it as a whole.

    Raises SettingsError if the constraint is not valid.
    """
    vocabulary = texts or byte_texts()
    matcher = compiled(constraint, vocabulary)
    found = []
    for text in given:
        data = list(text.encode("utf-8"))
        fits = matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
        found.append(fits and not matcher.is_error())
        if matcher.is_error() or not matcher.reset():
            matcher = compiled(constraint, vocabulary)
    return found


def schema_takes(schema: Any, *texts: str) -> list[bool]:
    """Return for each text whether it is JSON that a schema allows; raises SettingsError for a
    wrong schema.
    """
    return takes(Constraint.json_schema(schema), *texts)


def longest_step(constraint: Constraint, text: bytes) -> float:
    """Return the CPU seconds of the longest step while the constraint follows a text."""
    matcher = compiled(constraint, byte_texts())
    longest = 0.0
    for byte in text:
        start = time.thread_time()
        matcher.compute_bitmask()
        goes_on = not matcher.is_error() and matcher.try_consume_tokens([byte]) == 1
        longest = max(longest, time.thread_time() - start)
        if not goes_on:
            break
    return longest
