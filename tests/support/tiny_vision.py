"""Write tiny projectors (mmproj files) with random weights, and images.

An image becomes (image_size / patch_size)^2 tokens of the text model, or fewer with gemma3,
idefics3 and qwen2vl, which merge patches.
"""

from __future__ import annotations

import os
import struct
import zlib

import numpy as np
from gguf import GGUFWriter

from tests.support.tiny_writer import FloatArray

N_EMBD, N_HEAD, N_FF, N_LAYER = 32, 2, 64, 2
PATCH = 8


class TinyProjector:
    """Write a projector of kind mlp, gemma3, idefics3 or qwen2vl_merger, for a text model of
    `n_embd` values.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        kind: str,
        n_embd: int,
        image_size: int = 48,
        seed: int = 0,
    ) -> None:
        self.kind, self.n_embd, self.image_size = kind, n_embd, image_size
        self.random = np.random.default_rng(seed)
        self.writer = GGUFWriter(path, "clip")

    def write(self, *, without: str | None = None) -> None:
        """Write the file; `without` is a header field of the vision encoder to leave out."""
        self._add_metadata(without)
        self._add_encoder()
        getattr(self, f"_add_{self.kind.replace('.', '_')}")()
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def _add_metadata(self, without: str | None) -> None:
        writer = self.writer
        writer.add_name("tiny projector")
        writer.add_bool("clip.has_vision_encoder", True)
        writer.add_string("clip.projector_type", self.kind)
        writer.add_bool("clip.use_gelu", True)
        numbers = {
            "embedding_length": N_EMBD,
            "attention.head_count": N_HEAD,
            "feed_forward_length": N_FF,
            "block_count": N_LAYER,
            "projection_dim": self.n_embd,
            "image_size": self.image_size,
            "patch_size": PATCH,
        }
        if self.kind in ("gemma3", "idefics3"):
            numbers["projector.scale_factor"] = 2
        for name, number in numbers.items():
            if name != without:
                writer.add_uint32(f"clip.vision.{name}", number)
        writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
        for name in ("image_mean", "image_std"):
            if name != without:
                writer.add_array(f"clip.vision.{name}", [0.5, 0.5, 0.5])

    def _add_encoder(self) -> None:
        n_patches = (self.image_size // PATCH) ** 2
        self._add("v.patch_embd.weight", N_EMBD, 3, PATCH, PATCH, scale=0.15)
        if self.kind == "qwen2vl_merger":
            self._add("v.patch_embd.weight.1", N_EMBD, 3, PATCH, PATCH, scale=0.15)
        else:
            self._add("v.patch_embd.bias", N_EMBD, scale=0.1)
            self._add("v.position_embd.weight", n_patches, N_EMBD, scale=0.5)
        self._add_norm("v.post_ln")
        for layer in range(N_LAYER):
            prefix = f"v.blk.{layer}."
            self._add_norm(prefix + "ln1")
            self._add_norm(prefix + "ln2")
            for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
                self._add_linear(prefix + name, N_EMBD, N_EMBD)
            self._add_linear(prefix + "ffn_up", N_FF, N_EMBD)
            self._add_linear(prefix + "ffn_down", N_EMBD, N_FF)

    def _add_mlp(self) -> None:
        self._add_linear("mm.0", self.n_embd, N_EMBD)
        self._add_linear("mm.2", self.n_embd, self.n_embd)

    def _add_qwen2vl_merger(self) -> None:
        self._add_linear("mm.0", 4 * N_EMBD, 4 * N_EMBD)
        self._add_linear("mm.2", self.n_embd, 4 * N_EMBD)

    def _add_gemma3(self) -> None:
        self._add("mm.input_projection.weight", N_EMBD, self.n_embd, scale=N_EMBD**-0.5)
        self._add("mm.soft_emb_norm.weight", N_EMBD, scale=0.1, mean=1.0)

    def _add_idefics3(self) -> None:
        self._add("mm.model.fc.weight", self.n_embd, 4 * N_EMBD, scale=(4 * N_EMBD) ** -0.5)

    def _add_linear(self, name: str, n_out: int, n_in: int) -> None:
        self._add(f"{name}.weight", n_out, n_in, scale=1.5 * n_in**-0.5)
        self._add(f"{name}.bias", n_out, scale=0.1)

    def _add_norm(self, name: str) -> None:
        self._add(f"{name}.weight", N_EMBD, scale=0.1, mean=1.0)
        self._add(f"{name}.bias", N_EMBD, scale=0.1)

    def _add(self, name: str, *shape: int, scale: float, mean: float = 0.0) -> None:
        values: FloatArray = self.random.standard_normal(shape) * scale + mean
        self.writer.add_tensor(name, values.astype(np.float32))


def png(width: int = 48, height: int = 48, seed: int = 0) -> bytes:
    """Return a PNG file with random colours in 4 x 4 fields."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (4, 4, 3))
    rows = np.arange(height) * 4 // height
    columns = np.arange(width) * 4 // width
    pixels = coarse[rows][:, columns].astype(np.uint8)
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_part(*part) for part in parts)


def _png_part(kind: bytes, data: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + check
