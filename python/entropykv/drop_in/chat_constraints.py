"""Let constraints do what llama-cpp-python makes grammars for: JSON answers, and calls of tools."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import llama_cpp
from llama_cpp import llama_grammar

from entropykv.constraint.constraint import Constraint
from entropykv.errors import SettingsError

_CHAT = inspect.signature(llama_cpp.Llama.create_chat_completion)
_MOST_WRITTEN = 200_000
"""The most parts of a tool's schema after its references and repetitions are written out."""
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")


def with_constraint(
    llama: llama_cpp.Llama, shown: Callable[[Any], Any], *given: Any, **named: Any
) -> tuple[dict[str, Any], dict[str, Constraint]]:
    """Return the arguments of create_chat_completion() by name, with a constraint instead of a
    response_format, and the constraints of tools by the grammars that will be made of them.

    `shown` returns a tool's parameters as the chat template, and so that grammar, has them.
    Raises SettingsError for a schema that is too large, or that is no schema.
    """
    arguments = dict(_CHAT.bind(llama, *given, **named).arguments)
    del arguments["self"]
    asked = arguments.get("response_format")
    if asked is not None and asked.get("type") != "text":
        arguments["grammar"] = _constraint_of(asked)
        del arguments["response_format"]
    choice = arguments.get("tool_choice") or arguments.get("function_call")
    found: dict[str, Constraint] = {}
    if isinstance(choice, dict) or makes_grammars(llama):
        for tool in arguments.get("tools") or arguments.get("functions") or ():
            schema = tool.get("function", tool).get("parameters")
            if schema is not None and _is_chosen(tool, choice):
                constraint = Constraint.json_schema(schema)
                found[_grammar_of(shown(schema))] = constraint
    return arguments, found


def makes_grammars(llama: llama_cpp.Llama) -> bool:
    """Tell whether a chat format makes grammars of tools that nobody has chosen."""
    return "function" in str(llama.chat_format)


def _constraint_of(asked: dict[str, Any]) -> Constraint:
    kind = asked.get("type")
    if kind == "json_object":
        return (
            Constraint.json_schema(asked["schema"])
            if asked.get("schema") is not None
            else Constraint.json_object()
        )
    schema = asked.get("json_schema", {}).get("schema") if kind == "json_schema" else None
    if schema is None:
        raise SettingsError(
            f"response_format has the type {kind!r}, or no schema; use json_object, or json_schema "
            'with {"schema": ...}'
        )
    return Constraint.json_schema(schema)


def _is_chosen(tool: dict[str, Any], choice: Any) -> bool:
    if not isinstance(choice, dict):
        return True
    name = choice.get("function", choice).get("name")
    return bool(tool.get("function", tool).get("name") == name)


def _grammar_of(schema: Any) -> str:
    """Return the text of the grammar that llama-cpp-python makes of a tool's parameters."""
    _check_written_out(schema)
    try:
        return str(llama_grammar.json_schema_to_gbnf(json.dumps(schema)))
    except Exception:  # It asserts, and checks no types: then it takes the grammar of all JSON.
        return str(llama_grammar.JSON_GBNF)


def _check_written_out(schema: Any) -> None:
    """Raise SettingsError for a schema that is too large for llama-cpp-python's own converter.

    That converter writes out required items of arrays, and examines a definition again for every
    reference to it, and all properties for every property.
    """
    work = 0
    within: set[str] = set()
    rest: list[Any] = [schema]
    while rest:
        value = rest.pop()
        if isinstance(value, tuple):  # The end of what a reference names.
            within.discard(value[0])
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
                rest += [(ref,), _target(schema, ref)]
        if work > _MOST_WRITTEN:
            raise SettingsError(
                f"the schema of a tool has more than {_MOST_WRITTEN:,} parts when its references "
                "and repetitions are written out; use smaller counts such as minItems, leave "
                "properties out, or refer to fewer definitions"
            )


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
