"""Add GGUF models inside a KV budget to `llm` (https://llm.datasette.io).

pip install -e examples/llm-entropykv    # where entropykv is installed
llm -m entropykv -o gguf model.gguf -o kv_budget 1024 "What is the capital of France?"
llm chat -m entropykv -o gguf model.gguf
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import llm
from pydantic import Field

from entropykv import EntropyLlama


@llm.hookimpl
def register_models(register: Any) -> None:
    """Register the model under the name `entropykv`."""
    register(EntropyModel())


class EntropyModel(llm.Model):
    """Answer with a GGUF file, which stays loaded for the next turn of a chat."""

    model_id = "entropykv"
    can_stream = True

    class Options(llm.Options):
        """Declare the options that `-o NAME VALUE` sets."""

        gguf: str = Field(description="The model's file")
        kv_budget: str = Field(default="1024", description="As --kv-budget of entropykv")
        max_tokens: int = Field(default=512, description="The longest answer")
        temperature: float = Field(default=0.8, description="0: greedy")

    def __init__(self) -> None:
        """Load nothing yet."""
        self._loaded: tuple[tuple[str, str], EntropyLlama] | None = None

    def execute(
        self,
        prompt: Any,
        stream: bool,  # noqa: ARG002
        response: Any,  # noqa: ARG002
        conversation: Any,
    ) -> Iterator[str]:
        """Yield the answer piece by piece; a turn of a chat reads only its new text."""
        messages = []
        for turn in conversation.responses if conversation is not None else ():
            messages.append({"role": "user", "content": turn.prompt.prompt})
            messages.append({"role": "assistant", "content": turn.text()})
        if prompt.system:
            messages.insert(0, {"role": "system", "content": prompt.system})
        messages.append({"role": "user", "content": prompt.prompt})
        options = prompt.options
        chunks = self._model(options.gguf, options.kv_budget).create_chat_completion(
            messages,
            stream=True,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
        )
        for chunk in chunks:
            yield chunk["choices"][0]["delta"].get("content") or ""

    def _model(self, path: str, budget: str) -> EntropyLlama:
        if self._loaded is None or self._loaded[0] != (path, budget):
            if self._loaded is not None:
                self._loaded[1].close()
            llama = EntropyLlama(path, n_ctx=0, kv_budget=budget, verbose=False)
            self._loaded = (path, budget), llama
        return self._loaded[1]
