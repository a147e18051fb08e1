"""What the server is asked for: llama_cpp.server's settings, and the budget's."""

from __future__ import annotations

from typing import Optional

from llama_cpp.server.settings import ModelSettings, ServerSettings
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from entropykv.policy.names import AUTO
from entropykv.settings.cores import usable_cores

_PREFIX = SettingsConfigDict(env_prefix="ENTROPYKV_", protected_namespaces=())


class ModelOptions(ModelSettings):
    """The model and its budget; see EntropyLlama for what the budget's fields mean.

    What is not given comes from environment variables such as ENTROPYKV_MODEL.
    """

    model_config = _PREFIX

    n_threads: int = Field(
        default=usable_cores(), ge=1, description="Threads that generate; all usable cores."
    )
    n_threads_batch: int = Field(
        default=usable_cores(), ge=0, description="Threads that read prompts; all usable cores."
    )
    logits_all: bool = Field(
        default=False, description="Keep the logits of every token; logprobs need it."
    )
    verbose: bool = Field(default=False, description="Whether to print llama.cpp's own log.")
    kv_budget: str = "1.0"
    policy: str = AUTO
    kv_type: str = "auto"
    store: str = "auto"
    entropy_config: str | None = None
    sinks: int = 4
    recent_window: int | None = None
    freeze: str | None = None
    freeze_limit: str | None = None
    freeze_type: str | None = None
    recall_interval: int | None = None
    freeze_window: int | None = None
    freeze_threshold: float | None = None
    freeze_rate: float | None = None
    freeze_history: int | None = None


class ServerOptions(ServerSettings):
    """Where and how to serve; what is not given comes from variables such as ENTROPYKV_API_KEY."""

    model_config = _PREFIX

    host: str = Field(default="127.0.0.1", description="Listen address")
    port: int = Field(default=8000, ge=0, le=65535, description="Listen port; 0: any free one")
    api_key: Optional[str] = Field(  # noqa: UP045  (all that add_args_from_model() can read)
        default=None,
        min_length=1,
        description="Every request must bear it (also: environment variable ENTROPYKV_API_KEY)",
    )
    interrupt_requests: bool = Field(
        default=False, description="Whether a new request ends the stream that is being written."
    )
    max_body: int = Field(default=4 << 20, ge=1, description="Bytes that a request may have.")
