"""Define and answer requests for chat completions, with the fields of OpenAI's current clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from llama_cpp.server.types import CreateChatCompletionRequest
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from entropykv.constraint.constraint import Constraint
from entropykv.generation.prompt import GenerationRequest, Prompt
from entropykv.llamacpp.foreign_text import without_marks
from entropykv.server.chat.constraints import made, single
from entropykv.server.chat.messages import (
    ChatParts,
    ImageParts,
    Message,
    chat_prompt_of,
    document_named,
    question_prompt,
    template_messages,
)
from entropykv.server.chat.tool_calls import (
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    Tools,
    ToolUse,
)
from entropykv.server.dialects.answers import (
    AnswerForm,
    ChatWriter,
    Writer,
    written,
)
from entropykv.server.dialects.fields import (
    FIRST_ERROR,
    MOST_LOGPROBS,
    MOST_MESSAGES,
    MOST_TOOLS,
    Description,
    Name,
    RepeatPenalty,
    Seed,
    Stop,
    TemplateArguments,
    ThoughtBudget,
    ThoughtEnding,
    TokenLimit,
    sampler,
)
from entropykv.server.dialects.requests import (
    MOST_CHOICES,
    PASSAGES,
    GeneratingRequest,
    StreamOptions,
    check_passages,
    given,
    most_tokens,
    parted,
    sampling_of,
    stops_of,
)
from entropykv.server.engine.answering import Answering
from entropykv.server.http.errors import RequestError
from entropykv.server.models.loaded_model import LoadedModel
from entropykv.thinking.tags import ThinkingOptions, ThoughtFormat, template_switch


class JsonSchema(BaseModel):
    """A schema that the answer must follow."""

    model_config = ConfigDict(populate_by_name=True)

    name: Name = "answer"
    description: Description | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class TextFormat(BaseModel):
    """Response format `text`: the answer may be any text."""

    type: Literal["text"]


class ObjectFormat(BaseModel):
    """Response format `json_object`: the answer is a JSON object. The field `schema`, which the
    object must follow, is an extension of llama_cpp.server.
    """

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class SchemaFormat(BaseModel):
    """Response format `json_schema`: the answer is JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class Reasoning(BaseModel):
    """How much the model thinks before it answers; with the effort "none", not at all."""

    effort: Name | None = None


class ChatRequest(GeneratingRequest, CreateChatCompletionRequest):  # type: ignore[misc]
    """A request for a chat completion, with the fields of llama_cpp.server and further ones."""

    model: Name | None = None
    messages: Annotated[list[Message], FIRST_ERROR] = Field(  # type: ignore[assignment]
        min_length=1, max_length=MOST_MESSAGES
    )
    passages: int = PASSAGES
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = Field(
        default=None, validation_alias=AliasChoices("max_completion_tokens", "n_predict")
    )
    """OpenAI's newer name of max_tokens."""
    stop: Stop | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
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
    top_k: int = sampler("top_k", 40)
    repeat_penalty: RepeatPenalty = Field(
        default=1.0, validation_alias=AliasChoices("repeat_penalty", "repetition_penalty")
    )
    stream_options: StreamOptions = StreamOptions()
    response_format: TextFormat | ObjectFormat | SchemaFormat | None = Field(  # type: ignore[assignment]
        default=None, discriminator="type"
    )
    tools: Tools | None = None  # type: ignore[assignment]
    tool_choice: ToolChoice | None = None  # type: ignore[assignment]
    parallel_tool_calls: bool = Field(
        default=True, description="Whether an answer may call several tools."
    )
    functions: Annotated[list[Function], FIRST_ERROR] | None = Field(  # type: ignore[assignment]
        default=None, max_length=MOST_TOOLS
    )
    """OpenAI's older name of tools."""
    function_call: Literal["none", "auto"] | NamedFunction | None = None  # type: ignore[assignment]
    modalities: list[Literal["text"]] | None = Field(default=None, max_length=1)
    add_generation_prompt: bool | None = Field(
        default=None, description="Whether the prompt ends with the beginning of an answer."
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="Whether the answer continues the last message; null: if that is the "
        "assistant's, and add_generation_prompt is not given.",
    )
    verbose: bool = Field(default=False, description="Whether the answer tells its prompt.")

    @property
    def n_jobs(self) -> int:
        """Return how many choices are requested."""
        return self.n

    def most_written(self) -> int | None:
        """Return the most tokens of the answer: max_tokens, or else max_completion_tokens."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    def document_name(self) -> str | None:
        """Return the name of the document that the request names in its field `document` or in a
        message; None without one. Raises RequestError for several documents, and for a file in a
        message.
        """
        return document_named(self.document, (message.content for message in self.messages))

    def call(self, job: Answering, make: Callable[[AnswerForm], Writer] = ChatWriter) -> Any:
        """Generate one choice, and return the answer, or with `stream` an iterator of its chunks,
        in the form of the writer that `make` returns. Raises RequestError for fields that
        contradict each other or the model, and the errors of prompt() and Answering.answer().
        """
        check_passages(self.passages, job)
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                400,
                "top_logprobs: they come with logprobs; give logprobs true, or leave top_logprobs "
                "out",
                param="top_logprobs",
            )
        model, use = job.model, self.tool_use()
        options = self.thinking_options(model)
        prompt = self.prompt(job, use)
        reader = use if self.reads_calls(use) else None
        field, constraint = self._asked_constraint(reader) or ("grammar", None)
        n_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        request = GenerationRequest(
            prompt,
            sampling_of(self, model, constraint),
            most_tokens(self, model),
            stops_of(self, model),
            options,
            n_logprobs=n_logprobs,
            reads_anew=not self.cache_prompt,
        )
        form = AnswerForm(
            job,
            prompt,
            self.model or model.name,
            thoughts=options.format,
            use=reader,
            legacy_calls=self.functions is not None,
            logprobs=bool(self.logprobs),
            timed=self.timings_per_token,
            verbose=given(self, model, "verbose"),
        )
        return written(
            make(form),
            job,
            request,
            streams=bool(self.stream),
            constrained_by=field,
            n_passages=self.passages,
            tells_progress=self.return_progress,
        )

    def prompt(self, job: Answering, use: ToolUse | None) -> Prompt:
        """Return the prompt of the chat, with its images or the document that it asks about.

        Raises RequestError for images or tools beside a document, and the errors of prompt_parts(),
        chat_prompt_of() and question_prompt().
        """
        parts = self.prompt_parts(job.model, use)
        if job.document is None:
            return chat_prompt_of(job, parts)
        if parts.files:
            raise RequestError(
                400,
                "messages: images cannot go with a document; ask about one of them",
                param="messages",
            )
        if parts.tools is not None:
            raise RequestError(
                400,
                "tools: the model's chat template shows them before the document, which was read "
                "without them; leave them out",
                param="tools",
            )
        return question_prompt(job, parts)

    def prompt_parts(self, model: LoadedModel, use: ToolUse | None) -> ChatParts:
        """Return the arguments of the chat template for this request, and its images; `use`: its
        tools, or None. Raises RequestError for messages that cannot be shown or continued, and the
        errors of template_arguments().
        """
        images = ImageParts(model.images)
        messages = self.shown_messages(model, use, images)
        continues = self._continues()
        return ChatParts(
            messages[:-1] if continues else messages,
            None if use is None or not model.traits.shows_tools else use.definitions(),
            self.template_arguments(model),
            images.files,
            opens_answer=continues or self.add_generation_prompt is not False,
            begun=str(messages[-1]["content"] or "") if continues else "",
        )

    def _continues(self) -> bool:
        """Tell whether the answer continues the last message; raises RequestError if it should, but
        this message cannot be continued.
        """
        last = self.messages[-1]
        is_ours = last.role == "assistant" and len(self.messages) > 1
        asked = self.continue_final_message
        if asked and self.add_generation_prompt:
            raise RequestError(
                400,
                "continue_final_message: it cannot go with add_generation_prompt, which begins "
                "another message; give one of them",
                param="continue_final_message",
            )
        if asked is False or (asked is None and self.add_generation_prompt is not None):
            return False
        if not is_ours:
            if asked:
                raise RequestError(
                    400,
                    "continue_final_message: the last message is not an answer of the assistant",
                    param="continue_final_message",
                )
            return False
        place = f"messages.{len(self.messages) - 1}"
        if last.calls() or (last.model_extra or {}).get("reasoning_content"):
            raise RequestError(
                400,
                f"{place}: only the text of a message can be continued; leave its calls and its "
                "thought out, or send continue_final_message false",
                param=place,
            )
        if self.messages[-2].role == "assistant":
            raise RequestError(
                400,
                f"{place}: the message before is also the assistant's; join them",
                param=place,
            )
        return True

    def prompt_text(self, model: LoadedModel) -> tuple[str, list[int]]:
        """Return the text of the prompt, and its tokens.

        Raises RequestError for a chat with images or about a document, whose tokens are known only
        when it is answered, and the errors of tool_use(), prompt_parts() and ChatParts.text().
        """
        if self.document_name() is not None:
            raise RequestError(
                400, "document: it is not a part of the text; leave it out", param="document"
            )
        parts = self.prompt_parts(model, self.tool_use())
        if parts.files:
            raise RequestError(
                400,
                "messages: the tokens of images are not known before they are read; leave them out",
                param="messages",
            )
        text = parts.text(model)
        is_chat = model.model.chat_template is not None
        return without_marks(text), model.tokenize(text, add_bos=not is_chat)

    def template_arguments(self, model: LoadedModel) -> dict[str, Any]:
        """Return the variables of the chat template that the server's options and the request set;
        raises RequestError if enable_thinking is not true or false.
        """
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
        return {**model.template_arguments, **given}

    def thinking_options(self, model: LoadedModel) -> ThinkingOptions:
        """Return the request's options of thoughts, or the server's where none is given; a negative
        budget counts as not given.
        """
        given = model.thinking
        budgets = (self.reasoning_budget_tokens, self.thinking_budget_tokens, given.budget)
        message = self.reasoning_budget_message
        return ThinkingOptions(
            self.reasoning_format or given.format,
            next((budget for budget in budgets if budget is not None and budget >= 0), -1),
            given.message if message is None else message,
        )

    def parts(self) -> list[ChatRequest]:
        """Return a request for every choice."""
        return [parted(self, number, n=1) for number in range(self.n)]

    def tool_use(self) -> ToolUse | None:
        """Return the tools of the request, also those in the older fields `functions` and
        `function_call`; None if no tool may be called. Raises the errors of ToolUse.of().
        """
        if self.functions is None:
            return ToolUse.of(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)
        tools = [Tool(function=function) for function in self.functions]
        if isinstance(self.function_call, NamedFunction):
            return ToolUse.of(tools, NamedTool(function=self.function_call))
        return ToolUse.of(tools, self.function_call)

    def shown_messages(
        self, model: LoadedModel, use: ToolUse | None, images: ImageParts
    ) -> list[dict[str, Any]]:
        """Return the messages for the model's chat template: see template_messages()."""
        told = use is not None and not model.traits.shows_tools
        instructions = use.instructions() if use is not None and told else None
        return template_messages(self.messages, model.traits, instructions, images)

    def reads_calls(self, use: ToolUse | None) -> bool:
        """Tell whether calls are read from the answer: if a tool must be called, or if one may be
        and response_format asks for no JSON, which could be mistaken for a call.
        """
        asked = self.response_format
        return use is not None and (use.required or asked is None or isinstance(asked, TextFormat))

    def _asked_constraint(self, use: ToolUse | None) -> tuple[str, Constraint] | None:
        """Return the field that says what the answer must be, and its constraint; None if no field
        does. Raises RequestError for several fields, and for a value that is no constraint.

        A required call takes precedence: response_format then describes later answers.
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
