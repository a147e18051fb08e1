"""Read the JSON-Schema-Test-Suite, and count its schemas that are refused or enforced wrongly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jsonschema import validators
from jsonschema.exceptions import SchemaError

DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
KEYWORDS_OF_TYPES = {
    "object": "properties required additionalProperties patternProperties propertyNames "
    "minProperties maxProperties dependentRequired dependentSchemas",
    "array": "items prefixItems minItems maxItems uniqueItems contains additionalItems minContains "
    "maxContains unevaluatedItems",
    "string": "minLength maxLength pattern format",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
}
"""Each type of values, with the keywords that apply only to it, separated by spaces."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems")


@dataclass(frozen=True)
class Case:
    """Hold a schema with texts, and whether each text is valid under it."""

    keyword: str
    schema: Any
    texts: list[tuple[str, bool]]


@dataclass
class Counts:
    """Count what happened to the schemas of one keyword."""

    schemas: int = 0
    refused: int = 0
    accepted: int = 0
    """Schemas for which an invalid text was accepted."""
    rejected: int = 0
    """Schemas for which a valid text was rejected."""
    failures: list[str] = field(default_factory=list)
    """Lines about what a user must never see: error messages that are not one clear sentence, and
    invalid texts that are accepted.
    """

    def add(self, other: Counts) -> None:
        """Add the counts of other schemas."""
        self.schemas += other.schemas
        self.refused += other.refused
        self.accepted += other.accepted
        self.rejected += other.rejected
        self.failures += other.failures


def cases(suite: Path, draft: str) -> Iterator[Case]:
    """Yield the cases of a draft of JSON Schema; `suite` contains LICENSE and tests/."""
    for path in sorted((suite / "tests" / draft).glob("*.json")):
        for group in json.loads(path.read_text("utf-8")):
            schema = group["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            texts = [(_text(test["data"]), bool(test["valid"])) for test in group["tests"]]
            yield Case(path.stem, schema, texts)


def with_types(case: Case) -> Case | None:
    """Return a case whose schema states the types that its keywords imply; None if it states them
    already, or if jsonschema refuses it.

    The package jsonschema decides which texts are valid then.
    """
    schema = _typed(case.schema)
    if schema == case.schema:
        return None
    validator = validators.validator_for(schema)
    try:
        validator.check_schema(schema)
        judge = validator(schema)
        texts = [(text, judge.is_valid(json.loads(text))) for text, _ in case.texts]
    # A reference that leads out of the schema raises other errors.
    except (SchemaError, Exception):
        return None
    return Case(case.keyword, schema, texts)


def judged(case: Case, takes: Callable[..., list[bool]]) -> Counts:
    """Count how the schema and the texts of a case are treated by `takes`.

    `takes(schema, *texts)` returns whether each text is accepted, and raises ValueError for a
    schema that it refuses; a message of several lines or more than 600 characters is a failure.
    """
    counts = Counts(schemas=1)
    try:
        found = takes(case.schema, *(text for text, _ in case.texts))
    except ValueError as error:
        counts.refused = 1
        if len(str(error)) > 600 or "\n" in str(error):
            counts.failures.append(f"{case.keyword}: no sentence: {error}")
        return counts
    pairs = list(zip(case.texts, found, strict=True))
    wrong = [text for (text, valid), taken in pairs if taken and not valid]
    counts.accepted = bool(wrong)
    counts.rejected = any(valid and not taken for (_, valid), taken in pairs)
    counts.failures += [f"{case.keyword}: {json.dumps(case.schema)} takes {text}" for text in wrong]
    return counts


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _typed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key in _MAPS:
        if isinstance(found.get(key), dict):
            found[key] = {name: _typed(part) for name, part in found[key].items()}
    for key in _LISTS:
        if isinstance(found.get(key), list):
            found[key] = [_typed(part) for part in found[key]]
    for key in _SINGLE:
        if isinstance(found.get(key), dict):
            found[key] = _typed(found[key])
    implied = [
        kind
        for kind, keys in KEYWORDS_OF_TYPES.items()
        if not found.keys().isdisjoint(keys.split())
    ]
    if len(implied) == 1 and found.keys().isdisjoint({"type", "enum", "const", "$ref"}):
        found["type"] = implied[0]
    return found
