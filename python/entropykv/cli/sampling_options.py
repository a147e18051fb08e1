"""Declare the options of llama.cpp's samplers, with llama-cli's names, and build a Sampling."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math

from entropykv.cli.options import add_option, integer, utf8
from entropykv.constraint.constraint import Constraint
from entropykv.errors import SettingsError
from entropykv.files import read_text
from entropykv.session.session import Session
from entropykv.settings.declared import declared
from entropykv.settings.flags import N_PREDICT
from entropykv.settings.sampling import SAMPLER_LETTERS, SAMPLERS, TEMPERATURE, Sampling

_DECLARED = tuple(name for name, each in declared(Sampling).items() if each.flags)
"""The fields of Sampling that are numbers."""


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
    for name in _DECLARED:
        usual = {"default": TEMPERATURE} if name == "temperature" else {}
        add_option(group, Sampling, name, dest=name, **usual)
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
        "--sampler-seq",
        "--sampling-seq",
        metavar="LETTERS",
        help=f"the same in letters: {''.join(SAMPLER_LETTERS.values())}",
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
    fields = {name: getattr(options, name) for name in _DECLARED}
    if options.dry_sequence_breaker is not None:
        breakers = options.dry_sequence_breaker
        fields["dry_sequence_breakers"] = () if breakers == ["none"] else tuple(breakers)
    return Sampling(
        **fields,
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
    names = {letter: name for name, letter in SAMPLER_LETTERS.items()}
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
