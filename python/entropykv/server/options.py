"""Define the options of the server: llama_cpp.server's settings, and those of the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Optional

from llama_cpp.server.settings import ModelSettings, ServerSettings
from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict
from typing_extensions import Self

from entropykv.errors import SettingsError
from entropykv.llamacpp.foreign_text import PARSE_SPECIAL
from entropykv.server.dialects.fields import MOST_NAME, MOST_STOP, MOST_STOPS, sampler
from entropykv.server.engine.admission import Limits
from entropykv.settings import flags
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.cores import usable_cores
from entropykv.settings.freezing import Freezing, Recovery
from entropykv.settings.options import MOST_BYTES, MOST_TOKENS, Option, declared, parse_bytes
from entropykv.settings.sampling import is_random_seed
from entropykv.thinking.tags import (
    MOST_MESSAGE,
    ThinkingOptions,
    ThoughtFormat,
    template_variables,
)

MOST_MODELS = 1000
"""The most models of one server; each is listed, and has figures."""
MOST_SECONDS = 10**9
MOST_TEMPLATE = 2**20
"""The most characters of a chat template."""
_OF_REQUESTS = "What a request has that does not say it."
_REQUEST_FIELDS = (
    *("temperature", "top_p", "min_p", "top_k"),
    *("repeat_penalty", "presence_penalty", "frequency_penalty"),
    *("mirostat_mode", "mirostat_tau", "mirostat_eta", "max_tokens", "stop"),
)
_PREFIX = SettingsConfigDict(env_prefix="ENTROPYKV_", protected_namespaces=())


_DECLARED: dict[str, tuple[Option, Any]] = {
    **{each.server_name: (each, each.server_default) for each in declared(CacheOptions).values()},
    **{
        each.name: (each, None) for kind in (Freezing, Recovery) for each in declared(kind).values()
    },
}
"""The options of the cache by the names of their settings, each with its default here."""


def _declared(name: str) -> Any:
    """Return a field of the settings for an option of the cache: see settings/options.py."""
    option, default = _DECLARED[name]
    limits: dict[str, Any] = {}
    if option.least is not None:
        limits = {"ge": option.least, "le": option.most}
    text = option.help[0].upper() + option.help[1:]
    if default is None and option.kind is not bool:
        text += f" (default: {option.shown_default})"
    return Field(default=default, description=f"{text}.", **limits)


# What follows is written by `python -m tests.support.option_types`.


class CacheSettings(ModelSettings):
    """Hold the options of the cache as settings of the server: see CacheOptions."""

    kv_budget: str = _declared("kv_budget")
    policy: str = _declared("policy")
    kv_type: str = _declared("kv_type")
    store: str = _declared("store")
    entropy_config: Optional[str] = _declared("entropy_config")
    learn: Optional[bool] = _declared("learn")
    sinks: int = _declared("sinks")
    recent_window: Optional[int] = _declared("recent_window")
    freeze: Optional[str] = _declared("freeze")
    recovery: Optional[Literal["soft", "window", "full"]] = _declared("recovery")
    n_ctx: int = _declared("n_ctx")
    n_threads: int = _declared("n_threads")
    n_threads_batch: int = _declared("n_threads_batch")
    fixed_threads: Optional[bool] = _declared("fixed_threads")
    spec_type: str = _declared("spec_type")
    draft_max: int = _declared("draft_max")
    spec_draft_model: Optional[str] = _declared("spec_draft_model")
    draft_kv_budget: str = _declared("draft_kv_budget")
    draft_p_min: float = _declared("draft_p_min")
    parallel: int = _declared("parallel")
    swap: str = _declared("swap")
    swap_limit: str = _declared("swap_limit")
    checkpoints: Optional[str] = _declared("checkpoints")
    freeze_limit: Optional[str] = _declared("freeze_limit")
    freeze_type: Optional[str] = _declared("freeze_type")
    recall_interval: Optional[int] = _declared("recall_interval")
    freeze_window: Optional[int] = _declared("freeze_window")
    freeze_threshold: Optional[float] = _declared("freeze_threshold")
    freeze_rate: Optional[float] = _declared("freeze_rate")
    freeze_history: Optional[int] = _declared("freeze_history")
    recall_prompt: Optional[int] = _declared("recall_prompt")
    recovery_deviations: Optional[float] = _declared("recovery_deviations")
    recovery_window: Optional[int] = _declared("recovery_window")


# End of what is written.


class ModelOptions(CacheSettings):
    """Name the model, its budget (see CacheOptions), and defaults of requests for it.

    Values that are not given are read from environment variables such as ENTROPYKV_MODEL.
    """

    model_config = _PREFIX

    model: str = Field(
        default="",
        description="The path of the model's GGUF file; given several times, that of each model.",
    )
    hf_repo: Optional[str] = Field(
        default=None,
        min_length=1,
        description="A model of the Hugging Face Hub instead, as USER/MODEL or USER/MODEL:QUANT, "
        "which is fetched once (needs the extra hub).",
    )
    hf_file: Optional[str] = Field(
        default=None,
        min_length=1,
        description="With --hf-repo: the model's file in it, or a pattern of its name.",
    )
    hf_model_repo_id: Optional[str] = Field(
        default=None,
        min_length=1,
        description="The same as --hf-repo, with --model in the place of --hf-file, as "
        "llama_cpp.server has them.",
    )
    model_alias: Optional[str] = Field(
        default=None,
        description=flags.ALIAS.sentence,
    )
    tags: Optional[str] = Field(
        default=None,
        max_length=MOST_NAME,
        description="Words that /v1/models shows beside the model, separated by commas.",
    )
    logits_all: bool = Field(
        default=False,
        description="Changes nothing: logprobs are computed while tokens are read and written.",
    )
    verbose: bool = Field(default=False, description="Whether to print llama.cpp's own log.")
    conversations: int = Field(
        default=64, ge=1, description="Conversations that are kept for their next turn."
    )
    sleep_idle_seconds: int = Field(
        default=-1,
        ge=-1,
        le=MOST_SECONDS,
        description="Seconds without a request after which the model is unloaded until the next "
        "one; -1: never.",
    )

    mmproj: Optional[str] = Field(
        default=None,
        min_length=1,
        description="File of the model's projector (mmproj), with which requests may have images.",
    )
    chat_template: Optional[str] = Field(
        default=None,
        max_length=MOST_TEMPLATE,
        description="Chat template in Jinja that takes the place of the model's own.",
    )
    parse_special: bool = Field(
        default=False,
        description=f"Whether {PARSE_SPECIAL}.",
    )
    reasoning: Literal["auto", "on", "off"] = Field(
        default="auto", description=flags.REASONING.sentence
    )
    reasoning_format: ThoughtFormat = Field(
        default="auto",
        description="Where thoughts are shown: none leaves them in the answer, deepseek and auto "
        "put them in reasoning_content, deepseek-legacy does both in answers without streaming.",
    )
    reasoning_budget: int = Field(
        default=-1,
        ge=-1,
        le=MOST_TOKENS,
        description=flags.REASONING_BUDGET.sentence,
    )
    reasoning_budget_message: Optional[str] = Field(
        default=None,
        max_length=MOST_MESSAGE,
        description=flags.REASONING_MESSAGE.sentence,
    )
    reasoning_effort: Optional[str] = Field(
        default=None,
        max_length=MOST_NAME,
        description=flags.REASONING_EFFORT.sentence,
    )
    temperature: Optional[float] = sampler("temperature", description=_OF_REQUESTS)
    top_p: Optional[float] = sampler("top_p", description=_OF_REQUESTS)
    min_p: Optional[float] = sampler("min_p", description=_OF_REQUESTS)
    top_k: Optional[int] = sampler("top_k", description=_OF_REQUESTS)
    repeat_penalty: Optional[float] = sampler("repeat_penalty", description=_OF_REQUESTS)
    presence_penalty: Optional[float] = Field(default=None, ge=-2, le=2, description=_OF_REQUESTS)
    frequency_penalty: Optional[float] = Field(default=None, ge=-2, le=2, description=_OF_REQUESTS)
    mirostat_mode: Optional[int] = sampler("mirostat", description=_OF_REQUESTS)
    mirostat_tau: Optional[float] = Field(default=None, ge=0, le=10, description=_OF_REQUESTS)
    mirostat_eta: Optional[float] = Field(default=None, ge=0.001, le=1, description=_OF_REQUESTS)
    max_tokens: Optional[int] = Field(
        default=None,
        ge=-2,
        le=MOST_TOKENS,
        description="Tokens of an answer at most where a request does not say it; -1: until the "
        "model or the context ends.",
    )
    stop: Optional[list[Annotated[str, Field(max_length=MOST_STOP)]]] = Field(
        default=None,
        max_length=MOST_STOPS,
        description="Texts that end an answer where a request names none.",
    )

    @model_validator(mode="before")
    @classmethod
    def set_dynamic_defaults(cls, given: Any) -> Any:
        """Read -1 threads as 0; llama_cpp.server's own rule would count all cores of the
        machine.
        """
        return {
            name: 0 if name in ("n_threads", "n_threads_batch") and str(value) == "-1" else value
            for name, value in given.items()
        }

    @model_validator(mode="after")
    def _name_one_model(self) -> Self:
        """Accept llama_cpp.server's spelling, and raise ValueError for no model, and for
        several.
        """
        if self.hf_model_repo_id is not None:
            if self.hf_repo is not None or self.hf_file is not None:
                raise ValueError(
                    "--hf_model_repo_id is the same as --hf-repo, and --model with it as "
                    "--hf-file; give --hf-repo and --hf-file alone"
                )
            self.hf_repo, self.hf_file = self.hf_model_repo_id, self.model or None
            self.model, self.hf_model_repo_id = "", None
        if self.hf_file is not None and self.hf_repo is None:
            raise ValueError("--hf-file names a file of a repository; give that with -hf")
        if self.model and self.hf_repo is not None:
            raise ValueError("-m and -hf name a model each; give one of them")
        if not self.model and self.hf_repo is None:
            raise ValueError(
                "no model is given; name a GGUF file with -m, or one of the hub by -hf"
            )
        return self

    @model_validator(mode="after")
    def _count_threads(self) -> Self:
        """Replace 0 by numbers of threads, as `entropykv run` does."""
        self.n_threads = self.n_threads or usable_cores()
        self.n_threads_batch = self.n_threads_batch or self.n_threads
        return self

    @property
    def request_defaults(self) -> dict[str, Any]:
        """Return the server's defaults for fields that a request leaves out, by the names of the
        fields.
        """
        given = {name: getattr(self, name) for name in _REQUEST_FIELDS}
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("max_tokens", 0) < 0:
            given["max_tokens"] = None
        if not is_random_seed(self.seed):
            given["seed"] = self.seed
        if self.verbose:
            given["verbose"] = True
        if "last_n_tokens_size" in self.model_fields_set:
            given["repeat_last_n"] = self.last_n_tokens_size
        return given

    @property
    def projector(self) -> str | None:
        """Return the projector's file, also by llama_cpp.server's name; None: no images."""
        return self.mmproj or self.clip_model_path

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Return the variables of the chat template that these options set."""
        given = self.chat_template_kwargs
        return template_variables(given, self.reasoning, self.reasoning_effort)

    @property
    def thinking_options(self) -> ThinkingOptions:
        """Return where thoughts are shown, and how long they may be."""
        return ThinkingOptions(
            self.reasoning_format, self.reasoning_budget, self.reasoning_budget_message or ""
        )

    @property
    def served_names(self) -> list[str]:
        """Return the model's names for clients: its aliases, its name at the hub, or its file's
        name without the folder. The first one is shown.
        """
        return _words(self.model_alias) or [self.hf_repo or Path(self.model).name]

    @property
    def served_name(self) -> str:
        """Return the name of the model that is shown."""
        return self.served_names[0]

    @property
    def served_tags(self) -> list[str]:
        """Return the words that are shown beside the model."""
        return _words(self.tags)


class ServerOptions(ServerSettings):
    """Define where and how to serve; missing values are read from variables such as
    ENTROPYKV_API_KEY.
    """

    model_config = _PREFIX

    host: str = Field(default="127.0.0.1", description=flags.HOST.sentence)
    port: int = Field(default=8000, ge=0, le=65535, description=flags.PORT.sentence)
    api_key: Optional[str] = Field(
        default=None,
        min_length=1,
        description=flags.API_KEY.sentence,
    )
    api_key_file: Optional[str] = Field(
        default=None,
        min_length=1,
        description="File with an API key on every line, each of which is a user of its own; blank "
        "lines and those that begin with # are skipped.",
    )
    show_text: Optional[bool] = Field(
        default=None,
        description="Whether the page and /v1/kv/text show a user what the user's own texts in the "
        "cache say; unless it is given, only a server on this machine's own address without a key "
        "does.",
    )
    shared_prefixes: bool = Field(
        default=True,
        description="Whether a conversation can continue from text that another one with the same "
        "key has read; with false, only if both have the same name.",
    )
    interrupt_requests: bool = Field(
        default=False, description="Whether a new request ends streams of the same key."
    )
    max_body: int = Field(
        default=Limits.max_body,
        ge=1,
        description="Bytes that the body of a request may have: 1 MiB is 250,000 tokens of "
        "English text.",
    )
    max_bodies: int = Field(
        default=Limits.max_bodies,
        ge=1,
        description="Bytes that the bodies of all requests may have together, waiting ones too; "
        "more are answered with 503.",
    )
    max_images: int = Field(
        default=Limits.max_images, ge=0, description="Images that one request may have."
    )
    max_image_bytes: int = Field(
        default=Limits.max_image_bytes, ge=1, description="Bytes of the file of an image."
    )
    max_image_pixels: int = Field(
        default=Limits.max_image_pixels,
        ge=1,
        description="Pixels of all images of a request together.",
    )
    max_jobs: int = Field(
        default=Limits.max_jobs,
        ge=1,
        description="Choices that one request may ask for: its prompts times n.",
    )
    max_waiting: int = Field(
        default=Limits.max_waiting,
        ge=0,
        description="Choices that may wait while others are written; more are answered with 429.",
    )
    max_connections: int = Field(
        default=512,
        ge=1,
        description="Connections that there may be at a time; more are answered with 503.",
    )
    client_seconds: int = Field(
        default=int(Limits.client_seconds),
        ge=1,
        description="Seconds that a client may take to send the headers of a request, and its body "
        "(else 408), and to take what was sent to it.",
    )
    request_seconds: Optional[int] = Field(
        default=None,
        ge=1,
        description="Seconds that a request may take, waiting included; none unless it is given.",
    )
    drain_seconds: int = Field(
        default=0,
        ge=0,
        description="Seconds that running requests may take after SIGTERM; new ones get 503.",
    )
    cors_origins: Optional[str] = Field(
        default=None,
        description="Web pages that may use the server from a browser: origins such as "
        "http://localhost:3000, separated by commas; localhost for all pages of this machine, "
        "* for all.",
    )
    allowed_hosts: Optional[str] = Field(
        default=None,
        description="Names that requests may ask for besides the address: the header Host, such as "
        "llm.example.com or *.example.com, separated by commas; * for any.",
    )
    ignore_unknown_fields: bool = Field(
        default=False,
        description="Answer requests with fields that the server does not know, as if they were "
        "not there; else they get 400 and the name of the field.",
    )
    slot_save_path: Optional[str] = Field(
        default=None,
        min_length=1,
        description="Directory where POST /slots/{id}?action=save keeps conversations, and "
        "action=restore finds them; each API key has a folder of its own there.",
    )
    documents: Optional[str] = Field(
        default=None,
        min_length=1,
        description=flags.DOCUMENTS.sentence,
    )
    documents_limit: str = Field(
        default="8GiB",
        description="Bytes that all documents may take, and texts that wait to be read; beyond it, "
        "the least recently used document that is not in use is removed.",
    )
    models_dir: Optional[str] = Field(
        default=None,
        min_length=1,
        description="Directory of GGUF files, each of which is a model that requests can name.",
    )
    models_preset: Optional[str] = Field(
        default=None,
        min_length=1,
        description=flags.MODELS_PRESET.sentence,
    )
    models_max: int = Field(
        default=4,
        ge=0,
        le=MOST_MODELS,
        description="Models that may be loaded at a time; beyond it, the least recently used one "
        "that is idle makes room. 0: any number.",
    )
    models_memory: Optional[str] = Field(
        default=None,
        description="Bytes that all loaded models may take, such as 8GiB, estimated before they "
        "are loaded; none unless it is given.",
    )
    models_autoload: bool = Field(
        default=True, description="Whether a request loads the model that it names."
    )
    web: bool = Field(default=True, description="Whether the page at / is served.")
    log_requests: bool = Field(
        default=True,
        description="One line on stderr for every request: time, client, path, status, seconds and "
        "tokens; nothing of what was said.",
    )

    @property
    def models_memory_bytes(self) -> int | None:
        """Return how many bytes loaded models may take; None: no limit. Raises SettingsError for an
        invalid size.
        """
        if self.models_memory is None:
            return None
        return _size("memory for models", self.models_memory, "--models-memory")

    @property
    def documents_limit_bytes(self) -> int:
        """Return how many bytes documents may take; raises SettingsError for an invalid size."""
        return _size("disk for documents", self.documents_limit, "--documents-limit")


def _words(text: str | None) -> list[str]:
    """Return what stands between commas."""
    words = [word.strip() for word in (text or "").split(",")]
    return [word for word in words if word]


def _size(what: str, text: str, flag: str) -> int:
    size = parse_bytes(text)
    if size is None or not 0 < size <= MOST_BYTES:
        raise SettingsError(f"the {what} cannot be {text!r}; give bytes such as 8GiB ({flag})")
    return size
