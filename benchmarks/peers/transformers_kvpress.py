"""kvpress's rows: the dequantised weights in transformers, against its own full cache."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers.dense import Compressed, DensePrompt, continuation, with_own_prefill
from benchmarks.peers.ours import StockReference
from benchmarks.peers.presses import PRESSES, PressKind
from benchmarks.peers.protocol import AGREEMENT, Method, Passage
from entropykv.evaluation.metrics import Logits, compare

FULL = "full cache, against llama.cpp's"
"""The row that tells how far apart the two frameworks are with the same weights."""


def load_dequantised(model: Path, tokenizer_directory: str) -> Any:
    """The weights of a GGUF file in transformers, in float32.

    KVzip reads a tokenizer from a directory of the model's: it has no chat template, of which KVzip
    would take the first tokens of a text for the beginning.
    """
    source: dict[str, Any] = {"gguf_file": model.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(str(model.parent), **source)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tokenizer_directory)
    weights = AutoModelForCausalLM.from_pretrained(
        str(model.parent), dtype=torch.float32, attn_implementation="sdpa", **source
    ).eval()
    weights.config.save_pretrained(tokenizer_directory)
    weights.config.name_or_path = tokenizer_directory
    return weights


class KVPress:
    """Presses at the given keep ratios, and the full cache."""

    name = "kvpress"

    def __init__(
        self,
        model: str,
        reference: StockReference,
        presses: Sequence[str],
        keeps: Sequence[float],
        n_threads: int,
    ) -> None:
        """Load the model; errors are transformers' own."""
        torch.set_num_threads(n_threads)
        torch.manual_seed(0)  # some presses project at random
        logging.getLogger("kvpress").setLevel(logging.ERROR)
        self._directory = tempfile.TemporaryDirectory()
        self._model = load_dequantised(Path(model), self._directory.name)
        self._reference = reference
        self.methods = [
            Method(AGREEMENT, self.name, FULL, "f16", 1.0),
            *(
                Method(AGREEMENT, self.name, press, "f16", keep)
                for press in presses
                for keep in keeps
            ),
        ]

    def measure(
        self, passage: Passage, wanted: Sequence[Method]
    ) -> Iterator[tuple[Method, dict[str, float]]]:
        """Figures of the wanted methods for one text."""
        if not wanted:
            return
        dense = DensePrompt(self._model, passage.prompt)
        full = self._continue(dense.compressed(), passage)
        for method in wanted:
            if method.name == FULL:
                agreement = compare(self._reference.logits(passage), full, passage.continuation)
                yield method, asdict(agreement) | {"kept": 1.0, "bytes": 1.0}
                continue
            compressed = self._compress(dense, PRESSES[method.name], method.keep, passage)
            logits = self._continue(compressed, passage)
            agreement = compare(full, logits, passage.continuation)
            kept = {"kept": compressed.kept, "bytes": compressed.held}
            yield method, asdict(agreement) | kept

    def _compress(
        self, dense: DensePrompt, kind: PressKind, keep: float, passage: Passage
    ) -> Compressed:
        press = kind.make(1.0 - keep)
        if not kind.own_prefill:
            return dense.compressed(press)
        if kind.eager:
            self._model.set_attn_implementation("eager")
        try:
            return with_own_prefill(self._model, press, passage.prompt)
        finally:
            self._model.set_attn_implementation("sdpa")

    def _continue(self, compressed: Compressed, passage: Passage) -> Logits:
        return continuation(self._model, compressed, len(passage.prompt), passage.continuation)
