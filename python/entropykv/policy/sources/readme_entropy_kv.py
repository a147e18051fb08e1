"""Share by a profile's entropies, and rank by position: README_ENTROPY_KV.

*README_ENTROPY_KV.md* describes the research on entropy-adaptive KV cache compression in
https://github.com/SCJedi/vacuum_physics. It gives a head base * clamp(H / mean H, 0.3, 2.5)
entries, where H is the entropy of its attention over texts, and a KV head the largest H of its
group. The score of a position is e^(-alpha * distance) plus 0.5 for the newest tenth, with alpha =
2 / (newest * (1 + variation of the entropies)). The score falls with the distance, as that of
policy `streaming` does, so that both rank by the same number: cpp/decide/importance.cpp.
"""

from __future__ import annotations

from entropykv import _core
from entropykv.profile.profile import EntropyProfile

ENTROPY_CLAMP = (0.3, 2.5)
"""The limits of entropy / mean entropy in a head's budget."""


def weights_of(profile: EntropyProfile) -> list[float]:
    """Return the weight of every KV head of a profile, in the order of layers: its entropy relative
    to the mean, within ENTROPY_CLAMP.
    """
    entropies = profile.kv_head_entropies().ravel().tolist()
    return _core.entropy_weights(entropies, profile.mean, *ENTROPY_CLAMP)
