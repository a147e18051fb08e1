"""A session reports how much the importance of its entries has risen, and counts the memory that
this takes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from entropykv import Session
from entropykv.session.passages import AttentionSince
from tests.support.pools import PROMPTS, pool_of


def entries_of(session: Session) -> int:
    return session.stats().entries_kept


def test_what_is_remembered_is_counted_and_given_back(pool_llama: Path) -> None:
    with pool_of(pool_llama, n_sequences=2, kv_budget=256, policy="adaptive") as pool:
        first, other = pool.session(), pool.session()
        first.decode(PROMPTS[4])
        other.decode(PROMPTS[1])
        alone, together = first.stats().kv_bytes_scratch, pool.stats().kv_bytes_scratch
        since = AttentionSince(first)
        assert first.stats().kv_bytes_scratch - alone == 8 * entries_of(first)
        assert pool.stats().kv_bytes_scratch - together == 8 * entries_of(first)
        since.close()
        assert first.stats().kv_bytes_scratch == alone
        assert pool.stats().kv_bytes_scratch == together
        assert since.by_position(10) is None


def test_importance_rises_where_later_queries_look_and_never_at_sinks(pool_llama: Path) -> None:
    text = PROMPTS[4]
    with Session(pool_llama, n_ctx=1024, kv_budget=64, policy="adaptive") as session:
        session.decode(text)
        since = AttentionSince(session)
        nothing = since.by_position(len(text))
        assert nothing is not None
        assert not nothing.any()
        session.decode(PROMPTS[1][:4])
        risen = since.by_position(len(text))
        assert risen is not None
        assert risen.shape == (len(text),)
        assert (risen >= 0).all()
        assert risen.any()
        assert not risen[: session.config.options.n_sinks].any()
        kept = np.unique(
            np.concatenate(
                [session.cache.entries(layer, head) for layer in range(3) for head in (0, 1)]
            )
        )
        assert set(np.flatnonzero(risen)) <= set(kept.tolist())


def test_a_policy_that_ranks_by_position_has_nothing_to_compare(pool_llama: Path) -> None:
    with Session(pool_llama, n_ctx=1024, kv_budget=64, policy="streaming") as session:
        session.decode(PROMPTS[4])
        before = session.stats().kv_bytes_scratch
        since = AttentionSince(session)
        assert session.cache.importance() is None
        assert since.by_position(4) is None
        assert session.stats().kv_bytes_scratch == before
