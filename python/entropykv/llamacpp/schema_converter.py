"""Convert JSON schemas to grammars within limits; every caller with a schema uses this module."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from llama_cpp import llama_grammar

from entropykv.errors import SettingsError
from entropykv.llamacpp.schema_limits import MOST_GRAMMAR, MOST_VISITS, check_schema

_MOST_VALUES = 512
"""The most integers that are listed one by one for a schema with minimum and maximum."""
_LONGEST_NAME = 40
"""The most characters of a rule's name, because names of nested properties are concatenated."""
_LONGEST_REASON = 200
_OTHERWISE = frozenset({"$ref", "oneOf", "anyOf", "const", "enum"})
_LENGTHS = frozenset({"minLength", "maxLength"})
_OF_OBJECTS = frozenset({"properties", "additionalProperties", "allOf"})


def grammar_of_schema(schema: Any) -> str:
    """Return the grammar (GBNF) of the JSON texts that a schema allows; `schema` is parsed JSON.

    Raises SettingsError for a schema beyond the limits, or one that cannot be converted.
    """
    check_schema(schema)
    schema = with_ranges(schema)
    check_schema(schema)  # Check again, because listed integers count, too.
    converter = _Converter(schema)
    try:
        converter.visit(schema, "")
    except SettingsError:
        raise
    except RecursionError:
        reason = "its parts or references go too far into each other"
        raise SettingsError(f"no grammar can be made of this schema ({reason})") from None
    # The base class asserts, and does not check the types of values in a schema.
    except Exception as error:
        reason = str(error) or type(error).__name__
        if len(reason) > _LONGEST_REASON:
            reason = f"{reason[:_LONGEST_REASON]}..."
        raise SettingsError(f"no grammar can be made of this schema ({reason})") from error
    return str(converter.format_grammar())  # type: ignore[no-untyped-call]


def with_ranges(schema: Any) -> Any:
    """Return the schema with integers listed if it has a minimum and a maximum close to each other.

    Grammars cannot compare numbers.
    """
    if isinstance(schema, list):
        return [with_ranges(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    values = _listed(schema)
    if values is not None:
        others = {key: schema[key] for key in schema.keys() - {"minimum", "maximum", "type"}}
        return {**others, "enum": values}
    return {key: with_ranges(value) for key, value in schema.items()}


def _listed(schema: dict[str, Any]) -> list[int] | None:
    """Return the integers between the schema's limits; None without limits or if there are too
    many.
    """
    least, most = schema.get("minimum"), schema.get("maximum")
    if schema.get("type") != "integer" or not schema.keys().isdisjoint({"enum", "multipleOf"}):
        return None
    if not isinstance(least, int) or not isinstance(most, int):
        return None
    return list(range(least, most + 1)) if 0 <= most - least < _MOST_VALUES else None


class _Converter(llama_grammar.SchemaConverter):
    """Convert as llama-cpp-python does, in time and memory proportional to the schema.

    The base class writes out every required item of an array, examines all properties again for
    every property, and a definition again for every reference to it.
    """

    def __init__(self, schema: Any) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False
        )
        self._schema = schema
        self._rule_of_ref: dict[str, str] = {}
        self._known: dict[tuple[str, str], str] = {}
        """The names of added rules, by the requested name and the rule's content."""
        self._taken: Counter[str] = Counter()
        self._size = 0
        self._visits = 0

    def visit(self, schema: Any, name: str) -> str:
        """Add the rules of a schema; returns the name of its main rule."""
        self._visits += 1
        if self._visits > MOST_VISITS:
            raise SettingsError(f"the schema has more than {MOST_VISITS:,} parts; give fewer")
        if len(name) > _LONGEST_NAME:
            name = f"part{self._visits}"
        reserved = name in llama_grammar.RESERVED_NAMES
        rule_name = f"{name}-" if reserved else name or "root"
        if "allOf" in schema:
            self._find_all_of(schema["allOf"])
        if _is_array(schema):
            return self._add_rule(rule_name, self._array(schema, name))
        if _is_text_of_length(schema):
            return self._add_rule(rule_name, self._text(schema))
        rule: str = super().visit(schema, name)  # type: ignore[no-untyped-call]
        return rule

    def _text(self, schema: dict[str, Any]) -> str:
        least, most = _counts(schema, "minLength", "maxLength")
        char = self._add_primitive("char", llama_grammar.PRIMITIVE_RULES["char"])
        return rf'"\"" {char}{_repeated(least, most)} "\"" space'

    def _array(self, schema: dict[str, Any], name: str) -> str:
        least, most = _counts(schema, "minItems", "maxItems")
        item = self.visit(schema["items"], f"{name}-item" if name else "item")
        if most == 0:
            return '"[" space "]" space'
        more = _repeated(max(least - 1, 0), None if most is None else most - 1)
        content = f'{item} ("," space {item}){more}'
        return f'"[" space {content if least else f"({content})?"} "]" space'

    def _find_all_of(self, parts: Any) -> None:
        """Resolve the references of all parts of `allOf`; raises SettingsError for too many
        properties.
        """
        count = 0
        for each in parts:
            for part in each.get("anyOf", [each]):
                ref = part.get("$ref")
                if ref is not None:
                    self._refs[ref] = self._target(ref)
                count += len((part if ref is None else self._refs[ref]).get("properties", ()))
                if count > MOST_VISITS:
                    raise SettingsError(
                        f"allOf has more than {MOST_VISITS:,} properties; give fewer"
                    )

    def _add_rule(self, name: str, rule: str) -> str:
        """Add a rule under `name`, or under a similar name if `name` already has another
        content.
        """
        wanted = llama_grammar.INVALID_RULE_CHARS_RE.sub("-", name)
        known = self._known.get((wanted, rule))
        if known is not None:
            return known
        key = wanted
        while key in self._rules and self._rules[key] != rule:
            key = f"{wanted}{self._taken[wanted]}"
            self._taken[wanted] += 1
        self._size += len(key) + len(rule)
        if self._size > MOST_GRAMMAR:
            raise SettingsError(
                f"the schema makes a grammar of more than {MOST_GRAMMAR:,} characters; give fewer "
                "properties and values"
            )
        self._rules[key] = rule
        self._known[wanted, rule] = key
        return key

    def _generate_constant_rule(self, value: Any) -> str:
        """Return JSON text quoted for a grammar, in which a backslash is escaped."""
        text = json.dumps(value, ensure_ascii=False).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{text}"'

    def _resolve_ref(self, ref: str) -> str:
        """Return the rule of a reference; it is made only once, and may refer to itself."""
        if ref not in self._rule_of_ref:
            name = ref.rsplit("/", 1)[-1][:_LONGEST_NAME] or "part"
            itself = self._rule_of_ref[ref] = self._add_rule(f"{name}-itself", ref)
            self._rules[itself] = self._rule_of_ref[ref] = self.visit(self._target(ref), name)
        return self._rule_of_ref[ref]

    def _target(self, ref: Any) -> Any:
        """Return the schema that a reference names; raises ValueError if there is none."""
        if ref != "#" and not str(ref).startswith("#/"):
            raise ValueError(f"a reference must begin with #/, unlike {ref!r}")
        target = self._schema
        try:
            for key in ref.split("/")[1:]:
                target = target[int(key) if isinstance(target, list) else key]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"there is no {ref}") from None
        return target

    def _build_object_rule(
        self,
        properties: list[tuple[str, Any]],
        required: set[str],
        name: str,
        additional_properties: Any,
    ) -> str:
        """Return the rule of an object: the required properties, then any of the optional ones, in
        order.
        """
        prefix = f"{name}-" if name else ""
        rules = {}
        for key, part in properties:
            value = self.visit(part, f"{prefix}{key}")
            pair = f'{self._generate_constant_rule(key)} space ":" space {value}'
            rules[key] = self._add_rule(f"{prefix}{key[:_LONGEST_NAME]}-kv", pair)
        needed = [rule for key, rule in rules.items() if key in required]
        optional = [rule for key, rule in rules.items() if key not in required]
        rest = ""
        if additional_properties is True or isinstance(additional_properties, dict):
            others = {} if additional_properties is True else additional_properties
            rest = self._additional(others, prefix)
        starts = [f'{rest} ("," space {rest})*'] if rest else []
        following = f'("," space {rest})*' if rest else ""
        for number, rule in reversed(list(enumerate(optional))):
            starts.append(f"{rule} {following}")
            following = self._add_rule(
                f"{prefix}rest{number}", f'("," space {rule})? {following}'.rstrip()
            )
        content = ' "," space '.join(needed)
        if starts:
            any_of = " | ".join(reversed(starts))
            content += f' ("," space ({any_of}))?' if needed else f"({any_of})?"
        return f'"{{" space {content} "}}" space'

    def _additional(self, value: dict[str, Any], prefix: str) -> str:
        """Return the rule for an additional property with any name."""
        text = self._add_primitive("string", llama_grammar.PRIMITIVE_RULES["string"])
        rule = self.visit(value, f"{prefix}additional-value")
        return self._add_rule(f"{prefix}additional-kv", f'{text} ":" space {rule}')


def _is_array(schema: dict[str, Any]) -> bool:
    """Tell whether a schema describes an array of equal items, and nothing else."""
    items = schema.get("items")
    if not items or not isinstance(items, dict) or not schema.keys().isdisjoint(_OTHERWISE):
        return False
    kind = schema.get("type")
    return kind == "array" or (kind is None and schema.keys().isdisjoint(_OF_OBJECTS))


def _is_text_of_length(schema: dict[str, Any]) -> bool:
    """Tell whether a grammar can check only the length of a text with this schema."""
    keys, form = schema.keys(), str(schema.get("format"))
    formed = form.startswith("uuid") or f"{form}-string" in llama_grammar.STRING_FORMAT_RULES
    plain = keys.isdisjoint(_OTHERWISE | {"pattern"}) and not formed
    return schema.get("type") == "string" and plain and not keys.isdisjoint(_LENGTHS)


def _counts(schema: dict[str, Any], least_key: str, most_key: str) -> tuple[int, int | None]:
    """Return the least and the most items; raises ValueError for values that are not counts."""
    least, most = schema.get(least_key, 0), schema.get(most_key)
    for key, count in ((least_key, least), (most_key, most)):
        whole = isinstance(count, int | float) and count >= 0 and count == int(count)
        if count is not None and (not whole or isinstance(count, bool)):
            raise ValueError(f"{key} must be a whole number of 0 or more")
    if most is not None and most < (least or 0):
        raise ValueError(f"{most_key} is less than {least_key}")
    return int(least or 0), None if most is None else int(most)


def _repeated(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"
