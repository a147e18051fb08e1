"""Fit a predictor for a model that has none, from the first texts that its sessions read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from entropykv.profile.predictor import ScorePredictor, fit_predictor
from entropykv.session.sequence_slot import SequenceSlot
from entropykv.store.headwise import HeadwiseStore

LEAST_TOKENS = 1024
"""The least tokens that are read twice before the predictor is fitted to them."""
TOKENS_PER_FEATURE = 6
"""The least tokens per feature of an entry; keys and values of 64 numbers have 163 features. On
SmolLM2, factors from 4 to 12 keep the same facts.
"""


class PredictorFit:
    """Collect what the second reading of the first texts shows, and fit the predictor once.

    All stores of a pool share the collected sums and the predictor. The number of tokens alone
    decides when it is fitted, between two steps, so that the same texts are always treated equally.
    """

    n_needed = LEAST_TOKENS
    """How many tokens are read twice."""
    predictor: ScorePredictor | None = None
    """The fitted predictor; None while texts are still read twice."""
    n_tokens = 0
    """How many tokens were read twice so far."""
    _told = False

    def watch(self, store: HeadwiseStore) -> None:
        """Collect sums from the texts of a store, until the predictor is fitted."""
        if self.predictor is None:
            store.prediction.collect_lessons(True)
            most = max(store.prediction.n_features)
            self.n_needed = max(LEAST_TOKENS, TOKENS_PER_FEATURE * most)

    def note(self, n_tokens: int, slots: Sequence[SequenceSlot]) -> bool:
        """Count tokens that were read twice; returns whether this fitted the predictor.

        `slots`: all slots of the runner, at least one; then the scores of live entries are
        predicted.
        """
        if self.predictor is not None:
            return False
        self.n_tokens += n_tokens
        if self.n_tokens < self.n_needed:
            return False
        prediction = cast(HeadwiseStore, slots[0].store).prediction
        self.predictor = fit_predictor(prediction.lessons())
        prediction.collect_lessons(False)
        prediction.clear_lessons()
        prediction.adopt(self.predictor)
        for slot in slots:
            if slot.live:
                cast(HeadwiseStore, slot.store).predict_held(slot.position)
        return True

    def news(self) -> str | None:
        """Return the sentence of report() about the predictor, only once."""
        if self.predictor is None or self._told:
            return None
        self._told = True
        return self.report()

    def report(self) -> str | None:
        """Return a final sentence for the user; None if nothing was read twice.

        It is for users who have not enabled learning.
        """
        if self.n_tokens == 0:
            return None
        then = (
            "later ones are read once. --learn keeps what they have shown for other sessions"
            if self.predictor is not None
            else f"after {self.n_needed} of them, texts are read once"
        )
        return (
            f"the first {self.n_tokens} tokens beyond the budget were read twice, to learn what "
            f"this model looks up; {then}"
        )
