"""Say how a model is loaded and run besides its file: memory, LoRA, RoPE, chat template."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp

from entropykv.errors import ModelFileError, SettingsError

ROPE_SCALINGS = {
    "none": llama_cpp.LLAMA_ROPE_SCALING_TYPE_NONE,
    "linear": llama_cpp.LLAMA_ROPE_SCALING_TYPE_LINEAR,
    "yarn": llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN,
}
NUMA_STRATEGIES = {
    "distribute": llama_cpp.GGML_NUMA_STRATEGY_DISTRIBUTE,
    "isolate": llama_cpp.GGML_NUMA_STRATEGY_ISOLATE,
    "numactl": llama_cpp.GGML_NUMA_STRATEGY_NUMACTL,
}


@dataclass(frozen=True)
class LoadOptions:
    """Hold what llama.cpp is told when it loads a model; nothing of it changes the KV budget.

    `rope`: fields of llama_context_params, such as rope_freq_base. `adapters`: pairs of the path of
    a LoRA adapter and its scale. `numa`: one of NUMA_STRATEGIES. `chat_template`: Jinja text, or
    the name of a template that llama.cpp knows; None takes the model's own.
    """

    use_mmap: bool = True
    use_mlock: bool = False
    numa: str | None = None
    adapters: Sequence[tuple[str, float]] = ()
    rope: Mapping[str, float] = field(default_factory=dict)
    chat_template: str | None = None


class LoraAdapters:
    """Hold the LoRA adapters of a loaded model, which frees them with itself."""

    def __init__(self, model: Any, wanted: Sequence[tuple[str, float]]) -> None:
        """Load the adapters; raises ModelFileError for a file that is none of this model."""
        self._scales = [scale for _, scale in wanted]
        self._handles = []
        for path, _ in wanted:
            handle = llama_cpp.llama_adapter_lora_init(model, path.encode())
            if not handle:
                raise ModelFileError(
                    f"{path}: llama.cpp cannot load it; give a LoRA adapter of this model"
                )
            self._handles.append(handle)

    def apply(self, context: Any) -> None:
        """Let a context use the adapters."""
        apply_adapters(context, list(zip(self._handles, self._scales, strict=True)))


def apply_adapters(context: Any, adapters: Sequence[tuple[Any, float]]) -> None:
    """Let a context use loaded LoRA adapters, each with its scale, in place of those it had.

    Raises ModelFileError where llama.cpp refuses them.
    """
    n = len(adapters)
    handles = (llama_cpp.llama_adapter_lora_p_ctypes * n)(*(handle for handle, _ in adapters))
    scales = (ctypes.c_float * n)(*(scale for _, scale in adapters))
    if llama_cpp.llama_set_adapters_lora(context, handles, n, scales) != 0:
        raise ModelFileError(
            "llama.cpp cannot use the LoRA adapter with this model; give one that was made for it"
        )


def apply_named_template(name: str, messages: Sequence[Mapping[str, str]]) -> str:
    """Apply a template that llama.cpp knows by its name; raises SettingsError for any other."""
    roles = [(message["role"].encode(), message["content"].encode()) for message in messages]
    chat = (llama_cpp.llama_chat_message * len(roles))(
        *(llama_cpp.llama_chat_message(role, content) for role, content in roles)
    )
    size = 1024 + 2 * sum(len(role) + len(content) for role, content in roles)
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = llama_cpp.llama_chat_apply_template(name.encode(), chat, len(roles), True, buffer, size)
        if n < 0:
            raise SettingsError(
                f"llama.cpp knows no chat template named {name!r}; give a name such as chatml, or "
                "Jinja text"
            )
        if n <= size:
            return buffer.raw[:n].decode("utf-8")
        size = n
