"""The public 1.58-bit models as text: `entropykv models --known`."""

from __future__ import annotations

from entropykv.convert.known import KnownModel


def format_known(models: list[KnownModel], kv_budget: str) -> str:
    """One paragraph for each model, and what the values are taken from."""
    about = (
        "The public 1.58-bit language models, as `entropykv convert` writes them (sizes), and what "
        f"a budget of\n{kv_budget} leaves of their KV cache at their own context. Values after ~ "
        "are not confirmed."
    )
    return "\n\n".join([about, *(_paragraph(model, kv_budget) for model in models)])


def _paragraph(model: KnownModel, kv_budget: str) -> str:
    geometry = model.geometry
    full = 2 * model.n_ctx * geometry.cached_values
    types = ", ".join(name for name, _ in geometry.weight_types if name != "F32")
    folder = model.name.split("/")[-1]
    lines = [
        f"{model.name}" + (f" (and {', '.join(model.variants)})" if model.variants else ""),
        f"  {_mib(geometry.weights_bytes)} of {types}; {model.architecture}, "
        f"{_value(model, 'n_layer')} layers, {_value(model, 'n_head')} query heads, "
        f"{_value(model, 'n_head_kv')} KV heads of {model.shape.head_dim}, "
        f"{_value(model, 'n_ctx')} tokens of context, tokenizer of {model.tokenizer}",
        f"  KV cache {_mib(2000 * geometry.cached_values)} per 1,000 tokens in f16, {_mib(full)} "
        f"in full; with the budget {_mib(model.budget_bytes(kv_budget))}",
        f"  huggingface-cli download {model.name} --local-dir {folder}",
        f"  entropykv convert {folder} {folder}.gguf",
    ]
    if model.i2s:
        lines.append(f"  or the file ggml-model-i2_s.gguf of {model.i2s} instead of the directory")
    return "\n".join(lines)


def _value(model: KnownModel, name: str) -> str:
    return f"{'~' if name in model.unchecked else ''}{getattr(model, name)}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
