"""Read a model's vocabulary for llguidance, once for every loaded model."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import llama_cpp

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_LONGEST = 1 << 14


@dataclass(frozen=True)
class TokenTexts:
    """Hold the texts of a vocabulary's tokens in the form that llguidance needs."""

    tokenizer: LLTokenizer
    token_of: Callable[[str], int | None]
    """Returns the token that a text such as <think> is; None if it is not exactly one."""
    ends: tuple[int, ...] = ()
    """The tokens that end a text."""


def token_texts_of(
    texts: Sequence[bytes],
    ends: Sequence[int],
    control: Sequence[int],
    token_of: Callable[[str], int | None],
) -> TokenTexts:
    """Return the TokenTexts of a vocabulary.

    `texts`: the bytes of every token. `ends`: the tokens that end a text. `control`: tokens that
    are a part of no text. `token_of`: see TokenTexts.
    """
    from llguidance import LLTokenizer  # noqa: PLC0415  # Few texts need it.

    # No model samples the token that is added: the text ends where nothing else is allowed.
    if not ends:
        texts, ends = [*texts, b""], [len(texts)]
    tokenizer: Any = _Tokens([*texts], ends[0], [*control])
    return TokenTexts(LLTokenizer(tokenizer, eos_token=[*ends]), token_of, tuple(ends))


def read_token_texts(vocabulary: Any) -> TokenTexts:
    """Read the tokens of a llama_vocab, which takes about 2 s for 150,000 of them."""
    tokens = range(llama_cpp.llama_vocab_n_tokens(vocabulary))
    buffer = ctypes.create_string_buffer(_LONGEST)
    texts = [_text(vocabulary, token, buffer) for token in tokens]

    def token_of(text: str) -> int | None:
        data = text.encode("utf-8")
        found = (llama_cpp.llama_token * 2)()
        count = llama_cpp.llama_tokenize(vocabulary, data, len(data), found, 2, False, True)
        return int(found[0]) if count == 1 else None

    return token_texts_of(
        texts,
        [token for token in tokens if llama_cpp.llama_vocab_is_eog(vocabulary, token)],
        [token for token in tokens if _is_control(vocabulary, token, texts[token])],
        token_of,
    )


def _text(vocabulary: Any, token: int, buffer: Any) -> bytes:
    size = llama_cpp.llama_token_to_piece(vocabulary, token, buffer, _LONGEST, 0, True)
    return ctypes.string_at(buffer, max(size, 0))


def _is_control(vocabulary: Any, token: int, text: bytes) -> bool:
    kind = llama_cpp.llama_vocab_get_attr(vocabulary, token)
    is_tag = text[:1] == b"<" and text[-1:] == b">"
    control, own = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL, llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
    return bool(kind & control or (is_tag and kind & own))


class _Tokens:
    """Give llguidance the texts of tokens by the names that it asks for.

    No text is divided into tokens for llguidance, because the model chooses every token.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], end: int, control: list[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = end
        self.special_token_ids = control

    def __call__(self, _: str) -> list[int]:
        return []
