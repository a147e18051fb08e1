"""Measure a long conversation: memory, speed and recall over 60 turns, beyond the trained context.

python benchmarks/chat.py

Every turn states facts, and asks for one that was stated in this turn or in the two before it. The
turns are read as in `entropykv chat`, with its default budget. Resident memory is compared between
turn 15, when the budget is full, and the last turn. Speeds (tokens written, divided by the time for
writing) are those of turns 6 to 15 and of the last ten.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from entropykv import Session
from entropykv.cli.chat import BUDGET
from entropykv.cli.conversation import Conversation
from entropykv.cli.options import CONTEXT
from entropykv.model import shipped
from entropykv.model.geometry import read_geometry
from entropykv.settings.sampling import Sampling

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from training.facts import Fact, Writer

WARM_UP = 15
SPAN = 10
LATEST_TURNS = 3
KNOWN = 240  # The number of facts that are not stated again: more than the budget holds.


@dataclass(frozen=True)
class Style:
    """Hold how turns are written for a model: the facts of a turn, filler sentences, and how
    answers are judged.
    """

    facts: int
    filler: int
    system: str | None
    exact: bool
    """If true, an answer must be the sentence word for word; else it must have the fact's value."""
    answer_tokens: int


MODELS = {
    "bitnet": Style(facts=14, filler=3, system=None, exact=True, answer_tokens=12),
    "smollm2": Style(
        facts=5,
        filler=30,
        system="The user tells you facts. Answer each question in one short sentence.",
        exact=False,
        answer_tokens=24,
    ),
}


@dataclass(frozen=True)
class Result:
    """Hold the figures of a conversation: bytes, tokens per second, and shares of right answers."""

    tokens: int
    rss_growth: int
    early_speed: float
    late_speed: float
    right: float
    right_at_once: float
    """The share of right answers among the questions about a fact of the same turn."""


def resident_bytes() -> int:
    """Return the resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Script:
    """Make turns with a question each, and remember the fact that answers it."""

    def __init__(self, style: Style) -> None:
        self._style = style
        self._writer = Writer("chat")
        self._random = self._writer.random
        self._known: dict[tuple[int, int], Fact] = {}
        self._told: list[list[Fact]] = []

    def turn(self) -> tuple[str, Fact, int]:
        """Return the text of a turn, the fact that it asks for, and how many turns ago that fact
        was stated.
        """
        facts = [self._fact() for _ in range(self._style.facts)]
        self._told = [*self._told, facts][-LATEST_TURNS:]
        sentences = ["".join(fact.statement()) for fact in facts]
        sentences += ["".join(self._writer.filler()) for _ in range(self._style.filler)]
        self._random.shuffle(sentences)
        back = self._random.randrange(len(self._told))
        asked = self._random.choice(self._told[-1 - back])
        text = " ".join(f"{sentence.strip()}." for sentence in sentences)
        return f"{text}\n{''.join(asked.question())}", asked, back

    def _fact(self) -> Fact:
        fact = self._writer.fact(self._known, self._random.random() < 0.5)
        self._known[fact.subject, fact.relation] = fact
        if len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]
        return fact


def is_right(answer: str, fact: Fact, style: Style) -> bool:
    """Tell whether an answer is right; see Style.exact."""
    if style.exact:
        return answer.strip() == f"{''.join(fact.statement()).strip()}."
    value = "".join(fact.statement()).split(" ")[3:]
    return all(word in answer for word in value if word != "a")


def talk(session: Session, style: Style, n_turns: int) -> Result:
    """Hold a conversation of n_turns turns, and return its figures."""
    conversation = Conversation(
        session, Sampling(), max_tokens=style.answer_tokens, system=style.system
    )
    script = Script(style)
    right: list[tuple[bool, int]] = []
    marks = []  # Tokens written, seconds, and resident bytes after every turn.
    for _ in range(n_turns):
        text, fact, back = script.turn()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            conversation.ask(text)
        right.append((is_right(conversation.turns[-1].answer, fact, style), back))
        stats = session.stats()
        marks.append((stats.generated_tokens, stats.decode_seconds, resident_bytes()))

    def speed(first: int, last: int) -> float:
        return (marks[last][0] - marks[first][0]) / (marks[last][1] - marks[first][1])

    now = [correct for correct, back in right if back == 0]
    return Result(
        tokens=session.position,
        rss_growth=marks[-1][2] - marks[WARM_UP - 1][2],
        early_speed=speed(WARM_UP - SPAN - 1, WARM_UP - 1),
        late_speed=speed(-SPAN - 1, -1),
        right=sum(correct for correct, _ in right) / len(right),
        right_at_once=sum(now) / len(now),
    )


def main() -> None:
    """Hold the conversation with each model, and print a table of the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="bitnet,smollm2")
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--kv-budget", default=str(BUDGET))
    parser.add_argument("-t", "--threads", type=int, default=2)
    arguments = parser.parse_args()
    print(
        "| model | turns | tokens (of trained) | KV MiB | RSS growth MiB | tok/s turns 6-15 | "
        "last ten | ratio | right: latest 3 turns | same turn |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in arguments.models.split(","):
        local = shipped.smollm2() if name == "smollm2" else shipped.DEMOS[name]
        with Session(
            local.path, n_ctx=CONTEXT, kv_budget=arguments.kv_budget, n_threads=arguments.threads
        ) as session:
            result = talk(session, MODELS[name], arguments.turns)
            kv_bytes = session.stats().kv_bytes_peak
        trained = read_geometry(local.path).n_ctx_train
        print(
            f"| {name} | {arguments.turns} | {result.tokens} ({result.tokens / trained:.1f}x"
            f" {trained}) | {kv_bytes / 2**20:.1f} | {result.rss_growth / 2**20:.1f} | "
            f"{result.early_speed:.0f} | {result.late_speed:.0f} | "
            f"{result.late_speed / result.early_speed:.2f} | {result.right:.0%} | "
            f"{result.right_at_once:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
