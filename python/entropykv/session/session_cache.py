"""Look at what a session's cache holds, and change what it may hold: SessionCache."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from entropykv.errors import EntropyKVError
from entropykv.policy.policy import Policy
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.profile.find import other_file
from entropykv.profile.profile import EntropyProfile
from entropykv.session.echo import Echo
from entropykv.session.learning import Learner
from entropykv.session.model_runner import ModelRunner
from entropykv.session.model_text import ModelText
from entropykv.session.predictor_fit import PredictorFit
from entropykv.session.sequence import TokenSequence
from entropykv.session.sequence_slot import SequenceSlot
from entropykv.session.stats import SessionCounts, SessionStats, peak_rss_bytes
from entropykv.session.trajectory import Trajectory
from entropykv.settings.freezing import Freezing
from entropykv.settings.options import Budget
from entropykv.settings.renamed import warn_of_name
from entropykv.store.protocol import CacheLook, Store


class SessionCache(ModelText):
    """Hold a sequence, the store of its entries, and the runner that they share with others."""

    config: ResolvedConfig
    """What was asked for, and what it means for the model."""
    trajectory: Trajectory | None
    """What was held over the text, where entries are frozen."""
    _runner: ModelRunner
    _slot: SequenceSlot
    _store: Store
    _sequence: TokenSequence
    _counts: SessionCounts
    _closed = True
    """True until it holds something, so that close() works even where __init__ raises."""
    _broken = False
    """True where a decode has failed half-way."""

    def _check_open(self) -> None:
        if self._closed or self._runner.closed:
            raise EntropyKVError("the session is closed; make a new one")

    def _check_usable(self) -> None:
        self._check_open()
        if self._broken:
            raise EntropyKVError("the last decode failed half-way; call reset() first")

    @property
    def _echo(self) -> Echo | None:
        """Return what makes the echoes of texts; None where they are read once, or from now on."""
        return self._runner.echo

    @property
    def position(self) -> int:
        """Return how many tokens were decoded so far."""
        return self._sequence.position

    @property
    def n_ubatch(self) -> int:
        """Return how many tokens of text are read at once, however many follow."""
        return self._echo.chunk if self._echo else self.config.n_ubatch

    @property
    def tokens(self) -> list[int]:
        """Return every token read or generated so far, evicted or not."""
        return self._sequence.tokens.tolist()

    @property
    def text_bytes(self) -> int:
        """Return the bytes of its tokens and logits, and of where the text can be read again."""
        return self._sequence.n_bytes

    @property
    def logits(self) -> npt.NDArray[np.float32] | None:
        """Return the last token's logits, (n_vocab,), float32.

        They are None before the first token, and after truncate().
        """
        return self._sequence.logits

    @property
    def n_ctx(self) -> int:
        """Return the length of the longest sequence, in tokens."""
        return self.config.n_ctx

    @property
    def policy(self) -> Policy:
        """Return the policy that shares the budget; never `auto`."""
        return self.config.policy

    @property
    def profile(self) -> EntropyProfile | None:
        """Return the entropy profile that was given or found, where the policy takes one."""
        return self.config.profile

    @property
    def recipe(self) -> ResolvedConfig:
        """Return `config` under the name that it had before version 0.2.0."""
        warn_of_name("Session.recipe", "config")
        return self.config

    @property
    def learner(self) -> Learner | None:
        """Return what learns the model's profile, and tells what it has left; None without it."""
        return self._runner.learner

    @property
    def predictor_fit(self) -> PredictorFit | None:
        """Return what fits the model's predictor to its first texts; None where it is known."""
        return self._runner.fit

    @property
    def freezing(self) -> Freezing | None:
        """Return where evicted entries are kept; None where they are dropped."""
        return self.config.freezing

    @property
    def fallback(self) -> str | None:
        """Return why the flat store serves the model where either might."""
        return self.config.fallback

    @property
    def store(self) -> str:
        """Return which store serves the model: headwise or flat."""
        return self._store.name

    @property
    def context(self) -> Any:
        """Return the llama_context, for samplers; its logits may be another session's."""
        return self._store.context

    def entries(self, layer: int, kv_head: int) -> npt.NDArray[np.int32]:
        """Return the positions that a KV head keeps, ascending; IndexError for no such head."""
        budgets = self._store.budgets()
        if not 0 <= layer < len(budgets) or not 0 <= kv_head < len(budgets[layer]):
            raise IndexError(f"the model has no KV head {kv_head} in layer {layer}")
        with self._runner.live_store(self._slot) as store:
            return store.entries(layer, kv_head)

    def cache_map(self) -> CacheLook:
        """Return a function that looks at what all KV heads hold, for those who watch.

        look(first, per_column, n_columns) returns three arrays of bytes, (KV heads of all layers,
        columns), or of one row where all KV heads keep the same: which share of a column's
        positions is held, frozen, or held now and frozen at the look before; in 255ths, rounded up.
        """
        return self._store.cache_map()

    def budgets(self) -> list[tuple[int, ...]]:
        """Return the entries that every KV head may keep, as `[layer][KV head]`."""
        return self._store.budgets()

    def other_file(self) -> str | None:
        """Return a sentence where the profile was made with another file of the model's shape."""
        return None if self.profile is None else other_file(self.profile, self._model.geometry)

    def resize(self, kv_budget: Budget | str | float) -> None:
        """Change the budget while running: a larger one holds at once, a smaller one evicts.

        BudgetError leaves the session as it was.
        """
        self._check_usable()
        budget = Budget.parse(kv_budget)
        try:
            self._runner.resize(budget)
        except MemoryError:
            raise self._runner.too_large(budget) from None
        self._sequence.note_evictions(self.evicted)

    @property
    def evicted(self) -> int:
        """Return how many entries of all KV heads were dropped for good so far."""
        return self._store.evicted

    @property
    def sure_entries(self) -> int:
        """Return how many tokens every KV head keeps for sure; n_ctx where none is evicted."""
        return self._store.sure_entries

    def stats(self) -> SessionStats:
        """Return counts, bytes and times so far."""
        store = self._store
        return SessionStats(
            model=self._model.name,
            store=store.name,
            policy=self.policy.name,
            kv_budget=str(self._runner.budget),
            n_ctx=self.n_ctx,
            prompt_tokens=self._counts.prompt_tokens,
            generated_tokens=self._counts.generated_tokens,
            prompt_seconds=self._counts.prompt_seconds,
            decode_seconds=self._counts.decode_seconds,
            kv_bytes_full=self._sequence.position * store.bytes_full_per_token,
            entries_full=self._sequence.position * store.n_kv_heads,
            peak_rss_bytes=peak_rss_bytes(),
            freeze=self.freezing.where if self.freezing else None,
            climbs=dict(self._counts.climbs),
            **store.counters(),
        )
