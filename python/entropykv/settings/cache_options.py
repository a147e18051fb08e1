"""Hold all that a user can say about the cache, checked once; the defaults stand here alone.

Session, Pool, EntropyLlama, attach(), the server and the command line make a CacheOptions, and hand
it on whole. What follows from it for a model is a ResolvedConfig: see policy/resolved_config.py.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict, TypeVar

from entropykv.errors import SettingsError
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.cores import usable_cores
from entropykv.settings.freezing import Freezing
from entropykv.settings.options import (
    KV_CHOICES,
    MOST_MICRO_BATCH,
    MOST_THREADS,
    STORES,
    Budget,
    at_least,
    one_of,
)
from entropykv.settings.own_policy import OwnPolicy
from entropykv.settings.recovery import Recovery
from entropykv.settings.renamed import with_current_names

MICRO_BATCH = 512
MICRO_BATCH_OF_POOL = 128
"""Tokens of a prompt that a pool reads at a time: between two of them, others write a token."""
SEQUENCES_OF_POOL = 4
CHECKPOINTS = "64MiB"
MOST_SEQUENCES = 256
"""The most sequences that a llama_context takes."""

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
Function = TypeVar("Function", bound=Callable[..., object])
Options = TypeVar("Options")


def _takes_earlier_names(options: type[Options]) -> type[Options]:
    """Let a dataclass be made with the names that its fields had before: see renamed.py."""
    make = options.__init__

    @functools.wraps(make)
    def make_with_names(self: Options, **arguments: Any) -> None:
        make(self, **with_current_names(arguments))

    options.__init__ = make_with_names  # type: ignore[assignment, method-assign]
    return options


class CacheArguments(TypedDict, total=False):
    """Name the fields of CacheOptions that a loaded model leaves open, besides the budget."""

    policy: str | OwnPolicy
    kv_type: str
    store: str
    entropy_config: EntropyProfile | str | os.PathLike[str] | None
    learn: bool
    n_sinks: int
    recent_window: int | None
    freeze: Freezing | str | None
    recovery: Recovery | None


class SessionArguments(CacheArguments, total=False):
    """Name the fields of CacheOptions that Session takes."""

    kv_budget: Budget | str | float
    n_ctx: int
    n_ubatch: int | None
    n_threads: int
    n_threads_batch: int
    n_gpu_layers: int


class PoolArguments(SessionArguments, total=False):
    """Name all fields of CacheOptions: Pool takes them."""

    n_sequences: int | None
    swap: str
    swap_limit: str | int | None
    checkpoints: str | int | None


@_takes_earlier_names
@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Hold what is asked of the cache; raises BudgetError or SettingsError for impossible values.

    `kv_budget`: a fraction of n_ctx in (0, 1], tokens per KV head (2 or more), or bytes ("64MiB").
    With `n_sequences` a fraction is that of n_sequences contexts; tokens and bytes are of all.
    `policy`: a name: see docs/reference/policies.md; or an object of your own: see OwnPolicy.
    `kv_type`: f16, q8_0, or auto: f16 where a budget in bytes holds the whole context, else q8_0.
    `store`: headwise, flat, or auto: headwise where it can serve the model. `entropy_config`: an
    EntropyProfile or the path of one; None: that beside the model file or in this package, where
    the policy takes one. `learn`: where there is none, leave one beside the model file once enough
    of texts was read twice, for later sessions: see docs/background/profiles.md. `n_sinks`: first
    entries, and `recent_window`: newest entries, that every KV head keeps; None: half of the mean
    budget.
    `freeze`: keep what is evicted in cold storage: "ram", "disk:DIR", or a Freezing with settings
    of its own; None: no, unless policy is freeze.
    `recovery`: the ladder that restores what is frozen where the output grows uncertain; None: off.

    `n_ctx`: the longest sequence, in tokens; 0: what the model was trained for. `n_ubatch`: tokens
    of a prompt that are read at a time; None: 512, and 128 in a pool, where others write meanwhile.
    `n_threads`, `n_threads_batch`: threads that write, and that read prompts; 0: one for every core
    that this process may use, and as many. `n_gpu_layers`: layers on the GPU; -1: all.

    `n_sequences`: how many conversations of a pool hold entries at a time; None: one alone, without
    a pool. `swap`: where a pool keeps idle ones, "ram" or "disk:DIR", and `swap_limit`: how many
    bytes of them, such as "1GiB"; None: as many as there are. `checkpoints`: bytes besides the pool
    for places in texts that sessions can come back to; 0: none are kept; None: 64MiB in a pool, and
    none of one conversation alone, of which EntropyLlama makes a pool where they are asked for.
    """

    kv_budget: Budget | str | float = 1.0
    policy: str | OwnPolicy = "auto"
    kv_type: str = "auto"
    store: str = "auto"
    entropy_config: EntropyProfile | str | os.PathLike[str] | None = None
    learn: bool = False
    n_sinks: int = 4
    recent_window: int | None = None
    freeze: Freezing | str | None = None
    recovery: Recovery | None = None
    n_ctx: int = 0
    n_ubatch: int | None = None
    n_threads: int = 0
    n_threads_batch: int = 0
    n_gpu_layers: int = 0
    n_sequences: int | None = None
    swap: str = "ram"
    swap_limit: str | int | None = None
    checkpoints: str | int | None = None
    budget: Budget = field(init=False, repr=False, compare=False)
    """What `kv_budget` says, as a Budget."""
    freezing: Freezing | None = field(init=False, repr=False, compare=False)
    """What `freeze` says, as a Freezing; None where nothing freezes."""

    def __post_init__(self) -> None:
        """Check every value."""
        object.__setattr__(self, "budget", Budget.parse(self.kv_budget))
        object.__setattr__(self, "freezing", Freezing.parse(self.freeze))
        one_of("kv_type", self.kv_type, KV_CHOICES)
        one_of("store", self.store, STORES)
        at_least("n_ctx", self.n_ctx, 0)
        at_least("n_ubatch", self.micro_batch, 1, MOST_MICRO_BATCH)
        at_least("n_threads", self.n_threads, 0, MOST_THREADS)
        at_least("n_threads_batch", self.n_threads_batch, 0, MOST_THREADS)
        # Llama.cpp has this number for all layers.
        at_least("n_gpu_layers", self.n_gpu_layers, -1, 2**31 - 1)
        at_least("n_sinks", self.n_sinks, 0)
        if self.learn and self.entropy_config is not None:
            raise SettingsError(
                "--learn (learn) makes a profile where there is none, and --entropy-config "
                "(entropy_config) gives one; leave one of them out"
            )
        if self.recent_window is not None:
            at_least("recent_window", self.recent_window, 1)
        if self.n_sequences is not None:
            self._check_sequences(self.n_sequences)

    @staticmethod
    def of(options: CacheOptions | None, arguments: Mapping[str, Any]) -> CacheOptions:
        """Return `options`, or the defaults, with keyword arguments in their place."""
        return replace(options or CacheOptions(), **with_current_names(arguments))

    @staticmethod
    def _check_sequences(n_sequences: int) -> None:
        at_least("n_sequences", n_sequences, 1)
        if n_sequences > MOST_SEQUENCES:
            raise SettingsError(
                f"{n_sequences} conversations at a time are too many; use at most "
                f"{MOST_SEQUENCES}, and more sessions, which are swapped out while they are idle"
            )

    @property
    def micro_batch(self) -> int:
        """Return how many tokens of a prompt are asked to be read at a time."""
        if self.n_ubatch is not None:
            return self.n_ubatch
        return MICRO_BATCH if self.n_sequences is None else MICRO_BATCH_OF_POOL

    @property
    def threads(self) -> int:
        """Return the threads that write: the cores that this process may use unless set."""
        return self.n_threads or usable_cores()

    @property
    def threads_batch(self) -> int:
        """Return the threads that read prompts: as many unless set."""
        return self.n_threads_batch or self.threads

    @property
    def most_threads(self) -> int:
        """Return the most threads that an op of the model's graph has."""
        return max(self.threads, self.threads_batch)

    @property
    def in_pool(self) -> bool:
        """Tell whether the budget is that of a pool, and not of one session."""
        return self.n_sequences is not None

    def alone(self) -> CacheOptions:
        """Return these options for one session; raises SettingsError where they ask for a pool."""
        of_pool = (self.n_sequences, self.swap, self.swap_limit, self.checkpoints)
        if of_pool != (None, "ram", None, None):
            raise SettingsError(
                "a Session holds one conversation; for n_sequences, swap, swap_limit and "
                "checkpoints make a Pool, of n_sequences=1 if need be, or an EntropyLlama with "
                "n_sequences"
            )
        return self

    @property
    def checkpoint_limit(self) -> str | int:
        """Return the bytes of checkpoints besides the pool; a session alone keeps none."""
        of_all = CHECKPOINTS if self.in_pool else 0
        return of_all if self.checkpoints is None else self.checkpoints

    def going_back(self) -> CacheOptions:
        """Return these options, for a pool of one conversation where only checkpoints need one."""
        alone = self.in_pool or self.checkpoints is None
        return self if alone else replace(self, n_sequences=1)

    def pooled(self) -> CacheOptions:
        """Return these options for a pool: of SEQUENCES_OF_POOL conversations unless it is said."""
        return self if self.in_pool else replace(self, n_sequences=SEQUENCES_OF_POOL)


def shows(arguments: type) -> Callable[[Function], Function]:
    """Let help() list the options that `arguments` names in the place of a function's **arguments.

    Type checkers read the same from its annotation, Unpack[CacheArguments].
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        others = {each.name for each in signature.parameters.values()}
        shown = [
            inspect.Parameter(each.name, _KEYWORD, default=each.default, annotation=each.type)
            for each in fields(CacheOptions)
            if each.name in arguments.__annotations__ and each.name not in others
        ]
        *own, last = signature.parameters.values()
        rest = [last] if last.name == "llama" else []
        signature = signature.replace(parameters=[*own, *shown, *rest])
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorate
