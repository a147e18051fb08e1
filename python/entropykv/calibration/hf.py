"""Measure attention entropies through transformers with eager attention, without a GGUF file."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv.calibration.measure import CalibrationSettings, Extent, excerpts_of, measure
from entropykv.calibration.spread import Progress
from entropykv.errors import CalibrationError, reason_of
from entropykv.evaluation.texts import Text
from entropykv.profile.profile import EntropyProfile


def calibrate_hf(
    name: str,
    texts: Sequence[Text],
    settings: CalibrationSettings,
    device: str = "cpu",
    on_start: Callable[[Extent], None] = lambda _: None,
    on_progress: Progress = lambda _: None,
) -> EntropyProfile:
    """Measure entropies of a model that transformers loads, in float32; loss curves are not
    measured.

    `device`: torch's name of a device. Raises CalibrationError if torch or transformers is missing
    or cannot load the model, if a text is too short, and for an entropy that is not finite.
    """
    missing = [p for p in ("torch", "transformers") if importlib.util.find_spec(p) is None]
    if missing:
        raise CalibrationError(
            f"--hf needs {' and '.join(missing)}; install them with: pip install 'entropykv[hf]'"
        )
    model, tokenizer = load_eager(name, device)

    def tokenize(text: str) -> list[int]:
        return list(tokenizer(text, verbose=False)["input_ids"])

    excerpts = excerpts_of(texts, tokenize, settings)
    on_start(Extent(sum(len(excerpt.tokens) for excerpt in excerpts)))
    measured = measure(lambda tokens: eager_entropies(model, tokens), excerpts, on_progress)
    config = model.config.get_text_config()
    chosen = measured.chosen(settings.rows).mean(axis=0)
    n_head = chosen.shape[1]
    return EntropyProfile(
        n_layer=chosen.shape[0],
        n_head=n_head,
        n_head_kv=getattr(config, "num_key_value_heads", None) or n_head,
        n_ctx=getattr(config, "max_position_embeddings", None) or settings.max_length,
        head_entropies=chosen,
        model=name,
        source=f"entropykv calibrate --hf, {len(excerpts)} texts",
        measurement=measured.summary(settings, "f32"),
    )


def load_eager(name: str, device: str, **options: Any) -> tuple[Any, Any]:
    """Load model and tokenizer, with `options` for from_pretrained(); raises CalibrationError if
    that fails.
    """
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    messages: Any = logging
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    if device == "cuda" and not torch.cuda.is_available():
        raise CalibrationError("there is no CUDA device here; use --device cpu")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        model: Any = AutoModelForCausalLM.from_pretrained(
            name, attn_implementation="eager", dtype=torch.float32, **options
        )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise CalibrationError(
            f"{name}: transformers cannot load it ({reason_of(error, 200)}); give a model's "
            "directory or its name on Hugging Face"
        ) from error
    return model.to(device).eval(), tokenizer


def eager_entropies(model: Any, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return the entropy of every attention row in bits: (n_layer, len(tokens), n_head)."""
    import torch  # noqa: PLC0415

    with torch.inference_mode():
        ids = torch.tensor([list(tokens)], device=model.device)
        result = model(ids, output_attentions=True, use_cache=False)
        rows = []
        for weights in result.attentions:  # `weights` has shape (1, n_head, n_tokens, n_tokens).
            nats = torch.special.entr(weights[0].float()).sum(dim=-1)
            rows.append((nats / np.log(2.0)).T.cpu().numpy())
    return np.stack(rows).astype(np.float32)
