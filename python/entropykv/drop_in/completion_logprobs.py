"""Put the values of tokens into the answers of llama_cpp.Llama, whole and in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from entropykv.session.logprobs import LogprobRecorder, TokenLogprob

TextOf = Callable[[int], bytes]


class CompletionLogprobs:
    """Hand out the values of a completion's tokens, each with the piece that shows its beginning.

    Llama itself reads them from the logits of every token, which would have to be kept.
    """

    def __init__(
        self,
        recorder: LogprobRecorder,
        text_of: TextOf,
        is_end: Callable[[int], bool],
        *,
        bos: int,
        offset: int,
    ) -> None:
        """Use the values of a recorder; `text_of` returns the bytes of a token.

        `bos` is the token that only begins a prompt, and `offset` the length of the prompt's text,
        where the answer begins.
        """
        self._recorder = recorder
        self._text_of = text_of
        self._is_end = is_end
        self._n_given = 0
        self._n_bytes = 0
        """How many bytes the tokens have that were handed out."""
        self._n_shown = 0
        """How many bytes of the answer were shown."""
        self._offset = offset
        self._bos = bos
        self._begun = False

    def take(self, text: str, reason: str | None) -> dict[str, Any] | None:
        """Return the values of the tokens that begin in the next piece of the answer, if any do.

        `reason`: why the answer ends with this piece, if it does. Then all other tokens belong to
        it, unless a text of `stop`, which is left out, has ended it. The first piece also has the
        values of the prompt's tokens, if they were recorded.
        """
        self._n_shown += len(text.encode("utf-8"))
        written, tokens = self._recorder.written, []
        complete = reason == "length" or (
            reason is not None and len(written) > 0 and self._is_end(written[-1].token)
        )
        while self._n_given < len(written) and (complete or self._n_bytes < self._n_shown):
            each = written[self._n_given]
            if self._is_end(each.token):
                break
            self._n_given += 1
            self._n_bytes += len(self._text_of(each.token))
            tokens.append(each)
        if not self._begun and self._recorder.of_prompt:
            tokens = [*self._prompt(), *tokens]
            self._offset = 0
        self._begun = True
        return self._shown(tokens) if tokens else None

    def _prompt(self) -> list[TokenLogprob]:
        """Return the values of the prompt's tokens; the first has none, as in OpenAI's API."""
        tokens = self._recorder.prompt
        tokens = tokens[1:] if tokens and tokens[0].token == self._bos else tokens
        return [*(TokenLogprob(each.token, None) for each in tokens[:1]), *tokens[1:]]

    def _shown(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the values as the field `logprobs` of a completion has them."""
        texts, offsets, tops = [], [], []
        for each in tokens:
            text = self._name(each.token)
            texts.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            top = {self._name(token): value for token, value in each.top}
            tops.append(None if each.logprob is None else {**top, text: each.logprob})
        return {
            "tokens": texts,
            "text_offset": offsets,
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": tops,
        }

    def _name(self, token: int) -> str:
        return self._text_of(token).decode("utf-8", errors="ignore")
