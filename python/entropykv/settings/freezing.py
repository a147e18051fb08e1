"""Define which entries freeze, where cold storage is kept, when entries are restored, and how many
are restored because the output becomes uncertain.

Policy `rolling-freeze` freezes and restores on a schedule instead of evicting: Adilet Metinov,
Gulida M. Kudakeeva, Bolotbek uulu Nursultan, Gulnara D. Kabaeva: *Adaptive Soft Rolling KV Freeze
with Entropy-Guided Recovery: Sublinear Memory Growth for Efficient LLM Inference*. Section 3
detects entries with a low mean |q.k| and freezes them for floor(sqrt(c) / k) steps: the parameters
are fields of Freezing, the schedule is cpp/decide/freezing.cpp. Section 3.6 restores them when the
output becomes uncertain: the parameters are fields of Recovery, the ladder is session/recovery.py.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from enum import IntEnum

from entropykv.errors import SettingsError
from entropykv.settings.options import MOST_BYTES, check_declared, option, parse_bytes

RAM = "ram"
DISK = "disk:"
COLD_TYPES = {
    "f16": ("f16", "q8_0", "q4_0"),
    "q8_0": ("q8_0", "q4_0"),
    "q8_0/iq4_nl": ("q8_0/iq4_nl", "q4_0"),
}
"""The types of frozen entries, by those of the store: its own, and narrower ones."""
COLD_CHOICES = ("auto", *dict.fromkeys(itertools.chain(*COLD_TYPES.values())))
WHERE = "ram|disk:DIR"
RECALL_MICRO_BATCHES = (16, 64)
"""How many tokens are read at a time while frozen entries are searched: at the end of a prompt, and
at most before it. These tokens share the recalled entries.
"""
RECALL_END = 256
"""How many tokens are the end of a prompt, where questions are."""


@dataclass(frozen=True)
class Freezing:
    """Keep evicted entries in cold storage, out of attention; raises SettingsError for impossible
    values.

    `where`: `ram`, or `disk:DIR` for a file of this process in a directory. `limit`: bytes of cold
    storage, such as `1GiB`; None: as much as the context needs. `kv_type`: the type of frozen
    entries; auto: that of the store. `recall_interval`: frozen entries are searched with every
    N-th generated token, and with every micro-batch of a prompt (of RECALL_MICRO_BATCHES tokens);
    0: never. `recall_prompt`: they are searched in the last N tokens of a prompt; what comes before
    is read as if nothing was frozen. None: in the whole prompt, in time that grows with what is
    frozen. Policy rolling-freeze, policies that read twice, and tokens whose logits are all wanted
    search in whole prompts.

    The other fields are the schedule of policy rolling-freeze (Metinov et al., section 3).
    Entries older than the `window` newest tokens are detected if their attention in a step is below
    `threshold` even shares, and frozen for sqrt(detections) / `rate` steps, rounded down.
    `history`: the number of latest steps whose detections count; 0: the whole text (the paper gives
    no value). With policy rolling-freeze:products, entries with |q.k| below `threshold` are
    detected, as in the paper; which values are low depends on the model. `threshold` None: 1, and
    0.5 for |q.k|, as in the paper.
    """

    where: str = RAM
    limit: str | int | None = option(
        None,
        "bytes of frozen entries, such as 1GiB",
        "--freeze-limit",
        metavar="SIZE",
        instead="what the context needs",
    )
    kv_type: str = option(
        "auto",
        "type of frozen entries; auto: that of --kv-type",
        "--freeze-type",
        choices=COLD_CHOICES,
        label="the type of frozen entries",
    )
    recall_interval: int = option(
        1,
        "look for frozen entries that matter again with every N-th generated token; 0: never",
        "--recall-interval",
        metavar="N",
        kind=int,
        least=0,
    )
    window: int = option(
        32,
        "newest tokens that are not frozen",
        "--freeze-window",
        metavar="K",
        kind=int,
        least=1,
        label="the window of freezing",
        group="schedule",
    )
    threshold: float | None = option(
        None,
        "older ones are detected if they get less than so many even shares of the attention, or, "
        "with rolling-freeze:products, less |q.k|",
        "--freeze-threshold",
        metavar="T",
        kind=float,
        least=0.0,
        most=1e9,
        label="the threshold of freezing",
        instead="1; 0.5 for |q.k|",
        group="schedule",
    )
    rate: float = option(
        2.0,
        "freeze for sqrt(detections) / R steps, rounded down",
        "--freeze-rate",
        metavar="R",
        kind=float,
        least=1e-6,
        most=1e6,
        label="the rate of freezing",
        group="schedule",
    )
    history: int = option(
        0,
        "detections of the last W steps count; 0: all",
        "--freeze-history",
        metavar="W",
        kind=int,
        least=0,
        label="the history of freezing",
        group="schedule",
    )
    recall_prompt: int | None = option(
        None,
        "look for frozen entries in the last N tokens of a prompt only: what comes before is read "
        "as fast as without freezing",
        "--recall-prompt",
        metavar="N",
        kind=int,
        least=1,
        instead="the whole prompt",
    )

    def __post_init__(self) -> None:
        """Check every value."""
        if self.where != RAM and not self.directory:
            raise SettingsError(f"freeze cannot be {self.where!r}; use ram or disk:DIRECTORY")
        if self.limit is not None and not _possible(_bytes(self.limit)):
            raise SettingsError(
                f"the limit of frozen entries cannot be {self.limit!r}; give bytes such as 1GiB"
            )
        check_declared(self)

    @staticmethod
    def parse(value: Freezing | str | None) -> Freezing | None:
        """Read `ram` or `disk:DIR`, with defaults for the other fields; a Freezing and None, which
        freezes nothing, are returned as they are. Raises SettingsError for other values.
        """
        return Freezing(value) if isinstance(value, str) else _checked(value)

    @property
    def directory(self) -> str | None:
        """Return the directory of cold storage's file; None if it is kept in memory."""
        where: object = self.where
        if not isinstance(where, str) or not where.startswith(DISK):
            return None
        return where[len(DISK) :]

    @property
    def limit_bytes(self) -> int | None:
        """Return the `limit` in bytes; None without a limit."""
        return None if self.limit is None else _bytes(self.limit)

    def type_for(self, kv_type: str) -> str:
        """Return the type of frozen entries in a store with entries of type `kv_type`.

        Raises SettingsError for a type that is neither the store's nor narrower.
        """
        if self.kv_type == "auto":
            return kv_type
        if kv_type == "auto":
            return self.kv_type
        possible = COLD_TYPES[kv_type]
        if self.kv_type not in possible:
            raise SettingsError(
                f"frozen entries cannot be {self.kv_type} where the store has {kv_type}; use "
                f"--freeze-type {' or '.join(possible)}"
            )
        return self.kv_type


def check_freezing(freezing: Freezing | None, store: str, kv_type: str) -> None:
    """Raise SettingsError if the store has no cold storage, or if it cannot freeze entries of
    `kv_type` in the type of `freezing`; None: nothing is checked.
    """
    if freezing is None:
        return
    freezing.type_for(kv_type)
    if store in ("flat", "device"):
        raise SettingsError(
            f"the {store} store has no cold storage; use --store headwise, or leave --freeze "
            "(freeze=) out"
        )


def _checked(value: object) -> Freezing | None:
    if value is None or isinstance(value, Freezing):
        return value
    raise SettingsError(f"freeze cannot be {value!r}; use ram, disk:DIRECTORY, or a Freezing")


def _bytes(limit: str | int) -> int | None:
    return parse_bytes(limit) if isinstance(limit, str) else limit


def _possible(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_BYTES


class Rung(IntEnum):
    """Name how much is restored from cold storage; each rung restores more than the one before."""

    NONE = 0
    SOFT = 1
    """Restore frozen entries that would stay frozen for more than one further step."""
    WINDOW = 2
    """Restore all entries that were frozen within the last Recovery.window steps."""
    FULL = 3
    """Restore all frozen entries, and forget their timers."""
    REWALK = 4
    """Restore everything as FULL does, then generate the last tokens again."""


RUNGS = {rung.name.lower(): rung for rung in Rung if rung}
"""The rungs by the names that options have for them."""
WITHOUT_REWALK = tuple(name for name, rung in RUNGS.items() if rung is not Rung.REWALK)
"""The names of the rungs that are possible where written tokens cannot be taken back."""


@dataclass(frozen=True)
class Recovery:
    """Hold when the ladder is climbed, and how far; raises SettingsError for impossible values.

    A token is a spike if the entropy of the distribution after it, or -log2 of its top probability,
    smoothed over about `smooth` tokens, is more than `deviations` deviations above its running
    mean. Nothing counts before `warm_up` tokens. Mean and deviation give a new token the weight 1 /
    `memory` (exponential decay; a plain mean for the first tokens). A value above the limit counts
    as the limit, so that a spike hardly changes them, whereas a new level soon does.

    Each spike climbs one rung, up to `highest`, but not within `refractory` tokens after a climb,
    so that its effect can show. After every `calm` tokens without a spike, the ladder descends by
    one rung. `window`: the last steps whose frozen entries a window reset restores. `rewalk`: how
    many tokens a rewalk generates again, and therefore are held back; 0 never generates any again.
    """

    deviations: float = option(
        3.0,
        "deviations above the running mean that count as a spike",
        "--recovery-deviations",
        metavar="D",
        kind=float,
    )
    smooth: int = option(4, "tokens over which uncertainty is smoothed", least=1)
    warm_up: int = option(16, "tokens before which nothing counts", least=2)
    memory: int = option(128, "tokens whose mean and deviation count", least=2)
    refractory: int = option(4, "tokens after a climb during which no other climb is made", least=0)
    calm: int = option(32, "tokens without a spike after which the ladder goes down", least=1)
    window: int = option(
        64,
        "newest steps that a window reset restores",
        "--recovery-window",
        metavar="N",
        kind=int,
        least=1,
    )
    rewalk: int = option(
        8, "tokens that a rewalk writes again", "--rewalk", metavar="K", kind=int, least=0
    )
    highest: Rung = Rung.REWALK

    def __post_init__(self) -> None:
        """Check every value."""
        if not 0.0 < self.deviations < math.inf:
            raise SettingsError(
                f"deviations cannot be {self.deviations}; use a number above 0, such as 3"
            )
        check_declared(self)
        if not isinstance(self.highest, Rung) or self.highest is Rung.NONE:
            rungs = ", ".join(f"Rung.{rung.name}" for rung in Rung if rung)
            raise SettingsError(f"highest cannot be {self.highest!r}; use one of {rungs}")

    @property
    def top(self) -> Rung:
        """Return the highest rung in use; a REWALK of 0 tokens does not count."""
        return self.highest if self.rewalk else min(self.highest, Rung.FULL)

    @property
    def held_back(self) -> int:
        """Return how many tokens a rewalk may replace: the last ones are held back for it."""
        return self.rewalk if self.top is Rung.REWALK else 0
