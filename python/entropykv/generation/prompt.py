"""Say what is generated: prompts, made of the messages of a chat, of a text, or of tokens, and how
their answers are chosen and end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from entropykv.errors import ContextError, ImageError
from entropykv.llamacpp.model import Model
from entropykv.session.images import Images, ReadyImage
from entropykv.session.sequence import is_placeholder
from entropykv.settings.sampling import Sampling
from entropykv.thinking.tags import AnswerFrame, ThinkingOptions, ThoughtTags


@dataclass(frozen=True)
class PromptThought:
    """Hold what a prompt says of the thought that its answer may begin with."""

    tags: ThoughtTags
    opened: bool
    """Whether the prompt ends within the thought, because the template has begun it."""
    n_left_out: int
    """How many tokens at the end of the prompt are missing in later turns of the conversation."""


@dataclass(frozen=True)
class Prompt:
    """Hold what a model reads before it answers. Nothing of it changes."""

    tokens: list[int]
    text: str = ""
    """The text of the prompt; empty for one of tokens."""
    images: tuple[ReadyImage, ...] = ()
    """The images of the prompt, which are held until it is read."""
    n_document: int = 0
    """How many of the prompt's first tokens are those of a document."""
    thought: PromptThought | None = None
    """What the prompt says of the thought that follows; None for a text that is continued, and for
    a model that does not think.
    """


@dataclass(frozen=True)
class GenerationRequest:
    """Hold a request for one answer, which does not change while the answer is written."""

    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    """How tokens are chosen; its grammar says what the answer behind a thought must be."""
    max_tokens: int = -1
    """The most tokens of the answer; -1: until the model ends it or the context is full, 0: the
    prompt is only read.
    """
    stops: tuple[str, ...] = ()
    """Texts that end the answer, and are left out."""
    thinking: ThinkingOptions = field(default_factory=ThinkingOptions)
    """How long a thought may be, and where writers show it."""
    n_logprobs: int | None = None
    """How many of the most probable tokens are returned with their log probabilities at each token;
    None: no log probabilities at all.
    """
    prompt_logprobs: bool = False
    """Whether the log probabilities of the prompt's tokens are returned, too; then all of the
    prompt must be read.
    """
    penalizes_prompt: bool = True
    """Whether penalties consider the tokens of the prompt, too."""
    errors: Literal["replace", "ignore"] = "replace"
    """What becomes of bytes that are no character, as in bytes.decode()."""
    reads_anew: bool = False
    """Whether all of the prompt is read, whatever of it was read before."""


@dataclass(frozen=True)
class ShownImages:
    """Hold the images of a prompt whose text has a marker for each, and how they are read: see
    Images.tokenize().
    """

    images: Images
    files: Sequence[bytes]
    most_tokens: int
    owner: Hashable = None
    poll: Callable[[], object] | None = None
    """Called while images are encoded; it may raise to stop that."""

    def tokens_of(self, text: str, *, add_bos: bool) -> tuple[list[int], tuple[ReadyImage, ...]]:
        """Return the tokens of a text with placeholders, and the images that they stand for.

        Raises ImageError for images that cannot be read, or whose markers are not in the text, and
        ContextError for more than `most_tokens` tokens.
        """
        if text.count(self.images.marker) != len(self.files):
            raise ImageError(
                "the model's chat template does not show the images; use one that does "
                "(--chat-template)"
            )
        found = self.images.tokenize(
            text,
            self.files,
            add_bos=add_bos,
            most_tokens=self.most_tokens,
            owner=self.owner,
            poll=self.poll,
        )
        return found.tokens, found.images


def text_prompt(
    model: Model,
    text: str,
    *,
    add_bos: bool | None = None,
    shown: ShownImages | None = None,
    is_answer: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> Prompt:
    """Return the prompt of a text, in which names of control tokens become such tokens.

    `add_bos` None: it begins with a BOS token if texts of this model do. `shown`: the images whose
    markers are in the text. `is_answer`: the text is what a chat template has written with these
    `arguments`, so that an answer follows. Raises the errors of ShownImages.tokens_of().
    """
    begins = model.adds_bos if add_bos is None else add_bos
    images: tuple[ReadyImage, ...] = ()
    if shown is not None and shown.files:
        tokens, images = shown.tokens_of(text, add_bos=begins)
    else:
        tokens = model.tokenize(text, add_bos=begins, special=True)
    thought = thought_of(model, text, tokens, arguments) if is_answer else None
    return Prompt(tokens, text, images, thought=thought)


def infill_prompt(
    model: Model, before: Sequence[int], after: Sequence[int], extra: Sequence[int] = ()
) -> Prompt | None:
    """Return the prompt of a text between two others, which are tokens, in the form that the model
    was trained on; None for a model that was not trained for it.

    `extra`: tokens of further texts, which stand before. A BOS token of `before` begins the prompt.
    """
    marks = model.infill_marks
    if marks is None:
        return None
    first, second, between = marks
    has_bos = list(before[:1]) == [model.bos]
    begins = [model.bos] if has_bos or model.adds_bos else []
    return Prompt([*begins, *extra, first, *before[has_bos:], second, *after, between])


def thought_of(
    model: Model, text: str, tokens: Sequence[int], arguments: Mapping[str, Any] | None = None
) -> PromptThought | None:
    """Return what a prompt by the chat template says of the thought of its answer; None for a model
    that does not think.
    """
    template = model.chat_template
    if template is None or template.tags is None:
        return None
    frame = template.frame(arguments)
    opened = template.tags.is_open_after(text)
    return PromptThought(template.tags, opened, n_left_out(model, frame, tokens))


def n_left_out(model: Model, frame: AnswerFrame, tokens: Sequence[int]) -> int:
    """Return how many tokens at the end of a prompt are missing in later turns of the conversation;
    0 if it does not end with `frame.opening`.
    """
    opening, text, count = frame.opening.encode(), b"", 0
    while len(text) < len(opening) and count < len(tokens):
        count += 1
        if tokens[-count] < 0:  # The token is a placeholder of an image.
            return 0
        text = model.token_bytes(tokens[-count], special=True) + text
    return count if text.endswith(opening) else 0


def shown_prompt(model: Model, prompt: Prompt) -> str:
    """Return the text of a prompt; for one of tokens, without a BOS token at its beginning."""
    if prompt.text:
        return prompt.text
    tokens = [each for each in prompt.tokens if not is_placeholder(each)]
    begins = tokens[:1] == [model.bos]
    return model.detokenize(tokens[1:] if begins else tokens, special=True)


def check_room(prompt: Prompt, n_ctx: int) -> None:
    """Raise ContextError for a prompt that leaves no room for an answer in the context."""
    n_tokens = len(prompt.tokens)
    if n_tokens >= n_ctx:
        raise ContextError(
            f"the prompt of {n_tokens} tokens exceeds the available context size, {n_ctx} tokens "
            "with room for an answer; shorten the prompt, or raise -c (n_ctx)",
            n_tokens=n_tokens,
            n_ctx=n_ctx,
        )
