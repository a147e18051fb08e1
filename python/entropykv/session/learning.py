"""Write a profile beside a model that has none, learnt from texts that its sessions read twice."""

from __future__ import annotations

import os
from pathlib import Path

from entropykv.errors import ProfileError
from entropykv.llamacpp.model import Model
from entropykv.policy.lessons import Lessons, uniform_heads
from entropykv.policy.policy import BudgetRule
from entropykv.policy.resolved_config import ResolvedConfig
from entropykv.profile.find import find_profile, fingerprint_of, profile_beside
from entropykv.profile.predictor import ScorePredictor
from entropykv.profile.profile import LEARNT, EntropyProfile
from entropykv.store.headwise import HeadwiseStore
from entropykv.store.protocol import Store

LEAST_TOKENS = 1024
"""How many tokens must be read twice; docs/background/profiles.md shows the effect of more."""


class Learner:
    """Collect lessons from the stores of a model runner, and write the profile when there are
    enough.
    """

    obstacle: str | None = None
    """Why nothing is learnt, in a sentence; None if something is learnt."""
    path: Path | None = None
    """The path of the written profile."""

    def __init__(self, model: Model, config: ResolvedConfig, store: Store) -> None:
        """Prepare to learn, unless the model has a profile already."""
        self._model = model
        self._target = profile_beside(model.geometry.path)
        self._lessons: Lessons | None = None
        self._told = False
        self._awaits_predictor = config.learns_predictor
        try:
            if find_profile(model.geometry) is None:
                self._lessons = self._begin(config, store)
        except ProfileError as error:
            self.obstacle = str(error)

    def _begin(self, config: ResolvedConfig, store: Store) -> Lessons:
        """Return an empty sum of lessons; raises ProfileError with the reason if nothing can be
        learnt.
        """
        policy = config.policy
        if not isinstance(store, HeadwiseStore):
            raise ProfileError("the flat store follows no entropy profile, and none is learnt")
        if policy.rule is not BudgetRule.LOSSES or not config.reads_twice:
            why = (
                "recurrent layers cannot read one twice; make a profile with `entropykv calibrate`"
                if config.geometry.recurrent
                else "use --policy auto, without --freeze"
            )
            raise ProfileError(
                f"an entropy profile is learnt from texts that are read twice, and policy "
                f"{policy.name} reads them once: {why}"
            )
        heads = uniform_heads([(layer.n_head, layer.n_head_kv) for layer in store.layers])
        if heads is None:
            raise ProfileError(
                f"{self._model.name}: its layers have different numbers of heads, which no entropy "
                "profile describes"
            )
        if not os.access(self._target.resolve().parent, os.W_OK):
            raise ProfileError(
                f"{self._target}: the model's folder is not writable, and no profile is learnt; "
                "make one elsewhere with `entropykv calibrate -o FILE`, for --entropy-config FILE"
            )
        return Lessons(*heads)

    @property
    def n_tokens(self) -> int:
        """Return how many tokens have been learnt from."""
        return 0 if self._lessons is None else self._lessons.n_tokens

    def watch(self, store: Store) -> None:
        """Collect lessons from a store from now on."""
        if self._lessons is not None and isinstance(store, HeadwiseStore):
            store.sharing.teach(self._lessons)

    def leave_if_complete(self, predictor: ScorePredictor | None) -> None:
        """Write the profile once there are enough lessons; a file that exists by now is kept.

        `predictor`: the predictor that was fitted to the same texts; None if there is none.
        """
        if self._lessons is None or self._lessons.n_tokens < LEAST_TOKENS:
            return
        if self._awaits_predictor and predictor is None:
            return
        if self.path is not None or self.obstacle is not None:
            return
        if self._target.exists():
            self.obstacle = f"{self._target}: is there by now, and stays as it is"
            return
        try:
            self._profile(self._lessons, predictor).save(self._target)
        except ProfileError as error:
            self.obstacle = str(error)
        else:
            self.path = self._target

    def _profile(self, lessons: Lessons, predictor: ScorePredictor | None) -> EntropyProfile:
        curves, entropies = lessons.curves(), lessons.entropies()
        return EntropyProfile(
            n_layer=len(entropies),
            n_head=entropies.shape[1],
            n_head_kv=curves.output_error.shape[1],
            n_ctx=self._model.geometry.n_ctx_train,
            head_entropies=entropies,
            model=self._model.name,
            source=f"{LEARNT}, {lessons.n_tokens} tokens",
            fingerprint=fingerprint_of(self._model.geometry),
            curves=curves,
            predictor=predictor,
        )

    def news(self) -> str | None:
        """Return the sentence of report() about a new profile or an obstacle, only once."""
        known = self.path is not None or self.obstacle is not None
        if not known or self._told:
            return None
        self._told = True
        return self.report()

    def report(self) -> str | None:
        """Return a final sentence for the user; None if the model already had a profile."""
        if self.path is not None:
            return f"{self.path}: learnt; sessions with this model use it from now on"
        if self.obstacle is not None or self._lessons is None:
            return self.obstacle
        return (
            f"no profile is learnt yet: {self.n_tokens} tokens were read inside a budget that did "
            f"not hold them, and it takes {LEAST_TOKENS}"
        )
