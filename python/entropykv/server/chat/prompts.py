"""Make the prompts of chats: with images, or behind a document."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from entropykv.errors import ImageError
from entropykv.generation.prompt import Prompt, ShownImages, text_prompt, thought_of
from entropykv.server.documents.asked_document import about_document
from entropykv.server.engine.answering import Answering
from entropykv.server.http.errors import RequestError


def chat_prompt_of(
    job: Answering,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    arguments: Mapping[str, Any],
    files: Sequence[bytes] = (),
) -> Prompt:
    """Return the prompt of a chat; `files` are its images, whose markers are in the messages.

    Raises RequestError for images that cannot be read, and the errors of the template.
    """
    model = job.model
    text = model.model.chat_text(messages, tools=tools, arguments=arguments)
    model.control_tokens.check(text.encode("utf-8", "replace"))
    is_chat = model.model.chat_template is not None
    shown = None
    if files and model.images is not None:
        if model.images.marker not in text:
            raise RequestError(
                400,
                "messages: the model's chat template does not show the images; start the server "
                "with one that does (--chat-template)",
                param="messages",
            )
        owner = job.caller.tenant(shared_prefixes=model.shared_prefixes)
        shown = ShownImages(model.images, files, model.n_ctx, owner, job.check)
    try:
        return text_prompt(
            model.model,
            text,
            add_bos=False if is_chat else None,
            shown=shown,
            is_answer=is_chat,
            arguments=arguments,
        )
    except ImageError as error:
        raise RequestError(400, str(error), param="messages") from None


def question_prompt(
    job: Answering, messages: list[dict[str, Any]], arguments: Mapping[str, Any]
) -> Prompt:
    """Return the prompt of a chat about the job's document: its tokens, then the chat.

    The template shows a mark where the document stands, and only what it writes behind the mark is
    tokenised: a question goes on in the user's turn that the document began. Raises RequestError.
    """
    model, document = job.model, job.document_tokens()
    mark = f"[document {secrets.token_hex(16)}]"
    shown = about_document(messages, mark)
    text = model.model.chat_text(shown, arguments=arguments).partition(mark)[2]
    tokens = [*document, *model.tokenize(text)]
    is_chat = model.model.chat_template is not None
    thought = thought_of(model.model, text, tokens, arguments) if is_chat else None
    return Prompt(tokens, n_document=len(document), thought=thought)
