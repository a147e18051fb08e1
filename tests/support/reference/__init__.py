"""Define the numpy oracle: every algorithm of the C++ core in readable float64 code.

Arrays are named as in cpp/: n tokens of a micro-batch, T entries, `group` query heads per KV head.
"""

from __future__ import annotations

from tests.support.reference.attending import (
    NEIGHBOURHOOD,
    SCORING_INTERVAL,
    WINDOW_MARGIN,
    Attention,
    Options,
    attend_kv_head,
    attend_layer,
    biased,
    given,
    oldest_seen,
    visible,
)
from tests.support.reference.centring import KeyCentre, key_centre, stored_keys
from tests.support.reference.dropped import DroppedScores
from tests.support.reference.freezing import Detections, FreezingHead, FrozenEntry, Undecided
from tests.support.reference.heads import ReferenceHead, Rules, Schedule, losses_at
from tests.support.reference.predicting import (
    LEAST_SHARE,
    SHARE_ROUNDING,
    features,
    lesson_sums,
    predicted,
)
from tests.support.reference.ranking import (
    DECODE_ROOM,
    entries_to_keep,
    protected,
    recency_score,
    select_survivors,
    updated_importance,
)
from tests.support.reference.rope import Rope, rope_frequencies, rope_pairs, rope_positions, rotated
from tests.support.reference.sharing import (
    check_shares,
    convex_hull_at,
    curve_losses,
    curve_shares,
    layer_shares,
    pages_for,
)
from tests.support.reference.values import (
    F16_LARGEST,
    LEVELS,
    QUANT_BLOCK,
    Bools,
    Floats,
    Ints,
    round_f16,
    round_iq4_nl,
    round_q8_0,
    stored,
    stored_values,
    turned_blocks,
)

__all__ = [
    "DECODE_ROOM",
    "F16_LARGEST",
    "LEAST_SHARE",
    "LEVELS",
    "NEIGHBOURHOOD",
    "QUANT_BLOCK",
    "SCORING_INTERVAL",
    "SHARE_ROUNDING",
    "WINDOW_MARGIN",
    "Attention",
    "Bools",
    "Detections",
    "DroppedScores",
    "Floats",
    "FreezingHead",
    "FrozenEntry",
    "Ints",
    "KeyCentre",
    "Options",
    "ReferenceHead",
    "Rope",
    "Rules",
    "Schedule",
    "Undecided",
    "attend_kv_head",
    "attend_layer",
    "biased",
    "check_shares",
    "convex_hull_at",
    "curve_losses",
    "curve_shares",
    "entries_to_keep",
    "features",
    "given",
    "key_centre",
    "layer_shares",
    "lesson_sums",
    "losses_at",
    "oldest_seen",
    "pages_for",
    "predicted",
    "protected",
    "recency_score",
    "rope_frequencies",
    "rope_pairs",
    "rope_positions",
    "rotated",
    "round_f16",
    "round_iq4_nl",
    "round_q8_0",
    "select_survivors",
    "stored",
    "stored_keys",
    "stored_values",
    "turned_blocks",
    "updated_importance",
    "visible",
]
