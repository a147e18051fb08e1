"""Choose replicas by affinity.py within Ray Serve's request router.

The router runs in the front (front.py), which passes every request's Affinity as an argument. It
counts the requests that the front has sent to each replica; those are all, because there is one
front.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from entropykv.server.replicas.affinity import Affinity, Holders


class AffinityRouter(RequestRouter):  # type: ignore[misc, unused-ignore]  # without Ray: Any
    """Send a request to the replica that has read the beginning of its text, or else the idlest."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Take the arguments of RequestRouterConfig: `slack`, see Holders."""
        self._holders = Holders(kwargs["slack"])
        self._sent: Counter[str] = Counter()
        """How many requests every replica has."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replica that the request goes to, alone; without a request, all candidates."""
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        if not by_name or pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        affinity = next(
            (value for value in pending_request.args if isinstance(value, Affinity)), Affinity()
        )
        loads = {name: self._sent[name] for name in by_name}
        return [[by_name[self._holders.choose(affinity, loads)]]]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request that a replica gets."""
        super().on_send_request(replica_id)
        self._sent[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request no more: it was answered, refused, cancelled, or its replica died."""
        super().on_request_completed(replica_id, internal_request_id)
        self._sent[replica_id.unique_id] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget the counts of replicas that have gone."""
        super().update_replicas(replicas)
        names = {each.replica_id.unique_id for each in replicas}
        for name in [name for name in self._sent if name not in names]:
            del self._sent[name]
