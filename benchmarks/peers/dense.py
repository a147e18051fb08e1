"""Read a prompt once in transformers, and compress its full cache by many of kvpress's presses.

A press works in a hook after the attention of each layer, on the arguments of that attention and
the entries of the cache; the prompt itself is read with all of its keys. Therefore the hooks of all
presses get the same arguments, which are recorded once instead of reading the prompt again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from entropykv.llamacpp.distributions import Logits


@dataclass(frozen=True)
class _Seen:
    """Hold the arguments that the hook of one layer gets."""

    keywords: dict[str, Any]
    output: Any
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Compressed:
    """Hold a cache to which a press was applied."""

    cache: DynamicCache
    kept: float
    """The share of the prompt's entries that attention uses."""
    held: float
    """The share of the prompt's entries in memory; larger if evicted entries are only masked."""


def attentions(model: Any) -> list[Any]:
    """Return the attention module of every layer."""
    return [layer.self_attn for layer in model.model.layers]


def with_own_prefill(model: Any, press: Any, prompt: Sequence[int]) -> Compressed:
    """Read a prompt within the context of a press, as kvpress's pipeline does."""
    cache = DynamicCache()
    with torch.no_grad(), press(model):
        model.model(input_ids=torch.tensor([list(prompt)]), past_key_values=cache)
    return _compressed(model, cache, len(prompt))


class DensePrompt:
    """Hold the full cache of a prompt, and the recorded arguments of its layers' hooks."""

    def __init__(self, model: Any, prompt: Sequence[int]) -> None:
        """Read the prompt once, and record the arguments."""
        self._model, self._n = model, len(prompt)
        keywords: list[dict[str, Any]] = []
        outputs: list[Any] = []

        def record(_module: Any, _args: Any, given: dict[str, Any], output: Any) -> None:
            keywords.append(given)
            outputs.append(output)

        hooks = [m.register_forward_hook(record, with_kwargs=True) for m in attentions(model)]
        cache = DynamicCache()
        try:
            with torch.no_grad():
                model.model(input_ids=torch.tensor([list(prompt)]), past_key_values=cache)
        finally:
            for hook in hooks:
                hook.remove()
        self._layers = [
            _Seen(given, output, layer.keys, layer.values)
            for given, output, layer in zip(keywords, outputs, cache.layers, strict=True)
        ]

    def compressed(self, press: Any | None = None) -> Compressed:
        """Return a new cache to which a press was applied; without a press, the full cache."""
        cache = DynamicCache()
        for index, seen in enumerate(self._layers):
            cache.update(seen.keys.clone(), seen.values.clone(), index)
        modules = attentions(self._model)
        for module in modules:
            module.masked_key_indices = None
        if press is not None:
            with torch.no_grad(), press(self._model):
                for module, seen in zip(modules, self._layers, strict=True):
                    given = seen.keywords | {"past_key_values": cache}
                    press.forward_hook(module, [], given, seen.output)
        return _compressed(self._model, cache, self._n)


def _compressed(model: Any, cache: DynamicCache, n_prompt: int) -> Compressed:
    held = [layer.keys.shape[2] * layer.keys.shape[1] for layer in cache.layers]
    masked = sum(
        len(indices[0])
        for module in attentions(model)
        if (indices := getattr(module, "masked_key_indices", None)) is not None
    )
    full = n_prompt * sum(layer.keys.shape[1] for layer in cache.layers)
    return Compressed(cache, (sum(held) - masked) / full, sum(held) / full)


class Continued:
    """Read tokens after a compressed prompt.

    Every layer gets its own mask, because layers may keep different numbers of entries. Entries
    that a press evicts only for some heads are masked. (kvpress itself replaces their keys by ones
    that get no attention; for many queries at once, such keys may not exist.)
    """

    def __init__(self, model: Any, compressed: Compressed, n_prompt: int) -> None:
        """Use the cache of a prompt of n_prompt tokens."""
        self._model, self._cache, self._n_prompt = model, compressed.cache, n_prompt
        self._kept = [
            _kept(module, layer.keys.shape[2])
            for module, layer in zip(attentions(model), self._cache.layers, strict=True)
        ]
        self.position = n_prompt

    def read(self, tokens: Sequence[int]) -> Logits:
        """Read tokens in one pass; return their logits, (n_tokens, n_vocab)."""
        end = self.position + len(tokens)
        with torch.no_grad(), self._masks(len(tokens)):
            logits = self._model(
                input_ids=torch.tensor([list(tokens)]),
                past_key_values=self._cache,
                position_ids=torch.arange(self.position, end)[None],
            ).logits
        self.position = end
        result: Logits = logits[0].float().numpy()
        return result

    def truncate(self, position: int) -> None:
        """Remove the tokens from `position` on, which is at least the length of the prompt."""
        self.position = position
        for layer, kept in zip(self._cache.layers, self._kept, strict=True):
            n_entries = kept.shape[1] + position - self._n_prompt
            layer.keys = layer.keys[:, :, :n_entries]
            layer.values = layer.values[:, :, :n_entries]

    @contextmanager
    def _masks(self, n_tokens: int) -> Iterator[None]:
        n_read = self.position - self._n_prompt
        hooks = []
        for module, kept in zip(attentions(self._model), self._kept, strict=True):
            mask = _mask(kept, n_read, n_tokens)
            module.masked_key_indices = None

            def with_mask(
                _module: Any, args: Any, given: dict[str, Any], mask: torch.Tensor = mask
            ) -> tuple[Any, dict[str, Any]]:
                return args, given | {"attention_mask": mask}

            hooks.append(module.register_forward_pre_hook(with_mask, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _kept(module: Any, n_entries: int) -> torch.Tensor:
    """Return which of the prompt's remaining entries each query head sees: bool, (n_head or 1,
    n_entries).
    """
    kept = torch.ones(1, n_entries, dtype=torch.bool)
    if (indices := getattr(module, "masked_key_indices", None)) is not None:
        _, heads, entries = indices
        kept = kept.repeat(module.config.num_key_value_heads, 1)
        kept[heads, entries] = False
        kept = kept.repeat_interleave(module.num_key_value_groups, dim=0)
    return kept


def _mask(kept: torch.Tensor, n_read: int, n_tokens: int) -> torch.Tensor:
    """Return which entries each query head sees: bool, (1, n_head or 1, n_tokens, kept entries +
    n_read + n_tokens).
    """
    causal = torch.ones(n_tokens, n_read + n_tokens, dtype=torch.bool).tril(n_read)
    rows = (len(kept), n_tokens)
    return torch.cat([kept[:, None].expand(*rows, -1), causal[None].expand(*rows, -1)], dim=2)[None]
