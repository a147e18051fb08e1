"""Let llama-cpp-python's chat handlers of images answer inside a KV budget.

A handler renders a chat, has libmtmd cut it into tokens and images, and reads both into llama.cpp's
own cache, all in one method. Here it does so with stand-ins of libmtmd and of the model, which only
note what it would read. The prompt, with placeholders for its images, is then completed as any
other: what was read of it before is not read again.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_chat_format

from entropykv.errors import ContextError, EntropyKVError
from entropykv.llamacpp.projector import load_mtmd
from entropykv.session.images import ImagePrompt, Images

_HANDLERS = (llama_chat_format.Llava15ChatHandler, llama_chat_format.MTMDChatHandler)


class BudgetImageHandler:
    """Answer chats as a handler of llama-cpp-python does, inside the budget of an EntropyLlama."""

    def __init__(self, handler: Any) -> None:
        """Take a handler, which is left as it is."""
        self.handler = handler

    @staticmethod
    def of(handler: Any) -> Any:
        """Return what answers inside a budget in the place of a handler: itself without images."""
        return BudgetImageHandler(handler) if isinstance(handler, _HANDLERS) else handler

    def __call__(self, *, llama: Any, **arguments: Any) -> Any:
        """Answer a chat; raises ImageError, ContextError, and what opening the projector does."""
        images = self._images_of(llama)
        handler = copy.copy(self.handler)
        model = _NotingLlama(llama)
        handler._mtmd_cpp = _NotingMtmd(images, model)
        handler.mtmd_ctx = 1  # it would open the projector otherwise
        try:
            return handler(llama=model, **arguments)
        except EntropyKVError:
            raise
        except ValueError as error:
            if "exceeds n_ctx" not in str(error):
                raise
            raise ContextError(f"{error}; shorten the prompt or raise n_ctx") from None

    def _images_of(self, llama: Any) -> Images:
        """Return what reads images for a model; the first chat opens the handler's file."""
        session, path = llama._session, Path(self.handler.clip_model_path)
        images: Images | None = session.images
        if images is None or images.projector.path != path:
            use_gpu = bool(getattr(self.handler, "use_gpu", True))
            images = session.open_projector(path, use_gpu=use_gpu)
        return images


class _NotingLlama:
    """Stand for a Llama that a handler reads a prompt into, which is noted and not read."""

    def __init__(self, llama: Any) -> None:
        self._llama = llama
        self._tokens: list[int] = []
        self._ctx = self
        self.ctx = None
        self.n_tokens = 0
        self.prompt: ImagePrompt | None = None

    def __getattr__(self, name: str) -> Any:
        """Return whatever else the Llama has."""
        return getattr(self._llama, name)

    def reset(self) -> None:
        """Note nothing yet; what the Llama has read stays."""
        self._tokens.clear()
        self.n_tokens = 0

    def kv_cache_clear(self) -> None:
        """Do as reset() does, which handlers call beside it."""

    def eval(self, tokens: Sequence[int]) -> None:
        """Note tokens of the prompt."""
        self._tokens += tokens
        self.n_tokens = len(self._tokens)

    @property
    def input_ids(self) -> npt.NDArray[np.intc]:
        """Return the tokens noted so far."""
        return np.array(self._tokens, np.intc)

    def create_completion(self, **arguments: Any) -> Any:
        """Complete the prompt; its images are held until the next one comes."""
        self._llama._image_prompt = self.prompt
        return self._llama.create_completion(**arguments)


class _NotingMtmd:
    """Stand for llama_cpp.mtmd_cpp: a prompt becomes one chunk of tokens and placeholders."""

    def __init__(self, images: Images, llama: _NotingLlama) -> None:
        self._mtmd = load_mtmd()
        self._images = images
        self._llama = llama
        self._files: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        """Return types and constants of the module."""
        return getattr(self._mtmd, name)

    def mtmd_default_marker(self) -> bytes:
        """Return what stands for an image in the text."""
        return self._images.marker.encode()

    def mtmd_helper_bitmap_init_from_buf(
        self, _context: Any, buffer: Any, _size: int, _placeholder: bool
    ) -> int:
        """Note the file of an image; it is decoded with the prompt."""
        self._files.append(bytes(buffer))
        return len(self._files)

    def mtmd_bitmap_free(self, _bitmap: Any) -> None:
        """Free nothing: a bitmap is a number here."""

    def mtmd_input_chunks_init(self) -> int:
        """Return a number in the place of a handle."""
        return 1

    def mtmd_input_chunks_free(self, _chunks: Any) -> None:
        """Free nothing, as mtmd_bitmap_free()."""

    def mtmd_tokenize(self, _context: Any, _chunks: Any, text: Any, *_: Any) -> int:
        """Read the prompt with its images."""
        self._llama.prompt = self._images.tokenize(
            text._obj.text.decode("utf-8"), self._files, most_tokens=self._llama.n_ctx()
        )
        return 0

    def mtmd_input_chunks_size(self, _chunks: Any) -> int:
        """Return that there is one chunk."""
        return 1

    def mtmd_input_chunks_get(self, _chunks: Any, _number: int) -> int:
        """Return a number in the place of the chunk."""
        return 1

    def mtmd_input_chunk_get_type(self, _chunk: Any) -> int:
        """Return that it is text: placeholders are tokens, too."""
        return int(self._mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT)

    def mtmd_input_chunk_get_tokens_text(self, _chunk: Any, size: Any) -> list[int]:
        """Return all tokens, and their number in `size`."""
        tokens = [] if self._llama.prompt is None else self._llama.prompt.tokens
        size._obj.value = ctypes.c_size_t(len(tokens)).value
        return tokens
