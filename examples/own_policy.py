"""Define a policy: KV heads that spread their attention over many entries get more of the budget.

python examples/own_policy.py model.gguf
"""

from __future__ import annotations

import sys

import numpy as np

from entropykv import BudgetToShare, MicroBatchSeen, OwnPolicy, Session

TEXT = "A lighthouse keeper notes wind, ships and lamp oil in his book every evening. "


class ByEntropy(OwnPolicy):
    """Share the budget by the mean entropy of each KV head's attention in the text so far.

    The first layer gets at least an even share, because its heads attend to the neighbours of every
    token.
    """

    name = "by-entropy"
    importance = "mass+values"

    def __init__(self, sharpness: float = 1.0) -> None:
        """Set `sharpness`: 0 shares evenly, larger values favour heads with a high entropy."""
        self.sharpness = sharpness
        self.n_tokens = 0
        self.sums = np.zeros(0)

    def observe(self, seen: MicroBatchSeen) -> None:
        """Add up the entropies of each KV head: for every token, the mean over its query heads."""
        of_heads = []
        for layer, n_kv_heads in enumerate(seen.heads_per_layer):
            rows = seen.entropies(layer)
            groups = rows.reshape(rows.shape[0], n_kv_heads, -1)
            of_heads.append(groups.mean(axis=(0, 2)))
        if not self.sums.size:
            self.sums = np.zeros(sum(seen.heads_per_layer))
        self.sums += seen.n_tokens * np.concatenate(of_heads)
        self.n_tokens += seen.n_tokens

    def share(self, budget: BudgetToShare) -> np.ndarray:
        """Return the weight of each KV head; all are equal before anything was read."""
        if self.n_tokens == 0:
            return np.ones(budget.n_kv_heads)
        weights = (self.sums / self.n_tokens + 0.1) ** self.sharpness
        first = slice(budget.heads_per_layer[0])
        weights[first] = np.maximum(weights[first], weights.mean())
        return weights

    def state(self) -> np.ndarray:
        """Return the state that a saved session must contain."""
        return np.concatenate([[self.n_tokens], self.sums])

    def load(self, state: np.ndarray) -> None:
        """Restore a state that state() returned; raises ValueError for an impossible one."""
        if state.size == 0 or not np.isfinite(state).all():
            raise ValueError("entropies that cannot be")
        self.n_tokens, self.sums = int(state[0]), state[1:].copy()


def main(path: str) -> None:
    """Read a text in a budget of a fifth of the context; print how many entries layers keep."""
    with Session(path, n_ctx=512, kv_budget=0.2, policy=ByEntropy(sharpness=2.0)) as session:
        tokens = session.tokenize(TEXT * 40)[:400]
        session.decode(tokens)
        for layer, budgets in enumerate(session.cache.budgets()):
            kept = [len(session.cache.entries(layer, head)) for head in range(len(budgets))]
            print(f"layer {layer:2}: may keep {list(budgets)}, keeps {kept}")
        stats = session.stats()
        print(f"{stats.kv_bytes_peak:,} of {stats.kv_bytes_budget:,} bytes at most")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
