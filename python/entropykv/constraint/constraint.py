"""Define what a text must be: JSON of a schema, a regular expression, or a grammar."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from entropykv.constraint.json_schema import checked_schema, why_refused
from entropykv.constraint.lexemes import lark_of
from entropykv.errors import SettingsError

MOST_TEXT = 1 << 20
"""The most characters of a regular expression or a grammar."""
SCHEMA = "JSON schema"
"""The kind of a constraint that is JSON of a schema."""
_ANSWER = "answer"
_OPTIONS = '%llguidance {"no_forcing": true}'
"""Options of llguidance: without no_forcing, llguidance would write out at every token what can
only follow: a constant of 500,000 letters took 3 s at its first token, and 0.3 s at the next ones.
"""
_OPTION = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
_QUOTATION = re.compile(r"|\^+|\d+ \|.*")
"""Lines that quote the source, or point into it."""
_LARK = re.compile(r"^\s*(%llguidance\b|start\s*:(?!:=))", re.MULTILINE)

TokenOf = Callable[[str], "int | None"]
"""Returns the token that a text such as <think> is; None if it is not exactly one."""


@dataclass(frozen=True)
class Constraint:
    """Hold what a text must be; `of()` and functions such as json_schema() make one.

    Nothing is compiled before a ConstraintSampler is made, because compiling needs the vocabulary
    of a model.
    """

    kind: str
    """The kind of the constraint, for messages, such as SCHEMA."""
    source: str
    """The text that was given: a schema as JSON, or a grammar."""
    before: Callable[[TokenOf], str] | None = None
    """Returns what stands before the text, in Lark: see behind()."""
    root: str = "root"
    """The rule of a GBNF grammar that describes the whole text."""

    @classmethod
    def json_schema(cls, schema: Any) -> Constraint:
        """Allow the JSON texts of a schema (parsed JSON); raises the errors of checked_schema()."""
        return cls(SCHEMA, json.dumps(checked_schema(schema), ensure_ascii=False))

    @classmethod
    def json_object(cls) -> Constraint:
        """Allow all JSON objects."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def one_of(cls, texts: Sequence[str]) -> Constraint:
        """Allow exactly these texts; raises SettingsError if they are too long together."""
        return cls.lark("start: " + " | ".join(map(_quoted, texts)))

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Allow the texts that match a regular expression as a whole, in the syntax of Rust.

        Raises SettingsError for more than MOST_TEXT characters, and for a null character.
        """
        return cls("regular expression", _short_enough(pattern, "regular expression"))

    @classmethod
    def lark(cls, grammar: str) -> Constraint:
        """Allow the texts of a grammar in llguidance's variant of Lark, whose first rule is
        `start`.

        Raises SettingsError for more than MOST_TEXT characters, and for a null character.
        """
        return cls("Lark grammar", _short_enough(grammar, "Lark grammar"))

    @classmethod
    def gbnf(cls, grammar: str, root: str = "root") -> Constraint:
        """Allow the texts of a grammar in llama.cpp's format (GBNF); `root`: the rule that
        describes the whole text.

        Raises SettingsError for more than MOST_TEXT characters, and for a null character.
        """
        return cls("grammar", _short_enough(grammar, "grammar"), root=root)

    @classmethod
    def of(cls, given: Constraint | str) -> Constraint:
        """Return a constraint unchanged, or that of a grammar in GBNF or Lark: see is_lark().
        Raises SettingsError for a grammar as lark() and gbnf() do.
        """
        if isinstance(given, Constraint):
            return given
        return cls.lark(given) if is_lark(given) else cls.gbnf(given)

    def behind(self, before: Callable[[TokenOf], str]) -> Constraint:
        """Return the constraint of a text with something else before it, such as a thought.

        `before` gets a TokenOf, and returns rules of Lark: `start`, which refers to this constraint
        as @answer, and others that it needs.
        """
        return dataclasses.replace(self, before=before)

    def alone(self) -> Constraint:
        """Return the constraint without what stands before the text."""
        return dataclasses.replace(self, before=None)

    def compiled(self, token_of: TokenOf, ends: Sequence[int] = ()) -> str:
        """Return the constraint as llguidance reads it, in JSON; raises SettingsError for text that
        is not a GBNF grammar.

        `ends`: the tokens that end a text.
        """
        rules = f"start: @{_ANSWER}" if self.before is None else self.before(token_of)
        whole = {"lark_grammar": f"{_OPTIONS}\n{rules}\n"}
        return json.dumps({"grammars": [whole, {"name": _ANSWER, **self._grammar(token_of, ends)}]})

    def _grammar(self, token_of: TokenOf, ends: Sequence[int]) -> dict[str, Any]:
        if self.kind == SCHEMA:
            return {"json_schema": json.loads(self.source)}
        if self.kind == "regular expression":
            from llguidance import regex_to_lark  # noqa: PLC0415  # Few texts need it.

            return {"lark_grammar": f"start: /{regex_to_lark(self.source, '')}/"}
        if self.kind == "grammar":
            return {"lark_grammar": lark_of(self.source, self.root, token_of, ends)}
        return {"lark_grammar": self.source}

    def refused(self, reason: str, is_refused: Callable[[Any], str]) -> SettingsError:
        """Return the error for what llguidance says of this constraint.

        `is_refused` returns what llguidance says against a schema, "" if nothing; by it, the error
        names the smallest part of this schema that is refused.
        """
        reason = _sentence(reason)
        if self.kind == SCHEMA:
            where = why_refused(json.loads(self.source), reason, lambda s: _sentence(is_refused(s)))
            return SettingsError(f"the JSON schema cannot be enforced at {where}: {reason}")
        return SettingsError(f"the {self.kind} cannot be used: {reason}")


def is_lark(grammar: str) -> bool:
    """Tell whether a grammar is Lark and not GBNF: a line begins with %llguidance, as in llama.cpp,
    or with the rule `start`, as in vLLM.
    """
    return _LARK.search(grammar) is not None


def _short_enough(text: str, kind: str) -> str:
    if len(text) > MOST_TEXT:
        raise SettingsError(f"the {kind} has more than {MOST_TEXT:,} characters; shorten it")
    if "\0" in text:
        raise SettingsError(f"the {kind} has a null character; leave it out")
    return text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _sentence(reason: str, longest: int = 300) -> str:
    """Return what llguidance says without its dumps of states, its quotations and line breaks."""
    reason = reason.partition("<")[0] if reason.startswith("Parser") else reason
    reason = reason.replace(_OPTION, "use anyOf")
    lines = [line.strip() for line in reason.splitlines()]
    text = "; ".join(line for line in lines if not _QUOTATION.fullmatch(line)).rstrip(".;")
    return text if len(text) <= longest else f"{text[:longest]}..."
