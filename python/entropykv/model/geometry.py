"""Read what the header of a GGUF file declares about a model, without loading it: ModelGeometry."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from gguf import GGUFValueType

from entropykv.errors import ModelFileError, UnsupportedModelError
from entropykv.model.header import (
    AGAIN,
    MAX_LAYERS,
    HeaderReader,
    check_prefix,
    damage_named,
    integers,
    number,
    per_layer,
    required,
    text_value,
)

_PREFIX = "tokenizer.ggml."
_STRINGS = (GGUFValueType.STRING,)
_NUMBERS_OF_TOKENS = {
    "scores": (GGUFValueType.FLOAT32,),
    "token_type": (GGUFValueType.INT32, GGUFValueType.UINT32),
}
_BYTES = (GGUFValueType.UINT8, GGUFValueType.INT8)
_EPSILONS = ("layer_norm_epsilon", "layer_norm_rms_epsilon", "group_norm_epsilon")
_ROTATED = ("dimension_count", "dimension_count_swa")
_NONE = ("none", "no_vocab")


def check_loadable(reader: HeaderReader, architecture: str) -> None:
    """Raise ModelFileError for a file without tokenizer or merges, and ValueError for damage with
    which loading the file by llama.cpp would end the process.
    """
    _check_tokenizer(reader)
    for name in _ROTATED:
        key = f"{architecture}.rope.{name}"
        if (number(reader, key) or 0) % 2:
            raise ValueError(f"{key} is odd: values are rotated in pairs")
    for name in _EPSILONS:
        key = f"{architecture}.attention.{name}"
        field = reader.get_field(key)
        if field is None or field.types != [GGUFValueType.FLOAT32]:
            continue  # llama.cpp itself refuses other types.
        value = float(field.contents())
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{key} is {value}")


def _check_tokenizer(reader: HeaderReader) -> None:
    kind = text_value(reader, _PREFIX + "model")
    n_tokens = _length(reader, "tokens", _STRINGS)
    if kind is None or kind in _NONE or not n_tokens:
        raise ModelFileError(
            f"{reader.path}: has no tokenizer, so no text can be read; take a file that has one, "
            "or convert the model from a directory with its tokenizer files"
        )
    for name, kinds in _NUMBERS_OF_TOKENS.items():
        length = _length(reader, name, kinds)
        if length is not None and length < n_tokens:
            raise ValueError(f"{_PREFIX}{name} has {length} values for {n_tokens} tokens")
    n_merges = _length(reader, "merges", _STRINGS)
    if kind == "gpt2" and n_merges is None:
        raise ModelFileError(f"{reader.path}: lacks {_PREFIX}merges; {AGAIN}")
    _length(reader, "precompiled_charsmap", _BYTES)
    tokens = [token for token in reader.texts(_PREFIX + "tokens") if token]
    distinct = set(tokens)
    if len(distinct) < len(tokens):
        raise ValueError(f"{_PREFIX}tokens has a token twice")
    if kind == "llama":
        _check_bytes(distinct)


def _check_bytes(tokens: set[bytes]) -> None:
    """Raise ValueError if a byte that sentencepiece may fall back to has no token."""
    for byte in range(256):
        name = f"<0x{byte:02X}>"
        if name.encode() not in tokens and bytes([byte]) not in tokens:
            raise ValueError(f"{_PREFIX}tokens lacks {name}, which other text needs")


def _length(reader: HeaderReader, name: str, kinds: tuple[GGUFValueType, ...]) -> int | None:
    """Return the length of an array of the tokenizer; None if there is none. Raises ValueError for
    elements of other kinds.
    """
    field = reader.get_field(_PREFIX + name)
    if field is None:
        return None
    if field.types[0] != GGUFValueType.ARRAY or field.types[-1] not in kinds:
        wanted = " or ".join(kind.name.lower() for kind in kinds)
        raise ValueError(f"{_PREFIX}{name} is not an array of {wanted}")
    return int(field.parts[4][0])


ACTIVATION_KEY = "entropykv.activation"
"""The metadata key, our own, for the activation of the feed-forward gates.

An architecture does not determine it: BitNet files exist with SiLU (1bitLLM) and with squared ReLU
(Microsoft's 2B-4T).
"""
ACTIVATIONS = ("silu", "relu2")
_RECURRENT_KEYS = (
    *("ssm.conv_kernel", "ssm.state_size", "wkv.head_size", "shortconv.l_cache"),
    *("full_attention_interval", "attention.compress_ratios"),
)
"""Metadata keys that only models with recurrent layers have."""


@dataclass(frozen=True)
class ModelGeometry:
    """Hold the shape and the weights of a model, as its GGUF header declares them.

    `n_head` is the maximum of `heads_per_layer`. Recurrent layers have 0 heads, and layers that
    reuse the K and V of an earlier layer have 0 KV heads. Head sizes are elements of one head,
    `n_ctx_train` is in tokens. `weights_bytes` is the total size of the tensors in this file (for a
    split model: in this part); `weight_types` has (type, bytes), largest first. `activation` is the
    file's `entropykv.activation`: "relu2" for squared ReLU; "silu" or None for what llama.cpp's
    graph of the architecture computes. `learned_positions`: the file has an embedding for each
    position. `latent`: multi-head latent attention, where V is the first `head_dim_v` values of K
    and not cached separately.
    """

    path: Path
    architecture: str
    name: str
    n_layer: int
    n_head: int
    heads_per_layer: tuple[int, ...]
    kv_heads_per_layer: tuple[int, ...]
    head_dim_k: int
    head_dim_v: int
    n_ctx_train: int
    n_vocab: int
    weights_bytes: int
    file_bytes: int
    weight_types: tuple[tuple[str, int], ...]
    activation: str | None
    learned_positions: bool
    latent: bool
    recurrent: bool = False
    """True if some or all layers carry a state from token to token."""
    window_head_dims: tuple[int, ...] = ()
    """The sizes of K and V in layers with a sliding window, if they differ from other layers."""
    n_embd: int = 0
    """How many values one token has between two layers."""
    key_biases: bool = False
    """Whether a bias is added to the keys of some layer in this file, and no norm changes them
    afterwards.
    """
    n_ff: int = 0
    """How many values one token has within the largest feed-forward layer; 0 if the header omits
    it.
    """

    @property
    def cached_values(self) -> int:
        """Return how many values llama.cpp's own cache holds per token, in all layers together."""
        of_head = self.head_dim_k + (0 if self.latent else self.head_dim_v)
        return sum(self.kv_heads_per_layer) * of_head


def read_geometry(path: str | os.PathLike[str]) -> ModelGeometry:
    """Read the header of a GGUF file; tensor data is not read.

    Raises ModelFileError for a file that is missing, truncated, damaged or not GGUF, and
    UnsupportedModelError for a file of Microsoft's BitNet fork (I2_S, TL1, TL2) or an unknown
    activation.
    """
    path = Path(path)
    file_bytes = check_prefix(path)
    with damage_named(path):
        return geometry_of(HeaderReader(path), path, file_bytes)


def read_loadable(path: str | os.PathLike[str]) -> ModelGeometry:
    """Read the geometry of a file, and raise if loading it with llama.cpp would end the process.

    Raises the errors of read_geometry().
    """
    path = Path(path)
    file_bytes = check_prefix(path)
    with damage_named(path):
        reader = HeaderReader(path)
        geometry = geometry_of(reader, path, file_bytes)
        check_loadable(reader, geometry.architecture)
        return geometry


def read_chat_template(path: str | os.PathLike[str]) -> str | None:
    """Return the chat template of a file; None where it has none. Raises what read_geometry()
    raises.
    """
    path = Path(path)
    check_prefix(path)
    with damage_named(path):
        return text_value(HeaderReader(path), "tokenizer.chat_template")


def geometry_of(reader: HeaderReader, path: Path, file_bytes: int) -> ModelGeometry:
    """Return the geometry that a header declares.

    Raises ModelFileError or ValueError if it is damaged, and UnsupportedModelError for an unknown
    activation.
    """
    architecture = text_value(reader, "general.architecture")
    if architecture is None:
        raise ModelFileError(f"{path}: lacks general.architecture; {AGAIN}")
    if not architecture.isprintable():
        raise ValueError(f"general.architecture is {architecture!r}")
    layers = required(reader, f"{architecture}.block_count")
    if layers > MAX_LAYERS:
        raise ValueError(f"{architecture}.block_count is {layers}")
    heads = per_layer(reader, f"{architecture}.attention.head_count", layers)
    if heads is None:
        raise ModelFileError(f"{path}: lacks {architecture}.attention.head_count; {AGAIN}")
    kv_heads = per_layer(reader, f"{architecture}.attention.head_count_kv", layers) or heads
    n_sharing = number(reader, f"{architecture}.attention.shared_kv_layers") or 0
    if n_sharing >= layers:
        raise ValueError(f"{architecture}.attention.shared_kv_layers is {n_sharing}")
    kv_heads = (*kv_heads[: layers - n_sharing], *(0,) * n_sharing)
    for n_head, n_head_kv in zip(heads, kv_heads, strict=True):
        if n_head_kv > 0 and n_head % n_head_kv != 0:
            raise ValueError(f"head_count {n_head} is not a multiple of head_count_kv {n_head_kv}")
    n_embd = required(reader, f"{architecture}.embedding_length")
    default_dim = n_embd // (heads[0] or max(heads)) if max(heads) > 0 else 0
    key_length = number(reader, f"{architecture}.attention.key_length")
    value_length = number(reader, f"{architecture}.attention.value_length")
    return ModelGeometry(
        path=path,
        architecture=architecture,
        name=text_value(reader, "general.name") or path.stem,
        n_layer=layers,
        n_head=max(heads),
        heads_per_layer=heads,
        kv_heads_per_layer=kv_heads,
        head_dim_k=default_dim if key_length is None else key_length,
        head_dim_v=default_dim if value_length is None else value_length,
        n_ctx_train=required(reader, f"{architecture}.context_length"),
        n_vocab=_vocabulary_size(reader, architecture),
        weights_bytes=reader.type_bytes.total(),
        file_bytes=file_bytes,
        weight_types=tuple(reader.type_bytes.most_common()),
        activation=_activation(reader),
        learned_positions="position_embd.weight" in reader.places,
        latent=bool(number(reader, f"{architecture}.attention.key_length_mla")),
        recurrent=any(reader.get_field(f"{architecture}.{key}") for key in _RECURRENT_KEYS),
        window_head_dims=_window_head_dims(reader, architecture),
        n_embd=n_embd,
        key_biases=any(key_bias_of(reader, layer) for layer in range(layers)),
        n_ff=_largest(reader, f"{architecture}.feed_forward_length"),
    )


def key_bias_of(reader: HeaderReader, layer: int) -> str | None:
    """Return the name of the projection with the bias that a layer adds to its keys, and possibly
    to its queries and values; None if there is none, or a norm changes the keys afterwards.
    """
    block = f"blk.{layer}"
    if f"{block}.attn_k_norm.weight" in reader.places:
        return None
    names = (f"{block}.attn_k", f"{block}.attn_qkv")
    return next((name for name in names if f"{name}.bias" in reader.places), None)


def _largest(reader: HeaderReader, key: str) -> int:
    values = integers(reader, key)
    return 0 if values is None or values.size == 0 else int(values.max())


def _window_head_dims(reader: HeaderReader, architecture: str) -> tuple[int, ...]:
    names = (f"{architecture}.attention.{name}_length_swa" for name in ("key", "value"))
    return tuple(size for size in (number(reader, name) for name in names) if size)


def _activation(reader: HeaderReader) -> str | None:
    activation = text_value(reader, ACTIVATION_KEY)
    if activation is None or activation in ACTIVATIONS:
        return activation
    raise UnsupportedModelError(
        f"{reader.path}: its {ACTIVATION_KEY} is {activation[:40]!r}, which is none of "
        f"{', '.join(ACTIVATIONS)}; update entropykv or convert the model again"
    )


def _vocabulary_size(reader: HeaderReader, architecture: str) -> int:
    """Count the tokens of the tokenizer; without one, return the size in the metadata, or 0."""
    tokens = reader.get_field("tokenizer.ggml.tokens")
    if tokens is not None and tokens.types[0] == GGUFValueType.ARRAY:
        # The parts are: key length, key, type, item type, length, ...
        return int(tokens.parts[4][0])
    return number(reader, f"{architecture}.vocab_size") or 0
