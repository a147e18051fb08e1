"""Simulate how many replicas a number of users need, from measured speeds and a model's shape.

python benchmarks/scale_simulation.py [--users 1000] [--budget 1024] [--replicas 8,16,32]

Bytes of a conversation are those that `entropykv plan` computes from the model's shape (that of
Llama 3.1 8B). Speeds are options, in CPU milliseconds of one core for a token. By default, they are
those that were measured with SmolLM2-135M (docs/background/quality-and-speed.md), multiplied by the
ratio of the parameters, which is an estimate and not a measurement. A conversation that writes
alone reads all weights for every token, so that the speed of memory limits it, too. --batch-gain is
the speed of 16 clients together, divided by that of one (docs/background/pools.md).

A user asks, reads the answer, thinks, and asks again. A replica has --cores cores, reads prompts
one after the other, and gives half of its time to conversations that write while a prompt is read.
Requests reach the replica of their conversation (`affinity`), or the least busy one (`anywhere`),
which must read the whole conversation again if it does not hold it.
"""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path

from entropykv.model.geometry import ModelGeometry
from entropykv.policy.resolved_config import resolve
from entropykv.settings.cache_options import CacheOptions

_STEP = 0.1
"""The seconds of a simulated step."""
_WARM_UP = 0.25
"""The share of the simulated time that is not counted, because users are still beginning."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--replicas", default="8,16,32,64")
    parser.add_argument("--cores", type=int, default=32, help="of a replica")
    parser.add_argument("--memory", type=float, default=8.0, help="GiB of KV cache of a replica")
    parser.add_argument("--budget", type=int, default=1024, help="entries of a KV head")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--kv-type", default="q8_0")
    parser.add_argument("--parameters", type=float, default=8.03e9)
    parser.add_argument("--measured-parameters", type=float, default=134.5e6)
    parser.add_argument("--prefill-ms", type=float, default=1.3, help="of the measured model")
    parser.add_argument("--decode-ms", type=float, default=8.0, help="of the measured model")
    parser.add_argument("--weights", type=float, default=4.9e9, help="bytes of the weights")
    parser.add_argument("--bandwidth", type=float, default=200.0, help="of memory, GB a second")
    parser.add_argument("--batch-gain", type=float, default=2.0, help="of all that write together")
    parser.add_argument("--parallel", type=int, default=16, help="that write at a time")
    parser.add_argument("--think", type=float, default=60.0, help="seconds, mean")
    parser.add_argument("--question", type=int, default=100, help="tokens")
    parser.add_argument("--answer", type=int, default=200, help="tokens")
    parser.add_argument("--history", type=int, default=4000, help="tokens that were read before")
    parser.add_argument("--swap-gib", type=float, default=1.0, help="a second, to swap in")
    parser.add_argument("--minutes", type=float, default=20.0)
    arguments = parser.parse_args()
    of_one = conversation_bytes(arguments.budget, arguments.context, arguments.kv_type)
    full = conversation_bytes(arguments.context, arguments.context, "f16")
    speeds = Speeds.of(arguments)
    print(
        f"A conversation holds {of_one / 2**20:.0f} MiB with {arguments.budget} entries of a KV "
        f"head in {arguments.kv_type}, and {full / 2**20:.0f} MiB with a full cache of "
        f"{arguments.context} tokens in f16; {arguments.memory} GiB hold "
        f"{int(arguments.memory * 2**30 / of_one)} and {int(arguments.memory * 2**30 / full)}."
    )
    print(
        f"A replica reads {speeds.prefill:.0f} tokens a second; one conversation writes "
        f"{speeds.one:.1f}, all together {speeds.together:.1f}.\n"
    )
    print("| replicas | requests go | first token, median | 95 % | busy | answers a minute |")
    print("|---|---|---|---|---|---|")
    for n in map(int, arguments.replicas.split(",")):
        for affinity in (True, False):
            cluster = SimulatedCluster(n, arguments, speeds, of_one, affinity=affinity)
            print(cluster.run(), flush=True)


def conversation_bytes(entries: int, n_ctx: int, kv_type: str) -> int:
    """Return the bytes of the pages of one conversation with an 8B model, of `entries` entries per
    KV head, as `entropykv plan` computes them.
    """
    geometry = ModelGeometry(
        path=Path("8b.gguf"), architecture="llama", name="8B", n_layer=32, n_head=32,
        heads_per_layer=(32,) * 32, kv_heads_per_layer=(8,) * 32, head_dim_k=128, head_dim_v=128,
        n_ctx_train=131072, n_vocab=128256, weights_bytes=0, file_bytes=0, weight_types=(),
        activation=None, learned_positions=False, latent=False, n_embd=4096, n_ff=14336,
    )  # fmt: skip
    options = CacheOptions(
        n_ctx=n_ctx, kv_budget=min(entries, n_ctx), kv_type=kv_type, policy="uniform",
        store="headwise",
    )  # fmt: skip
    plan = resolve(options, geometry, None).headwise_plan()
    return plan.pool_pages * plan.page_bytes


@dataclass(frozen=True)
class Speeds:
    """Hold the tokens per second of a replica: of prompts, written by one conversation alone, and
    by all together.
    """

    prefill: float
    one: float
    together: float

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Speeds:
        """Return the measured speeds, scaled to the model and the number of cores."""
        ratio = arguments.parameters / arguments.measured_parameters
        one = 1000 * arguments.cores / (arguments.decode_ms * ratio)
        one = min(one, 1e9 * arguments.bandwidth / arguments.weights)
        return cls(
            1000 * arguments.cores / (arguments.prefill_ms * ratio), one, one * arguments.batch_gain
        )


@dataclass
class Request:
    """Hold a question that is waiting, being read, or being answered."""

    user: int
    came: float
    to_read: float
    to_write: float
    wait_for_swap: float = 0.0


@dataclass
class SimulatedReplica:
    """Hold a replica's requests, and the conversations that it keeps."""

    reading: deque[Request] = field(default_factory=deque)
    writing: list[Request] = field(default_factory=list)
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)
    busy: float = 0.0

    @property
    def load(self) -> int:
        return len(self.reading) + len(self.writing)


class SimulatedCluster:
    """Simulate users who send requests to replicas."""

    def __init__(
        self, n: int, arguments: argparse.Namespace, speeds: Speeds, of_one: int, *, affinity: bool
    ) -> None:
        self._arguments, self._speeds = arguments, speeds
        self._affinity = affinity
        self._replicas = [SimulatedReplica() for _ in range(n)]
        self._room = max(1, int(arguments.memory * 2**30 / of_one))
        self._swap_seconds = of_one / (arguments.swap_gib * 2**30)
        self._random = random.Random(1)  # noqa: S311
        self._homes = [self._random.randrange(n) for _ in range(arguments.users)]
        self._first: list[float] = []
        self._answers = 0

    def run(self) -> str:
        """Simulate the cluster, and return its row of the table that main() prints."""
        arguments = self._arguments
        seconds = 60 * arguments.minutes
        begins = [self._random.uniform(0, arguments.think) for _ in range(arguments.users)]
        asks = dict(enumerate(begins))
        now = 0.0
        while now < seconds:
            for user in [user for user, at in asks.items() if at <= now]:
                del asks[user]
                self._ask(user, now)
            for replica in self._replicas:
                for done in self._step(replica, now):
                    asks[done.user] = now + self._random.expovariate(1 / arguments.think)
                    self._answers += now > _WARM_UP * seconds
            now += _STEP
        counted = (1 - _WARM_UP) * seconds
        first = sorted(self._first) or [float("nan")]
        busy = sum(replica.busy for replica in self._replicas) / (seconds * len(self._replicas))
        return (
            f"| {len(self._replicas)} | {'affinity' if self._affinity else 'anywhere'} | "
            f"{first[len(first) // 2]:.1f} s | {first[int(0.95 * (len(first) - 1))]:.1f} s | "
            f"{busy:.0%} | {60 * self._answers / counted:.0f} |"
        )

    def _ask(self, user: int, now: float) -> None:
        arguments = self._arguments
        least = min(self._replicas, key=lambda replica: replica.load)
        home = self._replicas[self._homes[user]]
        replica = home if self._affinity else least
        request = Request(user, now, arguments.question, arguments.answer)
        if user in replica.held:
            replica.held.move_to_end(user)
        else:
            if self._affinity:  # The conversation was swapped out.
                request.wait_for_swap = self._swap_seconds
            else:
                request.to_read += arguments.history
            replica.held[user] = None
            while len(replica.held) > self._room:
                replica.held.popitem(last=False)
        replica.reading.append(request)

    def _step(self, replica: SimulatedReplica, now: float) -> list[Request]:
        """Let a replica compute for a step; return the requests that were answered."""
        if not replica.load:
            return []
        replica.busy += _STEP
        share = 0.5 if replica.writing and replica.reading else 1.0
        left = share * _STEP
        while replica.reading and left > 0 and len(replica.writing) < self._arguments.parallel:
            request = replica.reading[0]
            waited = min(left, request.wait_for_swap)
            request.wait_for_swap -= waited
            left -= waited
            n = min(request.to_read, left * self._speeds.prefill)
            request.to_read -= n
            left -= n / self._speeds.prefill
            if request.to_read > 0 or request.wait_for_swap > 0:
                break
            replica.writing.append(replica.reading.popleft())
            if now > _WARM_UP * 60 * self._arguments.minutes:
                self._first.append(now + _STEP - request.came)
        if not replica.writing:
            return []
        n = len(replica.writing)
        rate = min(self._speeds.one, self._speeds.together / n) * share
        done = []
        for request in [*replica.writing]:
            request.to_write -= rate * _STEP
            if request.to_write <= 0:
                replica.writing.remove(request)
                done.append(request)
        return done


if __name__ == "__main__":
    main()
