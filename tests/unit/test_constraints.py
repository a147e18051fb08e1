"""JSON schemas, regular expressions and Lark grammars allow the right texts, at limited cost."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from typing import Any

import llama_cpp
import numpy as np
import pytest

from entropykv.constraint import trial
from entropykv.constraint.constraint import Constraint
from entropykv.constraint.json_schema import MOST_OPTIONAL
from entropykv.constraint.sampler import CANDIDATE, ConstraintSampler
from entropykv.constraint.trial import Trials
from entropykv.constraint.vocabulary import token_texts_of
from entropykv.errors import SettingsError
from tests.support.constraints import byte_texts, longest_step, schema_takes, takes
from tests.support.grammars import AMBIGUOUS

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "to": {"$ref": "#/$defs/place"}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["home", "a\nway"]}},
}
PAIR = {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "null"}, "minItems": 2}
EITHER = {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 2}]}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (POINT, ['{"x":1}', '{"x": -3, "to": "a\\nway"}'], ['{"to":"home"}', '{"x":1,"y":2}', "1"]),
        (PAIR, ["[1,null]", "[1, null, null]"], ["[1]", "[2,null]", "[1,1]"]),
        (EITHER, ["true", '"ab"', '"\\u00e9\\ud83d\\ude00"', '"é😀"'], ['"abc"', "null", '"a\nb"']),
        ({"type": "number", "minimum": 0.5, "exclusiveMaximum": 2}, ["0.5", "1.75"], ["2", "0.4"]),
        ({"type": "integer", "multipleOf": 7}, ["14", "-7", "0"], ["15", "1.5"]),
        ({"type": "string", "pattern": "^(a|b)+c$"}, ['"abc"'], ['"ab"', '"xabc"', '"abcd"']),
        ({"type": "string", "pattern": '[^@]"'}, ['"a\\""', '"xa\\"x"'], ['"a"b"', '"@\\""']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024-2-9"', '"x"']),
        ({"type": ["object", "null"], "required": ["a"]}, ["null", '{"a": [{}]}'], ["{}", "[]"]),
        ({"allOf": [{"$ref": "#/$defs/a"}, {"maxLength": 1}], "$defs": {"a": {"type": "string"}}},
         ['"a"'], ['"ab"', "1"]),
        ({"oneOf": [{"properties": {"k": {"const": k}}, "required": ["k"], "type": "object"}
                    for k in ("a", "b")]}, ['{"k":"a"}', '{"k":"b"}'], ['{"k":"c"}', "{}"]),
        (True, ["1", '{"a": [null, "b"]}'], ["{", "a"]),
        ({"type": "object"}, ["{}", '{\n    "a": {\n        "b": 1}}'], ["[]", '{"a"}', "{} "]),
        ({"properties": {"x-guidance": {"type": "null"}}, "type": "object"},
         ['{"x-guidance": null}'], ['{"x-guidance": 1}']),
    ],
)  # fmt: skip
def test_the_texts_of_a_schema(schema: Any, valid: list[str], invalid: list[str]) -> None:
    assert schema_takes(schema, *valid) == [True] * len(valid)
    assert schema_takes(schema, *invalid) == [False] * len(invalid)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"a/b": {"items": {"not": {}}}}}, r'#/properties/a~1b/items: .*"not"'),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"format": "x"}}}, r"#/\$defs/x: Unknown format: x"),
        ({"anyOf": [{}, {"uniqueItems": True}]}, "#/anyOf/1: .*uniqueItems"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "at #: oneOf .*use anyOf"),
        ({"prefixItems": [{"pattern": "(?=a)"}]}, "#/prefixItems/0: .*look-around"),
        ({"if": {}, "then": {"required": ["a"]}}, 'at #: .*"if"'),
        ({"items": {"type": "weird"}}, "#/items: Invalid type: weird"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"$ref": "http://localhost/x"}, "does not fetch"),
        ({"x-guidance": {"lenient": True}, "not": {}}, 'at #: .*"not"'),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"enum": []}, "Unsatisfiable"),
        (False, "no text follows"),
        ([], "an object or true"),
        ({"items": [[[0]]] * 10_000}, "more than 20,000 values"),
        ({"description": "a" * (1 << 20) + "b"}, "characters of text"),
        ({"properties": {f"p{i}": {} for i in range(MOST_OPTIONAL + 1)}}, "not required"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(schema: Any, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason) as caught:
        schema_takes(schema, "{}")
    assert len(str(caught.value)) < 450


def test_schemas_that_are_too_deep_are_refused() -> None:
    deep: Any = {}
    for _ in range(300):
        deep = {"items": deep}
    with pytest.raises(SettingsError, match="within each other"):
        schema_takes(deep, "[]")


def test_regular_expressions_texts_and_lark() -> None:
    assert takes(Constraint.regex("a+(b|/)"), "aab", "a/", "b", "aabb") == [
        True,
        True,
        False,
        False,
    ]
    quoted = ['a"b', "a/b\n", "a", "é"]
    assert takes(Constraint.one_of(quoted), *quoted, "a/b", "") == [True] * 4 + [False] * 2
    sums = 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/'
    for constraint in (Constraint.lark(sums), Constraint.of(f"%llguidance {{}}\n{sums}")):
        assert takes(constraint, "1+22", "1+") == [True, False]
    assert takes(Constraint.of('root ::= start\nstart ::= "a"'), "a", "b") == [True, False]
    for bad in (Constraint.regex("a("), Constraint.lark("start: x"), Constraint.lark("")):
        with pytest.raises(SettingsError, match="cannot be used: ") as caught:
            takes(bad, "a")
        assert "\n" not in str(caught.value)


WORDS = [*(bytes([byte]) for byte in range(256)), b"{}", b'{"', b"<end>", b"<tag>", b"<stop>"]
END, TAG, STOP = 258, 259, 260
TEXTS = token_texts_of(WORDS, [END, STOP], [TAG], {"<tag>": TAG}.get)


class Sampled:
    """Call a sampler of a constraint as llama.cpp does."""

    def __init__(self, constraint: Constraint) -> None:
        self.sampler = ConstraintSampler(constraint, TEXTS)
        self._handle = self.sampler.handle()

    def allowed(self, order: Any = None, n: int = len(WORDS)) -> set[int]:
        data = np.zeros(n, CANDIDATE)
        data["id"] = np.arange(n) if order is None else order
        pointer = data.ctypes.data_as(llama_cpp.llama_token_data_p)
        array = llama_cpp.llama_token_data_array(pointer, n, -1, order is not None)
        llama_cpp.llama_sampler_apply(self._handle, ctypes.byref(array))
        self.sampler.check()
        return {int(each) for each in data["id"][data["logit"] == 0.0]}

    def take(self, *tokens: int) -> Sampled:
        for token in tokens:
            llama_cpp.llama_sampler_accept(self._handle, token)
            self.sampler.check()
        return self


def test_only_allowed_tokens_keep_their_logits_and_every_end_may_end_a_text() -> None:
    sampled = Sampled(Constraint.json_object())
    assert sampled.allowed() == {ord("{"), 256, 257}
    backwards = np.arange(len(WORDS))[::-1]
    assert sampled.allowed(backwards) == {ord("{"), 256, 257}
    assert sampled.allowed([257, 3, ord("{"), TAG], n=4) == {ord("{"), 257}
    assert sampled.take(256).allowed() == {END, STOP}
    assert sampled.take(STOP).allowed() == {END, STOP}
    tagged = Sampled(Constraint.of('root ::= <tag> "a" | "<tag>"'))
    assert tagged.allowed() == {TAG, ord("<")}
    assert tagged.take(TAG).allowed() == {ord("a")}


def test_a_text_never_ends_where_its_constraint_cannot_be_followed() -> None:
    """A constraint that allows no token is refused, although llguidance's masks would allow the end
    of the text.
    """
    for constraint, text in (
        (Constraint.of("root ::= x\nx ::= root"), b""),
        (Constraint.of('root ::= root "a"'), b""),
        (Constraint.of(AMBIGUOUS), b"a" * 300),
    ):
        with pytest.raises(SettingsError, match=r"allows no token|any further") as caught:
            Sampled(constraint).take(*text).allowed()
        assert len(str(caught.value)) < 300


def test_a_token_that_is_not_allowed_is_an_error() -> None:
    with pytest.raises(SettingsError, match="any further"):
        Sampled(Constraint.json_object()).take(ord("a"))


def test_a_vocabulary_without_an_end_allows_no_token_at_the_end() -> None:
    texts = token_texts_of(WORDS[:256], [], [], lambda _: None)
    assert takes(Constraint.regex("a"), "a", "", texts=texts) == [True, False]


def properties(n: int, prefix: str = "p") -> dict[str, Any]:
    return {f"{prefix}{i}": {"type": "integer"} for i in range(n)}


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (
            lambda: Constraint.json_schema({"properties": properties(MOST_OPTIONAL)}),
            b'{"p1":1,"p9":',
        ),
        (lambda: Constraint.json_schema({"const": "a" * 500_000}), b'"aaaaa'),
        (lambda: Constraint.json_schema({"pattern": "^a{1000000}$"}), b'"aaaaa'),
        (lambda: Constraint.json_schema({"items": {}, "minItems": 20_000_000}), b"[1,2,[3"),
        (lambda: Constraint.json_schema({"anyOf": [{"items": {"$ref": "#"}}] * 100}), b"[[[[1]"),
        (
            lambda: Constraint.json_schema(
                {"anyOf": [{"properties": properties(20, f"q{j}_")} for j in range(12)]}
            ),
            b'{"q1_1":1',
        ),
        (lambda: Constraint.json_schema({"enum": [f"w{i}" for i in range(19_000)]}), b'"w18'),
        (lambda: Constraint.lark('start: s\ns: "a" | s s | s s s'), b"a" * 300),
        (lambda: Constraint.regex("(a|aa|aaa)*(b{500}){500}"), b"a" * 300),
    ],
    ids=["optional", "const", "pattern", "items", "recursive", "objects", "enum", "lark", "regex"],
)
def test_no_step_takes_long(constraint: Any, text: bytes) -> None:
    start = time.thread_time()
    assert longest_step(constraint(), text) < 0.5
    assert time.thread_time() - start < 5


def test_a_text_ends_where_one_token_takes_too_long() -> None:
    """A text whose next token takes too long is refused.

    Every list here may be of any of the alternatives, so that the work grows with the cube of their
    number.
    """
    alternatives = [{"type": "array", "items": {"$ref": "#"}} for _ in range(290)]
    start = time.thread_time()
    with pytest.raises(SettingsError, match=r"for one token|ambiguous"):
        Sampled(Constraint.json_schema({"anyOf": alternatives})).take(*b"[" * 200)
    assert time.thread_time() - start < 20


SLOW = {"anyOf": [{"type": "integer", "multipleOf": 1009 + 2 * i} for i in range(50)]}


def test_what_takes_long_to_compile_is_refused_by_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MOST_SECONDS", 1.0)
    trials = Trials()
    rules = "\n".join(["start: x0", *(f"x{i}: x{i + 1}*" for i in range(20_000)), 'x20000: "a"'])
    powers = " & ".join(f"/(a{{{n}}})*/" for n in (101, 103, 107, 109))
    lark = Constraint.lark(f"start: A\nA: {powers}")
    for constraint in (Constraint.json_schema(SLOW), lark, Constraint.lark(rules)):
        before = os.times()
        with pytest.raises(SettingsError, match="to compile"):
            trials.check(constraint, lambda: None)
        after = os.times()
        # The trial is a process of its own, in which the first two constraints would take minutes.
        assert after.children_user - before.children_user < 30


def test_a_trial_ends_with_its_request_and_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MOST_SECONDS", 600.0)  # A busy machine may need long to begin it.

    class LeftError(Exception):
        pass

    def leave() -> None:
        raise LeftError

    trials = Trials()
    with pytest.raises(LeftError):
        trials.check(Constraint.json_schema(SLOW), leave)
    cheap = Constraint.json_schema({"type": "integer", "multipleOf": 7})
    trials.check(cheap, lambda: None)
    trials.check(cheap, leave)
    trials.check(Constraint.json_object(), leave)


def test_other_threads_run_while_a_constraint_is_compiled() -> None:
    constraint = Constraint.json_schema({"type": "integer", "multipleOf": 50_021})
    vocabulary, begun, done = byte_texts(), threading.Event(), threading.Event()
    beats = 0

    def beat() -> None:
        nonlocal beats
        while not done.wait(0.002):
            beats += 1
            begun.set()

    thread = threading.Thread(target=beat)
    thread.start()
    assert begun.wait(60)
    before = beats
    ConstraintSampler(constraint, vocabulary)
    meanwhile = beats - before
    done.set()
    thread.join()
    assert meanwhile > 3


def test_llguidance_is_imported_only_for_a_constraint() -> None:
    program = (
        "import sys, entropykv, entropykv.session.generate, entropykv.cli.request_options\n"
        "assert 'llguidance' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
