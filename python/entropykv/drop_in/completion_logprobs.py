"""Put log probabilities of tokens into the answers of llama_cpp.Llama, whole and in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from entropykv.session.logprobs import LogprobRecorder, TokenLogprob, completion_logprobs

TextOf = Callable[[int], bytes]


class CompletionLogprobs:
    """Hand out the log probabilities of a completion's tokens, each with the piece that shows its
    beginning.

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
        """Use the log probabilities of a recorder; `text_of` returns the bytes of a token.

        `bos` is the token that only begins a prompt, and `offset` the length of the prompt's text,
        where the answer begins.
        """
        self._recorder = recorder
        self._text_of = text_of
        self._is_end = is_end
        self._n_bytes = 0
        """How many bytes the tokens have that were handed out."""
        self._n_shown = 0
        """How many bytes of the answer were shown."""
        self._offset = offset
        self._bos = bos

    def take(self, text: str, reason: str | None) -> dict[str, Any] | None:
        """Return the log probabilities of the tokens that begin in the next piece of the answer, if
        any do.

        `reason`: why the answer ends with this piece, if it does. Then all other tokens belong to
        it, unless a text of `stop`, which is left out, has ended it. The first piece also has those
        of the prompt's tokens, if they were recorded.
        """
        self._n_shown += len(text.encode("utf-8"))
        recorder = self._recorder
        ended = recorder.last is not None and self._is_end(recorder.last)
        complete = reason == "length" or (reason is not None and ended)
        n_taken, n_prompt = 0, len(recorder.prompt)
        for each in recorder.written:
            if self._is_end(each.token) or not (complete or self._n_bytes < self._n_shown):
                break
            n_taken += 1
            self._n_bytes += len(self._text_of(each.token))
        tokens = recorder.take(n_taken)
        if n_prompt:  # The text begins with the prompt; its first token has none, as at OpenAI.
            tokens = tokens[1:] if tokens[0].token == self._bos else tokens
            tokens = [*(TokenLogprob(each.token, None) for each in tokens[:1]), *tokens[1:]]
            self._offset = 0
        return self._shown(tokens) if tokens else None

    def _shown(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return log probabilities as the field `logprobs` of a completion has them."""
        shown = completion_logprobs(tokens, self._name, self._offset)
        self._offset += sum(map(len, shown["tokens"]))
        return shown

    def _name(self, token: int) -> str:
        return self._text_of(token).decode("utf-8", errors="ignore")
