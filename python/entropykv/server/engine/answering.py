"""Answer one job: take the conversation that its prompt continues, and generate."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from entropykv.constraint.constraint import Constraint
from entropykv.constraint.trial import Trials
from entropykv.errors import EntropyKVError, PoolError, SessionFileError, SettingsError
from entropykv.generation.events import AnswerPiece, Ended, Event, PromptRead, generate_events
from entropykv.generation.prompt import GenerationRequest, check_room
from entropykv.generation.resuming import as_held, resume, spelled_on
from entropykv.server.engine.prefix_cache import PrefixCache
from entropykv.server.http.access import SOMEBODY, Caller
from entropykv.server.http.errors import RequestError
from entropykv.server.models.loaded_model import LoadedModel
from entropykv.session.generate import StepHooks
from entropykv.session.passages import AttentionSince, Passage
from entropykv.session.session import Session
from entropykv.session.session_files import document_header
from entropykv.session.stats import SessionStats

_TRIALS = Trials()
"""The trials of constraints, one object for all models, because constraints are tried without a
vocabulary.
"""


@dataclass(frozen=True)
class AskedDocument:
    """Hold the name and the file of a document that a request asks about."""

    name: str
    path: Path

    def refusal(self, error: EntropyKVError) -> RequestError:
        """Return the error for a document that cannot be loaded, without its path."""
        said = str(error).replace(str(self.path), f"the document {self.name!r}")
        if isinstance(error, PoolError):
            return RequestError(503, said)
        return RequestError(409, said, param="document", code="document_unusable")


@dataclass
class Totals:
    """Count tokens, steps, seconds and climbs of one lane."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    draft_steps: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    climbs: Counter[str] = field(default_factory=Counter)
    """How often each rung of the recovery ladder was climbed."""

    def counts(self) -> tuple[int, int]:
        """Return how many tokens were read and written so far."""
        return self.prompt_tokens, self.generated_tokens

    def add(self, before: SessionStats, now: SessionStats) -> None:
        """Add the difference between the figures before and after a request."""
        for name in COUNTS:
            done = getattr(now, name) - getattr(before, name)
            setattr(self, name, getattr(self, name) + done)
        self.climbs += Counter(now.climbs) - Counter(before.climbs)


COUNTS = [each.name for each in fields(Totals) if each.name != "climbs"]
"""The names of the figures that are sums over all lanes."""


@dataclass(eq=False)
class AnswerLane:
    """Hold one of the lanes in which jobs are answered at the same time, which llama-server calls
    slots.
    """

    number: int
    latest: Session | None = None
    """The conversation that was answered last in this lane, which is in the prefix cache unless it
    was dropped there.
    """
    totals: Totals = field(default_factory=Totals)
    """The figures of what was read and written in this lane."""


@dataclass(eq=False)
class Answering:
    """Hold a job while it is answered: what it may use, and how far it is."""

    model: LoadedModel
    prefix_cache: PrefixCache
    lane: AnswerLane
    check: Callable[[], object]
    """Called before every step; what it raises ends the job."""
    caller: Caller = SOMEBODY
    document: AskedDocument | None = None
    """The document that the job asks about."""
    n_prompt: int = 0
    """How many tokens the job's prompt has."""
    n_cached: int = 0
    """How many tokens of the prompt had been read before."""
    n_written: int = 0
    """How many tokens were written so far."""
    n_thought: int | None = None
    """How many of the written tokens are thoughts; None if the model does not think."""
    n_read: int = 0
    """How many tokens of the prompt that were not cached were read so far."""
    prompt_seconds: float = 0.0
    """How many seconds reading the prompt has taken."""
    answer_seconds: float = 0.0
    """How long the answer has taken so far."""
    n_drafted: int = 0
    n_accepted: int = 0
    """How many of the answer's tokens that were guessed (n_drafted) the samplers chose, too."""
    stop: str | None = None
    """The text of the request's stops that has ended the answer."""
    has_enough: bool = False
    """Whether the answer ends behind what was written; the writer of the answer sets it."""
    tell: Callable[[Any], object] | None = None
    """Sends a chunk of a stream that tells of progress; None: the answer is no stream."""
    n_passages: int = 0
    """How many passages of the document the client wants to see."""
    passages: list[Passage] | None = None
    """The passages of the document that the answer looked at; None if nothing measured that."""
    _session: Session | None = None
    _began: float = 0.0

    def interrupt(self) -> None:
        """Cancel a decode of the job that waits for its turn: see Session.interrupt()."""
        session = self._session
        if session is not None:
            session.interrupt()

    def document_tokens(self) -> list[int]:
        """Return the tokens of the document, which is loaded unless it is kept already; none if the
        job asks about no document.

        Raises RequestError for a document that cannot be loaded.
        """
        asked = self.document
        if asked is None:
            return []
        try:
            return self.prefix_cache.open_document(asked.path, self.caller)
        except EntropyKVError as error:
            raise asked.refusal(error) from None

    def answer(
        self,
        request: GenerationRequest,
        *,
        constrained_by: str = "grammar",
        n_passages: int = 0,
        on_prompt: Callable[[int], None] | None = None,
    ) -> Iterator[Event]:
        """Yield the events of the answer, in the conversation that the prompt continues.

        `constrained_by`: the field of the client's request that says what the answer must be.
        `n_passages`: how many passages are looked for. `on_prompt` is called with the number of
        tokens of the prompt that were read. Raises ContextError for a prompt without room for an
        answer, RequestError for a constraint or a document that cannot be used, PoolError without
        room in the pool, and the errors of generate_events().
        """
        check_room(request.prompt, self.model.n_ctx)
        self.n_passages = n_passages
        grammar, is_refused = request.sampling.grammar, True
        try:
            if grammar is not None:
                _TRIALS.check(Constraint.of(grammar), self.check)
            for event in self._in_conversation(request, on_prompt):
                is_refused = False
                yield event
        except SettingsError as error:
            if grammar is None or not is_refused:
                raise
            message = f"{constrained_by}: {error}"
            raise RequestError(400, message, param=constrained_by) from None

    def _in_conversation(
        self, request: GenerationRequest, on_prompt: Callable[[int], None] | None
    ) -> Iterator[Event]:
        session, tokens = self._taken(request), request.prompt.tokens
        before = session.stats()
        self._session, attention = session, None
        self.n_thought = None if request.prompt.thought is None else 0
        try:
            tokens = as_held(session, request.prompt)
            self.n_prompt = len(tokens)
            if tokens is not request.prompt.tokens:
                request = replace(request, prompt=replace(request.prompt, tokens=tokens))
            n_cached = resume(session, request, reads_question=self.n_passages > 0)
            if self.n_passages:
                attention = AttentionSince(session)
            hooks = StepHooks(self._before_step, gives_way=True)
            self.n_cached = n_cached
            if on_prompt is not None:
                on_prompt(n_cached)
            start = time.perf_counter()

            def told(n_done: int) -> None:
                self.n_read, self.prompt_seconds = n_done - n_cached, time.perf_counter() - start
                if on_prompt is not None:
                    on_prompt(n_done)

            answer = generate_events(
                session,
                request,
                n_cached=n_cached,
                hooks=hooks,
                on_prompt=told,
                has_enough=lambda: self.has_enough,
            )
            with closing(answer) as events:
                for event in events:
                    self._note(event, session)
                    if isinstance(event, Ended):
                        now = session.stats()
                        self.n_drafted = now.drafted_tokens - before.drafted_tokens
                        self.n_accepted = now.accepted_drafts - before.accepted_drafts
                        self.stop = event.stop
                        if attention is not None:
                            self.passages = self._looked_at(attention)
                    yield event
        finally:
            self._session = None
            if attention is not None:
                attention.close()
            self._give_back(session, request, before_answer=len(tokens))
            self.lane.totals.add(before, session.stats())

    def _taken(self, request: GenerationRequest) -> Session:
        """Return the conversation that a prompt continues, out of the prefix cache."""
        asked = self.document
        anew = request.prompt_logprobs or request.reads_anew
        tokens = [] if anew else request.prompt.tokens
        model = self.model.model
        try:
            return self.prefix_cache.take(
                tokens,
                self.caller,
                self.check,
                lambda held: spelled_on(model, held, tokens) is not None,
                None if asked is None else asked.path,
                reads_question=self.n_passages > 0,
            )
        except (PoolError, SessionFileError) as error:
            if asked is None:
                raise
            raise asked.refusal(error) from None

    def _give_back(
        self, session: Session, request: GenerationRequest, *, before_answer: int
    ) -> None:
        self.prefix_cache.gives_up(session)
        if not session.text.held().is_whole:
            session.close()
            return
        self.lane.latest = session
        thought = request.prompt.thought
        # The next turn continues before the last thought.
        place = before_answer - thought.n_left_out if thought is not None and self.n_thought else 0
        self.prefix_cache.put(session, self.caller, place)

    def _note(self, event: Event, session: Session) -> None:
        """Record how far the answer is."""
        if isinstance(event, PromptRead):
            self.n_read = event.n_tokens - event.n_cached
            self.prompt_seconds, self._began = event.seconds, time.perf_counter()
            self.prefix_cache.has_read(session)
            self.model.tell_what_is_learnt()
        elif isinstance(event, AnswerPiece):
            self.n_written += event.token is not None
            self.answer_seconds = time.perf_counter() - self._began
            if self.n_thought is not None:
                self.n_thought = event.n_thought

    def _before_step(self, n_left: int) -> None:
        self.check()
        if (session := self._session) is not None:
            self.prefix_cache.reads(session, min(n_left, session.reader.chunk))

    def _looked_at(self, attention: AttentionSince) -> list[Passage] | None:
        """Return the passages of the document that the answer looked at; None if it is not kept."""
        asked = self.document
        if asked is None:
            return None
        try:
            text = document_header(asked.path).note.text
            return attention.passages(text, len(self.document_tokens()), self.n_passages)
        except (PoolError, SessionFileError):  # The answer is complete without passages.
            return None
