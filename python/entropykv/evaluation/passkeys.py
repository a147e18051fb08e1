"""Plant facts into prose, and measure whether a cache still holds facts that were read long before.

Every case is a passage of the given texts with a few facts at sentence boundaries. Each fact is one
sentence that names its subject. The passage is read first, and a fact is asked for only afterwards,
so that nothing tells beforehand which part of the passage will be needed. The same texts, sizes and
seed give the same cases. All questions about a passage start from the same state, so that no
question sees the answer to another one.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from entropykv.errors import ContextError, SettingsError
from entropykv.evaluation.reading import (
    AnswersPart,
    AnySession,
    Item,
    Tick,
    Values,
    read,
    write,
)
from entropykv.evaluation.texts import Text, digest_of
from entropykv.llamacpp.distributions import Logits
from entropykv.llamacpp.model import Model

_ABBREVIATIONS = ("Mr", "Mrs", "Dr", "St", "[A-Z]")
_SENTENCE_END = re.compile(
    "".join(rf"(?<!\b{short})" for short in _ABBREVIATIONS)
    + r"[.!?][\"')\]]*\s+(?=[\"'(\[A-Z])|\n\s*\n"
)


@dataclass(frozen=True)
class Fact:
    """Hold a sentence to plant, and the question that asks for its value."""

    question: str
    stem: str
    """The sentence up to its value."""
    value: str

    @property
    def statement(self) -> str:
        """Return the whole sentence."""
        return f"{self.stem} {self.value}."

    @property
    def prompt(self) -> str:
        """Return the text that is read after the passage; a right answer continues it with the
        value.
        """
        return f"\n\nQuestion: {self.question}\nAnswer: {self.stem}"

    def is_answered_by(self, continuation: str) -> bool:
        """Tell whether a continuation of the prompt begins with the value, as whole words."""
        text = continuation.lstrip().casefold()
        value = self.value.casefold()
        return text.startswith(value) and not text[len(value) : len(value) + 1].isalnum()


@dataclass(frozen=True)
class Case:
    """Hold a passage and its facts, in the order in which the passage has them."""

    text: str
    facts: tuple[Fact, ...]
    depths: tuple[float, ...]
    """Where each fact stands: the share of the passage's tokens that precede it."""


@dataclass(frozen=True)
class Wording:
    """Hold one wording of a fact; {who} is replaced by one of `subjects`, and `value` draws a
    value.
    """

    question: str
    stem: str
    subjects: tuple[str, ...]
    value: Callable[[random.Random], str]


@dataclass(frozen=True)
class _Sentence:
    text: str
    """The sentence with the white space after it."""
    n_tokens: int


def _digits(n: int) -> Callable[[random.Random], str]:
    return lambda rng: str(rng.randrange(10 ** (n - 1), 10**n))


def _one_of(*parts: Sequence[str], separator: str = " ") -> Callable[[random.Random], str]:
    return lambda rng: separator.join(rng.choice(part) for part in parts)


_COLOURS = ("crimson", "turquoise", "violet", "orange", "silver", "olive", "ivory", "scarlet")
_THINGS = ("vase", "ladder", "barrel", "carpet", "lantern", "bench", "statue", "piano")
_ANIMALS = ("falcon", "badger", "walrus", "lizard", "otter", "raven", "camel", "salmon")
_FIRST = ("Ines", "Tobias", "Marguerite", "Oswald", "Priya", "Kenji", "Leonora", "Anselm")
_LAST = ("Okafor", "Lindqvist", "Barreto", "Whitcombe", "Tanaka", "Novak", "Delacroix", "Haddad")
_PEOPLE = tuple(f"{first} {last}" for first, last in zip(_FIRST, _LAST, strict=True))
_PLACES = ("museum", "observatory", "brewery", "archive", "harbour office", "north tower")
_TOWNS = ("Bergen", "Toledo", "Nairobi", "Quebec", "Trieste", "Lahore", "Zagreb", "Kyoto")

WORDINGS = (
    Wording(
        "What is the access code of the {who}?",
        "The access code of the {who} is",
        _PLACES,
        _digits(5),
    ),
    Wording(
        "What is the telephone number of {who}?",
        "The telephone number of {who} is",
        _PEOPLE,
        lambda rng: f"{_digits(3)(rng)}-{_digits(4)(rng)}",
    ),
    Wording(
        "Which number does the locker of {who} have?",
        "The locker of {who} has the number",
        _PEOPLE,
        _digits(3),
    ),
    Wording(
        "What is the password of the {who}?",
        "The password of the {who} is",
        ("laboratory", "wine cellar", "printing room", "chess club", "greenhouse", "night shift"),
        _one_of(_COLOURS, _ANIMALS, separator="-"),
    ),
    Wording(
        "What is the favourite colour of {who}?",
        "The favourite colour of {who} is",
        _PEOPLE,
        _one_of(_COLOURS),
    ),
    Wording(
        "Where is the spare key of the {who} hidden?",
        "The spare key of the {who} is hidden under the",
        _PLACES,
        _one_of(_COLOURS, _THINGS),
    ),
    Wording(
        "From which platform does the night train to {who} leave?",
        "The night train to {who} leaves from platform",
        _TOWNS,
        _digits(2),
    ),
    Wording(
        "Who is the captain of the ship {who}?",
        "The captain of the ship {who} is called",
        ("Aurora", "Petrel", "Meridian", "Halcyon", "Corsair", "Evening Star"),
        _one_of(_FIRST, _LAST),
    ),
    Wording(
        "In which town was {who} born?",
        "{who} was born in the town of",
        _PEOPLE,
        _one_of(_TOWNS),
    ),
    Wording(
        "What does {who} keep as a pet?",
        "{who} keeps as a pet a",
        _PEOPLE,
        _one_of(_COLOURS, _ANIMALS),
    ),
)


def make_cases(
    texts: Sequence[str],
    count_tokens: Callable[[str], int],
    *,
    n_cases: int,
    n_tokens: int,
    facts_per_text: int,
    seed: int,
) -> list[Case]:
    """Plant facts into passages, of which sentences and facts have at most `n_tokens` tokens
    together.

    A passage begins at any sentence of the texts, and continues with the next text at the end of
    one. `count_tokens` returns the number of tokens of a sentence. Raises SettingsError for more
    facts than there are wordings or than a passage has sentences, and ContextError if the texts are
    too short.
    """
    if facts_per_text > len(WORDINGS):
        raise SettingsError(
            f"there are {len(WORDINGS)} wordings of facts, too few for {facts_per_text} facts per "
            "text; use fewer facts"
        )
    sentences = [
        _Sentence(part, count_tokens(part)) for text in texts for part in split_sentences(text)
    ]
    available = sum(sentence.n_tokens for sentence in sentences)
    if available < n_tokens:
        raise ContextError(
            f"the texts have {available} tokens together, fewer than the {n_tokens} of one passage "
            "with facts; give more text or use shorter passages"
        )
    return [
        _case(
            random.Random(f"{seed} {number}"),  # noqa: S311
            sentences,
            count_tokens,
            n_tokens,
            facts_per_text,
        )
        for number in range(n_cases)
    ]


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences with the white space after them; a paragraph also ends a
    sentence.
    """
    text = text.strip() + "\n\n"
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    return [piece for piece in pieces if piece.strip()]


def plant(
    text: str, count_tokens: Callable[[str], int], *, n_tokens: int, n_facts: int, seed: int
) -> tuple[Case, str]:
    """Plant facts into the beginning of a text; returns the passage, and how the text continues.

    Its sentences and facts have at most `n_tokens` tokens together. It has `n_facts` facts, or
    fewer if sentences or WORDINGS are fewer, and is empty if no sentence fits.
    """
    rng = random.Random(seed)  # noqa: S311
    sentences = [_Sentence(part, count_tokens(part)) for part in split_sentences(text)]
    wordings = rng.sample(WORDINGS, min(n_facts, len(WORDINGS)))
    facts = [_fact(rng, wording) for wording in wordings]
    planted = _planted(facts, count_tokens)
    passage = _from_first(sentences, n_tokens - sum(fact.n_tokens for fact in planted))
    n = min(len(passage), len(facts))
    case = _case_of(rng, passage, facts[:n], planted[:n])
    return case, "".join(sentence.text for sentence in sentences[len(passage) :])


def _case(
    rng: random.Random,
    sentences: Sequence[_Sentence],
    count_tokens: Callable[[str], int],
    n_tokens: int,
    n_facts: int,
) -> Case:
    facts = [_fact(rng, wording) for wording in rng.sample(WORDINGS, n_facts)]
    planted = _planted(facts, count_tokens)
    passage = _passage(rng, sentences, n_tokens - sum(fact.n_tokens for fact in planted))
    if len(passage) < n_facts:
        raise SettingsError(
            f"a passage of {n_tokens} tokens has {len(passage)} sentences, too few for {n_facts} "
            "facts; use longer passages or fewer facts"
        )
    return _case_of(rng, passage, facts, planted)


def _planted(facts: Sequence[Fact], count_tokens: Callable[[str], int]) -> list[_Sentence]:
    texts = [f"{fact.statement} " for fact in facts]
    return [_Sentence(text, count_tokens(text)) for text in texts]


def _case_of(
    rng: random.Random,
    passage: Sequence[_Sentence],
    facts: Sequence[Fact],
    planted: Sequence[_Sentence],
) -> Case:
    """Put every fact before a sentence of the passage, which has at least as many sentences as
    there are facts.
    """
    places = sorted(rng.sample(range(len(passage)), len(facts)))
    total = sum(sentence.n_tokens for sentence in (*passage, *planted))
    pieces: list[str] = []
    depths: list[float] = []
    before = 0
    for number, sentence in enumerate(passage):
        if number in places:
            fact = planted[len(depths)]
            pieces.append(fact.text)
            depths.append(before / total)
            before += fact.n_tokens
        pieces.append(sentence.text)
        before += sentence.n_tokens
    return Case("".join(pieces).rstrip(), tuple(facts), tuple(depths))


def _fact(rng: random.Random, wording: Wording) -> Fact:
    who = rng.choice(wording.subjects)
    return Fact(wording.question.format(who=who), wording.stem.format(who=who), wording.value(rng))


def _passage(rng: random.Random, sentences: Sequence[_Sentence], room: int) -> list[_Sentence]:
    """Return consecutive whole sentences of at most `room` tokens, from a random one on; the first
    sentence follows the last.
    """
    first = rng.randrange(len(sentences))
    return _from_first((*sentences[first:], *sentences[:first]), room)


def _from_first(sentences: Sequence[_Sentence], room: int) -> list[_Sentence]:
    """Return the first sentences that have at most `room` tokens together."""
    passage: list[_Sentence] = []
    for sentence in sentences:
        room -= sentence.n_tokens
        if room < 0:
            break
        passage.append(sentence)
    return passage


_MORE_TOKENS = 3
"""How many more tokens an answer may have than the value, which may be split into tokens
differently.
"""


@dataclass(frozen=True)
class RecallItem(Item):
    """Hold a passage with facts, and for each fact the tokens that ask for it."""

    case: Case
    questions: tuple[tuple[int, ...], ...]
    answer_tokens: tuple[int, ...]
    """For each fact, how many tokens are written before the answer is judged."""


class RecallPart(AnswersPart):
    """Measure how many facts are recalled, over all passages; the budget does not grow for the
    questions.
    """

    name = "passkeys"

    def __init__(self, items: Sequence[RecallItem]) -> None:
        """Use items that recall_items() made."""
        self.items = items
        self.n_ctx = max(_longest(item) for item in items)

    def answer(self, session: AnySession, last: Logits, item: RecallItem, tick: Tick) -> Values:  # noqa: ARG002
        """Ask for every fact, each time from the state after the passage."""
        state: Any = session.files.save_state()
        answers = []
        for question, n_tokens in zip(item.questions, item.answer_tokens, strict=True):
            session.files.load_state(state)
            first, _ = read(session, question, tick)
            written = write(session, first, n_tokens, tick, stops=True)
            answers.append(session.detokenize(written.tokens))
        right = [
            fact.is_answered_by(answer)
            for fact, answer in zip(item.case.facts, answers, strict=True)
        ]
        return {"right": right, "answers": answers}


def recall_items(
    texts: Sequence[Text],
    model: Model,
    *,
    n_cases: int,
    n_tokens: int,
    facts_per_text: int,
    seed: int,
) -> list[RecallItem]:
    """Make passages of the texts with facts and questions. Raises the errors of make_cases(), and
    ContextError if a passage with a question exceeds the trained context.
    """

    def tokens_of(text: str, *, add_bos: bool = False) -> tuple[int, ...]:
        return tuple(model.tokenize(text, add_bos=add_bos, special=True))

    cases = make_cases(
        [text.content for text in texts],
        lambda text: len(tokens_of(text)),
        n_cases=n_cases,
        n_tokens=n_tokens,
        facts_per_text=facts_per_text,
        seed=seed,
    )
    items = []
    for number, case in enumerate(cases):
        tokens = tokens_of(case.text, add_bos=model.adds_bos)
        questions = tuple(tokens_of(fact.prompt) for fact in case.facts)
        answers = tuple(len(tokens_of(f" {fact.value}")) + _MORE_TOKENS for fact in case.facts)
        items.append(
            RecallItem(
                f"passage {number}",
                digest_of(json.dumps(asdict(case))),
                tokens,
                len(tokens) + sum(map(len, questions)) + sum(answers),
                case,
                questions,
                answers,
            )
        )
    longest, trained = max(map(_longest, items)), model.geometry.n_ctx_train
    if longest > trained:
        raise ContextError(
            f"passages with a question have up to {longest} tokens, more than the {trained} that "
            "the model was trained for; lower --passkey-tokens"
        )
    return items


def _longest(item: RecallItem) -> int:
    return len(item.tokens) + max(map(len, item.questions)) + max(item.answer_tokens)
