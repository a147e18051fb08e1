"""Continue a session from the longest part of a prompt that it has read already, even if its text
was read in other tokens.

A chat that is rendered again is tokenised by the tokenizer; the model may have generated the same
text in other tokens ("hel" + "lo"). Tokens that were read are reused if the texts agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from entropykv.generation.prompt import GenerationRequest, Prompt
from entropykv.llamacpp.model import Model
from entropykv.session.reuse import LEAST_SPARED, Demand, ReuseSource, common_prefix, reuse_of
from entropykv.session.sequence import is_placeholder
from entropykv.session.session import Session

_BYTES = 256
_IMAGES = 0x100000
"""The first of 65,536 characters that stand for images: no vocabulary has so many tokens."""


def resume(
    session: Session,
    request: GenerationRequest,
    *,
    reads_question: bool = False,
    repeatable: bool = True,
) -> int:
    """Go back in a session's text to where a prompt can continue; returns how many tokens of the
    prompt the session has read then.

    If the prompt begins with what was read, all of that is kept. Otherwise the text is cut where a
    reading from the start would also begin a micro-batch, so that a repeated prompt gets the same
    answer, but only if nothing was evicted since, and nothing will be before the answer ends. A
    checkpoint can be returned to in any case. `reads_question`: see Demand. Without `repeatable`,
    the text is cut where the prompt departs from it, so that less is read again. For log
    probabilities of the prompt, the text is cleared.
    """
    tokens, most = request.prompt.tokens, request.max_tokens
    if request.prompt_logprobs:  # Log probabilities of every token were requested.
        session.text.truncate(0)
        return 0
    end = session.config.n_ctx if most < 0 else len(tokens) + most
    demand = Demand(
        is_cut=repeatable,
        end=end if repeatable else None,
        knows_prompt=True,
        reads_question=reads_question,
    )
    held = session.text.held()
    reuse = reuse_of(held, tokens, demand)
    if reuse.source is ReuseSource.PROMPT:
        if session.text.return_to_prompt(reuse.position, end if repeatable else reuse.position):
            return reuse.position
        reuse = reuse_of(held, tokens, replace(demand, knows_prompt=False))
    if reuse.source is ReuseSource.WHOLE:
        return reuse.position
    beyond = max(reuse.position, LEAST_SPARED - 1)
    found = session.text.return_to_checkpoint(
        tokens, beyond, repeatable=repeatable, reads_question=reads_question
    )
    if not found:
        # A checkpoint for which there is no room leaves the session empty.
        session.text.truncate_or_clear(min(reuse.position, session.position))
    if session.position == len(tokens) and session.logits is None:
        session.text.truncate(0)
    return session.position


def as_held(session: Session, prompt: Prompt) -> list[int]:
    """Return the tokens of a prompt as those that a session has read, if both are the same text.

    What a model has written may be tokenised otherwise than the same text in a later prompt. Then
    usage and limits refer to the tokens that were read. Without any difference, where the text is
    another one, or if it would fill the context, it returns the prompt's own tokens.
    """
    held, tokens = session.tokens, prompt.tokens
    if not held or common_prefix(held, tokens) == len(held):
        return tokens
    found = spelled_on(session.model, held, tokens)
    return found if found is not None and len(found) < session.config.n_ctx else tokens


def spelled_on(model: Model, held: Sequence[int], tokens: Sequence[int]) -> list[int] | None:
    """Return tokens of the same text that begin with those in `held`; None if there are none."""

    def spell(token: int) -> str:
        piece = b"" if is_placeholder(token) else model.token_bytes(token)
        return spelling(piece) if piece else control_symbol(token)

    return continuing(held, tokens, spell, model.tokenize_bytes)


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

    Control tokens must be equal; `spell(token)`: their control_symbol(), else spelling() of the
    bytes. If the cached text ends within a token of the prompt, the text from there to the next
    control token is tokenised again: `tokenize` reads text without control tokens.
    """
    start = common_prefix(cached, prompt)
    ahead = ""  # What the prompt's text has beyond that of the cached tokens.
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
