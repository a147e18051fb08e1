"""Offer a model's vocabulary and templates in a session: ModelText."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from entropykv._core import TokenTrie
from entropykv.llamacpp.model import Model
from entropykv.session.image_spans import is_placeholder


class ModelText:
    """Turn text into tokens of a model, and tokens into text."""

    _model: Model

    @property
    def n_vocab(self) -> int:
        """Return the size of the vocabulary."""
        return self._model.n_vocab

    @property
    def vocabulary(self) -> Any:
        """Return the llama_vocab, for samplers of llama.cpp."""
        return self._model.vocabulary

    @property
    def token_trie(self) -> TokenTrie:
        """Return the texts of all tokens, for grammars."""
        return self._model.token_trie

    def tokenize(self, text: str, add_bos: bool | None = None, special: bool = True) -> list[int]:
        """Return the tokens of a text; `add_bos` None: as the model wants.

        `special`: names of control tokens are read as such.
        """
        add = self._model.adds_bos if add_bos is None else add_bos
        return self._model.tokenize(text, add_bos=add, special=special)

    def detokenize(self, tokens: Sequence[int], special: bool = False) -> str:
        """Return the text of tokens, without images; `special`: with control tokens."""
        text = [token for token in tokens if not is_placeholder(token)]
        return self._model.detokenize(text, special=special)

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of a token, for output as it comes; `special`: of control tokens.

        Those of an image have none.
        """
        if is_placeholder(token):
            return b""
        return self._model.token_bytes(token, special=special)

    def chat_prompt(self, text: str, system: str | None = None) -> str | None:
        """Return the prompt of one user turn: see Model.chat_prompt."""
        return self._model.chat_prompt(text, system)

    def chat_turn(self, text: str) -> str | None:
        """Return what a further user turn adds after an answer: see Model.chat_turn."""
        return self._model.chat_turn(text)

    def is_end(self, token: int) -> bool:
        """Tell whether a token ends the generation."""
        return self._model.is_end(token)
