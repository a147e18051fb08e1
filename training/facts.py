"""Write documents of simple English facts, with questions about facts far back in the document.

A document is a list of words of the vocabulary. Most words begin with a space, so that joining them
gives the text. Facts are sentences such as " Anna keeps a red umbrella."; a question is on a line
of its own and is answered by the fact, word for word: "What does Anna keep? Anna keeps a red
umbrella.</s>". Filler sentences without facts are between them.

One in ten pairs of subject and value (chosen by a fixed rule) never occurs in training: only these
pairs are used for evaluation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from training import words

BOS, EOS = "<s>", "</s>"
STOP, LINE, STOP_LINE, STOP_LINES, ASK = ".", "\n", ".\n", ".\n\n", "?"


@dataclass(frozen=True)
class Relation:
    """Hold the words of a relation: `question` and `statement` surround the subject, and one of
    `values` ends the sentence.
    """

    question: tuple[list[str], list[str]]
    statement: list[str]
    values: list[list[str]]


def _blank(text: str) -> list[str]:
    return [f" {word}" for word in text.split()]


def _relation(question: str, statement: str, values: list[str]) -> Relation:
    before, after = question.split(" X ")
    first, *rest = before.split()
    return Relation(
        ([first, *_blank(" ".join(rest))], _blank(after)),
        _blank(statement),
        [_blank(value) for value in values],
    )


RELATIONS = [
    _relation(
        "What does X keep",
        "keeps a",
        [f"{colour} {thing}" for colour in words.COLOURS for thing in words.OBJECTS],
    ),
    _relation("Where does X live", "lives in", words.CITIES),
    _relation("What does X work as", "works as a", words.JOBS),
    _relation("What does X like", "likes", words.FOODS),
    _relation("What does X play", "plays the", words.INSTRUMENTS),
    _relation(
        "Which pet does X have",
        "has a",
        [f"{colour} {animal}" for colour in words.COLOURS for animal in words.ANIMALS],
    ),
]


def vocabulary() -> list[str]:
    """Return every word of a document, the special ones first; no duplicates."""
    lists = [
        words.NAMES,
        words.COLOURS,
        words.OBJECTS,
        words.CITIES,
        words.JOBS,
        words.FOODS,
        words.INSTRUMENTS,
        words.ANIMALS,
        words.ADJECTIVES,
        words.PLACES,
        words.FILLER_VERBS,
        words.PREPOSITIONS,
        words.TIMES,
        words.FUNCTION_WORDS,
    ]
    spaced = [f" {word}" for group in lists for word in group]
    starts = ["What", "Where", "Which", "The", "It"]
    return list(dict.fromkeys([BOS, EOS, STOP_LINE, STOP_LINES, *spaced, *starts]))


@dataclass(frozen=True)
class Fact:
    """Hold a subject, a relation and its value."""

    subject: int
    relation: int
    value: int

    def statement(self) -> list[str]:
        """Return all words of the sentence, without the full stop."""
        relation = RELATIONS[self.relation]
        subject = f" {words.NAMES[self.subject]}"
        return [subject, *relation.statement, *relation.values[self.value]]

    def question(self) -> list[str]:
        """Return all words of the question, up to the question mark."""
        before, after = RELATIONS[self.relation].question
        return [*before, f" {words.NAMES[self.subject]}", *after, ASK]

    @property
    def held_out(self) -> bool:
        """Tell whether this pair of subject and value never occurs in training."""
        return (self.subject * 7 + self.relation * 3 + self.value) % 10 == 0


@dataclass
class Document:
    """Hold words, and for each whether it is part of the value that a question asks for."""

    words: list[str]
    is_answer: list[bool]

    def add(self, new: list[str], n_answer: int = 0) -> None:
        """Append words; the last `n_answer` of them are an answer."""
        self.words += new
        self.is_answer += [False] * (len(new) - n_answer) + [True] * n_answer


class Writer:
    """Write documents; the same seed writes the same documents."""

    def __init__(self, seed: int | str) -> None:
        """Start a series of documents."""
        self.random = random.Random(seed)

    def fact(self, known: dict[tuple[int, int], Fact], held_out: bool) -> Fact:
        """Return a new fact about a subject and relation for which there is none in `known`."""
        pick = self.random.random
        while True:
            if known and pick() < 0.3:
                subject = self.random.choice(list(known))[0]
            else:
                subject = int(pick() * len(words.NAMES))
            relation = int(pick() * len(RELATIONS))
            fact = Fact(subject, relation, int(pick() * len(RELATIONS[relation].values)))
            if (subject, relation) not in known and fact.held_out == held_out:
                return fact

    def filler(self) -> list[str]:
        """Return a sentence without a fact, and without its full stop."""
        choose: Callable[[list[str]], str] = self.random.choice
        if self.random.random() < 0.2:
            text = f"It was {choose(words.ADJECTIVES)} all {choose(words.TIMES)}"
        else:
            text = (
                f"The {choose(words.ADJECTIVES)} {choose(words.PLACES)} "
                f"{choose(words.FILLER_VERBS)} {choose(words.PREPOSITIONS)} the "
                f"{choose(words.PLACES)}"
            )
        return _blank(text)

    def _start(self) -> Document:
        document = Document([], [])
        first, *rest = self.filler()
        document.add([BOS, first.strip(), *rest, STOP])
        return document

    def ask(self, document: Document, fact: Fact) -> None:
        """Append a question on a line of its own, and its answer."""
        if document.words[-1] == STOP:
            document.words[-1] = STOP_LINE if self.random.random() < 0.8 else STOP_LINES
        else:
            document.add([LINE])
        document.add(fact.question())
        document.add(fact.statement(), len(RELATIONS[fact.relation].values[fact.value]))
        document.add([STOP, EOS])

    def training_document(self, n_tokens: int, n_filler: float, n_questions: float) -> Document:
        """Write facts, filler and questions in random order, cut to `n_tokens` words.

        `n_filler` and `n_questions` are the shares of filler and questions among the sentences.
        """
        document, known, unasked = self._start(), {}, []
        pick = self.random.random
        # Half of the documents ask at any time, half only in their last part.
        first_question = 0 if pick() < 0.5 else int(n_tokens * (0.3 + 0.5 * pick()))
        while len(document.words) < n_tokens:
            kind = pick()
            may_ask = len(known) > 1 and len(document.words) >= first_question
            if may_ask and (kind < n_questions or first_question):
                again = not unasked or pick() < 0.1
                asked = self.random.choice(list(known.values()) if again else unasked)
                unasked = [fact for fact in unasked if fact is not asked]
                self.ask(document, asked)
            elif kind < n_questions + n_filler and pick() < n_filler * 2:
                document.add([*self.filler(), STOP])
            else:
                fact = self.fact(known, held_out=False)
                known[fact.subject, fact.relation] = fact
                unasked.append(fact)
                document.add([*fact.statement(), STOP])
        return Document(document.words[:n_tokens], document.is_answer[:n_tokens])

    def test_document(self, n_tokens: int, n_questions: int) -> tuple[list[str], list[Fact]]:
        """Return about `n_tokens` words of facts and filler, and the facts to ask for afterwards.

        Questions come only at the end, so that nothing tells which facts will be needed.
        """
        document, known = self._start(), {}
        while len(document.words) < n_tokens - 14:
            if self.random.random() < 0.25:
                document.add([*self.filler(), STOP])
            else:
                held_out = self.random.random() < 0.5 or len(known) < n_questions
                fact = self.fact(known, held_out)
                known[fact.subject, fact.relation] = fact
                document.add([*fact.statement(), STOP])
        candidates = [fact for fact in known.values() if fact.held_out]
        return document.words, self.random.sample(candidates, min(n_questions, len(candidates)))
