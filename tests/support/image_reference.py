"""Read prompts with images as llama.cpp's own helper does, in a stock context."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import mtmd_cpp

from entropykv.llamacpp.model import Model

MARKER = mtmd_cpp.mtmd_default_marker().decode()


def helper_logits(
    path: Path, projector: Path, text: str, images: Sequence[bytes], *, flash: bool = False
) -> npt.NDArray[np.float32]:
    """Return the logits, (n_vocab,), after a prompt in which MARKER stands for each image.

    Flash attention rounds its queries to f16, as the flat store does.
    """
    n_batch = 512
    model = Model(path, n_gpu_layers=0, verbose=False, repack=True)
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx, parameters.n_threads, parameters.n_threads_batch = 2048, 1, 1
    parameters.n_batch = parameters.n_ubatch = n_batch
    kinds = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED, llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    parameters.flash_attn_type = kinds[flash]
    context = model.new_context(parameters)
    settings = mtmd_cpp.mtmd_context_params_default()
    settings.use_gpu = settings.print_timings = settings.warmup = False
    settings.n_threads = 1
    encoder = mtmd_cpp.mtmd_init_from_file(os.fsencode(projector), model.handle, settings)
    assert encoder
    chunks = mtmd_cpp.mtmd_input_chunks_init()
    bitmaps = [_bitmap(encoder, image) for image in images]
    try:
        data = text.encode()
        given = mtmd_cpp.mtmd_input_text(data, len(data), True, True)
        array = (mtmd_cpp.mtmd_bitmap_p_ctypes * len(bitmaps))(*bitmaps)
        assert (
            mtmd_cpp.mtmd_tokenize(encoder, chunks, ctypes.byref(given), array, len(bitmaps)) == 0
        )
        end = llama_cpp.llama_pos(0)
        assert (
            mtmd_cpp.mtmd_helper_eval_chunks(
                encoder, context, chunks, 0, 0, n_batch, True, ctypes.byref(end)
            )
            == 0
        )
        pointer: Any = llama_cpp.llama_get_logits_ith(context, -1)
        return np.ctypeslib.as_array(pointer, shape=(model.n_vocab,)).copy()
    finally:
        mtmd_cpp.mtmd_input_chunks_free(chunks)
        for bitmap in bitmaps:
            mtmd_cpp.mtmd_bitmap_free(bitmap)
        mtmd_cpp.mtmd_free(encoder)
        llama_cpp.llama_free(context)
        model.close()


def _bitmap(encoder: Any, data: bytes) -> Any:
    buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    bitmap = mtmd_cpp.mtmd_helper_bitmap_init_from_buf(encoder, buffer, len(data), False)
    assert bitmap
    return bitmap
