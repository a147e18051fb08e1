"""Read what an answer must be from the fields of a request, by the names of llama-server, vLLM and
SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from entropykv.constraint.constraint import Constraint
from entropykv.errors import SettingsError
from entropykv.server.dialects.fields import MOST_GRAMMAR
from entropykv.server.http.errors import RequestError

MOST_CHOICES = 1_000
"""The most texts of `choice`, one of which the answer must be."""

Source = Annotated[str, Field(max_length=MOST_GRAMMAR)]
Texts = Annotated[list[Source], Field(min_length=1, max_length=MOST_CHOICES)]
_NO_NAMES = frozenset({"const", "enum", "default", "examples"})
"""Keywords of a schema whose values are no schemas."""


class StructuredOutputs(BaseModel):
    """Hold what an answer must be, in the form of vLLM's clients, who give one of the fields."""

    model_config = ConfigDict(populate_by_name=True, extra="forbid")

    json_: dict[str, Any] | bool | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Source | None = None
    choice: Texts | None = None
    grammar: Source | None = None


class ConstraintFields(BaseModel):
    """The fields of a request that say what the answer must be; one of them may be given."""

    grammar: Source | None = Field(
        default=None,
        description="A grammar in GBNF; in Lark if a line begins with %llguidance or start:.",
    )
    json_schema: dict[str, Any] | bool | None = Field(
        default=None, description="A JSON schema, as llama-server takes it."
    )
    regex: Source | None = Field(default=None, description="A regular expression, as SGLang's.")
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="The same in an object, as vLLM takes it."
    )
    guided_json: dict[str, Any] | bool | None = Field(default=None, description="As older vLLM's.")
    guided_regex: Source | None = None
    guided_choice: Texts | None = None
    guided_grammar: Source | None = None

    def constraints(self) -> dict[str, Constraint]:
        """Return the constraint of each field that is given, by the field's name; raises
        RequestError for a value that is no constraint.
        """
        vllm = self.structured_outputs or StructuredOutputs()
        makers: dict[str, tuple[Any, Callable[[Any], Constraint]]] = {
            "grammar": (self.grammar or None, Constraint.of),
            "json_schema": (self.json_schema, Constraint.json_schema),
            "regex": (self.regex, Constraint.regex),
            "structured_outputs.json": (vllm.json_, Constraint.json_schema),
            "structured_outputs.json_object": (vllm.json_object or None, _any_object),
            "structured_outputs.regex": (vllm.regex, Constraint.regex),
            "structured_outputs.choice": (vllm.choice, Constraint.one_of),
            "structured_outputs.grammar": (vllm.grammar, Constraint.of),
            "guided_json": (self.guided_json, Constraint.json_schema),
            "guided_regex": (self.guided_regex, Constraint.regex),
            "guided_choice": (self.guided_choice, Constraint.one_of),
            "guided_grammar": (self.guided_grammar, Constraint.of),
        }
        return {
            name: made(name, make, value)
            for name, (value, make) in makers.items()
            if value is not None
        }


def single(constraints: dict[str, Constraint]) -> tuple[str, Constraint] | None:
    """Return the field and the constraint if there is only one; None if there is none. Raises
    RequestError for several.
    """
    if len(constraints) > 1:
        first, second = list(constraints)[:2]
        raise RequestError(
            400, f"{second}: it cannot go with {first}; give one of them", param=second
        )
    return next(iter(constraints.items()), None)


def made(param: str, make: Callable[[Any], Constraint], value: Any) -> Constraint:
    """Return the constraint that `make` returns for a value; raises RequestError (400) if `make`
    refuses the value, with `param` as the field.
    """
    try:
        return make(value)
    except SettingsError as error:
        raise RequestError(400, f"{param}: {error}", param=param) from error


def _any_object(_: Any) -> Constraint:
    return Constraint.json_object()


def embedded(schema: Any, place: str) -> Any:
    """Return a copy of a schema for a place within another schema, a path such as #/$defs/a.

    References that begin at the root of `schema` (#) begin at `place` in the copy. A part with an
    $id stays as it is, because it is the root of the references in it.
    """
    if isinstance(schema, list):
        return [embedded(part, place) for part in schema]
    if not isinstance(schema, dict) or "$id" in schema:
        return schema
    found = {
        key: value if key in _NO_NAMES else embedded(value, place) for key, value in schema.items()
    }
    reference = found.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        found["$ref"] = place + reference[1:]
    return found
