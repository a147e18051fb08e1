"""Check JSON schemas before they are compiled, and find the part that cannot be enforced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from entropykv.errors import SettingsError

MOST_DEPTH = 100
"""The deepest nesting of objects and lists in the JSON text of a schema."""
MOST_PARTS = 20_000
"""The most values in the JSON text of a schema: objects, lists, texts and numbers."""
MOST_CHARACTERS = 1 << 20
"""The most characters of all names and texts in a schema together."""
MOST_OPTIONAL = 250
"""The most properties of an object that may be left out, because each of them may be the next one.
"""
_MOST_TRIES = 200
"""The most parts that are tried to name the one that cannot be enforced."""

_BLANKS = r" |\r?\n[ \t]{0,20}"
_OPTIONS = {"whitespace_pattern": _BLANKS, "json_allow_general_unicode_escapes": True}
"""llguidance's options. The default would allow any number of blanks between two parts of a JSON
text, and small models would write them until the answer is full.
"""
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains", "not", "propertyNames")
_CONDITIONS = ("if", "then", "else", "unevaluatedItems", "unevaluatedProperties")
_DEFINITIONS = ("$defs", "definitions", "$schema")


def checked_schema(schema: Any) -> dict[str, Any]:
    """Return a copy of a schema (parsed JSON) with options for llguidance; raises SettingsError for
    false, for what is no schema, and beyond the limits.

    The check visits every value once, without recursion.
    """
    if schema is False:
        raise SettingsError("the JSON schema is false, which no text follows; give another one")
    if schema is not True and not isinstance(schema, dict):
        raise SettingsError("a JSON schema is an object or true; give one")
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
            _check_optional(value)
        if n_text > MOST_CHARACTERS:
            raise SettingsError(
                f"the schema has more than {MOST_CHARACTERS:,} characters of text; leave some of "
                "it out"
            )
    return {**(schema if isinstance(schema, dict) else {}), "x-guidance": _OPTIONS}


def _check_optional(schema: dict[str, Any]) -> None:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return
    needed = (
        {each for each in required if isinstance(each, str)}
        if isinstance(required, list)
        else set()
    )
    if len(properties.keys() - needed) > MOST_OPTIONAL:
        raise SettingsError(
            f"an object of the schema has more than {MOST_OPTIONAL:,} properties that are not "
            "required; require some of them, or leave them out"
        )


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


def why_refused(schema: dict[str, Any], reason: str, is_refused: Callable[[Any], str]) -> str:
    """Return the path of the smallest part of a schema for which llguidance gives this reason.

    `is_refused` returns its reason against a schema, "" if there is none. Parts of parts are tried
    alone, with the definitions of the whole.
    """
    around = {key: schema[key] for key in _DEFINITIONS if key in schema}
    path, part, tries = "#", schema, 0
    while True:
        for name, child in _children(part):
            tries += 1
            if tries > _MOST_TRIES:
                return path
            if is_refused({**child, **around}) == reason:
                path, part = f"{path}/{name}", child
                break
        else:
            return path


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas directly in a schema, with their paths relative to it."""
    found: list[tuple[str, Any]] = []
    for key in _MAPS:
        parts = schema.get(key)
        if isinstance(parts, dict):
            found += [(f"{key}/{_escaped(name)}", part) for name, part in parts.items()]
    for key in _LISTS:
        parts = schema.get(key)
        if isinstance(parts, list):
            found += [(f"{key}/{index}", part) for index, part in enumerate(parts)]
    found += [(key, schema[key]) for key in (*_SINGLE, *_CONDITIONS) if key in schema]
    yield from ((path, part) for path, part in found if isinstance(part, dict))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
