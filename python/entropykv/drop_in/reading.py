"""Read prompts into a session for a llama_cpp.Llama, and reuse what was read before."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv.drop_in.arguments import BudgetArguments, EvictionEvent
from entropykv.drop_in.context import BudgetContext
from entropykv.drop_in.read_ahead import ReadAhead
from entropykv.drop_in.sampler import SamplerOfSequence
from entropykv.errors import ContextError, EntropyKVError
from entropykv.session.drafting import Verification
from entropykv.session.logprobs import LogprobRecorder, rows_at_a_time
from entropykv.session.recovery import Watch
from entropykv.session.reuse import LEAST_SPARED, Demand, ReuseSource, reuse_of
from entropykv.session.session import Session


class PromptReader:
    """Read tokens into one session, and keep n_tokens, input_ids and scores of a Llama up to date.

    Methods take the Llama as an argument: a reference would be a cycle, and keep the memory of a
    deleted Llama until the garbage collector runs.
    """

    def __init__(self, context: BudgetContext, budget: BudgetArguments) -> None:
        """Read into a context's session with the arguments of an EntropyLlama."""
        self._context = context
        self._budget = budget
        self._sampled: int | None = None
        """The last sampled token, until it is read."""
        self._n_sampled = 0
        """How many tokens of the current answer were sampled."""
        self.n_read = 0
        """How many tokens of the current prompt were read."""
        self._watch: Watch | None = None
        """The recovery ladder of the current answer."""
        self._ahead = ReadAhead()
        self.max_tokens: int | None = None
        """The most tokens of the current answer; None if unknown."""

    @property
    def _session(self) -> Session:
        return self._context.session  # Raises EntropyKVError once closed.

    def eval(self, llama: llama_cpp.Llama, ids: list[int]) -> None:
        """Read tokens after the first n_tokens of a Llama, which are read again if necessary."""
        written = self._sampled is not None and ids[:1] == [self._sampled]
        self._sampled = None
        session = self._session
        if written and self._ahead.goes_on_with(session, llama.n_tokens, ids):
            self._advance(llama, ids[0], self._ahead.next_row())
            return
        self._ahead.forget()
        if not _went_back(session, llama.n_tokens):
            ids = llama.input_ids[: llama.n_tokens].tolist() + ids
            found = not llama._logits_all and session.text.return_to_checkpoint(
                ids[:-1], LEAST_SPARED - 1, repeatable=self._budget.repeatable
            )
            llama.n_tokens = session.position if found else 0
            ids = ids[llama.n_tokens :]
            if not found:
                session.text.truncate(0)
        if not ids:
            return
        evicted, start = session.cache.evicted, time.perf_counter()
        self._read(llama, ids, written=written and len(ids) == 1)
        self.n_read += 0 if written else len(ids)
        count = session.counts.add_generated if written else session.counts.add_prompt
        if written and self._watch is not None and session.logits is not None:
            self._watch.wants_rewalk(session.logits, session.position)
        count(0 if written else len(ids), time.perf_counter() - start)
        on_evict = self._budget.on_evict
        if on_evict is not None and session.cache.evicted != evicted:
            kept = session.stats().entries_kept
            on_evict(EvictionEvent(session.cache.evicted - evicted, kept, session.position))

    def _read(self, llama: llama_cpp.Llama, ids: list[int], *, written: bool) -> None:
        """Decode tokens; n_tokens and input_ids are updated after every micro-batch, even if a
        later one fails.

        `written`: the tokens are the last sampled one, not the end of a prompt.
        """
        session, all_logits = self._session, llama._logits_all
        llama._requires_eval = True
        verifying = self._verifying(llama) if written else None
        if verifying is not None:
            self._read_ahead(llama, ids[0], verifying)
            return
        recorder: LogprobRecorder | None = getattr(llama, "_logprobs", None)
        if recorder is None or not recorder.of_prompt or written:
            recorder, size = None, len(ids)
        else:
            size = rows_at_a_time(llama._n_vocab)
        for start in range(0, len(ids), size):
            piece, first = ids[start : start + size], llama.n_tokens
            for logits in session.reader.read(
                piece, all_logits=all_logits or recorder is not None, writes=written
            ):
                begin, end = llama.n_tokens, session.position
                read = piece[begin - first : end - first]
                llama.input_ids[begin:end] = read
                if recorder is not None and logits is not None:
                    recorder.read(read, logits)
                if all_logits:
                    llama.scores[begin:end] = logits
                elif logits is not None:
                    llama.scores[:1] = logits[-1:]
                llama.n_tokens = end
        llama._requires_eval = False

    # --- drafts -----------------------------------------------------------------------------------

    def _verifying(self, llama: llama_cpp.Llama) -> SamplerOfSequence | None:
        """Return the samplers that verify drafts; None if they use more than logits."""
        sampler: object = getattr(llama, "_sampler", None)
        if self._session.reader.drafting is None or self._watch is not None or llama._logits_all:
            return None
        plain = isinstance(sampler, SamplerOfSequence) and not sampler.has_processors
        return cast(SamplerOfSequence, sampler) if plain else None

    def _read_ahead(self, llama: llama_cpp.Llama, token: int, sampler: SamplerOfSequence) -> None:
        """Read a token that was sampled, and the drafts behind it that are sampled, too."""
        session, ahead = self._session, self._ahead
        most = session.config.n_ctx
        if self.max_tokens is not None:
            most = self.max_tokens - self._n_sampled - 1
        drafts = session.reader.propose_drafts(token, most)
        verification = Verification(drafts, sampler.sample_from, session.model.is_end)

        def verify(rows: npt.NDArray[np.float32]) -> int:
            return ahead.verify(rows, verification)

        session.reader.read_drafts(token, drafts, verify)
        self._advance(llama, token, ahead.first_row(session.logits))

    @staticmethod
    def _advance(
        llama: llama_cpp.Llama, token: int, logits: npt.NDArray[np.float32] | None
    ) -> None:
        """Let a Llama know of a token that the session has read, and of the logits behind it."""
        llama.input_ids[llama.n_tokens] = token
        llama.n_tokens += 1
        if logits is not None:
            llama.scores[:1] = logits
        llama._requires_eval = False

    def sampled_ahead(self) -> int | None:
        """Return the next token if it was sampled already; raises what sampling it raised."""
        return self._ahead.take()

    def note_sampled(self, token: int, seconds: float) -> None:
        """Remember a sampled token, and count it: if it is read next, it was generated."""
        self._sampled = token
        self._n_sampled += 1
        if not self._session.model.is_end(token):
            self._session.counts.add_generated(1, seconds)

    def forget_sampled(self) -> None:
        """Forget the last sampled token, which the text does not contain any more."""
        self._sampled = None

    def logits_at(self, llama: llama_cpp.Llama, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of a token, (n_vocab,): row -1 is the last one."""
        if llama._logits_all:
            scores: npt.NDArray[np.float32] = llama.scores[llama.n_tokens + row]
            return scores
        logits = self._session.logits
        if logits is None:
            raise EntropyKVError("there are no logits to sample from; eval() a token first")
        return logits

    # --- go on from what was read -----------------------------------------------------------------

    def begin_answer(self, llama: llama_cpp.Llama) -> None:
        """Forget the sampled token of an earlier answer, which does not continue the next
        prompt.
        """
        self.forget_sampled()
        self._ahead.forget()
        self._n_sampled = self.n_read = 0
        recovery = self._session.recovery
        self._watch = Watch(self._session, recovery, llama._n_vocab) if recovery else None

    def go_back_for(self, llama: llama_cpp.Llama, prompt: Sequence[int]) -> None:
        """Remove the text that would change a prompt's logits, compared with reading it from
        position 0.

        A prompt that continues the text keeps all of it: see reuse_of().
        """
        session = self._session
        n_ctx, limit = session.config.n_ctx, self.max_tokens
        end = n_ctx if limit is None else len(prompt) + limit
        held = session.text.held().until(llama.n_tokens)
        knows_prompt = session.logits is not None and not llama._logits_all
        demand = Demand(end=end, needs_logits=False, knows_prompt=knows_prompt)
        reuse = reuse_of(held, prompt, demand)
        if reuse.source is ReuseSource.PROMPT:
            if self._return_to_prompt(llama, reuse.position, end):
                return
            reuse = reuse_of(held, prompt, replace(demand, knows_prompt=False))
        if reuse.source is ReuseSource.WHOLE:
            return
        llama.n_tokens = reuse.position
        llama._requires_eval = True
        beyond = max(llama.n_tokens, LEAST_SPARED - 1)
        if not llama._logits_all and session.text.return_to_checkpoint(
            prompt, beyond, repeatable=True
        ):
            llama.n_tokens = session.position
            llama.input_ids[: llama.n_tokens] = prompt[: llama.n_tokens]
            if session.logits is not None and llama.n_tokens == len(prompt):
                llama.scores[:1] = session.logits
                llama._requires_eval = False

    def _return_to_prompt(self, llama: llama_cpp.Llama, position: int, end: int) -> bool:
        """Roll back to the end of the last prompt, without reading any of it again.

        Returns False if that is impossible.
        """
        session = self._session
        if not session.text.return_to_prompt(position, end):
            return False
        logits = session.logits
        if logits is None:
            return False
        llama.scores[:1] = logits
        llama.n_tokens = position
        llama._requires_eval = False
        return True


def _went_back(session: Session, position: int) -> bool:
    """Roll back to a position; returns False if the session holds too little for that, at the
    latest when the pool has given it a smaller share.
    """
    if not session.text.held().can_return_to(position):
        return False
    if session.position != position or position == 0:
        try:
            session.text.truncate(position)
        except ContextError:
            return False
    return True
