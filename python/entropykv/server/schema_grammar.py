"""Make grammars from the JSON schemas of response_format, and of the tools that may be called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llama_cpp import llama_grammar
from llama_cpp.llama_grammar import LlamaGrammar

from entropykv.errors import SettingsError
from entropykv.llamacpp.schema_converter import grammar_of_schema, with_ranges
from entropykv.llamacpp.schema_limits import check_schema
from entropykv.server.errors import RequestError

_NOT_ENFORCED = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "uniqueItems"}
    | {"patternProperties", "propertyNames", "minProperties", "maxProperties", "contains", "not"}
    | {"if", "then", "else", "dependentRequired", "dependentSchemas", "unevaluatedProperties"}
)
"""Keywords of a schema that grammars cannot enforce."""


def grammar_of(schema: Any, param: str, *, strict: bool = False) -> LlamaGrammar:
    """Return the grammar of the JSON texts that a schema allows.

    With `strict`, refuse keywords that the grammar would not enforce. Raises RequestError, with
    `param` as its field, for those and for a schema that cannot be converted.
    """
    check(schema, param)
    try:
        kept = with_ranges(schema) if strict else schema
        ignored = sorted(set(_keywords(kept)) & _NOT_ENFORCED)
        if ignored and strict:
            raise RequestError(
                400,
                f"{param}: {ignored[0]!r} cannot be enforced here; leave it out, or give strict as "
                "false",
                param=param,
            )
        return LlamaGrammar.from_string(grammar_of_schema(schema), verbose=False)
    except SettingsError as error:
        raise RequestError(400, f"{param}: {error}", param=param) from error


def check(schema: Any, param: str) -> None:
    """Raise RequestError, with `param` as its field, for a schema beyond the limits."""
    try:
        check_schema(schema)
    except SettingsError as error:
        raise RequestError(400, f"{param}: {error}", param=param) from error


def any_object() -> LlamaGrammar:
    """Return the grammar of all JSON objects."""
    return LlamaGrammar.from_string(llama_grammar.JSON_GBNF, verbose=False)


def definition_names(schema: Any, prefix: str, definitions: dict[str, Any]) -> Any:
    """Return a schema that can be embedded in another one, whose `$defs` will be `definitions`.

    Its own definitions are added there with `prefix` before their names, and its references are
    renamed; `#`, the schema itself, is added under the name `prefix`.
    """
    if not isinstance(schema, dict):
        return schema
    own = {**_object(schema.get("definitions")), **_object(schema.get("$defs"))}
    rest = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
    for name, definition in own.items():
        definitions[f"{prefix}-{name}"] = _renamed(definition, prefix)
    definitions[prefix] = _renamed(rest, prefix)
    return {"$ref": f"#/$defs/{prefix}"}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _renamed(schema: Any, prefix: str) -> Any:
    if isinstance(schema, list):
        return [_renamed(part, prefix) for part in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {key: _renamed(value, prefix) for key, value in schema.items()}
    reference = renamed.get("$ref")
    if reference == "#":
        renamed["$ref"] = f"#/$defs/{prefix}"
    elif isinstance(reference, str) and reference.startswith(("#/$defs/", "#/definitions/")):
        renamed["$ref"] = f"#/$defs/{prefix}-{reference.rsplit('/', 1)[1]}"
    return renamed


def _keywords(schema: Any) -> Iterator[str]:
    """Yield the keywords of a schema and of all nested schemas, but not names of properties."""
    if isinstance(schema, list):
        for part in schema:
            yield from _keywords(part)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key in ("properties", "$defs", "definitions"):
                yield from _keywords(list(_object(value).values()))
            elif key not in ("const", "enum", "default", "examples"):
                yield key
                yield from _keywords(value)
