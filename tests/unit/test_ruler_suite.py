"""RULER as a suite has the right words, lengths of prompts, metric and rows."""

from __future__ import annotations

import math

import pytest

from entropykv.errors import ContextError, SettingsError
from entropykv.evaluation.results import Record
from entropykv.evaluation.rows import summarize
from entropykv.evaluation.ruler.prompts import (
    CommonWordsTask,
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
from tests.support.ruler_prompts import count, numbered


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
