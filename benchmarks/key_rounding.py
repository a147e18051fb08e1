"""Measure what rounding keys to q8_0 costs attention, depending on how keys with biases are stored.

    python benchmarks/key_rounding.py MODEL.gguf [--text FILE] [--tokens N]

A full f16 cache reads a text; its keys are rounded as the store would round them, and every fourth
of the last 128 tokens attends to them again. Prints the KL divergence of attention, summed over the
KV heads of all layers; each KV head counts with the mean over its query heads and tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from entropykv import Session, _core
from entropykv.model.key_biases import KeyBias, read_key_biases

Floats = npt.NDArray[np.float64]
LAST, STEP = 128, 4
BLOCK = 32
TEXT = Path(__file__).parent / "texts" / "heldout_prose_01.txt"


class Form(NamedTuple):
    """Hold the centre that is subtracted from keys, the units of the rest, and the order of
    channels, each [dim].
    """

    centre: npt.NDArray[np.floating]
    unit: npt.NDArray[np.floating]
    order: npt.NDArray[np.intp]


def rounded(rows: Floats) -> Floats:
    """Return rows [n][dim], rounded to the values that q8_0 can hold."""
    blocks = rows.reshape(len(rows), -1, BLOCK)
    scale = np.float16(np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float64)
    steps = np.clip(np.rint(blocks / np.where(scale > 0, scale, 1)), -127, 127)
    return (steps * scale).reshape(rows.shape)


def forms(keys: Floats, bias: Floats, spread: Floats, node: _core.AttentionNode) -> dict[str, Form]:
    """Return ways to store the keys of a KV head, by name."""
    dim = keys.shape[1]
    zero, one, order = np.zeros(dim), np.ones(dim), np.arange(dim)
    half = dim // 2
    pair = np.hypot(bias[:half], bias[half:]) if node.rope.neox else np.hypot(bias[::2], bias[1::2])
    of_channels = np.tile(pair, 2) if node.rope.neox else np.repeat(pair, 2)
    scales = np.maximum(of_channels / (2 * np.median(pair)), 1.0)
    of_bias = _core.key_centre(bias.tolist(), spread.tolist(), node.rope, node.rope_magnitude)
    return {
        "as they are": Form(zero, one, order),
        "channels with large biases together": Form(zero, one, np.argsort(-of_channels)),
        "in units of the biases": Form(zero, scales, order),
        "without the centres": Form(of_bias[0], one, order),
        "without the centres, in units": Form(*of_bias, order),
        "without the text's own means, in its deviations": Form(keys.mean(0), keys.std(0), order),
    }


def divergence(queries: Floats, keys: Floats, other: Floats, first: int) -> float:
    """Return the mean KL divergence between the attention of queries [n][heads][dim] to keys and to
    `other`, [T][dim] each; query i is that of position `first` + STEP * i.
    """
    seen = np.arange(len(keys)) <= first + STEP * np.arange(len(queries))[:, None, None]

    def log_shares(of: Floats) -> Floats:
        logits = np.where(seen, queries @ of.T, -1e30)
        logits -= logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    ours, theirs = log_shares(keys), log_shares(other)
    return float((np.exp(ours) * np.where(seen, ours - theirs, 0.0)).sum(-1).mean())


def measure(model: Path, text: Path, n_tokens: int) -> dict[str, float]:
    """Return the KL divergence, summed over all KV heads, for each way to store keys."""
    totals: dict[str, float] = {}
    with Session(
        model, kv_budget=1.0, n_ctx=n_tokens, n_ubatch=LAST, kv_type="f16", policy="fast"
    ) as session:
        tokens = session.tokenize(text.read_text(encoding="utf-8"))[:n_tokens]
        core = session._slot.store.core  # type: ignore[attr-defined]  # noqa: SLF001
        session.decode(tokens[:-LAST])
        core.capture_queries(True)
        session.decode(tokens[-LAST:])
        biases = read_key_biases(session.config.geometry)
        for layer, node in enumerate(session.hook.nodes):
            queries = core.queries(layer)[0][::STEP].astype(np.float64)
            group = node.shape.n_head // node.shape.n_head_kv
            of_layer = biases.get(node.cache_layer) or no_bias(node)
            for head in range(node.shape.n_head_kv):
                keys = core.rows(layer, head)[2].astype(np.float64)
                of_head = queries[:, head * group : (head + 1) * group]
                stored = forms(keys, of_layer.bias[head], of_layer.spread[head], node)
                for name, (centre, unit, order) in stored.items():
                    held = rounded(((keys - centre) / unit)[:, order])
                    back = np.empty_like(keys)
                    back[:, order] = held
                    back = back * unit + centre
                    lost = divergence(of_head, keys, back, len(tokens) - LAST)
                    totals[name] = totals.get(name, 0.0) + lost
    return totals


def no_bias(node: _core.AttentionNode) -> KeyBias:
    """Return the bias of a layer that adds nothing to its keys."""
    shape = (node.shape.n_head_kv, node.shape.k_dim)
    return KeyBias(np.zeros(shape, np.float32), np.ones(shape, np.float32))


def main() -> None:
    """Print a row for each way to store keys."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=1280)
    options = parser.parse_args()
    for name, total in measure(options.model, options.text, options.tokens).items():
        print(f"{name:<48} {total:8.4f}")


if __name__ == "__main__":
    main()
