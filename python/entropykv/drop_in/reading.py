"""Read prompts inside a KV budget as a llama_cpp.Llama does, and nothing twice that need not be."""

from __future__ import annotations

import ctypes
import inspect
import os
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_tokenizer import LlamaTokenizer

from entropykv.drop_in.arguments import BudgetArguments, EvictionEvent
from entropykv.drop_in.context import BudgetContext, SharedModel
from entropykv.drop_in.prefix import continuing, control_symbol, spelling
from entropykv.errors import EntropyKVError
from entropykv.llamacpp.weights import Weights
from entropykv.session.image_spans import is_placeholder
from entropykv.session.images import ImageLimits, Images
from entropykv.session.recovery import Watch
from entropykv.session.reuse import common_prefix
from entropykv.session.session import Session

LEAST_SPARED = 32
"""Tokens that a checkpoint must spare reading to be worth its while: fewer are read as quickly."""
_GENERATE = inspect.signature(llama_cpp.Llama.generate)


class ReadingLlama(llama_cpp.Llama):
    """A Llama whose context is a BudgetContext: n_tokens and input_ids follow its session."""

    _ctx: BudgetContext
    _budget: BudgetArguments
    _sampled: int | None = None
    _max_tokens: int | None = None
    """How many tokens the completion that is being made may have; None where that is not known."""
    _generation: object = None
    """What identifies the call of generate() that reads now: an earlier one must not go on."""
    _watch: Watch | None = None
    """The recovery ladder of the call of generate() that reads now."""
    _lock: threading.RLock
    _pieces: dict[int, bytes] | None = None
    """Texts of tokens that were asked for, for all that share a vocabulary; None while it loads."""

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep the model; raise EntropyKVError once closed, or where another thread calls it."""
        lock = self._lock
        if not lock.acquire(blocking=False):
            _ = self._session  # raises where the other thread closes it
            raise EntropyKVError(
                "another thread is using this EntropyLlama, which holds one sequence; let calls "
                "take turns with a lock, or give each thread a model of its own"
            )
        try:
            with self._weights:
                yield
        finally:
            lock.release()

    @property
    def _weights(self) -> Weights:
        """Return what keeps the model within `with`; entering raises EntropyKVError once closed."""
        return SharedModel.of(self._model).weights

    @property
    def _session(self) -> Session:
        return self._ctx.session

    def open_projector(
        self, path: str | os.PathLike[str], limits: ImageLimits | None = None
    ) -> Images:
        """Open the model's projector: see Session.open_projector()."""
        return self._session.open_projector(path, limits, use_gpu=self._offloads)

    @property
    def images(self) -> Images | None:
        """Return what reads prompts with images; None while no projector is open."""
        return self._session.images

    @property
    def _offloads(self) -> bool:
        """Tell whether layers of the model are on a device, where its projector belongs, too."""
        return bool(self.model_params.n_gpu_layers)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Return a text's tokens, as llama_cpp.Llama does; raises EntropyKVError once closed."""
        _ = self._session  # raises once closed, where llama-cpp-python would crash
        return super().tokenize(text, add_bos, special)

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        """Return the text of tokens, as llama_cpp.Llama does.

        Texts of tokens are kept: Llama asks for all of an answer with every token of it, and each
        call of llama.cpp would let the threads of a pool take turns.
        """
        tokens = [token for token in tokens if not is_placeholder(token)]
        pieces = self._pieces
        if special or pieces is None or not isinstance(self.tokenizer_, LlamaTokenizer):
            return super().detokenize(tokens, prev_tokens, special)
        for token in tokens:
            if token not in pieces:
                pieces[token] = self._model.detokenize([token])
        text = b"".join([pieces[token] for token in tokens])
        begins = len(tokens) > 0 and tokens[0] == self.token_bos()
        return text[1:] if begins and text.startswith(b" ") else text

    def eval(self, tokens: Sequence[int]) -> None:
        """Read tokens after the first n_tokens of input_ids, which are read again if they must be.

        Raises ContextError for more than n_ctx tokens.
        """
        with self._alone():
            self._eval([int(token) for token in tokens])

    def _eval(self, ids: list[int]) -> None:
        written = self._sampled is not None and ids[:1] == [self._sampled]
        self._sampled = None
        session = self._session
        if not session.can_return_to(self.n_tokens):
            ids = self.input_ids[: self.n_tokens].tolist() + ids
            found = not self._logits_all and session.return_to_checkpoint(
                ids[:-1], LEAST_SPARED - 1, repeatable=self._budget.repeatable
            )
            self.n_tokens = session.position if found else 0
            ids = ids[self.n_tokens :]
        if session.position != self.n_tokens or self.n_tokens == 0:
            session.truncate(self.n_tokens)
        if not ids:
            return
        evicted, start = session.evicted, time.perf_counter()
        self._read(ids, written=written and len(ids) == 1)
        count = session.count_generated if written else session.count_prompt
        if written and self._watch is not None and session.logits is not None:
            self._watch.wants_rewalk(session.logits, session.position)
        count(0 if written else len(ids), time.perf_counter() - start)
        on_evict = self._budget.on_evict
        if on_evict is not None and session.evicted != evicted:
            kept = session.stats().entries_kept
            on_evict(EvictionEvent(session.evicted - evicted, kept, session.position))

    def _read(self, ids: list[int], *, written: bool) -> None:
        """Decode tokens; n_tokens and input_ids follow every micro-batch, whatever fails later.

        `written`: it is the token that was sampled last, and not the last one of a prompt.
        """
        session = self._session
        self._requires_eval = True
        first = self.n_tokens
        stream = session.decode_micro_batches(ids, all_logits=self._logits_all, writes=written)
        for logits in stream:
            begin, end = self.n_tokens, session.position
            self.input_ids[begin:end] = ids[begin - first : end - first]
            if self._logits_all:
                self.scores[begin:end] = logits
            elif logits is not None:
                self.scores[:1] = logits
            self.n_tokens = end
        self._requires_eval = False

    def reset(self) -> None:
        """Forget every token; kv_stats() goes on counting."""
        with self._alone():
            self.n_tokens = 0
            self._requires_eval = True
            self._session.truncate(0)

    def sample(self, *arguments: Any, **options: Any) -> int:
        """Sample a token from the logits of the last one read; see llama_cpp.Llama.sample."""
        start = time.perf_counter()
        with self._alone():
            session = self._session
            token: int = super().sample(*arguments, **options)
            self._sampled = token
            if not session.is_end(token):
                session.count_generated(1, time.perf_counter() - start)
        return token

    @property
    def _in_context(self) -> bool:
        """Tell whether the logits of the context are those of the session."""
        return self._session.is_alone

    def _logits_at(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of a token, (n_vocab,): row -1 is the last one."""
        if self._logits_all:
            scores: npt.NDArray[np.float32] = self.scores[self.n_tokens + row]
            return scores
        logits = self._session.logits
        if logits is None:
            raise EntropyKVError("there are no logits to sample from; eval() a token first")
        return logits

    def generate(self, tokens: Sequence[int], *arguments: Any, **options: Any) -> Any:
        """Yield tokens that follow `tokens`; see llama_cpp.Llama.generate.

        Where `tokens` begin with the text of what was read, spelled otherwise, that is not read
        again. Not with logits_all: the rows of `scores` are those of `tokens`.
        """
        bound = _GENERATE.bind(self, tokens, *arguments, **options)
        with self._alone():
            generation = self._generation = object()
            prompt = self._prepared(list(tokens), resets=bound.arguments.get("reset", True))
        stream: Generator[int, Any, None] = super().generate(prompt, *arguments, **options)
        sent = None
        with closing(stream), self._resting():
            while True:
                _check_attached(self)
                with self._alone():
                    self._check_goes_on(generation)
                    try:
                        token = stream.send(sent)
                    except StopIteration:
                        return
                sent = yield token

    @contextmanager
    def _resting(self) -> Iterator[None]:
        """In the end, let no other sequence of a pool wait for more of this one."""
        try:
            yield
        finally:
            if isinstance(self._ctx, BudgetContext):
                self._ctx.rest()

    def _check_goes_on(self, generation: object) -> None:
        _ = self._session  # raises once closed
        if self._generation is not generation:
            raise EntropyKVError(
                "another call has used this EntropyLlama, which holds one sequence, before this "
                "answer was complete; end one answer before the next, or use two models"
            )

    def _prepared(self, prompt: list[int], *, resets: bool) -> list[int]:
        """Return the tokens to read for a prompt, once what they depart from is forgotten."""
        # What was sampled for an earlier completion does not continue this prompt.
        self._sampled = None
        recovery = self._session.recovery
        self._watch = Watch(self._session, recovery, self._n_vocab) if recovery else None
        if resets and not self._logits_all:
            prompt = self._continuing(prompt) or prompt
        if resets and self._budget.repeatable:
            self._go_back_for(prompt)
        return prompt

    def _go_back_for(self, prompt: list[int]) -> None:
        """Forget what would make this prompt's logits others than when it was read from 0.

        A prompt that continues what was read keeps all of it.
        """
        shared = common_prefix(self._input_ids.tolist(), prompt)
        if shared == self.n_tokens > 0:
            return
        end = self._n_ctx if self._max_tokens is None else len(prompt) + self._max_tokens
        if shared == len(prompt) and self._return_to_prompt(shared, end):
            return
        self.n_tokens = self._session.repeatable_from(min(shared, len(prompt) - 1), end)
        self._requires_eval = True
        beyond = max(self.n_tokens, LEAST_SPARED - 1)
        if not self._logits_all and self._session.return_to_checkpoint(
            prompt, beyond, repeatable=True
        ):
            self._take_checkpoint(prompt)

    def _take_checkpoint(self, prompt: list[int]) -> None:
        """Hold what the session went back to; where it is all of a prompt, nothing is read."""
        session = self._session
        self.n_tokens = session.position
        self.input_ids[: self.n_tokens] = prompt[: self.n_tokens]
        if session.logits is not None and self.n_tokens == len(prompt):
            self.scores[:1] = session.logits
            self._requires_eval = False

    def _return_to_prompt(self, position: int, end: int) -> bool:
        """Go back to the last prompt, if it ended at `position`, without reading any of it again.

        Samplers of llama.cpp read the logits of the context: they are written there. Returns False
        where that is not possible.
        """
        session = self._session
        if self._logits_all or session.logits is None:
            return False
        in_context = self._in_context
        pointer: Any = llama_cpp.llama_get_logits_ith(session.context, -1) if in_context else None
        if (in_context and not pointer) or not session.return_to_prompt(position, end):
            return False
        logits = session.logits
        if in_context:
            ctypes.memmove(pointer, logits.ctypes.data, logits.nbytes)
        self.scores[:1] = logits
        self.n_tokens = position
        self._requires_eval = False
        return True

    def _continuing(self, prompt: list[int]) -> list[int] | None:
        """Return the prompt as tokens that begin with those read; None if they begin it anyway."""
        cached = self._input_ids
        if len(cached) == 0 or np.array_equal(cached, prompt[: len(cached)]):
            return None
        found = continuing(cached.tolist(), prompt, self._spell, self._tokenize_text)
        return found if found and len(found) < self._n_ctx else None

    def _goes_on_from(self, held: list[int], prompt: list[int]) -> bool:
        """Tell whether a prompt begins with the text of tokens, however it is spelled."""
        return continuing(held, prompt, self._spell, self._tokenize_text) is not None

    def _spell(self, token: int) -> str:
        piece = self._session.token_bytes(token)
        return spelling(piece) if piece else control_symbol(token)

    def _tokenize_text(self, text: bytes) -> list[int]:
        return self.tokenize(text, add_bos=False, special=False)


def _check_attached(llm: llama_cpp.Llama) -> None:
    if not isinstance(llm, ReadingLlama):
        raise EntropyKVError("the model was detached before this answer was complete; ask again")
