"""Find which tokens of a prompt a cache already holds, even if its text was read in other tokens.

A chat that is rendered again is tokenised by the tokenizer; the model may have generated the same
text in other tokens ("hel" + "lo"). Tokens that were read are reused if the texts agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from entropykv.session.prefix_index import common_prefix

_BYTES = 256
_IMAGES = 0x100000
"""The first of 65,536 characters that stand for images: no vocabulary has so many tokens."""


def spelling(piece: bytes) -> str:
    """Return a token's bytes as characters below 256, so that control tokens can use characters
    above.
    """
    return piece.decode("latin-1")


def control_symbol(token: int) -> str:
    """Return a control token's symbol, which differs from every text, including its own name.

    Placeholders of images are below -1. Their symbols are two characters that no vocabulary has.
    """
    if token < 0:
        high, low = divmod(-token, 1 << 16)
        return chr(_IMAGES + high) + chr(_IMAGES + low)
    return chr(_BYTES + token)


def continuing(
    cached: Sequence[int],
    prompt: Sequence[int],
    spell: Callable[[int], str],
    tokenize: Callable[[bytes], Sequence[int]],
) -> list[int] | None:
    """Return tokens of the same text as `prompt` that begin with `cached`; None if there are none.

    Control tokens must be equal; `spell` is control_symbol() for them, else spelling(). If the
    cached text ends within a token of the prompt, the text from there to the next control token is
    tokenised again: `tokenize` reads text without control tokens.
    """
    start = common_prefix(cached, prompt)
    ahead = ""  # How far the prompt's text so far exceeds that of the cached tokens.
    read = start
    for token in cached[start:]:
        text = spell(token)
        while len(ahead) < len(text):
            if read == len(prompt):
                return None
            ahead += spell(prompt[read])
            read += 1
        if not ahead.startswith(text):
            return None
        ahead = ahead[len(text) :]
    if not ahead:
        return [*cached, *prompt[read:]]
    while read < len(prompt) and not _is_control(spell(prompt[read])):
        ahead += spell(prompt[read])
        read += 1
    fragment = _fragment(ahead, spell, tokenize)
    return None if fragment is None else [*cached, *fragment, *prompt[read:]]


def _is_control(text: str) -> bool:
    return text != "" and ord(text[0]) >= _BYTES


def _fragment(
    text: str, spell: Callable[[int], str], tokenize: Callable[[bytes], Sequence[int]]
) -> list[int] | None:
    """Return tokens that spell exactly `text`, which may begin within a word; None if there are
    none.

    Some tokenizers put a space before every text. For these, a line break is put before the text,
    and both are removed from the result.
    """
    for lead in ("", "\n"):
        tokens = list(tokenize((lead + text).encode("latin-1")))
        dropped = ""
        while tokens and dropped.lstrip(" ") != lead:
            dropped += spell(tokens.pop(0))
        if "".join(map(spell, tokens)) == text:
            return tokens
    return None
