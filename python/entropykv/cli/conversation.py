"""A conversation in one session: every turn reads only what is new."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from entropykv.cli.answer import Answer, read_rest, write_answer
from entropykv.cli.interrupts import noted_interrupts
from entropykv.cli.saved import check_chat, load_session, save_session
from entropykv.errors import EntropyKVError
from entropykv.session.file import check_target, open_session
from entropykv.session.generate import Sampling, go_back
from entropykv.session.session import Session


@dataclass(frozen=True)
class Turn:
    """What the user said, and what came of it."""

    text: str
    answer: str


class Conversation:
    """Turns by the model's chat template, or lines of plain text where it has none.

    `system` stands before the first turn. Between two turns everything that was shown is read, so
    that a saved conversation goes on exactly as one that was not.
    """

    def __init__(
        self,
        session: Session,
        sampling: Sampling,
        *,
        max_tokens: int,
        system: str | None = None,
        use_template: bool = True,
    ) -> None:
        """Raise ModelFileError where the template cannot be used."""
        self.session = session
        self.turns: list[Turn] = []
        self.loaded_text = ""
        """What a loaded session had read, with special tokens left out."""
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._system = system
        self._is_chat = use_template and session.chat_prompt("-", system) is not None

    def ask(self, text: str) -> Answer:
        """Read the user's turn, and write the answer to stdout.

        Where the turn was not read completely, it is taken back. Raises ContextError.
        """
        start = self.session.position
        answer = Answer()
        try:
            write_answer(
                self.session, self._tokens_of(text), self._max_tokens, self._sampling, answer
            )
        except EntropyKVError:
            with contextlib.suppress(EntropyKVError):  # nothing more to tell than what was raised
                self._end_turn(start, text, answer)
            raise
        self._end_turn(start, text, answer)
        return answer

    def _tokens_of(self, text: str) -> list[int]:
        session, first = self.session, self.session.position == 0
        if self._is_chat:
            turn = session.chat_prompt(text, self._system) if first else session.chat_turn(text)
            return session.tokenize(turn or "", add_bos=False)
        before = ([] if self._system is None else [self._system]) if first else [""]
        return session.tokenize("\n".join([*before, text]), add_bos=None if first else False)

    def _end_turn(self, start: int, text: str, answer: Answer) -> None:
        with noted_interrupts():
            if answer.unread is None:
                if self.session.position > start:
                    go_back(self.session, start)
                return
            self.turns.append(Turn(text, self.session.detokenize(answer.tokens)))
            read_rest(self.session, answer.unread)

    def was_cut(self, answer: Answer) -> bool:
        """Whether an answer ended because it was long enough."""
        return len(answer.tokens) == self._max_tokens

    def reset(self) -> None:
        """Forget all turns."""
        self.session.reset()
        self.turns, self.loaded_text = [], ""

    def save(self, path: str) -> None:
        """Save the session. Raises SessionFileError."""
        check_target(path)
        save_session(self.session, path, [], chat=self._is_chat)

    def load(self, path: str) -> None:
        """Go on with a saved session, in place of this one. Raises SessionFileError."""
        with open_session(path) as reader:
            check_chat(reader.contents, self._is_chat, path)
        load_session(self.session, path)
        self.turns, self.loaded_text = [], self.session.detokenize(self.session.tokens)
