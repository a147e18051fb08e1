"""Thoughts in texts are found and limited: tags of templates, readers, budgets, constraints."""

from __future__ import annotations

import random
from typing import Any

import pytest
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from entropykv.constraint.constraint import Constraint
from entropykv.constraint.vocabulary import token_texts_of
from entropykv.thinking.reader import Parts, ThoughtCounter, before_answer, read_whole, reader_of
from entropykv.thinking.tags import AnswerFrame, ThoughtTags, frame_of, tags_of
from tests.support.constraints import takes
from tests.support.thinking import CHANNELS, CLOSING, OPENING

THINK = ThoughtTags("<think>", "</think>")
GRANITE = ThoughtTags("<think>", "</think>", ("<response>", "</response>"))
HARMONY = tags_of(CHANNELS)
CALL = (
    "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.find <|constrain|>json<|message|>{"name": "Ines"}'
)


def frame(template: str, **arguments: Any) -> AnswerFrame:
    formatter: Any = Jinja2ChatFormatter(template, eos_token="", bos_token="")
    return frame_of(lambda messages: str(formatter(messages=messages, **arguments).prompt))


@pytest.mark.parametrize(
    ("template", "begin"),
    [
        ("{{ '<think>' }}", "<think>"),
        ("{% if '</think>' in content %}", "<think>"),
        ("as [THINK]...[/THINK]", "[THINK]"),
        ("<|channel|>analysis", "<|channel|>analysis<|message|>"),
        ("<|START_THINKING|>", "<|START_THINKING|>"),
        ("<|channel>thought", "<|channel>thought"),
    ],
)
def test_a_template_names_the_tags_of_its_model(template: str, begin: str) -> None:
    tags = tags_of(template)
    assert tags is not None
    assert tags.begin == begin


def test_a_template_without_tags_is_of_a_model_that_does_not_think() -> None:
    assert tags_of("{% for m in messages %}{{ m.content }}{% endfor %}") is None
    assert tags_of(None) is None


def test_a_frame_is_what_later_turns_have_in_another_way() -> None:
    assert frame(OPENING) == AnswerFrame("<think>\n", "")
    assert frame(OPENING, enable_thinking=False) == AnswerFrame()
    assert frame(CLOSING) == AnswerFrame()
    assert frame(CLOSING, enable_thinking=False) == AnswerFrame("<think>\n\n</think>\n\n", "")
    assert frame(CHANNELS) == AnswerFrame("", "<|channel|>final<|message|>")


def test_a_frame_cuts_no_tag_in_two() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}[bot]</think>{% endif %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}[bot]<think>{% endif %}"
    )
    later = template.replace("{% if add_generation_prompt %}", "{% if messages|length == 1 %}")
    assert frame(later) == AnswerFrame("<think>", "</think>")


def test_a_template_that_leaves_out_answers_has_no_frame() -> None:
    assert frame("{{ messages[-1].content }}<think>") == AnswerFrame()


TEXTS = [
    (
        THINK,
        False,
        "<think>\nIs it so?\n\nYes.\n</think>\n\nIt is.",
        ("Is it so?\n\nYes.", "It is."),
    ),
    (THINK, True, "Is it so? </think>It is.", ("Is it so?", "It is.")),
    (THINK, True, "<think>It repeats the tag.</think>Yes", ("It repeats the tag.", "Yes")),
    (THINK, True, "It never ends <", ("It never ends <", "")),
    (THINK, False, "<think></think>\n\nNothing to think.", ("", "Nothing to think.")),
    (THINK, False, " No thought.", ("", " No thought.")),
    (THINK, False, "Write <think>a</think>.", ("", "Write <think>a</think>.")),
    (THINK, False, "<thi", ("", "<thi")),
    (GRANITE, False, "<think>a</think>\n<response>b < c</response>", ("a", "b < c")),
    (
        HARMONY,
        False,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        ("a", "b"),
    ),
    (HARMONY, False, "Hello", ("", "Hello")),
    (
        HARMONY,
        False,
        CALL,
        (
            "Look it up.",
            '<tool_call>\n{"name": "find", "arguments": {"name": "Ines"}}\n</tool_call>',
        ),
    ),
]


@pytest.mark.parametrize(("tags", "opened", "text", "parts"), TEXTS)
def test_a_text_has_the_same_parts_however_it_comes(
    tags: ThoughtTags, opened: bool, text: str, parts: tuple[str, str]
) -> None:
    assert read_whole(tags, text, opened=opened) == Parts(*parts)
    choice = random.Random(3)
    for _ in range(40):
        reader = reader_of(tags, opened=opened)
        thought = answer = ""
        place = 0
        while place < len(text):
            size = choice.randint(1, 5)
            more = reader.take(text[place : place + size])
            thought, answer = thought + more.thought, answer + more.answer
            place += size
        rest = reader.finish()
        assert (thought + rest.thought, answer + rest.answer) == parts


def test_a_thought_is_shown_as_it_comes() -> None:
    reader = reader_of(THINK, opened=True)
    assert reader.take("One, two") == Parts("One, two")
    assert reader.take(", three</th") == Parts(", three")
    assert reader.take("ink>Four") == Parts("", "Four")


def counter(*, opened: bool = False, budget: int = -1) -> ThoughtCounter:
    """Return a counter of thoughts whose tokens are bytes; the end of one is three of them."""
    tags = ThoughtTags("<", "..>")
    return ThoughtCounter(
        tags, lambda token: bytes([token]), opened=opened, budget=budget, ending=b"..>"
    )


def write(count: ThoughtCounter, text: bytes) -> bytes:
    """Return what is written if the model chooses `text`; the budget replaces parts of it."""
    written = b""
    for wanted in text:
        token = wanted if count.forced is None else count.forced
        written += bytes([token])
        count.accept(token)
    return written


def test_a_thought_ends_where_its_budget_does() -> None:
    assert write(counter(budget=4), b"<abcdefghijk") == b"<abcd..>hijk"


def test_a_budget_of_nothing_ends_a_thought_at_once() -> None:
    assert write(counter(budget=0), b"<abcdef") == b"<..>def"
    assert write(counter(budget=0, opened=True), b"abcdef") == b"..>def"


def test_a_thought_that_ends_by_itself_is_left_alone() -> None:
    count = counter(budget=9, opened=True)
    assert write(count, b"abc..>defghijklmnop") == b"abc..>defghijklmnop"
    assert count.n_tokens == 6


def test_each_thought_has_the_whole_budget() -> None:
    assert write(counter(budget=2), b"<abcdeX<abcdeY") == b"<ab..>X<ab..>Y"


def test_no_character_is_cut_by_a_budget() -> None:
    text = "<aéb".encode()
    assert write(counter(budget=2), text + b"cdefg") == "<aé..>".encode() + b"efg"


def test_without_a_budget_thoughts_are_counted_alone() -> None:
    count = counter(opened=True)
    write(count, b"ab..>cd")
    assert (count.n_tokens, count.forced, count.thinks) == (5, None, False)


def test_a_constraint_applies_to_the_final_channel() -> None:
    answer = Constraint.json_object().behind(before_answer(HARMONY, opened=False))
    thought = "<|channel|>analysis<|message|>{<|end|>"
    final = "<|channel|>final<|message|>"
    inside = [f"{thought}<|start|>assistant{final}{{}}", f"{final}{{}}"]
    outside = [f"{thought}{{}}", "{}", f"{thought}<|start|>assistant{final}[]"]
    assert takes(answer, *inside, *outside) == [True] * 2 + [False] * 3


@pytest.mark.parametrize("is_token", [True, False])
@pytest.mark.parametrize("opened", [True, False])
def test_a_constraint_applies_to_what_stands_behind_the_thought(
    is_token: bool, opened: bool
) -> None:
    """A constraint applies only to the text after the thought, whether tags are single tokens or
    spelled.

    Single bytes stand for tags that are tokens.
    """
    begin, end = ("\x01", "\x02") if is_token else (THINK.begin, THINK.end)
    tokens = {THINK.begin: 1, THINK.end: 2} if is_token else {}
    answer = Constraint.json_schema({"type": "object"}).behind(before_answer(THINK, opened=opened))
    texts = token_texts_of([bytes([b]) for b in range(256)], [0], [], tokens.get)
    inside = [f"{begin}Hm < 5?{end}{{}}", f"{begin}{{\n</{end}\n\n{{}}"]
    inside += [f"Hm{end}{{}}"] if opened else ["{}", "\n{}"]
    outside = [f"{begin}Hm{end}[]", "{", f"Hm{end}", f"{begin}{{}}"]
    outside += ["{}"] if opened else [f"Hm{end}{{}}"]
    assert takes(answer, *inside, texts=texts) == [True] * len(inside)
    assert takes(answer, *outside, texts=texts) == [False] * len(outside)
