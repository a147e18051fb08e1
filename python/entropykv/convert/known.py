"""List the public 1.58-bit language models: their shapes, and their sizes once converted."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from gguf import GGML_QUANT_SIZES

from entropykv.convert.decoder import HEAD, DecoderShape
from entropykv.convert.outputs import embedding_kind, ternary_kind
from entropykv.convert.source import EMBEDDING
from entropykv.model.geometry import ModelGeometry

PATH = Path(__file__).parent / "known_models.json"
"""JSON file with the shapes of the public models; `unchecked` lists values that no published text
has confirmed.
"""
_PATHS = {"packed": "packed directory", "masters": "master directory"}
"""Names of the forms that `convert` reads, by how the checkpoint stores its ternary weights."""


@dataclass(frozen=True)
class KnownModel:
    """Describe a model on Hugging Face, and its siblings of the same shape (`variants`).

    `storage`: packed (uint8 with scales) or masters (the conversion quantises them). `i2s`: the
    repository that has an I2_S file, or None. `tied`: the embedding is also the output head.
    """

    name: str
    architecture: str
    activation: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_vocab: int
    n_ctx: int
    rope_base: float
    tokenizer: str
    storage: str
    tied: bool
    unchecked: tuple[str, ...]
    variants: tuple[str, ...] = ()
    i2s: str | None = None

    @property
    def shape(self) -> DecoderShape:
        """Return the sizes of the model's tensors."""
        return DecoderShape(
            architecture=self.architecture,
            n_layer=self.n_layer,
            n_embd=self.n_embd,
            n_head=self.n_head,
            n_head_kv=self.n_head_kv,
            head_dim=self.n_embd // self.n_head,
            n_ff=self.n_ff,
            n_vocab=self.n_vocab,
        )

    @property
    def weight_types(self) -> dict[str, int]:
        """Return the bytes of each tensor type in the converted file, with the types that `convert`
        chooses.
        """
        projections = {f"{name}.weight" for name in self.shape.projections()}
        tensors = self.shape.required()
        if not self.tied:
            tensors |= {HEAD: tensors[EMBEDDING]}
        sizes = {"F32": 4 * len(projections)}  # Each projection has one scale of 4 bytes.
        for name, shape in tensors.items():
            kind = "F32"
            if name in projections:
                kind = ternary_kind(shape[-1]).name
            elif name in (EMBEDDING, HEAD):
                kind = embedding_kind(shape[-1]).name
            sizes[kind] = sizes.get(kind, 0) + _bytes_of(kind, math.prod(shape))
        return sizes

    @property
    def geometry(self) -> ModelGeometry:
        """Return the geometry that the header of the converted file will declare."""
        types = sorted(self.weight_types.items(), key=lambda item: -item[1])
        n_bytes = sum(self.weight_types.values())
        return ModelGeometry(
            path=Path(self.name),
            architecture=self.architecture,
            name=self.name,
            n_layer=self.n_layer,
            n_head=self.n_head,
            heads_per_layer=(self.n_head,) * self.n_layer,
            kv_heads_per_layer=(self.n_head_kv,) * self.n_layer,
            head_dim_k=self.shape.head_dim,
            head_dim_v=self.shape.head_dim,
            n_ctx_train=self.n_ctx,
            n_vocab=self.n_vocab,
            weights_bytes=n_bytes,
            file_bytes=n_bytes,
            weight_types=tuple(types),
            activation=self.activation,
            learned_positions=False,
            latent=False,
        )

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the forms that `convert` can read: the directory as it is stored, and an I2_S file
        if there is one.
        """
        return (_PATHS[self.storage], *(["I2_S"] if self.i2s else []))


def known_models() -> list[KnownModel]:
    """Return all known models; the family with the smallest model is first."""
    rows = json.loads(PATH.read_text(encoding="utf-8"))["models"]
    lists = ("unchecked", "variants")
    return [KnownModel(**row | {k: tuple(row.get(k, ())) for k in lists}) for row in rows]


def _bytes_of(kind: str, elements: int) -> int:
    sizes = {k.name: size for k, size in GGML_QUANT_SIZES.items()}
    block, block_bytes = sizes[kind]
    return elements // block * block_bytes
