"""Fit the predictor of a model that has none to the first texts that its sessions read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from entropykv.profile.predictor import ScorePredictor, fit_predictor
from entropykv.session.sequence_slot import SequenceSlot
from entropykv.store.headwise import HeadwiseStore

LEAST_TOKENS = 1024
"""The fewest tokens that are read twice before the predictor is fitted to what they have shown."""
TOKENS_PER_FEATURE = 6
"""How many of them there are at least for every feature of an entry: keys and values of 64 numbers
have 163. On SmolLM2, 4 to 12 for each keep the same facts."""


class PredictorFit:
    """Collect what the second reading of the first texts shows, and fit the predictor to it once.

    All stores of a pool share what is collected, and the predictor. It is fitted between two steps,
    by the number of tokens alone, so that the same texts are always treated in the same way.
    """

    n_needed = LEAST_TOKENS
    """How many tokens are read twice."""
    predictor: ScorePredictor | None = None
    """What was fitted; None as long as texts are read twice."""
    n_tokens = 0
    """How many tokens were read twice so far."""
    _told = False

    def watch(self, store: HeadwiseStore) -> None:
        """Collect what texts of a store show, until the predictor is known."""
        if self.predictor is None:
            store.prediction.collect_lessons(True)
            most = max(store.prediction.n_features)
            self.n_needed = max(LEAST_TOKENS, TOKENS_PER_FEATURE * most)

    def note(self, n_tokens: int, slots: Sequence[SequenceSlot]) -> bool:
        """Count tokens that were read twice; returns whether the predictor was fitted by that.

        `slots`: all of the runner, at least one; what those hold that are live is predicted then.
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
        """Return what report() has to say of the predictor, once."""
        if self.predictor is None or self._told:
            return None
        self._told = True
        return self.report()

    def report(self) -> str | None:
        """Return what a user should know in the end, in a sentence; None: nothing was read twice.

        It is for those who do not let the profile of the model be learnt.
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
