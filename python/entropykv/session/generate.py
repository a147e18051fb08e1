"""Run the generation loop: read a prompt, sample with llama.cpp's samplers, decode, repeat."""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import llama_cpp
import numpy as np
import numpy.typing as npt

from entropykv.constraint.constraint import Constraint
from entropykv.constraint.sampler import ConstraintSampler
from entropykv.constraint.vocabulary import TokenTexts
from entropykv.errors import ContextError, EntropyKVError, SettingsError
from entropykv.llamacpp.model import Model
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.session.drafting import Verification
from entropykv.session.logprobs import LogprobRecorder, rows_at_a_time
from entropykv.session.reader import SequenceReader
from entropykv.session.recovery import Climb, Watch
from entropykv.session.sequence import is_placeholder
from entropykv.session.session_cache import SessionCache
from entropykv.session.session_text import SessionText
from entropykv.session.stats import SessionCounts
from entropykv.settings.freezing import Recovery
from entropykv.settings.options import MOST_TOKENS, at_least
from entropykv.settings.sampling import MOST_SEED, Sampling, is_random_seed, new_seed
from entropykv.store.protocol import Logits
from entropykv.thinking.reader import ThoughtCounter

_MIROSTAT_CANDIDATES = 100


class SamplerChain:
    """Hold a llama_sampler chain; close() frees it."""

    def __init__(
        self,
        sampling: Sampling,
        n_vocab: int,
        n_ctx: int,
        vocabulary: Any,
        texts: TokenTexts | None = None,
    ) -> None:
        """Make the samplers; raises SettingsError for a constraint that cannot be used, and for a
        bias of a token that the model does not have.

        `texts` are the texts of tokens, which a constraint needs.
        """
        self._sampling = sampling
        self._texts = texts
        self._constraint: ConstraintSampler | None = None
        self._n_vocab, self._n_ctx, self._vocabulary = n_vocab, n_ctx, vocabulary
        given = new_seed() if is_random_seed(sampling.seed) else sampling.seed
        self._seed = (given or 0) & MOST_SEED
        parameters = llama_cpp.llama_sampler_chain_default_params()
        self.handle: Any = llama_cpp.llama_sampler_chain_init(parameters)
        self._remembering: list[Any] = []
        try:
            self._fill()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the samplers; it may be called twice."""
        handle, self.handle = self.handle, None
        if handle is not None:
            llama_cpp.llama_sampler_free(handle)

    def check(self) -> None:
        """Raise the error, if any, that the constraint met when the chain was last applied or told
        of a token: see ConstraintSampler.check().
        """
        if self._constraint is not None:
            self._constraint.check()

    @property
    def remembers(self) -> bool:
        """Tell whether the chain depends on tokens that were read before."""
        return bool(self._remembering)

    @property
    def looks_back(self) -> int:
        """Return how many earlier tokens the chain depends on at most."""
        windows = (self._sampling.repeat_last_n, self._sampling.dry_penalty_last_n)
        return max(self._window(window) for window in windows)

    def remember(self, tokens: list[int]) -> None:
        """Apply penalties to exactly these tokens.

        The rest of the chain is not reset, because a seed would give the same random numbers again.
        """
        for sampler in self._remembering:
            llama_cpp.llama_sampler_reset(sampler)
            for token in tokens:
                llama_cpp.llama_sampler_accept(sampler, token)

    def _fill(self) -> None:
        sampling = self._sampling
        if sampling.logit_bias:
            self._add(self._logit_bias())
        if sampling.grammar is not None and self._texts is not None:
            self._constraint = ConstraintSampler(Constraint.of(sampling.grammar), self._texts)
            self._add(self._constraint.handle())
        greedy = sampling.temperature <= 0.0
        makers = self._makers()
        if sampling.mirostat and not greedy:
            makers = {name: makers[name] for name in ("penalties", "dry")}
        for name in sampling.samplers:
            if name in makers:
                makers[name]()
        if greedy:
            self._add(llama_cpp.llama_sampler_init_greedy())
        elif sampling.mirostat:
            self._add(llama_cpp.llama_sampler_init_temp(sampling.temperature))
            self._add(self._mirostat())
        else:
            self._add(llama_cpp.llama_sampler_init_dist(self._seed))

    def _makers(self) -> dict[str, Callable[[], None]]:
        """Map the names of samplers to functions that add them to the chain. A greedy chain needs
        only the samplers that can change which token is the most probable one.
        """
        sampling = self._sampling
        history: dict[str, Callable[[], None]] = {"penalties": self._penalties, "dry": self._dry}
        if sampling.temperature <= 0.0:
            return history
        simple = {
            "top_k": lambda: llama_cpp.llama_sampler_init_top_k(sampling.top_k),
            "top_p": lambda: llama_cpp.llama_sampler_init_top_p(sampling.top_p, 1),
            "min_p": lambda: llama_cpp.llama_sampler_init_min_p(sampling.min_p, 1),
            "temperature": self._temperature,
        }
        if sampling.typical_p != 1.0:
            simple["typ_p"] = lambda: llama_cpp.llama_sampler_init_typical(sampling.typical_p, 1)
        if sampling.top_n_sigma >= 0.0:
            simple["top_n_sigma"] = lambda: llama_cpp.llama_sampler_init_top_n_sigma(
                sampling.top_n_sigma
            )
        if sampling.xtc_probability > 0.0:
            simple["xtc"] = lambda: llama_cpp.llama_sampler_init_xtc(
                sampling.xtc_probability, sampling.xtc_threshold, 1, self._seed
            )
        adding = {name: (lambda make=make: self._add(make())) for name, make in simple.items()}
        return {**history, **adding}

    def _add(self, sampler: Any) -> None:
        llama_cpp.llama_sampler_chain_add(self.handle, sampler)

    def _window(self, n_tokens: int) -> int:
        return min(self._n_ctx, MOST_TOKENS) if n_tokens < 0 else n_tokens

    def _penalties(self) -> None:
        sampling = self._sampling
        if not sampling.penalizes or sampling.repeat_last_n == 0:
            return
        init = llama_cpp.llama_sampler_init_penalties
        # From llama-cpp-python 0.3.35 on, the first argument is the size of the vocabulary.
        vocabulary = [self._n_vocab] if len(init.argtypes) > 4 else []
        self._remembering.append(
            init(
                *vocabulary,
                self._window(sampling.repeat_last_n),
                sampling.repeat_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
        )
        self._add(self._remembering[-1])

    def _dry(self) -> None:
        sampling = self._sampling
        if sampling.dry_multiplier == 0.0 or sampling.dry_penalty_last_n == 0:
            return
        breakers = [text.encode("utf-8") for text in sampling.dry_sequence_breakers]
        self._remembering.append(
            llama_cpp.llama_sampler_init_dry(
                self._vocabulary,
                sampling.dry_multiplier,
                sampling.dry_base,
                sampling.dry_allowed_length,
                self._window(sampling.dry_penalty_last_n),
                (ctypes.c_char_p * len(breakers))(*breakers),
                len(breakers),
            )
        )
        self._add(self._remembering[-1])

    def _temperature(self) -> Any:
        sampling = self._sampling
        if sampling.dynatemp_range > 0.0:
            return llama_cpp.llama_sampler_init_temp_ext(
                sampling.temperature, sampling.dynatemp_range, sampling.dynatemp_exponent
            )
        return llama_cpp.llama_sampler_init_temp(sampling.temperature)

    def _mirostat(self) -> Any:
        sampling = self._sampling
        tau, eta = sampling.mirostat_tau, sampling.mirostat_eta
        if sampling.mirostat == 1:
            return llama_cpp.llama_sampler_init_mirostat(
                self._n_vocab, self._seed, tau, eta, _MIROSTAT_CANDIDATES
            )
        return llama_cpp.llama_sampler_init_mirostat_v2(self._seed, tau, eta)

    def _logit_bias(self) -> Any:
        pairs = self._sampling.logit_bias
        for token, _ in pairs:
            if not 0 <= token < self._n_vocab:
                raise SettingsError(
                    f"logit_bias names token {token}; the model has tokens 0 to {self._n_vocab - 1}"
                )
        biases = [llama_cpp.llama_logit_bias(token, bias) for token, bias in pairs]
        array = (llama_cpp.llama_logit_bias * len(pairs))(*biases)
        return llama_cpp.llama_sampler_init_logit_bias(self._n_vocab, len(pairs), array)


class Decoder(Protocol):
    """Define what the generation loop needs of a session."""

    @property
    def model(self) -> Model:
        """Return the model, whose vocabulary the loop uses."""

    @property
    def config(self) -> ResolvedConfig:
        """Return the options, which say how long a text may be."""

    @property
    def position(self) -> int:
        """Return how many tokens were decoded so far."""

    @property
    def tokens(self) -> list[int]:
        """Return every token decoded so far."""

    @property
    def logits(self) -> npt.NDArray[np.float32] | None:
        """Return the logits of the last token, (n_vocab,); None if they are not known."""

    @property
    def reader(self) -> SequenceReader:
        """Return the part of the session that reads micro-batches and drafts."""

    @property
    def text(self) -> SessionText:
        """Return the part of the session that truncates its text."""

    @property
    def counts(self) -> SessionCounts:
        """Return the counts, to which tokens and seconds are added."""

    @property
    def cache(self) -> SessionCache:
        """Return the cache, whose frozen entries can be restored."""

    @property
    def recovery(self) -> Recovery | None:
        """Return the settings of the recovery ladder; None if it is off."""

    def note_climb(self, climb: Climb) -> None:
        """Record a climb of the ladder."""


def _go_on(*_: object) -> bool:
    """Do nothing before a step, and return False: the answer does not end."""
    return False


@dataclass(frozen=True)
class StepHooks:
    """Hold functions of a caller that are called before steps and tokens."""

    before: Callable[[int], object] = _go_on
    """A function that is called before every step with the most tokens, besides drafts, that the
    step reads; an error that it raises ends the generation.
    """
    gives_way: bool = False
    """Whether prompts of other sessions that arrive meanwhile are read between two steps."""
    ends: Callable[[], bool] = _go_on
    """A function that is called before every token of an answer, and returns whether the answer
    ends before it.
    """


@dataclass(frozen=True)
class Companions:
    """Hold what sees the tokens of one text while they are chosen, and may change the choice."""

    thought: ThoughtCounter | None = None
    """The counter that gets every token, and may force one to end a thought."""
    recorder: LogprobRecorder | None = None
    """The recorder that gets every token with the logits by which it was chosen."""
    hooks: StepHooks = StepHooks()
    processors: Sequence[Callable[[Logits], object]] = ()
    """Functions that change the logits before a token is chosen."""

    @property
    def see_the_text(self) -> bool:
        """Tell whether functions of a caller see the session before every token of the answer."""
        return bool(self.processors) or self.hooks.ends is not _go_on


ALONE = Companions()
_Result = TypeVar("_Result")


def generate_tokens(
    session: Decoder,
    tokens: Sequence[int],
    max_tokens: int,
    sampling: Sampling,
    on_prompt: Callable[[int], None] | None = None,
    *,
    companions: Companions = ALONE,
) -> Generator[int, None, None]:
    """Read a prompt, then yield generated tokens; see Session.generate().

    `on_prompt` is called with the number of tokens read after every micro-batch.

    With recovery, tokens are read before they are yielded. A consumer that stops early must close()
    the generator before using the session: then the session is as if nothing had been read ahead,
    except that it has no logits, and that entries evicted meanwhile do not return. If a decode
    fails, the tokens before it are still yielded, and then the error is raised. Raises ContextError
    for `max_tokens` 0, SettingsError below -1, and the errors of Chooser() and Session.decode().
    """
    at_least("max_tokens", max_tokens, -1)
    if max_tokens == 0:
        raise ContextError("there is nothing to generate; use max_tokens of 1 or more, or -1")
    with Chooser(sampling, session, companions) as chooser:
        if tokens or session.logits is None:
            read_prompt(session, tokens, on_prompt, companions=companions)
        yield from write_tokens(session, chooser, max_tokens)


def write_tokens(
    session: Decoder, chooser: Chooser, max_tokens: int, *, penalised_from: int = 0
) -> Generator[int, None, None]:
    """Yield tokens that follow the text that a session has read, at most `max_tokens`; -1: no
    limit. See generate_tokens().

    Penalties consider the tokens of the text from the position `penalised_from` on.
    """
    chooser.remember(session, penalised_from)
    yield from _Generation(session, chooser, max_tokens, penalised_from).run()


def read_prompt(
    session: Decoder,
    tokens: Sequence[int],
    on_prompt: Callable[[int], None] | None = None,
    *,
    companions: Companions = ALONE,
) -> None:
    """Read tokens of a prompt and count them; a recorder `of_prompt` gets their log probabilities.
    `on_prompt`: as in generate_tokens(). Raises the errors of Session.decode() and hooks.before().
    """
    start, before, done = time.perf_counter(), session.position, 0
    recorder = companions.recorder
    if recorder is not None and not recorder.of_prompt:
        recorder = None
    size = len(tokens) if recorder is None else rows_at_a_time(session.model.n_vocab)
    while True:
        piece = tokens[done : done + size]
        for logits in _micro_batches(session, piece, recorder is not None, companions.hooks):
            first, done = done, session.position - before
            if recorder is not None:
                recorder.read(tokens[first:done], logits)
            if on_prompt is not None:
                on_prompt(done)
        if done >= len(tokens):
            break
    session.counts.add_prompt(len(tokens), time.perf_counter() - start)


def _micro_batches(
    session: Decoder, tokens: Sequence[int], all_logits: bool, hooks: StepHooks
) -> Iterator[Any]:
    """Read tokens in micro-batches, with hooks.before() before each; yields the logits of each."""
    n_before = session.position
    steps = session.reader.read(
        tokens, all_logits=all_logits, writes=False, gives_way=hooks.gives_way
    )
    while True:
        left = len(tokens) - (session.position - n_before)
        if left > 0:
            hooks.before(left)
        logits = next(steps, _ENDED)
        if logits is _ENDED:
            return
        yield logits


_ENDED: Any = object()


class _Generation:
    """Generate tokens one by one.

    With recovery, chosen tokens are held back for a while, so that a rewalk can replace them.
    """

    def __init__(
        self, session: Decoder, chooser: Chooser, max_tokens: int, penalised_from: int
    ) -> None:
        self._session = session
        self._chooser = chooser
        self._penalised_from = penalised_from
        self._hooks = chooser.companions.hooks
        self._max_tokens = max_tokens
        self._start = session.position
        self._n_yielded = 0
        self._last: list[int] = []
        """The last yielded token in a list; empty before the first one."""
        self._held: deque[int] = deque()
        self._hold = 0
        self._watch: Watch | None = None
        if session.recovery is not None:
            self._hold = session.recovery.held_back
            self._watch = Watch(session, session.recovery, session.model.n_vocab)
        is_plain = self._watch is None and not chooser.companions.see_the_text
        self._drafts = is_plain and session.reader.drafting is not None

    def run(self) -> Iterator[int]:
        """Yield tokens. If the generator is closed or fails, the session's text ends before the
        last yielded token, if _forget_unyielded() can go back.
        """
        try:
            yield from self._generate()
        except BaseException:
            self._forget_unyielded()
            raise

    def _generate(self) -> Iterator[int]:
        session = self._session
        token = self._choose(session.logits)
        while token is not None and not session.model.is_end(token):
            self._held.append(token)
            yield from self._release(self._hold)
            if self._n_yielded + len(self._held) == self._max_tokens:
                break
            if session.position >= session.config.n_ctx:
                break
            start = time.perf_counter()
            try:
                chosen = self._read(token)
                self._recover()
            except Exception:
                yield from self._release(0)
                raise
            session.counts.add_generated(0, time.perf_counter() - start)
            if chosen is None:
                token = self._choose(session.logits)
            else:
                token = chosen.next
                self._held.extend(chosen.accepted)
                yield from self._release(self._hold)
        yield from self._release(0)

    def _choose(self, logits: Logits | None) -> int | None:
        start = time.perf_counter()
        token = self._next(logits)
        self._session.counts.add_generated(0, time.perf_counter() - start)
        return token

    def _next(self, logits: Logits | None) -> int | None:
        token = self._chooser.choose(logits)
        if token is not None and not self._session.model.is_end(token):
            self._chooser.count(token)
        return token

    def _release(self, n_held: int) -> Iterator[int]:
        """Yield the oldest tokens, until at most `n_held` are held back."""
        while len(self._held) > n_held:
            token = self._held.popleft()
            self._n_yielded += 1
            self._last = [token]
            self._session.counts.add_generated(1, 0.0)
            yield token

    def _read(self, token: int) -> Verification | None:
        """Read a token, and drafts after it. Returns the tokens that were chosen by the logits of
        the run; None: none was chosen yet.
        """
        self._hooks.before(1)
        if self._drafts:
            return self._read_drafts(token)
        for _ in self._session.reader.read([token], all_logits=False):
            pass
        return None

    def _read_drafts(self, token: int) -> Verification | None:
        session = self._session
        left = self._max_tokens - self._n_yielded - len(self._held) - 1
        most = session.config.n_ctx if self._max_tokens < 0 else left
        drafts = session.reader.propose_drafts(token, most)
        found = Verification(drafts, self._next, session.model.is_end)
        session.reader.read_drafts(token, drafts, found.verify)
        if found.error is not None:
            self._held.extend(found.accepted)
            raise found.error
        return found if found.is_asked else None

    def _recover(self) -> None:
        logits = self._session.logits
        if self._watch is None or logits is None:
            return
        if self._watch.wants_rewalk(logits, self._session.position):
            self._rewalk()

    def _rewalk(self) -> None:
        """Drop all tokens that are held back, and restore the logits before them."""
        session = self._session
        last = self._start + self._n_yielded - 1
        token = session.tokens[last]
        go_back(session, last)
        self._held.clear()
        for _ in session.reader.read([token], all_logits=False):
            pass
        self._chooser.remember(session, self._penalised_from)

    def _forget_unyielded(self) -> None:
        """Remove tokens read but not yielded, unless the session was changed meanwhile."""
        session = self._session
        known = self._start + max(self._n_yielded - 1, 0)
        n_ahead = session.position - known
        if n_ahead > 0 and session.tokens[known:] == [*self._last, *self._held][:n_ahead]:
            # If going back fails, the session is unusable, and its next use raises an error that
            # says why.
            with contextlib.suppress(EntropyKVError):
                go_back(session, known)


def go_back(session: Decoder, position: int) -> None:
    """Truncate the text of a session to `position`; if its model or store cannot do that, read the
    text before `position` again.
    """
    tokens = session.tokens[:position]
    try:
        session.text.truncate(position)
    except ContextError:
        session.text.truncate(0)
        for _ in session.reader.read(tokens, all_logits=False):
            pass


class Chooser:
    """Choose tokens by a chain of samplers, from given logits.

    llama_sampler_sample() is not used, because it reads the logits of the context, and those of a
    loaded session were never there.
    """

    _KIND = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])

    def __init__(self, sampling: Sampling, session: Decoder, companions: Companions) -> None:
        """Make samplers; raises SettingsError for options that cannot be used or combined."""
        self.companions = companions
        self._thought = thought = companions.thought
        self._recorder, self._processors = companions.recorder, companions.processors
        self.end: int | None = None
        """The token that has ended the text; None before that, or if a constraint has ended it."""
        self._is_end = session.model.is_end
        self._n_barred = sampling.min_tokens
        """How many more tokens must be chosen before one may end the text."""
        self._ends = np.array(session.model.end_tokens if self._n_barred else (), np.intp)
        recovers = session.recovery is not None and session.recovery.held_back > 0
        if sampling.grammar is not None and recovers:
            raise SettingsError(
                "a grammar cannot take back tokens that recovery writes again; use one of the two"
            )
        if thought is not None and thought.is_bounded and recovers:
            raise SettingsError(
                "a budget of thoughts cannot take back tokens that recovery writes again; use one "
                "of the two"
            )
        if self._recorder is not None and recovers:
            raise SettingsError(
                "logprobs cannot take back tokens that recovery writes again; use one of the two"
            )
        n_vocab = session.model.n_vocab
        vocabulary = session.model.vocabulary if sampling.needs_vocabulary else None
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._data = np.empty(n_vocab, self._KIND)
        self._pointer = self._data.ctypes.data_as(llama_cpp.llama_token_data_p)
        texts = session.model.token_texts() if sampling.grammar is not None else None
        self._chain = SamplerChain(sampling, n_vocab, session.config.n_ctx, vocabulary, texts)

    def __enter__(self) -> Chooser:
        """Return the chooser itself; leaving the `with` block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the chain."""
        self.close()

    def close(self) -> None:
        """Free the chain; it may be called twice."""
        self._chain.close()

    def count(self, token: int) -> None:
        """Report a token of the text to the counter of thoughts, if there is one."""
        if self._thought is not None:
            self._thought.accept(token)

    def remember(self, session: Decoder, first: int = 0) -> None:
        """Apply penalties to exactly the last tokens that the session has read, from the position
        `first` on.
        """
        if self._chain.remembers:  # Without penalties, no token is needed.
            first = max(first, session.position - self._chain.looks_back)
            last = session.tokens[first:]
            self._chain.remember([token for token in last if not is_placeholder(token)])

    def choose(self, logits: npt.NDArray[np.float32] | None) -> int | None:
        """Sample a token by logits, (n_vocab,), and report it to the chain; None if a constraint
        allows only the end of the text.

        Raises SettingsError if a constraint allows neither a token nor the end.
        """
        token = self._chosen(logits)
        if token is None or self._is_end(token):
            self.end = token
            return token
        self._n_barred -= 1
        if self._recorder is not None and logits is not None:
            self._recorder.write(token, logits)
        return token

    def _chosen(self, logits: npt.NDArray[np.float32] | None) -> int | None:
        forced = None if self._thought is None else self._thought.forced
        if forced is not None:
            llama_cpp.llama_sampler_accept(self._chain.handle, forced)
            self._chain.check()
            return forced
        self._data["id"] = self._ids  # Set the ids again, because samplers sort the array.
        self._data["logit"] = logits
        self._data["p"] = 0.0
        for change in self._processors:
            change(self._data["logit"])
        if self._n_barred > 0:
            self._data["logit"][self._ends] = -math.inf
        array = llama_cpp.llama_token_data_array(self._pointer, self._data.size, -1, False)
        llama_cpp.llama_sampler_apply(self._chain.handle, ctypes.byref(array))
        self._chain.check()
        chosen = array.data[array.selected]
        if chosen.logit == -math.inf:
            return None
        token = int(chosen.id)
        llama_cpp.llama_sampler_accept(self._chain.handle, token)
        self._chain.check()
        return token
