"""Say how long each field of a request may be.

Texts that the model reads (prompts, messages) have no limit of their own: the body's bytes and the
context's tokens bound them. Lists are checked up to their first error, since a body of a megabyte
has room for hundreds of thousands.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from entropykv.server.errors import RequestError
from entropykv.thinking.options import MOST_MESSAGE

MOST_NAME = 256
"""Characters of a name or an id: model, user, a conversation, a function, a call."""
MOST_DESCRIPTION = 65_536
"""Characters of what is said about a tool or a schema."""
MOST_STOPS, MOST_STOP = 64, 1_024
"""Strings of `stop`, and characters of each: all of them are looked for with every token."""
MOST_BIASES = 4_096
"""Tokens of `logit_bias`."""
MOST_METADATA = 16
"""Entries of `metadata`, whose names have 64 characters and whose values 512, as at OpenAI."""
MOST_MESSAGES = 4_096
"""Messages of a chat, items of a response's input, and parts of a message."""
MOST_TOOLS = 128
"""Tools of a request, and calls of a message, as at OpenAI."""
MOST_LOGPROBS = 100
"""Alternatives of a token."""
MOST_GRAMMAR = 1 << 20
"""Characters of `grammar`; what it may mean is limited where it is parsed."""
MOST_SUFFIX = 65_536
"""Characters of `suffix`, which is a part of every choice."""
MOST_TEMPLATE_ARGUMENTS = 64
"""Members of `chat_template_kwargs`."""
MOST_TOKENS = (1 << 31) - 1
MOST_PIECES = 65_536
"""Tokens that /tokenize gives with their pieces: each is an object of its own."""
MOST_DEPTH = 128
"""Objects and lists within each other, in a body: templates and tools read it recursively."""
MOST_VALUES = 50_000
"""Objects, lists and members of objects, in a body: in memory they are up to 30 times as large."""
FIRST_ERROR = Field(fail_fast=True)
"""Marks a list that is checked up to its first error."""


def _few(most: int) -> BeforeValidator:
    """Refuse an object of more members than `most` before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError(
                "too_long",
                "it has {given} members, and {most} are the most",
                {"given": len(value), "most": most},
            )
        return value

    return BeforeValidator(check)


Name = Annotated[str, Field(max_length=MOST_NAME)]
Description = Annotated[str, Field(max_length=MOST_DESCRIPTION)]
Stop = Annotated[
    list[Annotated[str, Field(max_length=MOST_STOP)]],
    Field(max_length=MOST_STOPS),
    FIRST_ERROR,
    BeforeValidator(
        lambda stop: [stop] if isinstance(stop, str) else stop,
        json_schema_input_type=str | list[str],
    ),
]
Tokens = Annotated[list[int], FIRST_ERROR]
Prompt = str | Tokens | Annotated[list[str], FIRST_ERROR] | Annotated[list[Tokens], FIRST_ERROR]
Biases = Annotated[dict[Name, float], _few(MOST_BIASES)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    _few(MOST_METADATA),
]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
TokenCount = Annotated[int, Field(ge=1, le=MOST_TOKENS)]


_OF_TEMPLATES = frozenset(
    {"messages", "tools", "functions", "function_call", "tool_choice", "bos_token", "eos_token"}
    | {"add_generation_prompt", "raise_exception", "strftime_now", "llama", "self"}
)
"""What a chat template is told by the server itself."""


def _free_names(value: Any) -> Any:
    """Refuse arguments of a chat template that have a name which the server uses."""
    taken = sorted(_OF_TEMPLATES & value.keys()) if isinstance(value, dict) else []
    if taken:
        raise PydanticCustomError(
            "taken",
            "{name} is what the server tells the template; leave it out",
            {"name": taken[0]},
        )
    return value


TemplateArguments = Annotated[
    dict[Name, Any], _few(MOST_TEMPLATE_ARGUMENTS), BeforeValidator(_free_names)
]
ThoughtBudget = Annotated[int, Field(ge=-1, le=MOST_TOKENS)]
ThoughtEnding = Annotated[str, Field(max_length=MOST_MESSAGE)]


def check_values(body: Any) -> None:
    """Raise RequestError (400) for JSON that is nested too deeply, or has too many values.

    Numbers and texts in a list do not count: a prompt may be a list of tokens.
    """
    n_values = 0
    rest = [(body, 1)]
    while rest:
        value, depth = rest.pop()
        if depth > MOST_DEPTH:
            raise RequestError(
                400, f"the body has more than {MOST_DEPTH} objects and lists within each other"
            )
        inner: Any = value
        n_values += 1
        if isinstance(value, dict):
            n_values += len(value)
            inner = value.values()
        elif not isinstance(value, list):
            continue
        nested = ((each, depth + 1) for each in inner if isinstance(each, dict | list))
        rest.extend(islice(nested, MOST_VALUES))
        if n_values + len(rest) > MOST_VALUES:
            raise RequestError(
                400,
                f"the body has more than {MOST_VALUES:,} objects, lists and members of objects; "
                "send less at a time",
            )
