"""What guesses the next tokens of a text (a drafter), and what speaks for its guesses.

Drafts come from the text itself (ngram_drafter.py), from a small model (draft_model.py), or from a
function of the user (FunctionDrafter).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from entropykv.settings.cache_options import DraftFunction

Tokens = npt.NDArray[np.int32]

LONGEST_MATCH = 32
"""The most tokens before two positions of a text that are compared."""
_MATCHED = (4, 6, 9, 17, LONGEST_MATCH)
"""From so many agreeing tokens on, a draft belongs to the next group."""
_RESUMED = (6, 9, 12)
"""The least numbers of agreeing tokens of the last groups of drafts: of those that go on where an
earlier draft was copied from.
"""
PRIORS = (0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.2, 0.3, 0.4, 0.6)
"""By group, the share of right drafts that is expected before any was seen."""


class Evidence(NamedTuple):
    """Say what speaks for drafts; it tells how often such drafts are right."""

    agreed: int
    """How many tokens before the drafts, of LONGEST_MATCH at most, are as the drafter expects."""
    is_resumed: bool = False
    """Whether drafts go on from an earlier position although the text has differed from it in
    between.
    """
    source: int = -1
    """The position in the text from which the drafts are copied; -1: they come from elsewhere."""

    @property
    def group(self) -> int:
        """Return the group of drafts that are counted together, from 0."""
        if self.is_resumed:
            return len(_MATCHED) + 1 + sum(self.agreed >= least for least in _RESUMED)
        return sum(self.agreed >= least for least in _MATCHED)

    @property
    def prior(self) -> float:
        """Return the share of right drafts that is expected before any was seen."""
        return PRIORS[self.group]


class Drafter(Protocol):
    """Guess what follows a text."""

    def draft(self, tokens: Tokens, most: int) -> tuple[list[int], Evidence]:
        """Return up to `most` tokens that may follow, and what speaks for them."""

    @property
    def n_bytes(self) -> int:
        """Return the bytes of memory that it holds for its text."""

    @property
    def seconds_each(self) -> float:
        """Return the time that a draft takes; 0.0 where it is nothing beside a step."""

    def close(self) -> None:
        """Free what it holds; it is not used any more."""


class DraftModels(Protocol):
    """Make drafters that share a small model."""

    def drafter(self) -> Drafter:
        """Make a drafter for another sequence."""

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of the small model's KV budget."""

    def close(self) -> None:
        """Free the small model after the running step."""


class FunctionDrafter:
    """Draft by a function of the user, such as an object of llama_cpp's LlamaDraftModel."""

    n_bytes = 0
    seconds_each = 0.0
    _EVIDENCE = Evidence(8)
    """The function says nothing about how sure it is; how often it was right will tell."""

    def __init__(self, function: DraftFunction) -> None:
        """Call `function` for drafts."""
        self._function = function

    def draft(self, tokens: Tokens, most: int) -> tuple[list[int], Evidence]:
        """Return what the function returns for the text: see Drafter."""
        if most < 1:
            return [], self._EVIDENCE
        drafts = np.asarray(self._function(tokens)).reshape(-1)[:most]
        return [int(draft) for draft in drafts], self._EVIDENCE

    def close(self) -> None:
        """Do nothing: the function belongs to the user."""
