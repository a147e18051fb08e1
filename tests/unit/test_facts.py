"""The documents that the shipped model was trained on, and their questions, are consistent."""

from __future__ import annotations

from training.facts import ASK, EOS, LINE, RELATIONS, STOP, Fact, Writer, vocabulary
from training.tokenizer import WordTokenizer
from training.words import NAMES


def statements(words: list[str]) -> list[str]:
    """Return the sentences of a document, without their full stops."""
    text = "".join(words).replace("\n", " ")
    return [sentence.strip() for sentence in text.replace(EOS, "").split(".")]


def all_facts() -> dict[str, Fact]:
    return {
        "".join(fact.statement()).strip(): fact
        for subject in range(len(NAMES))
        for relation, known in enumerate(RELATIONS)
        for fact in (Fact(subject, relation, value) for value in range(len(known.values)))
    }


def test_the_same_seed_writes_the_same_documents() -> None:
    first, again, other = (Writer(seed).training_document(256, 0.2, 0.4) for seed in (1, 1, 2))
    assert first.words == again.words
    assert first.words != other.words


def test_every_word_is_in_the_vocabulary_and_has_an_id_of_its_own() -> None:
    tokenizer = WordTokenizer()
    known = {*vocabulary(), STOP, LINE, ASK}
    for seed in range(20):
        words = Writer(seed).training_document(512, 0.2, 0.4).words
        assert set(words) <= known
        ids = tokenizer.encode(words)
        assert min(ids) >= 0
        assert len(set(ids)) == len(set(words))


def test_answers_are_marked_and_repeat_a_fact() -> None:
    document = Writer(3).training_document(512, 0.2, 0.4)
    ends = [i for i, word in enumerate(document.words) if word == EOS]
    assert len(ends) > 5
    for end in ends:
        line = "".join(document.words[:end]).rsplit("\n", 1)[1]
        answer = line.split("? ")[1]
        assert f"{answer}" in "".join(document.words[:end]).rsplit("\n", 1)[0]
        assert document.is_answer[end - 2]
        assert not document.is_answer[end]


def test_held_out_facts_never_occur_in_training_and_alone_are_asked() -> None:
    facts = all_facts()
    share = sum(fact.held_out for fact in facts.values()) / len(facts)
    assert 0.05 < share < 0.15
    for seed in range(30):
        seen = statements(Writer(f"train {seed}").training_document(512, 0.2, 0.4).words)
        assert sum(text in facts for text in seen) > 10
        assert not any(facts[text].held_out for text in seen if text in facts)
        words, asked = Writer(seed).test_document(512, 8)
        assert len(asked) == 8
        assert all(fact.held_out for fact in asked)
        text = statements(words)
        assert all(text.count("".join(fact.statement()).strip()) == 1 for fact in asked)


def test_a_subject_and_relation_has_one_value() -> None:
    words, _ = Writer(5).test_document(1536, 8)
    facts = all_facts()
    keys = [(facts[t].subject, facts[t].relation) for t in statements(words) if t in facts]
    assert len(keys) > 100
    assert len(keys) == len(set(keys))
