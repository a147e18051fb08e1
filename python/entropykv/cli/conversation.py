"""Hold a conversation in one session; every turn reads only new tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from entropykv.cli.answer import Answer, read_rest, write_answer
from entropykv.cli.image_options import tokens_of, with_places
from entropykv.cli.interrupts import noted_interrupts
from entropykv.cli.saved import check_chat, load_session, save_session
from entropykv.errors import EntropyKVError, SettingsError
from entropykv.session.file import check_target, open_session
from entropykv.session.generate import go_back
from entropykv.session.sampling import Sampling
from entropykv.session.session import Session


@dataclass(frozen=True)
class Turn:
    """Hold what the user said, and the answer."""

    text: str
    answer: str
    start: int
    """The position of the session before this turn."""
    files: tuple[bytes, ...] = ()
    """The files of the images that were shown with it."""


class Conversation:
    """Hold turns with the model's chat template, or lines of plain text if it has none.

    `system` is read before the first turn. Between two turns, everything that was shown has been
    read. Therefore a conversation that was saved and loaded continues exactly like one that was
    not.
    """

    def __init__(
        self,
        session: Session,
        sampling: Sampling,
        *,
        max_tokens: int,
        stops: Sequence[str] = (),
        system: str | None = None,
        use_template: bool = True,
    ) -> None:
        """Use a session; raises ModelFileError if the model's template cannot be used."""
        self.session = session
        self.turns: list[Turn] = []
        self.loaded_text = ""
        """The text that a loaded session had read, without special tokens."""
        self.files: list[bytes] = []
        """The files of images that are shown with the next turn."""
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._stops = stops
        self._system = system
        self._answers = use_template
        self._is_chat = use_template and session.chat_prompt("-", system) is not None

    def ask(self, text: str) -> Answer:
        """Read the user's turn, and write the answer to stdout.

        If the turn could not be read completely, it is removed again. Raises ContextError.
        """
        start = self.session.position
        answer = Answer()
        try:
            write_answer(
                self.session,
                self._tokens_of(text, self.files),
                self._max_tokens,
                self._sampling,
                answer,
                stops=self._stops,
                to_question=self._answers,
            )
        except EntropyKVError:
            # A second error would not help the user; the first one is raised.
            with contextlib.suppress(EntropyKVError):
                self._end_turn(start, text, answer)
            raise
        self._end_turn(start, text, answer)
        return answer

    def _tokens_of(self, text: str, files: list[bytes]) -> list[int]:
        text = with_places(text, len(files)) if files else text
        session, first = self.session, self.session.position == 0
        if self._is_chat:
            turn = session.chat_prompt(text, self._system) if first else session.chat_turn(text)
            return tokens_of(session, turn or "", files, add_bos=False)
        before = ([] if self._system is None else [self._system]) if first else [""]
        add_bos = None if first else False
        return tokens_of(session, "\n".join([*before, text]), files, add_bos=add_bos)

    def _end_turn(self, start: int, text: str, answer: Answer) -> None:
        with noted_interrupts():
            if answer.unread is None:
                if self.session.position > start:
                    go_back(self.session, start)
                return
            said = self.session.detokenize(answer.tokens)
            self.turns.append(Turn(text, said, start, tuple(self.files)))
            self.files = []
            read_rest(self.session, answer.unread)

    def undo(self) -> Turn:
        """Remove the last turn, and return it; raises SettingsError if there is none.

        If entries were evicted during the turn, the text before it is read again.
        """
        if not self.turns:
            raise SettingsError("there is no turn to remove; say something first")
        turn = self.turns[-1]
        with noted_interrupts():
            if self.session.can_return_to(turn.start):
                self.session.truncate(turn.start)
            else:
                self._read_again(self.session.tokens[: turn.start])
        self.turns.pop()
        return turn

    def ask_again(self) -> Answer:
        """Remove the last turn, and ask it again; raises the errors of undo() and ask()."""
        turn = self.undo()
        self.files = list(turn.files)
        return self.ask(turn.text)

    def _read_again(self, tokens: list[int]) -> None:
        self.session.truncate(0)
        read_rest(self.session, tokens)

    def begin_with(self, system: str) -> None:
        """Remove all turns, and set the system message for the next one; raises ModelFileError."""
        if self._is_chat:
            # Raises if the template does not support a system message.
            self.session.chat_prompt("-", system)
        self._system = system
        self.reset()

    def was_cut(self, answer: Answer) -> bool:
        """Tell whether an answer ended only because it reached its maximum length."""
        return len(answer.tokens) == self._max_tokens

    def reset(self) -> None:
        """Remove all turns."""
        self.session.reset()
        self.turns, self.loaded_text = [], ""

    def save(self, path: str) -> None:
        """Save the session; raises SessionFileError."""
        check_target(path)
        save_session(self.session, path, [], chat=self._is_chat)

    def load(self, path: str) -> None:
        """Replace this conversation by a saved session; raises SessionFileError."""
        with open_session(path) as reader:
            check_chat(reader.contents, self._is_chat, path)
        load_session(self.session, path)
        self.turns, self.loaded_text = [], self.session.detokenize(self.session.tokens)
