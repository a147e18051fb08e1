"""Compute how probable the tokens of a text were, from the logits that each was chosen by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv.errors import SettingsError
from entropykv.llamacpp.distributions import log_softmax
from entropykv.llamacpp.model import Model
from entropykv.session.sequence import is_placeholder

Row = npt.NDArray[np.float32]
MOST_LOGIT_BYTES = 32 << 20
"""The most bytes of logits that are held at a time while a prompt is read for log probabilities."""
MOST_VALUES = 131_072
"""The most log probabilities of one text that are held until they are sent, about 250 bytes each:
those of a whole answer or, in a stream, of its next piece.
"""


@dataclass(frozen=True)
class TokenLogprob:
    """Hold the log probability of a token, and of the most probable tokens at its position."""

    token: int
    logprob: float | None
    """The natural logarithm of the token's probability; None for the first token of a text, before
    which there are no logits.
    """
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens with their log probabilities, in descending order."""


def logprob_of(logits: Row, token: int, n_top: int) -> TokenLogprob:
    """Return the log probability of a token, and those of the `n_top` most probable tokens at its
    place.

    `logits`: those behind the token before it, (n_vocab,). Penalties, biases and temperature play
    no part: this is what the model itself considers probable.
    """
    values = log_softmax(logits[None])[0]
    n_top = min(n_top, len(values))
    best = np.argpartition(-values, n_top - 1)[:n_top] if n_top else np.zeros(0, dtype=np.intp)
    ranked = sorted(best.tolist(), key=lambda each: (-values[each], each))
    top = tuple((each, float(values[each])) for each in ranked)
    return TokenLogprob(token, float(values[token]), top)


def rows_at_a_time(n_vocab: int) -> int:
    """Return how many tokens of a prompt are read together if the logits of each are needed."""
    return max(1, MOST_LOGIT_BYTES // (n_vocab * np.dtype(np.float32).itemsize))


@dataclass
class LogprobRecorder:
    """Collect the log probabilities of the tokens of one text while it is read and written."""

    n_top: int
    of_prompt: bool = False
    """True if the log probabilities of the prompt are wanted, too; then all of the prompt must be
    read.
    """
    prompt: list[TokenLogprob] = field(default_factory=list)
    written: list[TokenLogprob] = field(default_factory=list)
    last: int | None = None
    """The token that was written last."""
    _n_values: int = 0
    _before: Row | None = None
    """The logits behind the last token of the prompt that was read; None before the first one."""

    def read(self, tokens: Sequence[int], logits: Row) -> None:
        """Add tokens of the prompt; `logits`: those behind each, (tokens, n_vocab).

        Raises SettingsError for more values than MOST_VALUES, as write() does.
        """
        for token, behind in zip(tokens, logits, strict=True):
            before = self._before
            value = (
                TokenLogprob(token, None)
                if before is None
                else logprob_of(before, token, self.n_top)
            )
            self.prompt.append(self._counted(value))
            self._before = behind
        # Without a copy, the row would keep the logits of all other tokens in memory.
        self._before = None if self._before is None else self._before.copy()

    def write(self, token: int, logits: Row) -> None:
        """Add a token that was chosen by `logits`, (n_vocab,). Raises SettingsError for more values
        than MOST_VALUES.
        """
        self.last = token
        self.written.append(self._counted(logprob_of(logits, token, self.n_top)))

    def take(self, n_written: int) -> list[TokenLogprob]:
        """Return the log probabilities of the prompt and of the first `n_written` written tokens,
        and drop them.
        """
        taken = [*self.prompt, *self.written[:n_written]]
        self._n_values -= sum(1 + len(each.top) for each in taken)
        self.prompt, self.written = [], self.written[n_written:]
        return taken

    def _counted(self, value: TokenLogprob) -> TokenLogprob:
        """Return the log probability of a token, counted as held; raises SettingsError beyond
        MOST_VALUES.
        """
        self._n_values += 1 + len(value.top)
        _check_number(self._n_values)
        return value


def _check_number(n_values: int) -> None:
    if n_values > MOST_VALUES:
        raise SettingsError(
            f"logprobs: they are more than {MOST_VALUES:,} values together; ask for fewer of them, "
            "for fewer tokens, or for a stream"
        )


class HeldValues:
    """Hold the log probabilities of an answer's tokens until it is sent as a whole."""

    def __init__(self) -> None:
        """Begin without tokens."""
        self.values: list[TokenLogprob] = []
        self._n_values = 0

    def add(self, values: Sequence[TokenLogprob]) -> None:
        """Add log probabilities of tokens; raises SettingsError for more than MOST_VALUES."""
        self.values += values
        self._n_values += sum(1 + len(each.top) for each in values)
        _check_number(self._n_values)


def text_of(model: Model, token: int) -> str:
    """Return the text of a token; bytes that are only a part of a character are left out."""
    data = b"" if is_placeholder(token) else model.token_bytes(token)
    return data.decode("utf-8", errors="ignore")


class CompletionLogprobs:
    """Show log probabilities as the field `logprobs` of OpenAI's completions has them, part by
    part.
    """

    def __init__(self, model: Model, offset: int) -> None:
        """Show tokens of a model by their texts.

        `offset`: where the first token begins in the text of prompt and answer, in characters.
        """
        self._model = model
        self._offset = offset

    def of_prompt(self, values: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        """Return the log probabilities of a prompt as OpenAI shows them: a token that only begins a
        text is left out, and the first one has no value.
        """
        shown = list(values)
        if shown and not text_of(self._model, shown[0].token):
            del shown[0]
        return [*(TokenLogprob(each.token, None) for each in shown[:1]), *shown[1:]]

    def shown(self, values: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Return OpenAI's field `logprobs` for `values`; None if they are empty. Text offsets
        continue those of earlier calls.
        """
        if not values:
            return None
        texts, offsets, tops = [], [], []
        for each in values:
            text = text_of(self._model, each.token)
            texts.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            top = {text_of(self._model, token): value for token, value in each.top}
            tops.append(None if each.logprob is None else {**top, text: each.logprob})
        return {
            "tokens": texts,
            "text_offset": offsets,
            "token_logprobs": [each.logprob for each in values],
            "top_logprobs": tops,
        }
