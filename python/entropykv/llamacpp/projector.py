"""Turn images into embeddings with llama.cpp's libmtmd and a projector file (mmproj).

A projector is the vision encoder of a text model, in a GGUF file of its own. It turns an image into
hundreds of rows of numbers, which the text model reads instead of the embeddings of tokens. No
other module touches handles of libmtmd.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from gguf import GGUFValueType
from llama_cpp import _logger as llama_logger

from entropykv.errors import (
    EntropyKVError,
    ImageError,
    ModelFileError,
    UnsupportedModelError,
)
from entropykv.llamacpp.model import Model, captured_log, last_error
from entropykv.model.header import (
    AGAIN,
    MAX_LAYERS,
    HeaderReader,
    check_prefix,
    damage_named,
    required,
    text_value,
)

_NODES = 16
"""How many nodes of the encoder's graph are computed before encode() may be interrupted again."""
_TEXT_FIELDS = ["text", "text_len", "add_special", "parse_special"]
_FUNCTIONS = (
    "mtmd_helper_image_get_decoder_pos",
    "mtmd_helper_init_opt_default",
    "mtmd_helper_log_set",
)
"""Functions by which the interface of libmtmd in llama-cpp-python 0.3.36 is recognised: earlier
releases lack some.
"""
_SIZES = (
    "embedding_length",
    "attention.head_count",
    "block_count",
    "projection_dim",
    "patch_size",
)
"""Header fields of a vision encoder, named `clip.vision...`; llama.cpp divides by some of them, so
zeros are refused.
"""


@dataclass(frozen=True)
class TextChunk:
    """Hold tokens of a prompt before, between or behind its images."""

    tokens: list[int]


@dataclass(frozen=True, eq=False)
class ImageChunk:
    """Hold a part of an image that one run of the encoder turns into embeddings."""

    image: int
    """The index of the chunk's image, from 0."""
    n_tokens: int
    """How many rows of embeddings the chunk has; each row is read instead of a token."""
    n_positions: int
    """By how many positions RoPE advances over the chunk: fewer than n_tokens with M-RoPE."""
    positions: npt.NDArray[np.int32] | None
    """RoPE's positions of the rows if the first one is at 0, (4, n_tokens); None: consecutive
    positions.
    """
    moves: npt.NDArray[np.int32] | None
    """1 where an element of `positions` grows with the position of the first row, else 0; same
    shape.
    """
    sees_all: bool
    """True if the chunk's rows attend to each other, and not only to earlier ones."""
    handle: Any
    """libmtmd's mtmd_input_chunk, which is valid only inside Projector.tokenized()."""


class Projector:
    """Hold the vision encoder of a model, and encode one image at a time.

    It must be closed before the model. Any thread may call its methods; concurrent calls wait for
    each other.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: Model,
        *,
        n_threads: int,
        use_gpu: bool = False,
    ) -> None:
        """Load the file; its header is checked before llama.cpp reads it. `use_gpu`: run the
        encoder on a GPU, if llama.cpp was built for one.

        Raises ModelFileError for a file that is not a projector, is damaged, or was made for
        another model, and UnsupportedModelError if llama-cpp-python lacks libmtmd, or if the file
        has no vision encoder.
        """
        self.path = Path(path)
        self.identity = _check_header(self.path)
        """A hash of the projector's header, because other projectors give other embeddings."""
        self._mtmd = mtmd = load_mtmd()
        self._model = model
        self._lock = threading.RLock()
        self._poll: Callable[[], object] | None = None
        self._stopped: BaseException | None = None
        self._nodes = 0
        self._on_node = llama_cpp.ggml_backend_sched_eval_callback(self._node)
        self.marker = f"<__image_{secrets.token_hex(16)}__>"
        """The marker for an image in a text; it is random, so that no text can contain it by chance
        or intent.
        """
        self.n_embd: int = llama_cpp.llama_model_n_embd_inp(model.handle)
        """The number of values in a row of embeddings."""
        parameters = mtmd.mtmd_context_params_default()
        parameters.use_gpu = use_gpu
        parameters.n_threads = n_threads
        parameters.print_timings = False
        parameters.warmup = False
        parameters.media_marker = self.marker.encode()
        parameters.cb_eval = self._on_node
        with captured_log(mtmd.mtmd_helper_log_set) as log, model.in_use():
            self._handle: Any = mtmd.mtmd_init_from_file(
                os.fsencode(self.path), model.handle, parameters
            )
        if not self._handle:
            raise ModelFileError(
                f"{self.path}: llama.cpp cannot use this projector with {model.name} "
                f"({last_error(log)}); give the mmproj file that was made for the model"
            )

    @contextmanager
    def tokenized(
        self, text: str, images: Sequence[bytes], *, add_bos: bool
    ) -> Iterator[list[TextChunk | ImageChunk]]:
        """Split a prompt into text and images; self.marker stands for each image, in their order.

        `add_bos`: put a BOS token first if the model wants one. The chunks' handles are valid only
        inside the `with` block. Raises ImageError for an image that cannot be decoded,
        UnsupportedModelError if the vocabulary lacks the tokens that enclose an image, and
        EntropyKVError if the projector is closed.
        """
        mtmd = self._mtmd
        with self._open() as handle, captured_log(mtmd.mtmd_helper_log_set) as log:
            chunks = mtmd.mtmd_input_chunks_init()
            bitmaps: list[Any] = []
            try:
                bitmaps += (self._bitmap(handle, data, i) for i, data in enumerate(images))
                data = text.encode("utf-8")
                given = mtmd.mtmd_input_text(data, len(data), add_bos, True)
                array = (mtmd.mtmd_bitmap_p_ctypes * len(bitmaps))(*bitmaps)
                with self._model.in_use():
                    code = mtmd.mtmd_tokenize(
                        handle, chunks, ctypes.byref(given), array, len(bitmaps)
                    )
                if code != 0:
                    raise ImageError(
                        f"llama.cpp cannot read the prompt with its {len(bitmaps)} images "
                        f"({last_error(log)}); give others"
                    )
                n_chunks = mtmd.mtmd_input_chunks_size(chunks)
                yield [
                    self._chunk(handle, mtmd.mtmd_input_chunks_get(chunks, i))
                    for i in range(n_chunks)
                ]
            finally:
                mtmd.mtmd_input_chunks_free(chunks)
                for bitmap in bitmaps:
                    mtmd.mtmd_bitmap_free(bitmap)

    def _bitmap(self, handle: Any, data: bytes, number: int) -> Any:
        mtmd = self._mtmd
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(handle, buffer, len(data), False)
        if not bitmap:
            raise ImageError(
                f"image {number + 1} is damaged: llama.cpp cannot decode it; send another file"
            )
        mtmd.mtmd_bitmap_set_id(bitmap, str(number).encode())
        return bitmap

    def _chunk(self, handle: Any, chunk: Any) -> TextChunk | ImageChunk:
        mtmd = self._mtmd
        kind = mtmd.mtmd_input_chunk_get_type(chunk)
        if kind == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
            size = ctypes.c_size_t()
            pointer = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(size))
            tokens = pointer[: size.value] if size.value else []
            if tokens and min(tokens) < 0:
                raise UnsupportedModelError(
                    f"{self._model.name}: its vocabulary lacks tokens that {self.path} puts around "
                    "an image; give the mmproj file that was made for the model"
                )
            return TextChunk(tokens)
        n_tokens = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        positions = moves = None
        if mtmd.mtmd_decode_use_mrope(handle):
            positions = self._positions(chunk, n_tokens, 0)
            moves = self._positions(chunk, n_tokens, 1) - positions
        return ImageChunk(
            image=int(mtmd.mtmd_input_chunk_get_id(chunk)),
            n_tokens=n_tokens,
            n_positions=mtmd.mtmd_input_chunk_get_n_pos(chunk),
            positions=positions,
            moves=moves,
            sees_all=mtmd.mtmd_decode_use_non_causal(handle, chunk),
            handle=chunk,
        )

    def _positions(self, chunk: Any, n_tokens: int, first: int) -> npt.NDArray[np.int32]:
        """Return a chunk's positions in the order of a llama_batch, (4, n_tokens): time, row,
        column, unused.
        """
        mtmd = self._mtmd
        found = (mtmd.mtmd_decoder_pos * n_tokens)()
        tokens = mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        mtmd.mtmd_helper_image_get_decoder_pos(tokens, first, found)
        return np.array([(p.t, p.y, p.x, p.z) for p in found], np.int32).T.copy()

    def encode(
        self, chunk: ImageChunk, poll: Callable[[], object] | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the embeddings of a chunk, (n_tokens, n_embd).

        `poll` is called repeatedly while the encoder runs; an exception that it raises stops the
        encoder and is raised again here. Raises ImageError if the encoder fails, and EntropyKVError
        if the projector is closed.
        """
        mtmd = self._mtmd
        with self._open() as handle, captured_log(mtmd.mtmd_helper_log_set) as log:
            self._poll, self._stopped = poll, None
            try:
                code = mtmd.mtmd_encode_chunk(handle, chunk.handle)
                if self._stopped is not None:
                    raise self._stopped
            finally:
                self._poll = self._stopped = None
            if code != 0:
                raise ImageError(
                    f"llama.cpp cannot encode the image ({last_error(log)}); give another one"
                )
            flat = np.ctypeslib.as_array(
                mtmd.mtmd_get_output_embd(handle), shape=(chunk.n_tokens * self.n_embd,)
            )
            rows: npt.NDArray[np.float32] = flat.reshape(chunk.n_tokens, self.n_embd).copy()
            return rows

    def _node(self, _tensor: Any, ask: bool, _user_data: Any) -> bool:
        """Let llama.cpp compute some nodes of the graph at a time, and stop it if poll() raises.

        This is a callback of llama.cpp, which exceptions must not cross: so the exception is
        stored, even KeyboardInterrupt.
        """
        try:
            if ask:
                self._nodes = (self._nodes + 1) % _NODES
                return self._nodes == 0
            if self._poll is not None and self._stopped is None:
                self._poll()
        except BaseException as error:
            self._stopped = error
        return ask or self._stopped is None

    @contextmanager
    def _open(self) -> Iterator[Any]:
        with self._lock:
            if not self._handle:
                raise EntropyKVError("the projector is closed; open it again")
            yield self._handle

    def close(self) -> None:
        """Free the encoder, once no other thread is in encode() or in a tokenized() block."""
        with self._lock:
            handle, self._handle = self._handle, None
            if handle:
                self._mtmd.mtmd_free(handle)


@functools.cache
def load_mtmd() -> Any:
    """Return llama-cpp-python's module for libmtmd, with its log switched off; raises
    UnsupportedModelError if there is none, or one with another interface.
    """
    try:
        from llama_cpp import mtmd_cpp  # noqa: PLC0415  # it raises where the library is missing
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise UnsupportedModelError(
            "this llama-cpp-python was built without libmtmd, which reads images "
            f"({error}); install one that has it, or leave --mmproj out"
        ) from None
    text = getattr(mtmd_cpp, "mtmd_input_text", None)
    fields = [name for name, *_ in getattr(text, "_fields_", ())]
    if fields != _TEXT_FIELDS or not all(hasattr(mtmd_cpp, name) for name in _FUNCTIONS):
        raise UnsupportedModelError(
            f"llama-cpp-python {llama_cpp.__version__} calls libmtmd, which reads images, in "
            "another way than is known here; install 0.3.36, or leave --mmproj out"
        )
    quiet = llama_logger.llama_log_callback
    mtmd_cpp.mtmd_helper_log_set(quiet, ctypes.c_void_p(0))
    return mtmd_cpp


def _check_header(path: Path) -> str:
    """Return a hash of a projector's header. Raises ModelFileError for headers on which llama.cpp
    would abort the process, and UnsupportedModelError for a projector that reads no images.
    """
    check_prefix(path)
    with damage_named(path):
        reader = HeaderReader(path)
        kind = text_value(reader, "general.architecture")
        if kind != "clip":
            raise ModelFileError(
                f"{path}: is no projector but a model ({kind}); give the mmproj file beside it"
            )
        vision = reader.get_field("clip.has_vision_encoder")
        if vision is None or vision.types != [GGUFValueType.BOOL] or not vision.contents():
            raise UnsupportedModelError(
                f"{path}: has no vision encoder; sound is not read inside a KV budget, so give a "
                "projector for images"
            )
        sizes = {name: required(reader, f"clip.vision.{name}") for name in _SIZES}
        if sizes["block_count"] > MAX_LAYERS:
            raise ValueError(f"clip.vision.block_count is {sizes['block_count']}")
        for name in ("image_mean", "image_std"):
            field = reader.get_field(f"clip.vision.{name}")
            if field is None:
                raise ModelFileError(f"{path}: lacks clip.vision.{name}; {AGAIN}")
            if (
                field.types != [GGUFValueType.ARRAY, GGUFValueType.FLOAT32]
                or len(field.parts[field.data[0]]) != 3
            ):
                raise ValueError(f"clip.vision.{name} is no list of three numbers")
        header = reader.data[: int(reader.data_offset)].tobytes()
    return hashlib.sha256(header).hexdigest()
