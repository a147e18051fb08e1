"""List the presses of kvpress that need no question, no training and no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kvpress


@dataclass(frozen=True)
class PressKind:
    """Describe a press: how it is made for a share of entries to evict, and what it needs."""

    make: Callable[[float], Any]
    own_prefill: bool = False
    """True if the press reads the prompt in its own way, several times."""
    eager: bool = False
    """True if the press needs matrices of attention, which transformers returns only with eager
    attention.
    """


def _snapkv(window: int) -> Callable[[float], Any]:
    return lambda ratio: kvpress.SnapKVPress(ratio, window_size=window)


def _over(wrapper: Callable[..., Any], make: Callable[[float], Any]) -> Callable[[float], Any]:
    return lambda ratio: wrapper(make(ratio))


def _expected_attention(ratio: float) -> Any:
    return kvpress.ExpectedAttentionPress(ratio, epsilon=1e-2)


PRESSES: dict[str, PressKind] = {
    "StreamingLLM": PressKind(kvpress.StreamingLLMPress),
    "SnapKV, window 64": PressKind(_snapkv(64)),
    "SnapKV, window 128": PressKind(_snapkv(128)),
    "AdaKV(SnapKV 64)": PressKind(_over(kvpress.AdaKVPress, _snapkv(64))),
    "AdaKV(SnapKV 128)": PressKind(_over(kvpress.AdaKVPress, _snapkv(128))),
    "CriticalKV(SnapKV 64)": PressKind(_over(kvpress.CriticalKVPress, _snapkv(64))),
    "CriticalAdaKV(SnapKV 64)": PressKind(_over(kvpress.CriticalAdaKVPress, _snapkv(64))),
    "PyramidKV": PressKind(kvpress.PyramidKVPress),
    "ExpectedAttention": PressKind(_expected_attention),
    "AdaKV(ExpectedAttention)": PressKind(_over(kvpress.AdaKVPress, _expected_attention)),
    "TOVA": PressKind(kvpress.TOVAPress),
    "KeyDiff": PressKind(kvpress.KeyDiffPress),
    "Knorm": PressKind(kvpress.KnormPress),
    "LagKV": PressKind(kvpress.LagKVPress),
    "Compactor": PressKind(lambda ratio: kvpress.CompactorPress(compression_ratio=ratio)),
    "LeverageScore": PressKind(lambda ratio: kvpress.LeverageScorePress(compression_ratio=ratio)),
    "NonCausalAttn": PressKind(lambda ratio: kvpress.NonCausalAttnPress(compression_ratio=ratio)),
    "CUR": PressKind(lambda ratio: kvpress.CURPress(compression_ratio=ratio)),
    "CapKV": PressKind(kvpress.CapPress),
    "ChunkKV(SnapKV 64)": PressKind(_over(kvpress.ChunkKVPress, _snapkv(64))),
    "Merging(SnapKV 64)": PressKind(_over(kvpress.MergingPress, _snapkv(64))),
    "Random": PressKind(lambda ratio: kvpress.RandomPress(ratio, seed=0)),
    "ObservedAttention (H2O)": PressKind(
        kvpress.ObservedAttentionPress, own_prefill=True, eager=True
    ),
    "KVzip": PressKind(kvpress.KVzipPress, own_prefill=True),
    "KVzip+": PressKind(
        lambda ratio: kvpress.KVzipPress(ratio, kvzip_plus_normalization=True), own_prefill=True
    ),
    "KVCompose": PressKind(
        lambda ratio: kvpress.KVComposePress(compression_ratio=ratio), own_prefill=True
    ),
    "KVgrad": PressKind(kvpress.KVgradPress, own_prefill=True),
}
"""All presses by the name of their rows, the slow ones last.

The following are left out: presses that need weights or patterns for the model from a hub
(FastKVzip, KVzap, QFilter, ExpectedAttentionStats, LU-KV, RestoreKV, DMS, DuoAttention), that read
a question (Finch), that have no keep ratio (SimLayerKV), that drop channels instead of entries
(ThinK), and that evict only while decoding.
"""
