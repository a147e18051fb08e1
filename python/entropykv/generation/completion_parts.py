"""Read the events of an answer as the parts of a completion, for writers of all its forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from entropykv.generation.events import AnswerPiece, Ended, Event, PromptRead
from entropykv.session.logprobs import CompletionLogprobs, HeldValues, TokenLogprob


class CompletionPart(NamedTuple):
    """Hold what a part of a completion adds, or all of it."""

    text: str
    values: Sequence[TokenLogprob]
    """The log probabilities that belong to the text."""
    tokens: Sequence[int]
    ended: Ended | None = None
    """Why the completion ends here; None: it goes on."""

    @property
    def reason(self) -> str | None:
        """Return why the completion ends here, in OpenAI's words; None: it goes on."""
        return None if self.ended is None else self.ended.reason


class CompletionReader:
    """Read the events of one completion."""

    def __init__(self, echo: str = "", logprobs: CompletionLogprobs | None = None) -> None:
        """Begin with a text, that of the prompt if it is repeated.

        `logprobs` shows the values of the prompt's tokens; None: they were not asked for.
        """
        self._echo, self._logprobs = echo, logprobs
        self.n_prompt = 0
        """How many tokens the prompt has, once it was read."""

    def parts(self, events: Iterator[Event]) -> Iterator[CompletionPart]:
        """Yield a part for every piece of text, with what came since the one before, and the
        end, with the rest.
        """
        text, values, tokens = self._echo, list[TokenLogprob](), list[int]()
        for event in events:
            if isinstance(event, PromptRead):
                self.n_prompt = event.n_tokens
                if self._logprobs is not None:
                    values += self._logprobs.of_prompt(event.logprobs)
            elif isinstance(event, AnswerPiece):
                text += event.text
                values += event.logprobs
                tokens += [] if event.token is None else [event.token]
                if text:
                    yield CompletionPart(text, values, tokens)
                    text, values, tokens = "", [], []
            else:
                yield CompletionPart(text, values, tokens, event)

    def whole(self, events: Iterator[Event]) -> CompletionPart:
        """Return all of a completion; raises SettingsError for too many log probabilities."""
        text, held, tokens, ended = "", HeldValues(), list[int](), None
        for part in self.parts(events):
            text += part.text
            held.add(part.values)
            tokens += part.tokens
            ended = part.ended
        return CompletionPart(text, held.values, tokens, ended)
