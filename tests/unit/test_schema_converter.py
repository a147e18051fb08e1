"""Grammars of JSON schemas: which texts they allow, and schemas that are too much."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import jsonschema
import pytest

from entropykv.errors import SettingsError
from entropykv.llamacpp.schema_converter import grammar_of_schema
from entropykv.server.errors import RequestError
from entropykv.server.schema_grammar import grammar_of
from entropykv.server.tool_calls import Tool, ToolUse
from tests.support.grammars import takes

HUGE = 20_000_000


def optional(n: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(n)}, **more}


def laughs(depth: int, name: str) -> dict[str, Any]:
    """Return definitions that each refer twice to the next: 2 ** depth if each is visited every
    time.
    """
    defs: dict[str, Any] = {f"{name}{depth}": {"type": "null"}}
    for i in range(depth):
        ref = {"$ref": f"#/$defs/{name}{i + 1}"}
        defs[f"{name}{i}"] = {"type": "object", "properties": {"a": ref, "b": ref}}
    return {"$ref": f"#/$defs/{name}0", "$defs": defs}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


# --- the texts that a schema allows ---------------------------------------------------------------

# Grammars put required properties first.
NULLS = {"b": None, "a": None, "c": None}
TEXTS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "array": (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
        [[True] * n for n in range(6)],
    ),
    "array of one": (
        {"items": {"type": "boolean"}, "minItems": 1, "maxItems": 1},
        [[True] * n for n in range(3)],
    ),
    "empty array": (
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 0},
        [[], [True]],
    ),
    "array of any length": (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1},
        [[True] * n for n in (0, 1, 2, 50)],
    ),
    "array of many": (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 3000, "maxItems": 3001},
        [[True] * n for n in (2999, 3000, 3001, 3002)],
    ),
    "text": ({"type": "string", "minLength": 2, "maxLength": 3}, ["a" * n for n in range(5)]),
    "text of a form that no grammar knows": (
        {"type": "string", "format": "email", "maxLength": 65_535},
        ["a@b", "a" * 65_536],
    ),
    "date": ({"type": "string", "format": "date"}, ["2026-11-24"]),
    "long text": ({"type": "string", "maxLength": 65_535}, ["é" * 65_535, "é" * 65_536]),
    "object": (
        {
            "type": "object",
            "properties": {key: {"type": "null"} for key in "abc"},
            "required": ["b"],
            "additionalProperties": False,
        },
        [
            *(NULLS, {"b": None}, {"a": None}, {}, {"b": None, "c": None}, {**NULLS, "d": None}),
            *({"b": None, "a": None}, {"b": 1}),
        ],
    ),
    "object with others": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "additionalProperties": {"type": "boolean"},
        },
        [
            *({}, {"a": None}, {"x": True}, {"a": None, "x": True}, {"a": None, "x": 3}),
            {"b": None, "x": True, "y": False},
        ],
    ),
    "object with others behind what it must have": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}},
            "required": ["a"],
            "additionalProperties": {"type": "boolean"},
        },
        [{}, {"a": None}, {"a": None, "x": True, "y": True}, {"x": True}],
    ),
    "names that rules have": (
        {
            "type": "object",
            "properties": {
                "root": {"type": "array", "items": {"type": "null"}},
                "space": {"type": "string", "maxLength": 1},
                "char": {"type": "string", "minLength": 1},
                "é": {"type": "null"},
                "è": {"type": "boolean"},
            },
        },
        [{"root": [None], "space": "a", "char": "b", "é": None, "è": True}, {"é": True}],
    ),
    "recursive": (
        {
            "$ref": "#/$defs/tree_node",
            "$defs": {
                "tree_node": {
                    "type": "object",
                    "properties": {
                        "left": {"$ref": "#/$defs/tree_node"},
                        "value": {"type": "boolean"},
                    },
                    "required": ["value"],
                    "additionalProperties": False,
                }
            },
        },
        [
            *({"value": True}, {"value": True, "left": True}),
            {"value": True, "left": {"value": True, "left": {"value": False}}},
        ],
    ),
    "quotes and backslashes": (
        {"properties": {'a"\\': {"enum": ['"', "\\", "\n", "é", 3]}}, "required": ['a"\\']},
        [{'a"\\': value} for value in ('"', "\\", "\n", "é", 3, "n", "\\\\")],
    ),
    "of itself": (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
        [{}, {"a": {}}, {"a": {"a": {"a": {}}}}, {"a": 1}],
    ),
    "all of": (
        {"allOf": [{"$ref": "#/$defs/x"}, {"properties": {"b": {"type": "null"}}}]}
        | {"$defs": {"x": {"properties": {"a": {"type": "null"}}}}},
        [{"a": None, "b": None}, {"a": 1, "b": None}],
    ),
    "integers": (
        {"type": "integer", "minimum": -2, "maximum": 3},
        [-3, -2, 0, 3, 4],
    ),
    "shared": (laughs(60, "def-"), [{}, {"a": {"b": {}}}, {"b": {"a": 3}}]),
    "shared under names that no rule can have": (laughs(60, "def_"), [{}, {"a": {"b": {}}}]),
    "many properties": (
        optional(800, additionalProperties=False),
        [{}, {"p3": None, "p700": None}],
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_allowed_as_the_schema_allows_them(name: str) -> None:
    schema, values = TEXTS[name]
    start = time.monotonic()
    grammar = grammar_of_schema(schema)
    assert time.monotonic() - start < 5
    valid = jsonschema.Draft202012Validator(schema).is_valid
    assert any(map(valid, values))
    for value in values:
        assert takes(grammar, json.dumps(value, ensure_ascii=False)) == valid(value), value


# --- too much -------------------------------------------------------------------------------------

_WIDE = {f"d{i}": {"properties": {f"p{j}": {} for j in range(90)}} for i in range(90)}
TOO_MUCH: dict[str, tuple[Any, str]] = {
    "minItems": ({"type": "array", "items": {"type": "null"}, "minItems": HUGE}, "minItems"),
    "maxItems": ({"type": "array", "items": {"type": "null"}, "maxItems": HUGE}, "maxItems"),
    "minLength": ({"type": "string", "minLength": HUGE}, "minLength"),
    "maxLength": ({"type": "string", "maxLength": 10**400}, "maxLength"),
    "pattern": ({"type": "string", "pattern": f"^a{{{HUGE}}}$"}, "pattern"),
    "pattern of many": ({"type": "string", "pattern": "^(((a{900}b){900}c){900}d)$"}, "pattern"),
    "digits": ({"type": "string", "pattern": "^a{" + "9" * 3000 + "}$"}, "pattern"),
    "long pattern": ({"type": "string", "pattern": "^" + "a" * 5000 + "$"}, "characters"),
    "in a property": ({"properties": {"a": {"type": "string", "minLength": HUGE}}}, "minLength"),
    "in a definition": ({"$defs": {"a": {"items": {}, "minItems": 1e18}}}, "minItems"),
    "depth": (nested(2000), "within each other"),
    "enum": ({"enum": list(range(100_000))}, "values"),
    "properties": (optional(10_000), "values"),
    "text": ({"const": "a" * 2_000_000}, "characters of text"),
    "ranges": (
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 500}] * 3000},
        "values",
    ),
    "references in a row": (
        {"$ref": "#/$defs/a0"}
        | {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3000)}},
        "no grammar can be made",
    ),
    "allOf": (
        {"allOf": [{"$ref": f"#/$defs/d{i % 90}"} for i in range(3000)], "$defs": _WIDE},
        "allOf",
    ),
    "no count": ({"type": "string", "minLength": "5"}, "minLength"),
    "less than nothing": ({"type": "string", "maxLength": -1}, "maxLength"),
    "less than the least": ({"items": {"type": "null"}, "minItems": 3, "maxItems": 2}, "maxItems"),
    "a long reason": ({"type": "no" * 5000}, "no grammar can be made"),
    "names within each other": (
        {"type": "object", "properties": {"n" * 900: optional(90)} | optional(90)["properties"]}
        | {"enum": ["x" * 2_000] * 3_000},
        "characters of text",
    ),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_schema_that_is_too_much_is_refused_before_anything_is_made_of_it(name: str) -> None:
    schema, reason = TOO_MUCH[name]
    start = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(SettingsError, match=reason) as caught:
            grammar_of_schema(schema)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < 5
    assert peak < 50 << 20
    assert len(str(caught.value)) < 400


def test_the_server_refuses_it_by_the_field() -> None:
    with pytest.raises(RequestError) as caught:
        grammar_of({"type": "string", "minLength": HUGE}, "response_format")
    assert caught.value.status_code == 400
    assert caught.value.body["error"]["param"] == "response_format"
    with pytest.raises(RequestError):
        grammar_of(nested(2000), "response_format", strict=True)
    deep = Tool.model_validate({"function": {"name": "a", "parameters": nested(900)}})
    with pytest.raises(RequestError, match="tools: the schema has more than 100 objects"):
        ToolUse([deep], required=True).grammar()
