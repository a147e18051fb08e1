"""Define all options of the cache with their defaults, and check them once.

Session, Pool, EntropyLlama, attach(), the server and the command line make a CacheOptions.
policy/resolved_config.py derives a ResolvedConfig from it for a model.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from entropykv.errors import SettingsError
from entropykv.settings.cores import usable_cores
from entropykv.settings.freezing import RUNGS, WHERE, Freezing, Recovery
from entropykv.settings.options import (
    KV_CHOICES,
    MOST_MICRO_BATCH,
    MOST_THREADS,
    STORES,
    Budget,
    at_least,
    check_declared,
    of_group,
    option,
)

if TYPE_CHECKING:  # --help loads faster without numpy.
    import numpy as np
    import numpy.typing as npt

    from entropykv.profile.profile import EntropyProfile
    from entropykv.settings.own_policy import OwnPolicy

MICRO_BATCH = 512
MICRO_BATCH_OF_POOL = 128
"""How many tokens of a prompt a pool reads at a time; after each chunk, other sessions write a
token.
"""
SEQUENCES_OF_POOL = 4
CHECKPOINTS = "64MiB"
POLICY_SYNTAX = "NAME[:MEASURE[+MODIFIER...]]"
SPEC_TYPES = ("none", "ngram", "draft", "auto")
MOST_DRAFTS = 63
LEARN_VARIABLE = "ENTROPYKV_LEARN"
"""The environment variable that counts if the option `learn` is None."""
SWITCH = {"on": True, "off": False}
DRAFT_BUDGET = "0.2"
MOST_SEQUENCES = 256
"""The most sequences that a llama_context accepts."""

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
DraftFunction = Callable[..., "npt.NDArray[np.intc]"]
"""Returns the tokens that may follow a text, (n,), int32, called with `input_ids`, the text's
tokens, int32: an object of llama_cpp's LlamaDraftModel is one.
"""
Function = TypeVar("Function", bound=Callable[..., object])


# What follows is written by `python -m tests.support.option_types`.


class CacheArguments(TypedDict, total=False):
    """List the fields of CacheOptions that can be set for a loaded model, besides the budget."""

    policy: str | OwnPolicy
    kv_type: str
    store: str
    entropy_config: EntropyProfile | str | os.PathLike[str] | None
    learn: bool | None
    n_sinks: int
    recent_window: int | None
    freeze: Freezing | str | None
    recovery: Recovery | None


class SessionArguments(CacheArguments, total=False):
    """List the fields of CacheOptions that Session accepts."""

    kv_budget: Budget | str | float
    n_ctx: int
    n_ubatch: int | None
    n_threads: int
    n_threads_batch: int
    fixed_threads: bool
    n_gpu_layers: int
    spec_type: str
    draft_max: int
    spec_draft_model: str | os.PathLike[str] | DraftFunction | None
    draft_kv_budget: Budget | str | float
    draft_p_min: float


class PoolArguments(SessionArguments, total=False):
    """List the fields of CacheOptions that Pool accepts: all."""

    n_sequences: int | None
    swap: str
    swap_limit: str | int | None
    checkpoints: str | int | None


# End of what is written.


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Hold the options of the cache; raises BudgetError or SettingsError for impossible values.

    Every field is declared with its help, its limits, and its names at the command line and in the
    server's settings; docs/reference/options.md has the table. In Python, `policy` may also be an
    object of a class derived from OwnPolicy, `entropy_config` an EntropyProfile, and `freeze` a
    Freezing with settings of its own.
    """

    kv_budget: Budget | str | float = option(
        1.0,
        "what is kept: a fraction of the context (0.2 or 20%), tokens per KV head (2 or more), or "
        "bytes such as 64MiB; for several conversations: a fraction of what all their contexts "
        "take, or the tokens or bytes of all",
        "--kv-budget",
        metavar="B",
        group="loading",
    )
    policy: str | OwnPolicy = option(
        "auto",
        "auto (the best known for the model) or fast; what gets most attention: uniform, entropy, "
        "profile, adaptive, guided, layer, layer-range, rolling-freeze; the newest: streaming, "
        "recency; measures and more: docs/reference/policies.md",
        "--policy",
        metavar=POLICY_SYNTAX,
    )
    kv_type: str = option(
        "auto",
        "how K and V are stored; auto: f16 where a budget in bytes holds the whole context, else "
        "q8_0",
        "--kv-type",
        choices=KV_CHOICES,
    )
    store: str = option(
        "auto",
        "headwise: per KV head, on the CPU; device: per KV head, where each layer is; flat: "
        "llama.cpp's own cache, any model and backend; auto: device if layers are on a device, "
        "headwise, flat: the first that can serve the model",
        "--store",
        choices=STORES,
    )
    entropy_config: EntropyProfile | str | os.PathLike[str] | None = option(
        None,
        "entropy profile of the model's heads, JSON",
        "--entropy-config",
        metavar="FILE",
        instead="what `entropykv calibrate` left beside the model, or what comes with entropykv",
    )
    learn: bool | None = option(
        None,
        "on: keep what the first texts show of a model that has no entropy profile, in the user's "
        "cache directory, and use it from then on; off: read and write nothing there",
        "--learn",
        metavar="on|off",
        kind=bool,
        instead=f"on, unless the environment variable {LEARN_VARIABLE} is off",
    )
    n_sinks: int = option(
        4, "first tokens that are never evicted", "--sinks", metavar="N", kind=int, least=0
    )
    recent_window: int | None = option(
        None,
        "newest tokens that every KV head keeps",
        "--recent-window",
        metavar="N",
        kind=int,
        least=1,
        instead="half of the mean budget; policies adaptive (auto without a profile) and guided "
        "with modifier predicted: three eighths of it; policies layer and layer-range: half of "
        "each layer's own budget, sinks included",
    )
    freeze: Freezing | str | None = option(
        None,
        "keep what is evicted, out of attention: in memory, or in a file in a directory",
        "--freeze",
        metavar=WHERE,
        instead="drop it; with policy rolling-freeze: ram",
    )
    recovery: Recovery | None = option(
        None,
        "restore frozen entries where the entropy of the output rises or its top probability "
        "falls, one rung further each time, up to this one",
        "--recovery",
        choices=tuple(RUNGS),
        instead="nothing is watched",
    )
    n_ctx: int = option(
        0,
        "longest sequence in tokens, which may be longer than what the model was trained for; 0: "
        "just that",
        *("-c", "--ctx-size"),
        setting="n_ctx",
        metavar="N",
        kind=int,
        least=0,
        group="loading",
    )
    n_ubatch: int | None = option(
        None,
        "tokens of the prompt read at a time",
        *("-ub", "--ubatch-size"),
        setting="n_ubatch",
        kind=int,
        least=1,
        most=MOST_MICRO_BATCH,
        instead=f"{MICRO_BATCH}; {MICRO_BATCH_OF_POOL} in a pool, where others write meanwhile",
        group="loading",
    )
    n_threads: int = option(
        0,
        "the most threads that write; 0: one for every core that this process may use (physical "
        "cores, affinity, CPU quota of the cgroup)",
        *("-t", "--threads"),
        setting="n_threads",
        kind=int,
        least=0,
        most=MOST_THREADS,
        group="loading",
    )
    n_threads_batch: int = option(
        0,
        "the most threads that read prompts; 0: as many as write",
        *("-tb", "--threads-batch"),
        setting="n_threads_batch",
        metavar="N",
        kind=int,
        least=0,
        most=MOST_THREADS,
        group="loading",
    )
    fixed_threads: bool = option(
        False,
        "always compute with all of these threads, also while other processes use the cores",
        "--fixed-threads",
        kind=bool,
        at_server=None,
        group="loading",
    )
    n_gpu_layers: int = option(
        0,
        "layers on the GPU; -1: all",
        *("-ngl", "--n-gpu-layers", "--gpu-layers"),
        setting="n_gpu_layers",
        metavar="N",
        kind=int,
        least=-1,
        most=2**31 - 1,  # llama-cpp-python sends this for all layers.
        group="loading",
    )
    spec_type: str = option(
        "auto",
        "how tokens are guessed ahead; ngram: what followed the end of the text at an earlier "
        "place of it; draft: by a smaller model; auto: draft with --model-draft, else ngram, where "
        "wrong guesses can be undone",
        "--spec-type",
        choices=SPEC_TYPES,
        group="loading",
    )
    draft_max: int = option(
        15,
        "the most tokens that are guessed at a time",
        *("--draft-max", "--spec-draft-n-max", "--draft", "--draft-n"),
        setting="draft_max",
        metavar="N",
        kind=int,
        least=1,
        most=MOST_DRAFTS,
        group="drafts",
    )
    spec_draft_model: str | os.PathLike[str] | DraftFunction | None = option(
        None,
        "a small model with the same vocabulary, which guesses tokens ahead",
        *("-md", "--spec-draft-model", "--model-draft"),
        setting="spec_draft_model",
        metavar="FILE",
        instead="none",
        group="drafts",
    )
    draft_kv_budget: Budget | str | float = option(
        DRAFT_BUDGET,
        "KV budget of the model of --model-draft, written as --kv-budget",
        "--draft-kv-budget",
        metavar="B",
        group="drafts",
    )
    draft_p_min: float = option(
        0.4,
        "the model of --model-draft stops guessing at a token with a smaller probability",
        *("--draft-p-min", "--spec-draft-p-min"),
        setting="draft_p_min",
        metavar="P",
        kind=float,
        least=0.0,
        most=1.0,
        group="drafts",
    )
    n_sequences: int | None = option(
        None,
        "conversations that hold entries at a time",
        *("-np", "--parallel"),
        metavar="N",
        kind=int,
        least=1,
        most=MOST_SEQUENCES,
        instead="one alone, without a pool",
        at_server=1,
        group="pool",
    )
    swap: str = option(
        "ram",
        "where a pool keeps idle conversations: ram, or disk:DIRECTORY",
        setting="swap",
        group="pool",
    )
    swap_limit: str | int | None = option(
        None,
        "bytes of idle conversations; beyond it, the least recently used are dropped",
        setting="swap_limit",
        instead="as many as there are",
        at_server="1GiB",
        group="pool",
    )
    checkpoints: str | int | None = option(
        None,
        "bytes besides the budget for places in texts that can be gone back to, such as 64MiB; 0: "
        "none",
        setting="checkpoints",
        instead=f"{CHECKPOINTS} in a pool, and none of one conversation alone",
        group="pool",
    )
    budget: Budget = field(init=False, repr=False, compare=False)
    """The value of `kv_budget` as a Budget."""
    draft_budget: Budget = field(init=False, repr=False, compare=False)
    """The value of `draft_kv_budget` as a Budget."""
    freezing: Freezing | None = field(init=False, repr=False, compare=False)
    """The value of `freeze` as a Freezing; None if `freeze` is None."""

    def __post_init__(self) -> None:
        """Check every value."""
        object.__setattr__(self, "budget", Budget.parse(self.kv_budget))
        object.__setattr__(self, "draft_budget", Budget.parse(self.draft_kv_budget))
        object.__setattr__(self, "freezing", Freezing.parse(self.freeze))
        if self.n_sequences is not None:
            self._check_sequences(self.n_sequences)
        check_declared(self)
        self._check_drafts()

    def _check_drafts(self) -> None:
        """Raise SettingsError for a draft model that is missing or of no use."""
        given = self.spec_draft_model is not None
        if self.spec_type == "draft" and not given:
            raise SettingsError(
                "--spec-type draft guesses with a small model; give it with --model-draft FILE "
                "(spec_draft_model), or use --spec-type ngram"
            )
        if self.spec_type in ("none", "ngram") and given:
            raise SettingsError(
                f"--spec-type {self.spec_type} does not use a small model; leave --model-draft "
                "(spec_draft_model) out, or use --spec-type draft"
            )

    @staticmethod
    def of(options: CacheOptions | None, arguments: Mapping[str, Any]) -> CacheOptions:
        """Return `options`, or the defaults for None, with the values in `arguments` instead of
        theirs.
        """
        return replace(options or CacheOptions(), **arguments)

    @staticmethod
    def _check_sequences(n_sequences: int) -> None:
        at_least("n_sequences", n_sequences, 1)
        if n_sequences > MOST_SEQUENCES:
            raise SettingsError(
                f"{n_sequences} conversations at a time are too many; use at most "
                f"{MOST_SEQUENCES}, and more sessions, which are swapped out while they are idle"
            )

    @property
    def learns(self) -> bool:
        """Tell whether what a model teaches is kept in the user's cache directory, and read there.

        Raises SettingsError for a value of the environment variable that is neither on nor off.
        """
        if self.learn is not None:
            return bool(self.learn)
        said = os.environ.get(LEARN_VARIABLE) or "on"
        if said.lower() not in SWITCH:
            raise SettingsError(f"{LEARN_VARIABLE} cannot be {said!r}; set it to on or off")
        return SWITCH[said.lower()]

    @property
    def micro_batch(self) -> int:
        """Return how many tokens of a prompt are requested to be read at a time."""
        if self.n_ubatch is not None:
            return self.n_ubatch
        return MICRO_BATCH if self.n_sequences is None else MICRO_BATCH_OF_POOL

    @property
    def threads(self) -> int:
        """Return the number of threads that write: unless set, the cores that this process
        may use.
        """
        return self.n_threads or usable_cores()

    @property
    def threads_batch(self) -> int:
        """Return the number of threads that read prompts: unless set, as many as write."""
        return self.n_threads_batch or self.threads

    @property
    def most_threads(self) -> int:
        """Return the largest number of threads of any op in the model's graph."""
        return max(self.threads, self.threads_batch)

    @property
    def in_pool(self) -> bool:
        """Tell whether the budget belongs to a pool instead of a single session."""
        return self.n_sequences is not None

    def alone(self) -> CacheOptions:
        """Return these options for one session; raises SettingsError if they ask for a pool."""
        if any(
            getattr(self, name) != getattr(CacheOptions, name) for name in of_group(self, "pool")
        ):
            raise SettingsError(
                "a Session holds one conversation; for n_sequences, swap, swap_limit and "
                "checkpoints make a Pool, of n_sequences=1 if need be, or an EntropyLlama with "
                "n_sequences"
            )
        return self

    @property
    def checkpoint_limit(self) -> str | int:
        """Return the limit of checkpoints outside the pool, in bytes or as text such as 64MiB; by
        default 0 for a single session.
        """
        of_all = CHECKPOINTS if self.in_pool else 0
        return of_all if self.checkpoints is None else self.checkpoints

    def going_back(self) -> CacheOptions:
        """Return the options: for a pool of one conversation if checkpoints are asked for without a
        pool, else unchanged.
        """
        alone = self.in_pool or self.checkpoints is None
        return self if alone else replace(self, n_sequences=1)

    def pooled(self) -> CacheOptions:
        """Return these options for a pool: of SEQUENCES_OF_POOL conversations unless a number is
        given.
        """
        return self if self.in_pool else replace(self, n_sequences=SEQUENCES_OF_POOL)


def shows(arguments: type) -> Callable[[Function], Function]:
    """Let help() list the options in `arguments` instead of a function's **arguments.

    Type checkers get the same information from the annotation Unpack[CacheArguments].
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
