"""Declare the options of llama.cpp's samplers, with llama-cli's names, and build a Sampling."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from typing import Any

from entropykv.cli.options import integer, utf8
from entropykv.constraint.constraint import Constraint
from entropykv.errors import SettingsError
from entropykv.files import read_text
from entropykv.session.sampling import SAMPLERS, Sampling
from entropykv.session.session import Session
from entropykv.settings.flags import N_PREDICT, TEMPERATURE

_DEFAULTS = Sampling(temperature=0.8)
_LETTERS = {
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
"""The letters that --sampler-seq uses for samplers, as in llama-cli."""

_FLOATS = (
    (*TEMPERATURE.names, "temperature", TEMPERATURE.help),
    ("--top-p", None, "top_p", "1: off"),
    ("--min-p", None, "min_p", "0: off"),
    ("--typical", "--typical-p", "typical_p", "locally typical sampling, 1: off"),
    ("--top-nsigma", "--top-n-sigma", "top_n_sigma", "-1: off"),
    ("--xtc-probability", None, "xtc_probability", "0: off"),
    ("--xtc-threshold", None, "xtc_threshold", "above 0.5: off"),
    ("--dynatemp-range", None, "dynatemp_range", "dynamic temperature, 0: off"),
    ("--dynatemp-exp", None, "dynatemp_exponent", "its exponent"),
    ("--repeat-penalty", None, "repeat_penalty", "1: off"),
    ("--presence-penalty", None, "presence_penalty", "0: off"),
    ("--frequency-penalty", None, "frequency_penalty", "0: off"),
    ("--dry-multiplier", None, "dry_multiplier", "0: off"),
    ("--dry-base", None, "dry_base", "its base"),
    ("--mirostat-lr", None, "mirostat_eta", "its learning rate"),
    ("--mirostat-ent", None, "mirostat_tau", "its target entropy"),
)
_INTEGERS = (
    ("--top-k", "top_k", -1, "0 and -1: off"),
    ("--repeat-last-n", "repeat_last_n", -1, "newest tokens that penalties consider, -1: all"),
    ("--dry-allowed-length", "dry_allowed_length", 0, "repetitions of this length are free"),
    ("--dry-penalty-last-n", "dry_penalty_last_n", -1, "newest tokens that it considers, -1: all"),
)


def add_sampling_options(parser: argparse.ArgumentParser, *, n_predict: int | None) -> None:
    """Add options of how tokens are chosen, and of the maximum number; sampling_of() reads them.

    `n_predict` is the default of the maximum; None: the command itself decides where none is given.
    """
    group = parser.add_argument_group("answer")
    most = N_PREDICT if n_predict is None else N_PREDICT._replace(default=str(n_predict))
    most.add(group, type=_n_predict, default=n_predict)
    group.add_argument(
        "-r",
        "--reverse-prompt",
        action="append",
        default=[],
        type=utf8,
        metavar="TEXT",
        help="end an answer before this text; may be given several times",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="continue where the model would end its answer"
    )
    _add_samplers(parser.add_argument_group("sampling"))
    _add_grammars(parser.add_argument_group("what an answer may be"))


def _n_predict(text: str) -> int:
    """Read the maximum tokens of an answer; llama-cli's -2 (until the context is full)
    becomes -1.
    """
    return max(-1, integer(-2)(text))


def _add_samplers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-s",
        "--seed",
        type=integer(-1, 2**32 - 1),
        default=-1,
        metavar="N",
        help="-1, the default: another every time",
    )
    for flag, alias, field, text in _FLOATS:
        group.add_argument(
            *filter(None, (flag, alias)),
            dest=field,
            type=float,
            default=getattr(_DEFAULTS, field),
            metavar="X",
            help=f"{text} (default: %(default)s)",
        )
    for flag, field, least, text in _INTEGERS:
        group.add_argument(
            flag,
            dest=field,
            type=integer(least),
            default=getattr(_DEFAULTS, field),
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )
    group.add_argument(
        "--mirostat", type=int, choices=(0, 1, 2), default=0, help="0: off (default: %(default)s)"
    )
    group.add_argument(
        "--dry-sequence-breaker",
        action="append",
        type=utf8,
        metavar="TEXT",
        help="none: no breakers",
    )
    group.add_argument(
        "--samplers",
        metavar="LIST",
        help="which ones, in this order, with ; between them (default: "
        + "; ".join(SAMPLERS)
        + ")",
    )
    group.add_argument(
        "--sampler-seq", "--sampling-seq", metavar="LETTERS", help="the same in letters: edskypmxt"
    )


def _add_grammars(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-l",
        "--logit-bias",
        action="append",
        default=[],
        metavar="TOKEN(+/-)BIAS",
        help="make a token more or less likely, such as 15043-1; may be given several times",
    )
    forms = group.add_mutually_exclusive_group()
    forms.add_argument(
        "--grammar", type=utf8, metavar="GBNF", help="a grammar with a rule named root"
    )
    forms.add_argument(
        "--grammar-lark",
        type=utf8,
        metavar="LARK",
        help="a grammar in llguidance's Lark, with a rule start",
    )
    forms.add_argument(
        "--regex", type=utf8, metavar="REGEX", help="a regular expression, of the whole answer"
    )
    forms.add_argument("--grammar-file", metavar="FILE", help="read GBNF or Lark from a file")
    forms.add_argument(
        *("-j", "--json-schema"),
        type=utf8,
        metavar="SCHEMA",
        help="JSON of this schema ({}: any)",
    )
    forms.add_argument("-jf", "--json-schema-file", metavar="FILE", help="read it from a file")


def sampling_of(options: argparse.Namespace) -> Sampling:
    """Return a Sampling; raises SettingsError for values out of range."""
    if options.n_predict == 0:
        raise SettingsError("-n 0 generates nothing; use -1 or a number of tokens")
    fields: dict[str, Any] = {
        field: getattr(options, field)
        for field in (*(row[2] for row in _FLOATS), *(row[1] for row in _INTEGERS))
    }
    if options.dry_sequence_breaker is not None:
        breakers = options.dry_sequence_breaker
        fields["dry_sequence_breakers"] = () if breakers == ["none"] else tuple(breakers)
    return Sampling(
        **fields,
        mirostat=options.mirostat,
        seed=None if options.seed < 0 else options.seed,
        samplers=_samplers_of(options),
        logit_bias=tuple(map(_bias, options.logit_bias)),
        grammar=_constraint_of(options),
    )


def ending_never(sampling: Sampling, session: Session) -> Sampling:
    """Return a sampling that excludes the tokens that end an answer (--ignore-eos)."""
    ends = [
        (token, -math.inf) for token in range(session.model.n_vocab) if session.model.is_end(token)
    ]
    return dataclasses.replace(sampling, logit_bias=(*sampling.logit_bias, *ends))


def _samplers_of(options: argparse.Namespace) -> tuple[str, ...]:
    if options.samplers is not None and options.sampler_seq is not None:
        raise SettingsError("--samplers and --sampler-seq say the same; give one of them")
    if options.samplers is not None:
        return tuple(name.strip() for name in options.samplers.split(";") if name.strip())
    if options.sampler_seq is None:
        return SAMPLERS
    names = {letter: name for name, letter in _LETTERS.items()}
    unknown = [letter for letter in options.sampler_seq if letter not in names]
    if unknown:
        raise SettingsError(
            f"--sampler-seq has no letter {unknown[0]!r}; use those of {''.join(names)}"
        )
    return tuple(names[letter] for letter in options.sampler_seq)


def _bias(text: str) -> tuple[int, float]:
    for sign in "+-":
        token, found, bias = text.partition(sign)
        if found:
            try:
                return int(token), float(sign + bias)
            except ValueError:
                break
    raise SettingsError(f"--logit-bias {text} is not a token with a bias; give one such as 15043-1")


def _constraint_of(options: argparse.Namespace) -> Constraint | None:
    if options.grammar_file is not None:
        return Constraint.of(read_text(options.grammar_file, SettingsError))
    if options.grammar is not None:
        return Constraint.of(options.grammar)
    if options.grammar_lark is not None:
        return Constraint.lark(options.grammar_lark)
    if options.regex is not None:
        return Constraint.regex(options.regex)
    schema = options.json_schema
    if options.json_schema_file is not None:
        schema = read_text(options.json_schema_file, SettingsError)
    if schema is None:
        return None
    try:
        read = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f'the JSON schema is not JSON ({error}); give one such as \'{{"type": "object"}}\''
        ) from None
    return Constraint.json_schema(read)
