"""Print the public 1.58-bit models: `entropykv models --known`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from entropykv.cli.table import format_columns
from entropykv.convert.known import KnownModel
from entropykv.policy.names import policy_named
from entropykv.policy.plan import HeadwisePlan, attention_layers, kv_type_for, plan_headwise
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.options import Budget

_TITLES = ("model", "converted from", "file", "KV/1,000", "KV full", "KV budget", "entries")


def format_known(models: list[KnownModel], kv_budget: str) -> str:
    """Return a table, a paragraph about each model, and the sources of the values."""
    about = (
        "The public 1.58-bit language models, as `entropykv convert` writes them, their KV cache\n"
        f"in f16, and what a budget of {kv_budget} leaves of it at their own context (entries per "
        "KV head).\nPacked weights and I2_S files are converted exactly, masters are quantised on "
        "the way.\nValues after ~ are not confirmed. Sizes in MiB."
    )
    table = format_columns([_TITLES, *(_row(model, kv_budget) for model in models)])
    return "\n\n".join([about, table, *(_paragraph(model) for model in models)])


def plan_of(model: KnownModel, kv_budget: Budget | str | float) -> tuple[HeadwisePlan, str]:
    """Return the plan that `entropykv plan` prints for a budget at the model's full context, and
    the KV type.

    The type is the one that `--kv-type auto` chooses for this budget.
    """
    budget, geometry = Budget.parse(kv_budget), model.geometry
    layers, n_sinks = attention_layers(geometry), CacheOptions.n_sinks
    kv_type = kv_type_for("auto", budget, geometry, model.n_ctx)
    policy = policy_named("auto", None, "headwise")
    plan = plan_headwise(budget, layers, model.n_ctx, kv_type, policy, None, n_sinks, None)
    return plan, kv_type


def figures_of(model: KnownModel, kv_budget: str) -> dict[str, Any]:
    """Return one object of `entropykv models --json`: the row of the table, and the figures that
    follow from it.
    """
    plan, kv_type = plan_of(model, kv_budget)
    return asdict(model) | {
        "conversion_paths": model.paths,
        "head_dim": model.shape.head_dim,
        "converted_bytes": model.geometry.weights_bytes,
        "weight_types": model.weight_types,
        "kv_bytes_per_1000_tokens_f16": 2000 * model.geometry.cached_values,
        "kv_budget": kv_budget,
        "kv_bytes_f16": 2 * model.n_ctx * model.geometry.cached_values,
        "kv_bytes_budget": plan.pool_bytes,
        "kv_type_budget": kv_type,
        "entries_per_head_budget": plan.mean_entries,
    }


def _row(model: KnownModel, kv_budget: str) -> tuple[str, ...]:
    geometry = model.geometry
    plan, kv_type = plan_of(model, kv_budget)
    sizes = (
        geometry.weights_bytes,
        2000 * geometry.cached_values,
        2 * model.n_ctx * geometry.cached_values,
        plan.pool_bytes,
    )
    return (
        _folder(model),
        ", ".join(model.paths),
        *(f"{size / 2**20:,.0f}" for size in sizes),
        f"{plan.mean_entries:,} {kv_type}",
    )


def _paragraph(model: KnownModel) -> str:
    geometry = model.geometry
    types = ", ".join(name for name, _ in geometry.weight_types if name != "F32")
    folder = _folder(model)
    lines = [
        f"{model.name}" + (f" (and {', '.join(model.variants)})" if model.variants else ""),
        f"  {types}; {model.architecture}, "
        f"{_value(model, 'n_layer')} layers, {_value(model, 'n_head')} query heads, "
        f"{_value(model, 'n_head_kv')} KV heads of {model.shape.head_dim}, "
        f"{_value(model, 'n_ctx')} tokens of context, tokenizer of {model.tokenizer}",
        f"  entropykv run -hf {model.name} -p TEXT",
        f"  or hf download {model.name} --local-dir {folder}",
        f"  and entropykv convert {folder} {folder}.gguf",
    ]
    if model.i2s:
        lines.append(f"  or the file ggml-model-i2_s.gguf of {model.i2s} instead of the directory")
    return "\n".join(lines)


def _folder(model: KnownModel) -> str:
    return model.name.split("/")[-1]


def _value(model: KnownModel, name: str) -> str:
    return f"{'~' if name in model.unchecked else ''}{getattr(model, name)}"
