"""Let llama-cpp-python's chat handlers for images answer inside a KV budget.

A handler renders a chat, lets libmtmd split it into tokens and images, and reads both into
llama.cpp's own cache, all in one method. Here, the handler gets stand-ins for libmtmd and for the
model, which only record the prompt. The prompt, with placeholders for its images, is then completed
as any other, so that its beginning is reused if it was read before.
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
    """Answer chats as an image handler of llama-cpp-python does, inside the budget of an
    EntropyLlama.
    """

    def __init__(self, handler: Any) -> None:
        """Wrap a handler, which is not changed."""
        self.handler = handler

    @staticmethod
    def of(handler: Any) -> Any:
        """Return a handler that answers inside a budget: a wrapper for image handlers, other ones
        unchanged.
        """
        return BudgetImageHandler(handler) if isinstance(handler, _HANDLERS) else handler

    def __call__(self, *, llama: Any, **arguments: Any) -> Any:
        """Answer a chat; raises ImageError for an image that cannot be read, ContextError for a
        prompt that is too long, and the errors of opening the projector.
        """
        images = self._images_of(llama)
        handler = copy.copy(self.handler)
        model = _NotingLlama(llama)
        handler._mtmd_cpp = _NotingMtmd(images, model)
        handler.mtmd_ctx = 1  # Otherwise the handler would open the projector itself.
        try:
            return handler(llama=model, **arguments)
        except EntropyKVError:
            raise
        except ValueError as error:
            if "exceeds n_ctx" not in str(error):
                raise
            raise ContextError(f"{error}; shorten the prompt or raise n_ctx") from None

    def _images_of(self, llama: Any) -> Images:
        """Return the image reader of a model; the first chat opens the handler's projector file."""
        session, path = llama._session, Path(self.handler.clip_model_path)
        images: Images | None = session.images
        if images is None or images.projector.path != path:
            use_gpu = bool(getattr(self.handler, "use_gpu", True))
            images = session.open_projector(path, use_gpu=use_gpu)
        return images


class _NotingLlama:
    """Stand in for the Llama that a handler reads a prompt into: it records the tokens and reads
    nothing.
    """

    def __init__(self, llama: Any) -> None:
        self._llama = llama
        self._tokens: list[int] = []
        self._ctx = self
        self.ctx = None
        self.n_tokens = 0
        self.prompt: ImagePrompt | None = None

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the Llama."""
        return getattr(self._llama, name)

    def reset(self) -> None:
        """Forget the recorded tokens; the Llama itself keeps what it has read."""
        self._tokens.clear()
        self.n_tokens = 0

    def kv_cache_clear(self) -> None:
        """Do nothing, because handlers call reset() as well."""

    def eval(self, tokens: Sequence[int]) -> None:
        """Record tokens of the prompt."""
        self._tokens += tokens
        self.n_tokens = len(self._tokens)

    @property
    def input_ids(self) -> npt.NDArray[np.intc]:
        """Return the tokens recorded so far."""
        return np.array(self._tokens, np.intc)

    def create_completion(self, **arguments: Any) -> Any:
        """Complete the prompt; its images are kept until the next prompt."""
        self._llama._image_prompt = self.prompt
        return self._llama.create_completion(**arguments)


class _NotingMtmd:
    """Stand in for llama_cpp.mtmd_cpp: a prompt becomes a single chunk of tokens and placeholders.

    Bitmaps and chunks are numbers here, which stand for pointers that nobody reads.
    """

    def __init__(self, images: Images, llama: _NotingLlama) -> None:
        self._mtmd = load_mtmd()
        self._images = images
        self._llama = llama
        self._files: list[bytes] = []
        self._constant = {
            "mtmd_default_marker": images.marker.encode(),
            "mtmd_bitmap_free": None,
            "mtmd_input_chunks_init": 1,
            "mtmd_input_chunks_free": None,
            "mtmd_input_chunks_size": 1,
            "mtmd_input_chunks_get": 1,
            # Placeholders are tokens, too.
            "mtmd_input_chunk_get_type": int(self._mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT),
        }
        """What functions return whose arguments do not matter, by their names."""

    def __getattr__(self, name: str) -> Any:
        """Return a function of `_constant`, or any other attribute of the module, such as its types
        and constants.
        """
        if name in self._constant:
            return lambda *_: self._constant[name]
        return getattr(self._mtmd, name)

    def mtmd_helper_bitmap_init_from_buf(
        self, _context: Any, buffer: Any, _size: int, _placeholder: bool
    ) -> int:
        """Record the content of an image file, which is decoded with the prompt, and return its
        number.
        """
        self._files.append(bytes(buffer))
        return len(self._files)

    def mtmd_tokenize(self, _context: Any, _chunks: Any, text: Any, *_: Any) -> int:
        """Tokenize the prompt and encode its images; returns 0 for success."""
        self._llama.prompt = self._images.tokenize(
            text._obj.text.decode("utf-8"), self._files, most_tokens=self._llama.n_ctx()
        )
        return 0

    def mtmd_input_chunk_get_tokens_text(self, _chunk: Any, size: Any) -> list[int]:
        """Return all tokens of the prompt, and store their number in `size`."""
        tokens = [] if self._llama.prompt is None else self._llama.prompt.tokens
        size._obj.value = ctypes.c_size_t(len(tokens)).value
        return tokens
