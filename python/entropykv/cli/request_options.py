"""Declare and read what an answer is asked for: the text of -p and -f, the images of --image, which
the projector of --mmproj encodes, and how tokens are chosen. The names are those of llama-cli and
llama-mtmd-cli.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from entropykv.cli.options import add_option, integer, utf8
from entropykv.cli.terminal import say
from entropykv.constraint.constraint import Constraint
from entropykv.errors import ContextError, ImageError, SettingsError
from entropykv.files import open_regular, read_standard_input, read_text
from entropykv.generation.prompt import Prompt, ShownImages, text_prompt
from entropykv.session.images import ImageLimits
from entropykv.session.session import Session
from entropykv.settings.flags import N_PREDICT
from entropykv.settings.options import declared
from entropykv.settings.sampling import SAMPLER_LETTERS, SAMPLERS, TEMPERATURE, Sampling

PLACE = "<__media__>"
"""The marker that llama-mtmd-cli uses for an image in a prompt."""


def read_prompt(options: argparse.Namespace) -> str:
    """Return the text of -f and -p, which may be empty. With -e, backslash escapes in -p and -sys
    are replaced, also in `options`. Raises ContextError for a file that cannot be read.
    """
    if options.escape:
        for name in ("prompt", "system"):
            if getattr(options, name) is not None:
                setattr(options, name, _unescaped(getattr(options, name)))
    parts = []
    if options.file == "-":
        parts.append(read_standard_input())
    elif options.file is not None:
        parts.append(read_text(options.file, ContextError))
    if options.prompt is not None:
        parts.append(options.prompt)
    return "\n".join(parts)


def _unescaped(text: str) -> str:
    """Replace backslash escapes as llama-cli does; unknown ones stay unchanged."""
    known = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'"}
    return re.sub(r"\\(.)", lambda found: known.get(found[1], found[0]), text)


def add_image_options(group: argparse._ActionsContainer, what: str) -> None:
    """Add --mmproj and --image; `what` names the text with the images for --help: the prompt, or
    the first turn.
    """
    group.add_argument(
        "-mm",
        "--mmproj",
        metavar="FILE",
        help="the model's projector, with which it reads images inside the budget",
    )
    group.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help=f"an image of {what}, or several (separated by commas, too): they come before the "
        f"text, or where it has {PLACE}",
    )


def open_projector(session: Session, options: argparse.Namespace, files: Sequence[bytes]) -> None:
    """Open the projector of --mmproj, and check the images that it will encode first.

    Raises SettingsError for images without a projector, ImageError for files that are not images,
    and the errors of Projector.
    """
    if options.mmproj is not None:
        images = session.open_projector(options.mmproj, use_gpu=options.n_gpu_layers != 0)
        images.check(files)
    elif options.image:
        raise SettingsError("--image needs the model's projector; give it with --mmproj FILE")


def image_files(given: Sequence[str]) -> list[bytes]:
    """Return the contents of the files given to --image, whose values may hold several paths
    separated by commas; raises the errors of image_file().
    """
    paths: list[str] = []
    for text in given:
        paths += [text] if Path(text).exists() else text.split(",")
    return [image_file(path) for path in paths]


def image_file(path: str) -> bytes:
    """Return the content of an image file; raises ImageError if it is unreadable or too large."""
    most = ImageLimits().file_bytes
    try:
        with open_regular(path) as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ImageError(f"{path}: {error.strerror}; give an image file") from None
    if len(data) > most:
        raise ImageError(f"{path}: has more than {most:,} bytes; give a smaller image")
    return data


def with_places(text: str, n_images: int) -> str:
    """Return a text with one marker for each image, put first if it has none; raises ImageError for
    another number of markers.
    """
    if PLACE not in text:
        return PLACE * n_images + text
    if text.count(PLACE) != n_images:
        raise ImageError(
            f"the text has {text.count(PLACE)} places ({PLACE}) for {n_images} images; give one "
            "for each, or none"
        )
    return text


def prompt_of(
    session: Session,
    text: str,
    files: Sequence[bytes],
    *,
    add_bos: bool | None,
    is_answer: bool = False,
    poll: Callable[[], object] | None = None,
) -> Prompt:
    """Encode the images of a prompt, and return it, with placeholders for each image.

    `is_answer`: the text is what the chat template has written. `poll` is called repeatedly while
    images are encoded, and may raise to stop that. Raises ImageError, and ContextError for more
    tokens than there is room for.
    """
    images, shown = session.images, None
    if files and images is not None:
        if text.count(PLACE) != len(files):
            raise ImageError("the model's chat template does not show the images; give --no-chat")
        say(f"encoding {len(files)} image{'s'[: len(files) - 1]}")
        room = session.config.n_ctx - session.position
        text = text.replace(PLACE, images.marker)
        shown = ShownImages(images, files, room, poll=poll)
    return text_prompt(session.model, text, add_bos=add_bos, shown=shown, is_answer=is_answer)


_DECLARED = tuple(name for name, each in declared(Sampling).items() if each.flags)
"""The fields of Sampling that have an option of the same name."""


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
    """Read the most tokens of an answer; llama-cli's -2 (until the context is full) becomes -1."""
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
    """Return the Sampling that options ask for; raises SettingsError for impossible values, options
    that contradict each other, and files that cannot be read.
    """
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
