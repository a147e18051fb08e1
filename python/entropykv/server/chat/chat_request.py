"""Define the fields of a chat completion: messages, tools and response formats of OpenAI's
clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from llama_cpp import LogitsProcessorList
from llama_cpp.server.types import CreateChatCompletionRequest
from pydantic import BaseModel, ConfigDict, Field

from entropykv.constraint.constraint import Constraint
from entropykv.server.chat.chat_thought import ChatThought
from entropykv.server.chat.constraints import made, single
from entropykv.server.chat.image_parts import ImageParts
from entropykv.server.chat.messages import Message, template_messages
from entropykv.server.chat.tool_calls import (
    CallReader,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    Tools,
    ToolUse,
    as_deltas,
)
from entropykv.server.dialects.choices import seeds, with_passages, with_usage
from entropykv.server.dialects.fields import (
    FIRST_ERROR,
    MOST_LOGPROBS,
    MOST_MESSAGES,
    MOST_TOKENS,
    MOST_TOOLS,
    Biases,
    Description,
    Name,
    RepeatPenalty,
    Seed,
    Stop,
    TemplateArguments,
    ThoughtBudget,
    ThoughtEnding,
    TokenLimit,
    TopK,
)
from entropykv.server.dialects.requests import (
    DOCUMENT,
    MOST_CHOICES,
    PASSAGES,
    Request,
    StreamOptions,
    ask_for_passages,
    sampling_arguments,
)
from entropykv.server.documents.asked_document import about_document, document_named
from entropykv.server.http.errors import RequestError
from entropykv.server.models.loading import ServedLlama
from entropykv.thinking.options import ThinkingOptions, ThoughtFormat, template_switch


class JsonSchema(BaseModel):
    """A schema that the answer must follow."""

    model_config = ConfigDict(populate_by_name=True)

    name: Name = "answer"
    description: Description | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class TextFormat(BaseModel):
    """Text of any form."""

    type: Literal["text"]


class ObjectFormat(BaseModel):
    """A JSON object; the field `schema` is an extension of llama_cpp.server."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class SchemaFormat(BaseModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class Reasoning(BaseModel):
    """How much the model thinks before it answers; none: not at all."""

    effort: Name | None = None


class ChatRequest(Request, CreateChatCompletionRequest):
    """A chat completion of llama_cpp.server, extended by the fields of OpenAI's current clients."""

    model: Name | None = None
    messages: Annotated[list[Message], FIRST_ERROR] = Field(  # type: ignore[assignment]
        min_length=1, max_length=MOST_MESSAGES
    )
    document: Name | None = DOCUMENT
    passages: int = PASSAGES
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    """OpenAI's newer name of max_tokens."""
    min_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)
    stop: Stop | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    logit_bias: Biases | None = None  # type: ignore[assignment]
    seed: Seed | None = None
    reasoning_format: ThoughtFormat | None = Field(
        default=None, description="Where thoughts are shown, as llama-server's --reasoning-format."
    )
    reasoning_effort: Name | None = Field(
        default=None,
        description="How much a model thinks that knows several degrees; none: not at all.",
    )
    reasoning: Reasoning = Field(
        default=Reasoning(), description="The same as an object, as some clients send it."
    )
    reasoning_budget_tokens: ThoughtBudget | None = Field(
        default=None, description="Tokens of a thought at most; -1: as the server was started."
    )
    thinking_budget_tokens: ThoughtBudget | None = Field(
        default=None, description="The same by its other name."
    )
    reasoning_budget_message: ThoughtEnding | None = Field(
        default=None, description="Text that ends a thought whose tokens are used up."
    )
    chat_template_kwargs: TemplateArguments | None = Field(
        default=None, description="What the chat template is told besides the messages."
    )
    user: Name | None = None
    top_k: TopK = 40
    repeat_penalty: RepeatPenalty = 1.0
    stream_options: StreamOptions = StreamOptions()
    response_format: TextFormat | ObjectFormat | SchemaFormat | None = Field(  # type: ignore[assignment]
        default=None, discriminator="type"
    )
    tools: Tools | None = None  # type: ignore[assignment]
    tool_choice: ToolChoice | None = None  # type: ignore[assignment]
    functions: Annotated[list[Function], FIRST_ERROR] | None = Field(  # type: ignore[assignment]
        default=None, max_length=MOST_TOOLS
    )
    """OpenAI's older name of tools."""
    function_call: Literal["none", "auto"] | NamedFunction | None = None  # type: ignore[assignment]
    modalities: list[Literal["text"]] | None = Field(default=None, max_length=1)

    @property
    def n_jobs(self) -> int:
        """Return how many choices are requested."""
        return self.n

    def most_written(self) -> int | None:
        """Return the most tokens of the answer that the request itself names; see TokenLimit."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    def document_name(self) -> str | None:
        """Return the document that the request names, also in a message; raises RequestError."""
        return document_named(self.document, (message.content for message in self.messages))

    def call(self, llama: ServedLlama) -> Any:
        """Generate one choice, and return a response or its chunks; raises RequestError."""
        ask_for_passages(self.passages, llama)
        use = self.tool_use()
        arguments = sampling_arguments(self, llama)
        if self.logprobs:
            arguments["top_logprobs"] = self.top_logprobs or 0
        images = ImageParts(llama.images)
        arguments["messages"] = self.shown_messages(llama, use, images)
        if llama.asked is not None:
            _check_beside_document(llama, use, images)
            arguments["messages"] = about_document(arguments["messages"], llama.asked.mark)
        llama.template_arguments = self.template_arguments(llama)
        reader = use if self.reads_calls(use) else None
        if llama.traits.own_tools:
            reader = None
            arguments.update(self._own_tools(use))
        elif use is not None and llama.traits.shows_tools:
            arguments["tools"] = use.definitions()
        thought = ChatThought.begin(
            llama,
            llama.thinking,
            llama.template_arguments,
            arguments["messages"],
            arguments.get("tools"),
            self.thinking_options(llama),
        )
        llama.thought = thought
        if asked := self._asked_constraint(reader):
            llama.constrained_by, constraint = asked
            if thought is not None and llama.constrained_by != "grammar":
                constraint = thought.before_answer(constraint)
            arguments["grammar"] = constraint
        if thought is not None and thought.options.budget >= 0:
            processors = arguments.get("logits_processor", ())
            arguments["logits_processor"] = LogitsProcessorList([*processors, thought.force])

        with images.shown(llama):
            answer: Any = llama.create_chat_completion(**arguments, seed=self.seed)
        answer = self._in_parts(answer, thought, reader)
        if self.passages:
            answer = with_passages(answer, llama)
        return with_usage(answer, llama)

    def _in_parts(self, answer: Any, thought: ChatThought | None, use: ToolUse | None) -> Any:
        """Return an answer, or its chunks, with thoughts and calls as separate fields."""
        legacy = self.functions is not None
        if self.stream:
            answer = answer if thought is None else thought.in_chunks(answer)
            return answer if use is None else _chunks_with_calls(answer, use, legacy=legacy)
        answer = answer if thought is None else thought.in_whole(answer)
        return answer if use is None else _with_calls(answer, use, legacy=legacy)

    def template_arguments(self, llama: ServedLlama) -> dict[str, Any]:
        """Return the variables of the chat template besides the messages; raises RequestError."""
        given = dict(self.chat_template_kwargs or {})
        effort = self.reasoning_effort or self.reasoning.effort
        if effort == "none":
            given.update(template_switch(thinks=False))
        elif effort is not None:
            given["reasoning_effort"] = effort
        if not isinstance(given.get("enable_thinking", True), bool):
            raise RequestError(
                400,
                "chat_template_kwargs.enable_thinking: it is true or false",
                param="chat_template_kwargs",
            )
        return {**llama.template_defaults, **given}

    def thinking_options(self, llama: ServedLlama) -> ThinkingOptions:
        """Return the request's options of thoughts, completed by the server's options."""
        given = llama.thinking_options
        budgets = (self.reasoning_budget_tokens, self.thinking_budget_tokens, given.budget)
        message = self.reasoning_budget_message
        return ThinkingOptions(
            self.reasoning_format or given.format,
            next((budget for budget in budgets if budget is not None and budget >= 0), -1),
            given.message if message is None else message,
        )

    def parts(self) -> list[ChatRequest]:
        """Return a request for every choice."""
        return [self.model_copy(update={"n": 1, "seed": seed}) for seed in seeds(self.seed, self.n)]

    def tool_use(self) -> ToolUse | None:
        """Return the tools that may be called, by their newer names; raises RequestError."""
        if self.functions is None:
            return ToolUse.of(self.tools, self.tool_choice)
        tools = [Tool(function=function) for function in self.functions]
        if isinstance(self.function_call, NamedFunction):
            return ToolUse.of(tools, NamedTool(function=self.function_call))
        return ToolUse.of(tools, self.function_call)

    def shown_messages(
        self, llama: ServedLlama, use: ToolUse | None, images: ImageParts
    ) -> list[dict[str, Any]]:
        """Return the messages for the model's chat template; raises RequestError."""
        told = use is not None and not llama.traits.shows_tools
        instructions = use.instructions() if use is not None and told else None
        return template_messages(self.messages, llama.traits, instructions, images)

    def _own_tools(self, use: ToolUse | None) -> dict[str, Any]:
        """Return the arguments of a chat format that writes and reads calls itself."""
        if use is None:
            return {}
        if not use.required:
            return {"tools": use.definitions(), "tool_choice": "auto"}
        if len(use.callable_tools) > 1:
            raise RequestError(
                400,
                "tool_choice: 'required' is not possible with the server's --chat_format; name "
                "the tool, or start the server without --chat_format",
                param="tool_choice",
            )
        choice = {"type": "function", "function": {"name": use.callable_tools[0].name}}
        return {"tools": use.definitions(), "tool_choice": choice}

    def reads_calls(self, use: ToolUse | None) -> bool:
        """Tell whether the answer may have calls: JSON that was asked for may only look like one,
        unless a call is required.
        """
        asked = self.response_format
        return use is not None and (use.required or asked is None or isinstance(asked, TextFormat))

    def _asked_constraint(self, use: ToolUse | None) -> tuple[str, Constraint] | None:
        """Return what the answer must be, with the field that says it; raises RequestError.

        A call that is forced says it alone: then a response_format is that of later answers.
        """
        call = None if use is None else use.constraint()
        if call is not None:
            return "tools", call
        found = self.constraints()
        asked = self.response_format
        if isinstance(asked, ObjectFormat):
            schema = {"type": "object"} if asked.schema_ is None else asked.schema_
            found["response_format"] = made("response_format", Constraint.json_schema, schema)
        elif isinstance(asked, SchemaFormat):
            found["response_format"] = made(
                "response_format", Constraint.json_schema, asked.json_schema.schema_
            )
        return single(found)


def _check_beside_document(llama: ServedLlama, use: ToolUse | None, images: ImageParts) -> None:
    """Raise RequestError for tools and images that the chat template shows before a document."""
    if images.files:
        raise RequestError(
            400,
            "messages: images cannot go with a document; ask about one of them",
            param="messages",
        )
    if use is not None and (llama.traits.own_tools or llama.traits.shows_tools):
        raise RequestError(
            400,
            "tools: the model's chat template shows them before the document, which was read "
            "without them; leave them out",
            param="tools",
        )


def _with_calls(answer: dict[str, Any], use: ToolUse, *, legacy: bool) -> dict[str, Any]:
    """Return an answer with the calls in its text as separate fields."""
    choice = answer["choices"][0]
    text, calls = use.read(choice["message"]["content"] or "")
    if not calls:
        return answer
    message = {**choice["message"], "content": text or None, "tool_calls": calls}
    if legacy:
        message["function_call"] = calls[0]["function"]
    choice = {**choice, "message": message, "finish_reason": "tool_calls"}
    return {**answer, "choices": [choice]}


def _chunks_with_calls(
    chunks: Iterator[dict[str, Any]], use: ToolUse, *, legacy: bool
) -> Iterator[dict[str, Any]]:
    """Yield the chunks of an answer, with each call in its text once its JSON has ended.

    With `legacy`, the first call is also sent as `function_call`, as in an answer that is not
    streamed.
    """
    reader, n_calls = CallReader(use), 0
    for chunk in chunks:
        choice = chunk["choices"][0]
        delta, reason = choice["delta"], choice["finish_reason"]
        parts = [reader.take(delta.get("content") or "")]
        if reason is not None:
            parts.append(reader.finish())
        text, calls = "".join(p.text for p in parts), [c for p in parts for c in p.calls]
        others = {name: value for name, value in delta.items() if name != "content"}
        shown = {**others, **({"content": text} if text else {})}
        deltas = [shown] if shown or choice.get("logprobs") else []
        for each in (*deltas, *as_deltas(calls, first=n_calls, legacy=legacy)):
            yield {**chunk, "choices": [{**choice, "delta": each, "finish_reason": None}]}
            choice = {**choice, "logprobs": None}
        n_calls += len(calls)
        if reason is not None:
            reason = "tool_calls" if n_calls else reason
            yield {**chunk, "choices": [{**choice, "delta": {}, "finish_reason": reason}]}
