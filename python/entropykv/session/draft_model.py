"""Let a small model with the same vocabulary draft for the sequences of another model.

The small model has a pool (or one sequence) with a KV budget of its own. Before a step, the small
model's sequence follows the text of the large model: it goes back to the common beginning of the
two, reads the tokens after it, and writes drafts greedily, as long as their probability is high
enough.
"""

from __future__ import annotations

import os
import time
from array import array
from dataclasses import replace

import llama_cpp
import numpy as np

from entropykv.errors import ContextError, PoolError, SettingsError
from entropykv.llamacpp.model import Model
from entropykv.session.drafter import LONGEST_MATCH, Evidence, Tokens
from entropykv.session.model_runner import ModelRunner
from entropykv.session.reader import SequenceReader
from entropykv.session.reuse import common_prefix
from entropykv.session.sequence import is_placeholder
from entropykv.session.session_text import SessionText
from entropykv.settings.cache_options import CacheOptions
from entropykv.store.protocol import Logits

_CATCH_UP = 512
"""The most tokens of a text that the small model reads before one step of the large one. The next
steps read the rest, without drafts, so that no token waits for a long prompt.
"""
_MOST_MORE_TOKENS = 128
"""By how many tokens the sizes of the two vocabularies may differ, because of padding; the limit is
that of llama.cpp.
"""
_FIRST_COMPARED = 5
"""The first token whose text is compared. Tokens with smaller numbers are special ones, which are
compared by their role, as in llama.cpp.
"""
_POLICY = "fast"
"""The policy of the small model, which reads every text once and needs no profile."""


class DraftModel:
    """Hold a small model, which has a sequence for every sequence of the large model (the target)
    that it drafts for.
    """

    def __init__(self, path: str | os.PathLike[str], options: CacheOptions, target: Model) -> None:
        """Load the small model; raises SettingsError if its vocabulary differs from that of
        `target`, and the errors of a Session.

        `options`: those of the target, with the resolved n_ctx. The small model takes over threads
        and the number of sequences; its budget is options.draft_kv_budget.
        """
        self._p_min = options.draft_p_min
        self._runner = ModelRunner(path, _options_for(options))
        try:
            check_vocabulary(self._runner.model, target)
        except BaseException:
            self._runner.close()
            raise

    def drafter(self) -> ModelDrafter:
        """Make a drafter for another sequence."""
        return ModelDrafter(self._runner, self._p_min)

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of the KV budget of the small model."""
        core = self._runner.shared.core
        if core is not None:
            return core.budget_bytes
        counters = [slot.store.counters() for slot in self._runner.slots]
        return sum(each["kv_bytes_budget"] for each in counters)

    def close(self) -> None:
        """Free the small model after the running step."""
        self._runner.close()


def open_draft_model(runner: ModelRunner) -> None:
    """Load the small model for the runner's sequences, if the option spec_draft_model is a path and
    no function; raises what DraftModel() raises.
    """
    config = runner.config
    path = config.options.spec_draft_model
    if isinstance(path, (str, os.PathLike)):
        options = replace(config.options, n_ctx=config.n_ctx)
        runner.draft_model = DraftModel(path, options, runner.model)


def _options_for(options: CacheOptions) -> CacheOptions:
    return CacheOptions(
        kv_budget=options.draft_budget,
        policy=_POLICY,
        n_ctx=options.n_ctx,
        n_threads=options.n_threads,
        n_threads_batch=options.n_threads_batch,
        fixed_threads=options.fixed_threads,
        n_gpu_layers=options.n_gpu_layers,
        n_sequences=options.n_sequences,
        swap=options.swap,
        swap_limit=options.swap_limit,
        checkpoints=0 if options.in_pool else None,
        spec_type="none",
    )


class ModelDrafter:
    """Draft for one text of the large model with a sequence of the small one."""

    _DECAY = 0.9

    def __init__(self, runner: ModelRunner, p_min: float) -> None:
        """Stop before drafts whose probability is less than `p_min`."""
        self._runner = runner
        self._slot = runner.add_slot()
        self._text = SessionText(runner, self._slot)
        self._reader = SequenceReader(runner, self._slot, self._text)
        self._p_min = p_min
        self._seconds = self._drafts = 0.0

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the tokens and logits of the small model's sequence."""
        return self._slot.text.n_bytes

    @property
    def seconds_each(self) -> float:
        """Return the seconds that one draft took on average lately; 0.0 before the first one."""
        return self._seconds / self._drafts if self._drafts else 0.0

    def draft(self, tokens: Tokens, most: int) -> tuple[list[int], Evidence]:
        """Return what the small model would write: see Drafter.

        Returns no drafts while the small model still reads a long text, where its context ends, and
        where its pool has no room.
        """
        if most < 1 or any(map(is_placeholder, tokens[self._slot.text.position :].tolist())):
            return [], Evidence(0)  # The small model sees no images.
        try:
            logits = self._follow(tokens)
            return ([], Evidence(0)) if logits is None else self._write(logits, most)
        except (ContextError, PoolError):
            return [], Evidence(0)

    def close(self) -> None:
        """Let the runner free the small model's sequence before its next step."""
        self._runner.remove_slot_later(self._slot)

    def _follow(self, tokens: Tokens) -> Logits | None:
        """Read the part of a text that was not read yet; returns the logits after the last token,
        (n_vocab,), or None if some of the text is left to read.
        """
        slot = self._slot
        if slot.broken:
            self._text.truncate(0)
        # If both texts are equal, the last token is read again, because the logits after it are
        # needed.
        common = common_prefix(slot.text.tokens, array("i", tokens.tobytes()))
        common = min(common, len(tokens) - 1)
        if common < slot.text.position:
            self._go_back(common)
        rest = tokens[slot.text.position :]
        logits = self._read(rest[:_CATCH_UP].tolist())
        return logits if len(rest) <= _CATCH_UP else None

    def _go_back(self, position: int) -> None:
        """Truncate the small model's sequence to a position, or to 0 if its store cannot."""
        try:
            self._text.truncate(position)
        except ContextError:
            self._text.truncate(0)

    def _read(self, tokens: list[int]) -> Logits | None:
        *_, logits = self._reader.read(tokens, all_logits=False)
        return None if logits is None else logits[-1]

    def _write(self, logits: Logits, most: int) -> tuple[list[int], Evidence]:
        """Write up to `most` drafts; as evidence, it returns the probability of the first draft, in
        32nds.
        """
        start = time.perf_counter()
        drafts: list[int] = []
        agreed = 0
        while True:
            token = int(logits.argmax())
            probability = float(1.0 / np.exp(logits - logits[token]).sum())
            if probability < self._p_min:
                break
            agreed = agreed or max(1, round(LONGEST_MATCH * probability))
            drafts.append(token)
            if len(drafts) == most or self._runner.model.is_end(token):
                break
            read = self._read([token])
            if read is None:
                break
            logits = read
        self._seconds = self._seconds * self._DECAY + time.perf_counter() - start
        self._drafts = self._drafts * self._DECAY + max(len(drafts), 1)
        return drafts, Evidence(agreed)


def check_vocabulary(draft: Model, target: Model) -> None:
    """Raise SettingsError unless the draft model and the target have the same tokens, as far as
    llama.cpp requires it.

    It compares the kind of vocabulary, the tokens that begin and end texts, the sizes, and the
    texts of the tokens that exist in both.
    """
    with draft.in_use(), target.in_use():
        what = _difference(draft, target)
    if what is not None:
        raise SettingsError(
            f"{draft.name} cannot guess for {target.name}: {what}; use a smaller model of the same "
            "family for --model-draft (spec_draft_model)"
        )


def _difference(draft: Model, target: Model) -> str | None:
    ours, theirs = draft.vocabulary, target.vocabulary
    if llama_cpp.llama_vocab_type(ours) != llama_cpp.llama_vocab_type(theirs):
        return "they have different kinds of vocabularies"
    adds = (llama_cpp.llama_vocab_get_add_bos, llama_cpp.llama_vocab_bos)
    ends = (llama_cpp.llama_vocab_get_add_eos, llama_cpp.llama_vocab_eos)
    for (asks, token), name in ((adds, "beginning"), (ends, "end")):
        if asks(ours) != asks(theirs) or (asks(ours) and token(ours) != token(theirs)):
            return f"they have different tokens at the {name} of texts"
    if abs(draft.n_vocab - target.n_vocab) > _MOST_MORE_TOKENS:
        return f"{draft.n_vocab} and {target.n_vocab} tokens in their vocabularies"
    for token in range(_FIRST_COMPARED, min(draft.n_vocab, target.n_vocab)):
        if _text(ours, token) != _text(theirs, token):
            return f"token {token} has different texts"
    return None


def _text(vocabulary: object, token: int) -> bytes:
    text: bytes = llama_cpp.llama_vocab_get_text(vocabulary, token)
    return text
