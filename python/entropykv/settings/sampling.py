"""Define how the next token of an answer is chosen: Sampling, and its limits, checked once."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from entropykv.errors import SettingsError
from entropykv.settings.options import check_declared, option

if TYPE_CHECKING:  # --help loads faster without this module.
    from entropykv.constraint.constraint import Constraint

SAMPLER_LETTERS = {
    "penalties": "e",
    "dry": "d",
    "top_n_sigma": "s",
    "top_k": "k",
    "typ_p": "y",
    "top_p": "p",
    "min_p": "m",
    "xtc": "x",
    "temperature": "t",
}
"""The letters that llama.cpp's --sampler-seq uses for samplers."""
SAMPLERS = tuple(SAMPLER_LETTERS)
"""The names of the samplers in their default order, as in llama-cli."""
TEMPERATURE = 0.8
"""The temperature where a command line or a request says none, as in llama.cpp."""
RANDOM_SEED = MOST_SEED = 0xFFFFFFFF
"""llama.cpp's number for a random seed, which differs every time."""


def is_random_seed(seed: int | None) -> bool:
    """Tell whether a seed asks for a random one: None, -1, or RANDOM_SEED."""
    return seed is None or seed & MOST_SEED == MOST_SEED


def new_seed() -> int:
    """Return a seed that nobody can guess."""
    return secrets.randbelow(MOST_SEED)


def _number(default: float, help: str, *flags: str, **limits: float) -> Any:  # noqa: A002
    """Declare a field that is a number, within `limits`: `least` and `most`."""
    return option(default, help, *flags, metavar="X", kind=float, **limits)


def _share(default: float, help: str, *flags: str) -> Any:  # noqa: A002
    """Declare a field that is a number from 0 to 1."""
    return _number(default, help, *flags, least=0, most=1)


def _count(default: int, least: int, help: str, flag: str) -> Any:  # noqa: A002
    """Declare a field that is an integer of `least` or more."""
    return option(default, help, flag, metavar="N", kind=int, least=least)


@dataclass(frozen=True)
class Sampling:
    """Hold how the next token is chosen; names and defaults are llama-cli's, except that sampling
    is greedy by default.

    With temperature 0 or less, the most probable token after penalties and grammar is chosen.
    Values that switch a sampler off: top_k 0 or -1, top_p 1, min_p 0, typical_p 1, top_n_sigma -1,
    xtc_probability 0, dynatemp_range 0, mirostat 0, repeat_penalty 1, the other penalties 0,
    dry_multiplier 0. `repeat_last_n`: how many of the newest tokens penalties consider (0: none,
    -1: the whole context). `samplers`: the names of samplers in order. `grammar`: what the answer
    must be, a Constraint or the text of a grammar (GBNF or Lark). `logit_bias`: pairs of a token
    and the value to add to its logit. `min_tokens`: the text does not end before it has this many.
    seed None or -1: a random one. Raises SettingsError for impossible values.
    """

    temperature: float = _number(0.0, "0: greedy", "--temp", "--temperature")
    top_k: int = _count(40, -1, "0 and -1: off", "--top-k")
    top_p: float = _share(0.95, "1: off", "--top-p")
    min_p: float = _share(0.05, "0: off", "--min-p")
    repeat_penalty: float = _number(1.0, "1: off", "--repeat-penalty")
    seed: int | None = None
    typical_p: float = _share(1.0, "locally typical sampling, 1: off", "--typical", "--typical-p")
    top_n_sigma: float = _number(-1.0, "-1: off", "--top-nsigma", "--top-n-sigma")
    xtc_probability: float = _share(0.0, "0: off", "--xtc-probability")
    xtc_threshold: float = _share(0.1, "above 0.5: off", "--xtc-threshold")
    dynatemp_range: float = _number(0.0, "dynamic temperature, 0: off", "--dynatemp-range")
    dynatemp_exponent: float = _number(1.0, "its exponent", "--dynatemp-exp")
    mirostat: int = option(0, "0: off", "--mirostat", metavar="0|1|2", kind=int, least=0, most=2)
    mirostat_tau: float = _number(5.0, "its target entropy", "--mirostat-ent")
    mirostat_eta: float = _number(0.1, "its learning rate", "--mirostat-lr")
    repeat_last_n: int = _count(
        64, -1, "newest tokens that penalties consider, -1: all", "--repeat-last-n"
    )
    presence_penalty: float = _number(0.0, "0: off", "--presence-penalty")
    frequency_penalty: float = _number(0.0, "0: off", "--frequency-penalty")
    dry_multiplier: float = _number(0.0, "0: off", "--dry-multiplier")
    dry_base: float = _number(1.75, "its base", "--dry-base")
    dry_allowed_length: int = _count(
        2, 0, "repetitions of this length are free", "--dry-allowed-length"
    )
    dry_penalty_last_n: int = _count(
        -1, -1, "newest tokens that it considers, -1: all", "--dry-penalty-last-n"
    )
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Constraint | str | None = None
    samplers: tuple[str, ...] = SAMPLERS
    min_tokens: int = option(0, "before so many tokens, the text does not end", least=0)

    def __post_init__(self) -> None:
        """Check every value."""
        check_declared(self)
        if self.repeat_penalty <= 0.0:
            raise SettingsError("repeat_penalty must be a number above 0; 1 switches it off")
        if self.min_tokens and self.grammar is not None:
            raise SettingsError(
                "min_tokens cannot go with what constrains an answer, which may have to end before"
            )
        for name in self.samplers:
            if name not in SAMPLERS:
                raise SettingsError(
                    f"there is no sampler {name!r}; use some of {', '.join(SAMPLERS)}"
                )

    @property
    def needs_vocabulary(self) -> bool:
        """Tell whether samplers of llama.cpp need the texts of tokens."""
        return self.dry_multiplier != 0.0

    @property
    def penalizes(self) -> bool:
        """Tell whether the chain has penalties, which depend on earlier tokens."""
        penalties = (self.presence_penalty, self.frequency_penalty)
        return self.repeat_penalty != 1.0 or penalties != (0.0, 0.0)
