"""Hold a conversation in one session, where a new turn does not read former ones again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from entropykv.cli.answer import Answer, read_rest, write_answer
from entropykv.cli.request_options import prompt_of, with_places
from entropykv.cli.saved import check_chat, load_session, save_session
from entropykv.cli.terminal import InterruptionError, noted_interrupts
from entropykv.errors import EntropyKVError, SettingsError
from entropykv.generation.prompt import GenerationRequest, Prompt
from entropykv.llamacpp.model import plain_chat
from entropykv.session.file import check_target, open_session
from entropykv.session.generate import go_back
from entropykv.session.session import Session
from entropykv.settings.sampling import Sampling
from entropykv.thinking.tags import AnswerFrame, ThinkingOptions


@dataclass(frozen=True)
class Turn:
    """Hold what the user said, and the answer."""

    text: str
    answer: str
    """The text of the answer, without what was thought before it."""
    start: int
    """The position of the session before this turn."""
    files: tuple[bytes, ...] = ()
    """The contents of the image files that were shown with the turn."""


class Conversation:
    """Hold turns with the model's chat template, or lines of plain text if it has none.

    `system` is read before the first turn. Between two turns, everything that was shown has been
    read. Therefore a conversation that was saved and loaded continues exactly like one that was
    not. What a model thinks before an answer is no part of the conversation: the session goes back
    to before it, and reads the answer as the chat template shows it in later turns.
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
        thinking: ThinkingOptions | None = None,
        folds: bool = True,
    ) -> None:
        """Use a session; raises as Model.chat_prompt() does if the template cannot be used."""
        self.session = session
        self.turns: list[Turn] = []
        self.loaded_text = ""
        """The text that a loaded session had read, without special tokens."""
        self.files: list[bytes] = []
        """The contents of the image files that are shown with the next turn."""
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._stops = stops
        self._system = system
        self._answers = use_template
        self._thinking = thinking or ThinkingOptions()
        self._folds = folds
        self._end_of_document: int | None = None
        """The position where the first question about a document is read; None without one."""
        self._is_chat = use_template and session.model.chat_prompt("-", system) is not None

    def begin_after_document(self) -> None:
        """Treat the text that the session has read as a document: the next turn is a question about
        it.
        """
        self._end_of_document = self.session.position

    def ask(self, text: str) -> Answer:
        """Read the user's turn, and write the answer to stdout.

        If the turn could not be read completely, it is removed again. Raises ContextError if it
        does not fit into the context, ImageError for images that cannot be read, and the errors of
        Session.generate().
        """
        start = self.session.position
        answer = Answer()
        try:
            shown = with_places(text, len(self.files)) if self.files else text
            with noted_interrupts() as interrupts:
                prompt = self._prompt(shown, interrupts.check)
        except InterruptionError:  # An image was being encoded.
            answer.interrupted = True
            return answer
        except EntropyKVError:
            self.files = []  # With these images, every further turn would fail as well.
            raise
        thought = prompt.thought
        place = start + len(prompt.tokens) - (0 if thought is None else thought.n_left_out)
        request = GenerationRequest(
            prompt, self._sampling, self._max_tokens, tuple(self._stops), self._thinking
        )
        end = partial(self._end_turn, start, text, answer, None if thought is None else place)
        try:
            write_answer(
                self.session, request, answer, to_question=self._answers, folds=self._folds
            )
        except EntropyKVError:
            # A second error would not help the user; the first one is raised.
            with contextlib.suppress(EntropyKVError):
                end()
            raise
        end()
        return answer

    def _chat_text(self, text: str) -> str | None:
        """Return what the chat template makes of a turn; None for plain text."""
        session = self.session
        if session.position == self._end_of_document:
            return session.question_text(text, chat=self._is_chat)
        if not self._is_chat:
            return None
        if session.position == 0:
            return session.model.chat_prompt(text, self._system)
        return session.model.chat_turn(text)

    def _prompt(self, text: str, poll: Callable[[], object]) -> Prompt:
        session, first = self.session, self.session.position == 0
        chat = self._chat_text(text)
        if chat is not None:
            return prompt_of(
                session, chat, self.files, add_bos=False, is_answer=self._is_chat, poll=poll
            )
        before = ([] if self._system is None else [self._system]) if first else [""]
        add_bos = None if first else False
        lines = plain_chat([*before, text])
        if self._answers:  # Otherwise the user writes all of the prompt, also control tokens.
            lines = session.model.said(lines)
        return prompt_of(session, lines, self.files, add_bos=add_bos, poll=poll)

    def _end_turn(self, start: int, text: str, answer: Answer, place: int | None) -> None:
        """Keep the turn, or go back to before it if its prompt was not read to its end.

        `place` is the position at which an answer without a thought begins, None for a model that
        does not think.
        """
        with noted_interrupts():
            if answer.unread is None:
                if self.session.position > start:
                    go_back(self.session, start)
                return
            files, self.files = tuple(self.files), []
            if place is None:
                said = self.session.detokenize(answer.tokens)
                self.turns.append(Turn(text, said, start, files))
                read_rest(self.session, answer.unread)
                return
            self.turns.append(Turn(text, answer.text, start, files))
            self._forget_thought(place, answer)

    def _forget_thought(self, place: int, answer: Answer) -> None:
        """Go back to before the thought, and read the answer in the form that later turns have."""
        session, frame = self.session, self.session.model.answer_frame
        if frame == AnswerFrame() and answer.n_thought == 0:
            read_rest(session, answer.unread or [])
            return
        self._return_to(place)
        said = session.tokenize(frame.lead, add_bos=False) if frame.lead else []
        said += session.tokenize(answer.text, add_bos=False, special=False)
        start = time.perf_counter()
        if read_rest(session, said):
            session.counts.add_prompt(len(said), time.perf_counter() - start)

    def _return_to(self, position: int) -> None:
        """Roll back to a position; if something was evicted since, return to a checkpoint and read
        the text after it again.
        """
        session = self.session
        if session.text.held().can_return_to(position):
            session.text.truncate(position)
            return
        tokens = session.tokens[:position]
        if not session.text.return_to_checkpoint(tokens):
            session.text.truncate(0)
        read_rest(session, tokens[session.position :])

    def undo(self) -> Turn:
        """Remove the last turn, and return it; raises SettingsError if there is none.

        If entries were evicted during the turn, the text before it is read again, from the last
        checkpoint on if there is one.
        """
        if not self.turns:
            raise SettingsError("there is no turn to remove; say something first")
        turn = self.turns[-1]
        with noted_interrupts():
            self._return_to(turn.start)
        self.turns.pop()
        return turn

    def ask_again(self) -> Answer:
        """Remove the last turn, and ask it again; raises the errors of undo() and ask()."""
        turn = self.undo()
        self.files = list(turn.files)
        return self.ask(turn.text)

    def begin_with(self, system: str) -> None:
        """Remove all turns, and set the system message for the next one; raises as
        Model.chat_prompt() does if the chat template cannot show it.
        """
        if self._is_chat:
            # Raises if the template does not support a system message.
            self.session.model.chat_prompt("-", system)
        self._system = system
        self.reset()

    def was_cut(self, answer: Answer) -> bool:
        """Tell whether an answer ended only because it reached its maximum length."""
        return len(answer.tokens) == self._max_tokens

    def reset(self) -> None:
        """Remove all turns."""
        self.session.reset()
        self._end_of_document = None
        self.turns, self.loaded_text = [], ""

    def save(self, path: str) -> None:
        """Save the session; raises SessionFileError if the file cannot be written."""
        check_target(path)
        save_session(self.session, path, [], chat=self._is_chat)

    def load(self, path: str) -> None:
        """Replace this conversation by a saved session. Raises SessionFileError for a file that
        cannot be loaded, and SettingsError for a document, and for plain text instead of a chat or
        vice versa.
        """
        with open_session(path) as reader:
            check_chat(reader.contents, self._is_chat, path)
        load_session(self.session, path)
        self._end_of_document = None
        self.turns, self.loaded_text = [], self.session.detokenize(self.session.tokens)
