"""Write tiny text models with fitting projectors, one for each kind of image."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropykv import Session
from entropykv.session.images import ImagePrompt
from tests.architectures import MODELS
from tests.support.architecture_models import written
from tests.support.image_reference import MARKER
from tests.support.releases import need_images
from tests.support.tiny_models import write_llama
from tests.support.tiny_vision import TinyProjector, png

KINDS = {"causal": "mlp", "seeing all": "gemma3", "M-RoPE": "qwen2vl_merger"}
"""The projector type for each kind of image: rows that attend to earlier ones, to all, or have
two-dimensional positions.
"""
FILES = [png(64, 40), png(48, 48, seed=3)]
TEXT = f"the painting {MARKER} and the other {MARKER} of the old land shows what"
TOKENS = {"causal": 36, "seeing all": 9, "M-RoPE": 12}
"""The number of tokens that the first image of FILES becomes, by kind."""


@dataclass(frozen=True)
class VisionModel:
    kind: str
    path: Path
    projector: Path

    def session(self, **options: Any) -> Session:
        given = {"n_ctx": 512, "n_ubatch": 64, "n_threads": 1, "kv_type": "f16"}
        session = Session(self.path, **{**given, **options})
        session.open_projector(self.projector)
        return session


def write_vision(kind: str, folder: Path) -> VisionModel:
    """Write a text model and its projector; skip the test if this release cannot read them."""
    need_images()
    if kind == "causal":
        path = folder / "llama.gguf"
        write_llama(path, weight_type="F32", n_head=4, n_head_kv=2, head_dim=16)
    else:
        path = written(MODELS["gemma3" if kind == "seeing all" else "qwen2vl"], folder)
    projector = folder / f"mmproj-{path.stem}.gguf"
    TinyProjector(projector, KINDS[kind], n_embd=64).write()
    return VisionModel(kind, path, projector)


def prompt_of(session: Session, text: str = TEXT, files: list[bytes] | None = None) -> ImagePrompt:
    assert session.images is not None
    marked = text.replace(MARKER, session.images.marker)
    return session.images.tokenize(marked, FILES if files is None else files)
