"""Measure kvpress, with the dequantised weights in transformers, against its own full cache."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers.answers import score
from benchmarks.peers.dense import Compressed, Continued, DensePrompt, with_own_prefill
from benchmarks.peers.ours import StockReference
from benchmarks.peers.presses import PRESSES
from benchmarks.peers.protocol import AGREEMENT, FACTS, RULER, Method, Passage
from entropykv.evaluation.metrics import compare
from entropykv.evaluation.stock import StockSession
from entropykv.llamacpp.distributions import Logits

FULL = "full cache, against llama.cpp's"
"""The name of the row for how much the frameworks' full caches differ with the same weights."""
FULL_CACHE = "full cache"
"""The name of the row of scores without a press."""


def load_dequantised(model: Path, tokenizers: Sequence[Path]) -> Any:
    """Return the weights of a GGUF file in transformers, in float32, and save its tokenizer twice.

    KVzip reads a tokenizer from the directory in the model's name. The first directory has no chat
    template, because KVzip would otherwise cut the template's beginning off the text.
    """
    source: dict[str, Any] = {"gguf_file": model.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(str(model.parent), **source)
    weights = AutoModelForCausalLM.from_pretrained(
        str(model.parent), dtype=torch.float32, attn_implementation="sdpa", **source
    ).eval()
    for directory, template in zip(tokenizers, (None, tokenizer.chat_template), strict=True):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(directory)
        weights.config.save_pretrained(directory)
    return weights


class ContinuedReader:
    """Let answers.score() read after a compressed prompt, with llama.cpp's vocabulary."""

    def __init__(self, continued: Continued, vocabulary: StockSession) -> None:
        """Use a prompt after which nothing was read yet."""
        self._continued = continued
        self.tokenize = vocabulary.tokenize
        self.detokenize = vocabulary.detokenize
        self.model = vocabulary.model
        self.reader = self.files = self

    @property
    def position(self) -> int:
        """Return the number of tokens read so far."""
        return self._continued.position

    def read(self, tokens: Sequence[int], all_logits: bool) -> Iterator[Logits]:
        """Read all tokens in one pass; yield the logits of all or of the last one: (n, n_vocab)."""
        logits = self._continued.read(tokens)
        yield logits if all_logits else logits[-1:]

    def save_state(self) -> int:
        """Return the position, which is enough to go back, because tokens are only appended."""
        return self.position

    def load_state(self, state: int) -> None:
        """Remove the tokens after a saved position."""
        self._continued.truncate(state)


class KVPress:
    """Run presses at the given keep ratios, and the full cache."""

    name = "kvpress"

    def __init__(
        self,
        model: str,
        reference: StockReference,
        presses: Sequence[str],
        keeps: Sequence[float],
        n_threads: int,
    ) -> None:
        """Load the model; raises the errors of transformers."""
        torch.set_num_threads(n_threads)
        torch.manual_seed(0)  # Some presses use random projections.
        logging.getLogger("kvpress").setLevel(logging.ERROR)
        self._directory = tempfile.TemporaryDirectory()
        self._tokenizers = [Path(self._directory.name) / name for name in ("text", "chat")]
        self._model = load_dequantised(Path(model), self._tokenizers)
        self._reference = reference
        self.methods = [
            Method(AGREEMENT, self.name, FULL, "f16", 1.0),
            *(Method(measure, self.name, FULL_CACHE, "f16", 1.0) for measure in (FACTS, RULER)),
            *(
                Method(measure, self.name, press, "f16", keep)
                for measure in (AGREEMENT, FACTS, RULER)
                for press in presses
                for keep in keeps
            ),
        ]

    def measure(
        self, passage: Passage, wanted: Sequence[Method]
    ) -> Iterator[tuple[Method, dict[str, float]]]:
        """Yield the figures of the wanted methods for one text."""
        if not wanted:
            return
        self._model.config.name_or_path = str(self._tokenizers[passage.is_chat])
        dense = DensePrompt(self._model, passage.prompt)

        @cache
        def full() -> Logits:
            return self._continued(dense.compressed(), passage).read(passage.continuation)

        for method in wanted:
            compressed = self._compress(dense, method, passage)
            kept = {"kept": compressed.kept, "bytes": compressed.held}
            continued = self._continued(compressed, passage)
            yield method, self._figures(continued, method, passage, full) | kept

    def _figures(
        self, continued: Continued, method: Method, passage: Passage, full: Callable[[], Logits]
    ) -> dict[str, float]:
        if method.measure != AGREEMENT:
            reader = ContinuedReader(continued, self._reference.session)
            return {"score": score(reader, passage.questions)}
        expected = self._reference.logits(passage) if method.name == FULL else full()
        logits = continued.read(passage.continuation)
        return asdict(compare(expected, logits, passage.continuation))

    def _compress(self, dense: DensePrompt, method: Method, passage: Passage) -> Compressed:
        if method.name in (FULL, FULL_CACHE):
            return dense.compressed()
        kind = PRESSES[method.name]
        press = kind.make(1.0 - method.keep)
        if not kind.own_prefill:
            return dense.compressed(press)
        if kind.eager:
            self._model.set_attn_implementation("eager")
        try:
            return with_own_prefill(self._model, press, passage.prompt)
        finally:
            self._model.set_attn_implementation("sdpa")

    def _continued(self, compressed: Compressed, passage: Passage) -> Continued:
        return Continued(self._model, compressed, len(passage.prompt))
