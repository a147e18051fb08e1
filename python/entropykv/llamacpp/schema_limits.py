"""Reject JSON schemas that would take much time or memory to convert, before converting them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from entropykv.errors import SettingsError

MOST_DEPTH = 100
"""The deepest nesting of objects and lists in the JSON text of a schema."""
MOST_PARTS = 20_000
"""The most values in the JSON text of a schema: objects, lists, texts and numbers."""
MOST_TEXT = 1 << 20
"""The most characters of all names and texts in a schema together."""
MOST_COUNT = 1_000_000
"""The largest value of minItems, maxItems, minLength and maxLength."""
MOST_PATTERN = 4_000
"""The most characters of a pattern."""
MOST_PATTERN_COUNT = 2_000
"""The largest sum of repetitions such as {3} or {2,5} in a pattern."""
MOST_GRAMMAR = 4 << 20
"""The most characters of the grammar that a schema is converted to."""
MOST_VISITS = 50_000
"""The most schemas that are converted; a definition counts once."""
MOST_WRITTEN = 200_000
"""The most parts of a schema after its references and repetitions are written out."""

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_QUANTIFIER = re.compile(r"\{(\d*),?(\d*)\}")
_DIGITS = 9
"""A number with more digits is treated as a thousand million."""


def check_schema(schema: Any) -> None:
    """Raise SettingsError for a schema beyond the limits; the check visits every value once,
    without recursion.
    """
    n_text = 0
    for n_parts, (value, depth) in enumerate(_values(schema), start=1):
        if depth > MOST_DEPTH:
            raise SettingsError(
                f"the schema has more than {MOST_DEPTH} objects and lists within each other; "
                "name parts of it in $defs"
            )
        if n_parts > MOST_PARTS:
            raise SettingsError(
                f"the schema has more than {MOST_PARTS:,} values; leave some of its properties out"
            )
        n_text += len(value) if isinstance(value, str) else 0
        if isinstance(value, dict):
            n_text += sum(map(len, value))
            _check_counts(value)
        if n_text > MOST_TEXT:
            raise SettingsError(
                f"the schema has more than {MOST_TEXT:,} characters of text; leave some of it out"
            )


def check_written_out(schema: Any) -> None:
    """Raise SettingsError for a schema that is too large for llama-cpp-python's own converter.

    That converter writes out required items of arrays, and examines a definition again for every
    reference to it, and all properties for every property.
    """
    check_schema(schema)
    work = 0
    within: set[str] = set()
    rest: list[Any] = [schema]
    while rest:
        value = rest.pop()
        if isinstance(value, _EndOfReference):
            within.discard(value.ref)
            continue
        work += 1
        if isinstance(value, list):
            rest.extend(value)
        elif isinstance(value, dict):
            work += _written(value)
            rest.extend(each for key, each in value.items() if key not in ("$defs", "definitions"))
            ref = value.get("$ref")
            if isinstance(ref, str) and ref not in within:
                within.add(ref)
                rest.extend((_EndOfReference(ref), _target(schema, ref)))
        if work > MOST_WRITTEN:
            raise SettingsError(
                "the schema is too large once its references are written out; leave some of its "
                "properties out, or refer to fewer definitions"
            )


@dataclass(frozen=True)
class _EndOfReference:
    """Mark, on the stack of values to visit, the end of a reference's contents."""

    ref: str


def _written(schema: dict[str, Any]) -> int:
    counts = [schema.get(key) for key in _COUNTS]
    properties = schema.get("properties")
    n_properties = len(properties) if isinstance(properties, dict) else 0
    return n_properties**2 // 10 + sum(int(each) for each in counts if isinstance(each, int))


def _target(schema: Any, ref: str) -> Any:
    """Return the value that a reference names; None if it does not exist."""
    target = schema
    for key in ref.split("/")[1:]:
        target = target.get(key) if isinstance(target, dict) else None
    return target


def _values(schema: Any) -> Iterator[tuple[Any, int]]:
    """Yield every value of a JSON text, with the number of objects and lists that contain it."""
    rest: list[tuple[Any, int]] = [(schema, 0)]
    while rest:
        value, depth = rest.pop()
        yield value, depth
        if isinstance(value, dict):
            rest.extend((each, depth + 1) for each in value.values())
        elif isinstance(value, list):
            rest.extend((each, depth + 1) for each in value)


def _check_counts(schema: dict[str, Any]) -> None:
    for key in _COUNTS:
        count = schema.get(key)
        if isinstance(count, int | float) and count > MOST_COUNT:
            raise SettingsError(
                f"{key} is {_short(count)}, which is more than {MOST_COUNT:,}; give less, or "
                "leave it out"
            )
    pattern = schema.get("pattern")
    if not isinstance(pattern, str):
        return
    if len(pattern) > MOST_PATTERN:
        raise SettingsError(f"a pattern has more than {MOST_PATTERN:,} characters; shorten it")
    quantifiers = _QUANTIFIER.findall(pattern)
    if sum(_number(each) for pair in quantifiers for each in pair) > MOST_PATTERN_COUNT:
        raise SettingsError(
            f"a pattern repeats more than {MOST_PATTERN_COUNT:,} times with its {{}}; repeat less, "
            "or use + or *"
        )


def _number(digits: str) -> int:
    return int(digits or 0) if len(digits) <= _DIGITS else 10**_DIGITS


def _short(count: float) -> str:
    return f"{count:,}" if abs(count) < 1e15 else "a number of more than 15 digits"
