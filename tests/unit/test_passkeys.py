"""Facts are planted into prose, and can be found there again."""

from __future__ import annotations

import pytest

from entropykv.errors import ContextError, SettingsError
from entropykv.evaluation.passkeys import WORDINGS, Case, Fact, make_cases, plant, split_sentences

PROSE = [
    "".join(f'The {number}th day was calm. "Was it?" asked he. ' for number in range(start, 400))
    for start in (0, 100)
]


def words(text: str) -> int:
    return len(text.split())


def cases(seed: int = 0, n_tokens: int = 300, facts_per_text: int = 4) -> list[Case]:
    return make_cases(
        PROSE, words, n_cases=12, n_tokens=n_tokens, facts_per_text=facts_per_text, seed=seed
    )


def test_every_fact_is_in_its_text_once_at_a_sentence_boundary() -> None:
    for case in cases():
        assert len(case.facts) == len({fact.stem for fact in case.facts}) == 4
        for fact in case.facts:
            assert case.text.count(fact.statement) == 1
            before, after = case.text.split(fact.statement)
            assert not before or before.rstrip()[-1] in '.!?"'
            assert not after or after[0].isspace()
            assert fact.question not in case.text


def test_depths_are_where_the_facts_are_and_vary() -> None:
    depths = [depth for case in cases() for depth in case.depths]
    assert min(depths) < 0.2
    assert max(depths) > 0.8
    for case in cases():
        for fact, depth in zip(case.facts, case.depths, strict=True):
            before = words(case.text.split(fact.statement)[0])
            assert depth == pytest.approx(before / words(case.text), abs=0.01)


def test_passages_are_as_long_as_asked_and_begin_anywhere() -> None:
    lengths = [words(case.text) for case in cases(n_tokens=500)]
    assert max(lengths) <= 500
    assert min(lengths) > 480
    assert len({case.text[:60] for case in cases(n_tokens=500)}) > 6


def test_a_seed_repeats() -> None:
    assert cases(seed=3) == cases(seed=3)
    assert cases(seed=3) != cases(seed=4)
    assert len({fact for case in cases() for fact in case.facts}) > 40


def test_wordings_are_varied_and_end_with_their_value() -> None:
    assert len(WORDINGS) >= 8
    assert len({wording.stem for wording in WORDINGS}) == len(WORDINGS)
    for wording in WORDINGS:
        assert "{who}" in wording.question
        assert "{who}" in wording.stem
        assert not wording.stem.endswith(" ")


@pytest.mark.parametrize(
    ("continuation", "right"),
    [
        (" 4821.\n", True),
        (" 4821", True),
        ("\n4821, he", True),
        (" 48210", False),
        (" the 4821", False),
        ("", False),
    ],
)
def test_an_answer_begins_with_the_value(continuation: str, right: bool) -> None:
    fact = Fact("What is the code?", "The code is", "4821")
    assert fact.is_answered_by(continuation) == right
    assert fact.prompt.endswith("The code is")


def test_sentences_joined_are_the_text() -> None:
    text = (
        'He came. "Who?" she asked. It was Mr. J. Smith at 3.5 p.m.!\n\nA new day\n\nwithout stops'
    )
    sentences = split_sentences(text)
    assert "".join(sentences).strip() == text
    assert [s.strip() for s in sentences] == [
        "He came.",
        '"Who?" she asked.',
        "It was Mr. J. Smith at 3.5 p.m.!",
        "A new day",
        "without stops",
    ]


def test_texts_that_cannot_hold_the_facts_are_refused() -> None:
    with pytest.raises(ContextError, match=r"5000[0-9]* of one passage"):
        cases(n_tokens=50_000)
    with pytest.raises(SettingsError, match="too few for 11 facts"):
        cases(facts_per_text=11)
    with pytest.raises(SettingsError, match="too few for 9 facts"):
        cases(n_tokens=60, facts_per_text=9)


def test_facts_are_planted_into_the_beginning_of_a_text() -> None:
    case, rest = plant(PROSE[0], words, n_tokens=300, n_facts=8, seed=1)
    assert 280 < words(case.text) <= 300
    assert len(case.facts) == len(case.depths) == 8
    text = case.text
    for fact in case.facts:
        assert text.count(f"{fact.statement} ") == 1
        text = text.replace(f"{fact.statement} ", "")
    # The passage without the facts, and then the rest, are the original text.
    assert f"{text} {rest}".split() == PROSE[0].split()
    assert plant(PROSE[0], words, n_tokens=300, n_facts=8, seed=1) == (case, rest)
    assert plant(PROSE[0], words, n_tokens=300, n_facts=8, seed=2)[0].facts != case.facts


def test_fewer_facts_are_planted_into_few_sentences() -> None:
    case, rest = plant(
        "One day. Then two. More " + "more " * 499, words, n_tokens=400, n_facts=8, seed=1
    )
    assert len(case.facts) == 2
    assert words(rest) == 500
    case, rest = plant("more " * 500, words, n_tokens=400, n_facts=8, seed=1)
    assert (case.text, case.facts) == ("", ())
