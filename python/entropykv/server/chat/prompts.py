"""Make the prompts of chats: with images, or behind a document."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entropykv.errors import ImageError
from entropykv.generation.prompt import Prompt, ShownImages, text_prompt, thought_of
from entropykv.server.documents.asked_document import about_document
from entropykv.server.engine.answering import Answering
from entropykv.server.http.errors import RequestError
from entropykv.server.models.loaded_model import LoadedModel


@dataclass(frozen=True)
class ChatParts:
    """Hold what the chat template is told of one chat."""

    messages: list[dict[str, Any]]
    tools: Sequence[Any] | None
    arguments: Mapping[str, Any]
    files: Sequence[bytes] = ()
    """The images, whose markers are in the messages."""
    opens_answer: bool = True
    """Whether the prompt ends with the beginning of an answer."""
    begun: str = ""
    """The beginning of the answer, which the model continues."""

    def text(self, model: LoadedModel, messages: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Return the text of the prompt, by default of its own messages, which only tokenize()
        reads.

        Raises RequestError for an answer that cannot be continued, and the errors of the template.
        """
        try:
            text = model.model.chat_text(
                self.messages if messages is None else messages,
                tools=self.tools,
                arguments=self.arguments,
                opens_answer=self.opens_answer,
            )
        except TypeError as error:  # Templates add what they were not told to a text.
            raise RequestError(
                400, f"the chat template refuses this: {error}", param="messages"
            ) from None
        tags = model.model.thought_tags
        if self.begun and tags is not None and tags.is_open_after(text):
            raise RequestError(
                400,
                "messages: the last one cannot be continued, because the model thinks first; send "
                'chat_template_kwargs {"enable_thinking": false}',
                param="messages",
            )
        return text + str(model.model.said(self.begun, is_answer=True))


def chat_prompt_of(job: Answering, parts: ChatParts) -> Prompt:
    """Return the prompt of a chat.

    Raises RequestError for images that cannot be read, and the errors of the template.
    """
    model = job.model
    text = parts.text(model)
    model.control_tokens.check(text.encode("utf-8", "replace"))
    is_chat = model.model.chat_template is not None
    shown = None
    if parts.files and model.images is not None:
        if model.images.marker not in text:
            raise RequestError(
                400,
                "messages: the model's chat template does not show the images; start the server "
                "with one that does (--chat-template)",
                param="messages",
            )
        owner = job.caller.tenant(shared_prefixes=model.shared_prefixes)
        shown = ShownImages(model.images, parts.files, model.n_ctx, owner, job.check)
    try:
        return text_prompt(
            model.model,
            text,
            add_bos=False if is_chat else None,
            shown=shown,
            is_answer=is_chat,
            arguments=parts.arguments,
        )
    except ImageError as error:
        raise RequestError(400, str(error), param="messages") from None


def question_prompt(job: Answering, parts: ChatParts) -> Prompt:
    """Return the prompt of a chat about the job's document: its tokens, then the chat.

    The template shows a mark where the document stands, and only what it writes behind the mark is
    tokenised: a question goes on in the user's turn that the document began. Raises RequestError.
    """
    model, document = job.model, job.document_tokens()
    mark = f"[document {secrets.token_hex(16)}]"
    text = parts.text(model, about_document(parts.messages, mark)).partition(mark)[2]
    tokens = [*document, *model.tokenize(text)]
    thought = thought_of(model.model, text, tokens, parts.arguments)
    return Prompt(tokens, n_document=len(document), thought=thought)
