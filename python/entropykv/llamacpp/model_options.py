"""Define how a model is loaded and run: memory, LoRA, RoPE, chat template, devices."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp

from entropykv.errors import ModelFileError, SettingsError

ROPE_SCALINGS = {
    "none": llama_cpp.LLAMA_ROPE_SCALING_TYPE_NONE,
    "linear": llama_cpp.LLAMA_ROPE_SCALING_TYPE_LINEAR,
    "yarn": llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN,
}
_HAS_TENSOR_SPLIT = hasattr(llama_cpp, "LLAMA_SPLIT_MODE_TENSOR")
NUMA_STRATEGIES = {
    "distribute": llama_cpp.GGML_NUMA_STRATEGY_DISTRIBUTE,
    "isolate": llama_cpp.GGML_NUMA_STRATEGY_ISOLATE,
    "numactl": llama_cpp.GGML_NUMA_STRATEGY_NUMACTL,
}


SPLIT_MODES = {
    "none": llama_cpp.LLAMA_SPLIT_MODE_NONE,
    "layer": llama_cpp.LLAMA_SPLIT_MODE_LAYER,
    "row": llama_cpp.LLAMA_SPLIT_MODE_ROW,
    **({"tensor": llama_cpp.LLAMA_SPLIT_MODE_TENSOR} if _HAS_TENSOR_SPLIT else {}),
}
"""llama.cpp's numbers of the ways to split a model over several devices."""
LOAD_MODES = {
    "auto": (True, False),
    "mmap": (True, False),
    "mmap+mlock": (True, True),
    "mlock": (False, True),
    "none": (False, False),
    "dio": (False, False),
}
"""For each of llama.cpp's load modes, the values of use_mmap and use_mlock."""
MOST_DEVICES = llama_cpp.LLAMA_MAX_DEVICES
_MOST_OVERRIDES = 64
_OVERRIDE_BYTES = 127
"""The most bytes of a key, and of a text value, in llama_model_kv_override."""
_NEXT_OVERRIDE = re.compile(r",(?=[^,=]+=(?:int|float|bool|str):)")
_KINDS: dict[str, Callable[[str], bool | int | float | str]] = {
    "bool": lambda text: {"true": True, "1": True, "false": False, "0": False}[text.lower()],
    "int": int,
    "float": float,
    "str": str,
}
Overrides = Mapping[str, bool | int | float | str]


@dataclass(frozen=True)
class LoadOptions:
    """Hold options for loading a model; none of them changes the KV budget.

    `rope`: fields of llama_context_params, such as rope_freq_base. `adapters`: pairs of the path of
    a LoRA adapter and its scale. `numa`: one of NUMA_STRATEGIES. `chat_template`: Jinja text, or
    the name of a template that llama.cpp knows; None takes the model's own. `template_arguments`:
    variables that a Jinja template gets besides the messages. `split_mode` (one of SPLIT_MODES),
    `main_gpu` and `tensor_split` (parts of the model for each device) say how devices share the
    model. `overrides`: metadata values that replace those of the file. `parse_special`: whether
    names of control tokens in messages and documents become such tokens.
    """

    use_mmap: bool = True
    use_mlock: bool = False
    numa: str | None = None
    adapters: Sequence[tuple[str, float]] = ()
    rope: Mapping[str, float] = field(default_factory=dict)
    chat_template: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    split_mode: str | None = None
    main_gpu: int | None = None
    tensor_split: Sequence[float] = ()
    overrides: Overrides = field(default_factory=dict)
    parse_special: bool = False

    def apply(self, parameters: Any) -> list[Any]:
        """Set fields of llama_model_params; returns arrays that must live until the model is
        loaded.
        """
        _set_load_mode(parameters, self.use_mmap, self.use_mlock)
        arrays: list[Any] = []
        # Without a device, llama.cpp refuses some of these fields.
        devices = llama_cpp.llama_supports_gpu_offload()
        if devices and self.split_mode is not None:
            parameters.split_mode = SPLIT_MODES[self.split_mode]
        if devices and self.main_gpu is not None:
            parameters.main_gpu = self.main_gpu
        if devices and self.tensor_split:
            arrays.append((ctypes.c_float * MOST_DEVICES)(*self.tensor_split))
            parameters.tensor_split = arrays[-1]
        if self.overrides:
            arrays.append(_array_of(self.overrides))
            parameters.kv_overrides = arrays[-1]
        return arrays


def _set_load_mode(parameters: Any, use_mmap: bool, use_mlock: bool) -> None:
    """Set how weights are brought into memory; releases before 0.3.36 have two fields for it."""
    if not hasattr(llama_cpp, "LLAMA_LOAD_MODE_MMAP"):
        parameters.use_mmap, parameters.use_mlock = use_mmap, use_mlock
    elif use_mmap and use_mlock:
        parameters.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK
    elif use_mlock:
        parameters.load_mode = llama_cpp.LLAMA_LOAD_MODE_MLOCK
    elif not use_mmap:
        parameters.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE


def read_overrides(texts: Iterable[str]) -> dict[str, bool | int | float | str]:
    """Read values of the form KEY=TYPE:VALUE, separated by commas, as llama.cpp does.

    Raises SettingsError for a value that is malformed or too long, and for too many of them.
    """
    overrides: dict[str, bool | int | float | str] = {}
    for text in (part for each in texts for part in _NEXT_OVERRIDE.split(each)):
        key, _, typed = text.partition("=")
        kind, _, value = typed.partition(":")
        try:
            overrides[key] = _KINDS[kind](value)
        except (KeyError, ValueError):
            raise SettingsError(
                f"--override-kv (kv_overrides) cannot be {text[:200]!r}; give key=type:value with "
                f"a type of {', '.join(_KINDS)}"
            ) from None
        long = max(len(key.encode()), len(value.encode()) if kind == "str" else 0)
        if not key or long > _OVERRIDE_BYTES or len(overrides) > _MOST_OVERRIDES:
            raise SettingsError(
                f"--override-kv (kv_overrides): keys and texts have 1 to {_OVERRIDE_BYTES} bytes, "
                f"and there are at most {_MOST_OVERRIDES}; give fewer, or shorter ones"
            )
        if kind == "int" and not -(2**63) <= int(value) < 2**63:
            raise SettingsError(f"--override-kv {key}: integers have 64 bits; give a smaller one")
    return overrides


def _array_of(overrides: Overrides) -> Any:
    """Return an array of llama_model_kv_override, with an empty one at the end."""
    kinds = {
        bool: (llama_cpp.LLAMA_KV_OVERRIDE_TYPE_BOOL, "val_bool"),
        int: (llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT, "val_i64"),
        float: (llama_cpp.LLAMA_KV_OVERRIDE_TYPE_FLOAT, "val_f64"),
        str: (llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR, "val_str"),
    }
    array = (llama_cpp.llama_model_kv_override * (len(overrides) + 1))()
    for entry, (key, value) in zip(array, overrides.items(), strict=False):
        entry.key = key.encode()
        entry.tag, name = kinds[type(value)]
        setattr(entry.value, name, value.encode() if isinstance(value, str) else value)
    return array


class LoraAdapters:
    """Hold the LoRA adapters of a loaded model, which frees them together with the weights."""

    def __init__(self, model: Any, wanted: Sequence[tuple[str, float]]) -> None:
        """Load the adapters; raises ModelFileError for a file that is not an adapter of
        this model.
        """
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
        """Enable the adapters in a context."""
        apply_adapters(context, list(zip(self._handles, self._scales, strict=True)))


def apply_adapters(context: Any, adapters: Sequence[tuple[Any, float]]) -> None:
    """Enable loaded LoRA adapters in a context, each with its scale, and disable all others.

    Raises ModelFileError if llama.cpp refuses them.
    """
    n = len(adapters)
    handles = (llama_cpp.llama_adapter_lora_p_ctypes * n)(*(handle for handle, _ in adapters))
    scales = (ctypes.c_float * n)(*(scale for _, scale in adapters))
    if llama_cpp.llama_set_adapters_lora(context, handles, n, scales) != 0:
        raise ModelFileError(
            "llama.cpp cannot use the LoRA adapter with this model; give one that was made for it"
        )
