"""RULER's prompts have the words and counts of NVIDIA/RULER's, and the suite its lengths, metric
and rows.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter

import pytest

from entropykv.errors import ContextError, SettingsError
from entropykv.evaluation.results import Record
from entropykv.evaluation.rows import summarize
from entropykv.evaluation.ruler.prompts import (
    CommonWordsTask,
    FrequentWordsTask,
    NeedleTask,
    Task,
    TaskPrompt,
    Vocabulary,
    load_vocabulary,
)
from entropykv.evaluation.ruler.scores import (
    TASKS,
    Suite,
    make_prompts,
    make_task,
    own_texts,
    string_match_all,
)


def numbered(text: str) -> list[tuple[str, str]]:
    return re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", text.strip())


def count(prompt: TaskPrompt) -> int:
    return len(re.findall(r"\w+|\S", prompt.text))


NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ORIGINALS = {
    "niah": """Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz you about the {type_needle_v} afterwards.\n{context}\nWhat are all the special magic {type_needle_v} for {query} mentioned in the provided text? The special magic {type_needle_v} for {query} mentioned in the provided text are""",  # noqa: E501
    "vt": """Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find all variables that are assigned the value {query} in the text above. Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are assigned the value {query}, they are: """,  # noqa: E501
    "cwe": """Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most often in the list are:""",  # noqa: E501
    "fwe": """Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently appeared words in the above coded text? Answer: According to the coded text above, the three most frequently appeared words are:""",  # noqa: E501
}
"""The template and answer prefix of each task in scripts/data/synthetic/constants.py, joined."""


WORDS = Vocabulary(("fox", "owl", "elk", "bee", "cat"), ("red", "old", "wet"), ("run", "see"))
SENTENCES = "The old man sat. He did not speak at all. Nobody came by that day."
ESSAY = (*SENTENCES.split(),) * 9


def one_needle(template: str) -> str:
    """Return a template with the changes that the original code makes for a single value."""
    for old, new in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        template = template.replace(old, new)
    return template


def rng(seed: int = 0) -> random.Random:
    return random.Random(seed)


def test_a_single_needle_is_worded_as_the_original() -> None:
    prompt = NeedleTask(Vocabulary(("fox",), ("red",), ()), ESSAY, "noise").prompt(1, rng())
    (number,) = prompt.references
    assert re.fullmatch(r"[1-9]\d{6}", number)
    assert prompt.context == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I "
        "will quiz you about the number afterwards.\n"
        f"One of the special magic numbers for red-fox is: {number}.\n{NOISE}\n"
    )
    assert prompt.question == (
        "What is the special magic number for red-fox mentioned in the provided text?"
    )
    assert prompt.answer_prefix == (
        " The special magic number for red-fox mentioned in the provided text is"
    )


NEEDLES = {
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needles", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needles", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}
"""By task of synthetic.yaml: haystack, kinds of keys and values, and numbers of keys, values and
queries.

There are at least as many keys as queries.
"""


PATTERNS = {
    "words": r"[\w'-]+",
    "numbers": r"[1-9]\d{6}",
    "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
}


@pytest.mark.parametrize("name", NEEDLES)
def test_needles_are_those_of_the_definition(name: str) -> None:
    haystack, key_kind, value_kind, n_keys, n_values, n_queries = NEEDLES[name]
    task = make_task(name, 1024, own_texts(), 0, len)
    assert task.n_generated == 128
    size = 300 if haystack == "essay" else 30
    prompt = task.prompt(size, rng(5))
    needle = re.compile(
        f"One of the special magic {value_kind} for ({PATTERNS[key_kind]}) is: "
        f"({PATTERNS[value_kind]})\\."
    )
    hidden = needle.findall(prompt.context)
    assert len(hidden) == n_keys * n_values + (size if haystack == "needles" else 0)
    asked = prompt.question.partition(" for ")[2].removesuffix(" mentioned in the provided text?")
    keys = asked.replace(" and ", " ").split(", ")
    assert len(keys) == n_queries
    assert prompt.references == tuple(
        value for key in keys for value in sorted_as(prompt.references, hidden, key)
    )
    assert len(prompt.references) == n_queries * n_values
    template, kind = ORIGINALS["niah"], value_kind
    if n_queries * n_values == 1:
        template, kind = one_needle(template), value_kind[:-1]
    context = prompt.context.partition("afterwards.\n")[2].removesuffix("\n")
    assert prompt.text == template.format(type_needle_v=kind, query=asked, context=context)
    rest = needle.sub("", context)
    if haystack == "noise":
        assert context.count(NOISE) == size
    elif haystack == "essay":
        words = " ".join(text.content for text in own_texts()).split()[:size]
        assert rest.split() == words
    else:
        assert not rest.strip()


def sorted_as(references: tuple[str, ...], hidden: list[tuple[str, str]], key: str) -> list[str]:
    """Return the values of a key in the order of the references."""
    values = {value for of, value in hidden if of == key}
    return [value for value in references if value in values]


def test_queries_are_listed_as_the_originals() -> None:
    task = NeedleTask(WORDS, ESSAY, "essay", n_keys=4, n_queries=4)
    question = task.prompt(40, rng()).question
    assert re.fullmatch(
        r"What are all the special magic numbers for \w+-\w+, \w+-\w+, \w+-\w+, and \w+-\w+ "
        r"mentioned in the provided text\?",
        question,
    )


def test_needles_lie_between_sentences_and_the_essay_goes_round() -> None:
    task = NeedleTask(WORDS, ESSAY, "essay", n_keys=4)
    context = task.prompt(3 * len(ESSAY), rng(2)).context
    needles = re.findall(r"(.{2}|\n)One of the special magic numbers for [\w-]+ is: \d+\.", context)
    assert len(needles) == 4
    assert set(needles) <= {". ", "\n"}
    assert context.count("The old man sat.") == 3 * 9


def test_a_chain_and_its_example_are_those_of_the_original() -> None:
    task = make_task("vt", 1024, [], 0, lambda text: len(text.split()))
    assert task.n_generated == 30
    prompt = task.prompt(20, rng(3))
    parts = re.fullmatch(
        r"(?P<example>.*they are:  (?P<given>(?:[A-Z]{3} ){4}[A-Z]{3}))\n\n(?P<asked>Memor.*)",
        prompt.text,
        re.DOTALL,
    )
    assert parts is not None
    assert 480 < len(parts["example"].split()) - 5 <= 500
    value = check_chain(parts["asked"], prompt.references, 20)
    assert prompt.question.startswith("Question: Find all variables")
    assert prompt.answer_prefix.startswith(" Answer: According to")
    other = check_chain(parts["example"].removesuffix(" " + parts["given"]), parts["given"].split())
    assert value != other
    lines = [line for line in parts["example"].splitlines() if line.startswith("VAR")]
    again = task.prompt(20, rng(4)).context.splitlines()
    shared = [line for line in lines if line in again]
    assert not shared  # The names and the value differ between the prompts, but not their places.
    places = [i for i, line in enumerate(again[:40]) if line.startswith("VAR")][:5]
    assert places == [i for i, line in enumerate(parts["example"].splitlines()) if line in lines]


def check_chain(text: str, names: tuple[str, ...] | list[str], n_noise: int | None = None) -> str:
    """Assert that a text is what the original code makes of these names; return the value in it."""
    value = re.search(r"value (\d{5}) in", text)
    assert value is not None
    context = text.partition("\n\n")[2].partition("\nQuestion")[0]
    expected = [f"VAR {names[0]} = {value[1]}"]
    expected += [f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(names)]
    lines = context.split("\n")
    assert [line for line in lines if line != NOISE] == expected
    assert len(set(names)) == 5
    if n_noise is not None:
        assert lines.count(NOISE) == n_noise
        assert all(re.fullmatch("[A-Z]{5}", name) for name in names)
    assert text == ORIGINALS["vt"].format(context=context, query=value[1], num_v=5)
    return value[1]


@pytest.mark.parametrize(
    ("length", "example", "common", "uncommon"),
    [(1024, (20, 3, 1), 6, 1), (4096, (40, 10, 3), 30, 3)],
)
def test_common_words_are_as_common_as_in_the_original(
    length: int, example: tuple[int, int, int], common: int, uncommon: int
) -> None:
    task = CommonWordsTask(load_vocabulary(), length)
    assert task.n_generated == 120
    prompt = task.prompt(50, rng())
    cut = prompt.text.index("\nBelow is")
    first, second = prompt.text[:cut], prompt.text[cut + 1 :]
    check_list(second, list(prompt.references), 50, common, uncommon)
    given = first.partition("are:")[2]
    names = [word for _, word in numbered(given)]
    assert given == " " + " ".join(f"{i + 1}. {name}" for i, name in enumerate(names))
    check_list(first.removesuffix(given), names, *example)


def check_list(text: str, names: list[str], n_words: int, common: int, uncommon: int) -> None:
    context = text.partition("most often.\n")[2].partition("\nQuestion")[0]
    assert text == ORIGINALS["cwe"].format(context=context)
    listed = numbered(context)
    assert [number for number, _ in listed] == [str(i + 1) for i in range(len(listed))]
    counts = Counter(word for _, word in listed)
    assert len(counts) == n_words
    assert len(names) == 10
    assert {counts[name] for name in names} == {common}
    assert {count for word, count in counts.items() if word not in names} == {uncommon}


def test_frequent_words_follow_zipf() -> None:
    task = FrequentWordsTask(4096)
    assert task.n_generated == 50
    prompt = task.prompt(900, rng())
    context = prompt.context.partition("coded words. ")[2].removesuffix("\n")
    assert prompt.text == ORIGINALS["fwe"].format(context=context)
    counts = Counter(context.split()).most_common()
    assert counts[0][0] == "..."
    assert tuple(word for word, _ in counts[1:4]) == prompt.references
    vocabulary = (4096 - 50) // 50
    zeta = sum(k**-2.0 for k in range(1, 200_000))
    expected = [int(900 * k**-2.0 / zeta) for k in range(1, vocabulary + 1)]
    assert [count for _, count in counts] == [count for count in expected if count]
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in counts[1:])


def test_words_are_those_that_ruler_uses() -> None:
    vocabulary = load_vocabulary()
    assert len(vocabulary.nouns) > 6000
    assert {"castle", "violin"} <= set(vocabulary.nouns)
    assert {"happy", "wooden"} <= set(vocabulary.adjectives)
    assert {"walk", "write"} <= set(vocabulary.verbs)
    assert list(vocabulary.all) == sorted(set(vocabulary.all))


def prompts_of(name: str, n_samples: int, length: int = 1200, seed: int = 0) -> list[TaskPrompt]:
    task: Task = make_task(name, length, own_texts(), seed, lambda text: len(text.split()))
    return make_prompts(name, task, Suite(n_samples=n_samples), length, seed, count)


@pytest.mark.parametrize("name", TASKS)
def test_prompts_fill_their_length_and_depend_on_the_seed_alone(name: str) -> None:
    three = prompts_of(name, 3)
    n_generated = make_task(name, 1200, own_texts(), 0, len).n_generated
    sizes = [count(prompt) + n_generated for prompt in three]
    assert max(sizes) <= 1200
    assert min(sizes) > 0.9 * 1200
    assert sizes[0] > 1200 - 120
    assert len({prompt.text for prompt in three}) == 3
    assert prompts_of(name, 1) == three[:1]
    assert prompts_of(name, 1, seed=1) != three[:1]


def test_a_length_that_is_too_short_is_refused() -> None:
    with pytest.raises(ContextError, match="150 tokens are too few for prompts of niah_single_1"):
        prompts_of("niah_single_1", 1, length=150)


def test_a_list_has_no_more_words_than_there_are() -> None:
    task = CommonWordsTask(Vocabulary(tuple(f"n{i}" for i in range(50)), (), ()), 2048)
    (prompt,) = make_prompts("cwe", task, Suite(n_samples=1), 2048, 0, count)
    words = {word for _, word in numbered(prompt.context.partition("\nBelow")[2])}
    assert len(words) >= 50


def test_unknown_tasks_are_refused_and_others_are_in_order() -> None:
    with pytest.raises(SettingsError, match="RULER has no task 'qa_1' here; give some of niah"):
        Suite(tasks=["vt", "qa_1"])
    suite = Suite(lengths=[2048, 1024, 2048], tasks=["vt", "niah_single_1", "vt"])
    assert suite.tasks == ["niah_single_1", "vt"]
    assert suite.lengths == [1024, 2048]


def test_the_metric_is_the_share_of_references_in_the_answer() -> None:
    assert string_match_all(" 1234567.", ["1234567"]) == 1.0
    assert string_match_all("QXYZW and ABCDE", ["abcde", "Qxyzw", "OTHER", "more"]) == 0.5
    assert string_match_all("123456", ["1234567"]) == 0.0
    assert string_match_all("", ["a", "b"]) == 0.0


def test_rows_have_the_means_of_tasks() -> None:
    scores = [("vt", 0.2), ("vt", 0.6), ("cwe", 1.0)]
    records = [
        Record("stock", "ruler", "", str(number), values_of(task, score))
        for number, (task, score) in enumerate(scores)
    ]
    row = summarize("stock", "f16", "full", records)
    assert row.scores == {"vt": pytest.approx(0.4), "cwe": 1.0}
    assert row.score is not None
    assert math.isclose(row.score, 0.7)
    assert (row.length, row.question, row.answers) == (1024, "known", 3)


def values_of(task: str, score: float) -> dict[str, object]:
    return {"task": task, "score": score, "length": 1024, "question": "known"}
