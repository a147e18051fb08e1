"""`entropykv read`: read a document once, and keep it in a file that can be asked."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from entropykv.cli.chat import BUDGET
from entropykv.cli.engine import add_engine_options, open_engine, say_learnt
from entropykv.cli.interrupts import EXIT_INTERRUPTED, InterruptionError, noted_interrupts
from entropykv.cli.notes import columns_of, say
from entropykv.cli.options import add_budget_options
from entropykv.cli.parser import CommandParser
from entropykv.cli.progress import ProgressBar
from entropykv.cli.prompt_options import add_system_options
from entropykv.cli.read_each import add_each_options, is_each, read_each
from entropykv.cli.saved import say_what
from entropykv.errors import ContextError, SessionFileError, SettingsError
from entropykv.files import read_standard_input, read_text
from entropykv.session.document import read_document
from entropykv.session.document_folder import local_document, written_document
from entropykv.session.file import check_target, open_session
from entropykv.session.session import Session
from entropykv.session.stats import format_rows

_SHOWN_CHARACTERS = 200


def add_read(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "read",
        usage="%(prog)s FILE... (-m MODEL | -hf USER/MODEL) -o DOCUMENT [options]\n"
        "       %(prog)s FILE... (-m MODEL | -hf USER/MODEL) --each [--out DIR] [options]\n"
        "       %(prog)s --show DOCUMENT",
        description="Read text files, one after the other, and keep what the KV budget holds of "
        "them in one file, or each in a file of its own. `run --document` and `chat --document` "
        "answer questions from it without reading the text again. After an interruption, the same "
        "command continues.",
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="a text in UTF-8 (-: standard input)"
    )
    parser.add_argument("-o", "--output", metavar="DOCUMENT", help="the file that is written")
    add_each_options(parser.add_argument_group("several documents"))
    model = add_budget_options(parser, endless=True, kv_budget=str(BUDGET))
    model.add_argument(
        "--show",
        metavar="DOCUMENT",
        help="print what a document holds: its text, entries per layer, and bytes",
    )
    add_system_options(parser.add_argument_group("prompt"), "the document")
    add_engine_options(parser)
    parser.show_first(
        *("-o", "--each", "--out", "--show", "-m", "-hf", "-sys", "-c", "--kv-budget", "--policy"),
        *("-t", "-ngl"),
        example="entropykv read book.txt -m model.gguf --kv-budget 4096 -o book.ekv",
    )
    parser.set_defaults(command=_read)


def _read(options: argparse.Namespace) -> int:
    if options.demo is not None:
        raise SettingsError("--demo has a document of its own; give -m or -hf")
    if options.show is not None:
        if options.files or options.output is not None or is_each(options):
            raise SettingsError("--show reads nothing; leave the files and -o out")
        return _show(options.show)
    if is_each(options):
        return read_each(options)
    if not options.files or options.output is None:
        raise SettingsError(
            "give the files to read, and the document to write with -o, such as -o book.kv; or "
            "--each for one document per file"
        )
    text = "\n".join(_text_of(name) for name in options.files)
    try:
        with written_document(options.output) as path:
            check_target(path)
            _read_into(options, text, path)
    except InterruptionError:
        return EXIT_INTERRUPTED
    return 0


def _read_into(options: argparse.Namespace, text: str, path: Path) -> None:
    with open_engine(options) as session:
        start = time.perf_counter()
        bar = ProgressBar(unit="token")
        try:
            with bar, noted_interrupts() as interrupts:
                contents = read_document(
                    session,
                    text,
                    path,
                    names=options.files,
                    system=options.system,
                    progress=_progress(session, bar, interrupts.check, len(text.encode())),
                )
        except InterruptionError:
            say(f"interrupted after {session.position} tokens; the same command continues there")
            raise
        say_what("wrote", options.output, contents, time.perf_counter() - start, path)
        say_learnt(session)


def _text_of(name: str) -> str:
    return read_standard_input() if name == "-" else read_text(name, ContextError)


def expected_bytes(session: Session, n_tokens: int, text_bytes: int) -> int:
    """Return about how many bytes the document of a text will have: entries, tokens, the logits of
    the last token, and the text.
    """
    full = n_tokens * session.cache.bytes_full_per_token
    kept = min(session.stats().kv_bytes_budget, full)
    return kept + 4 * n_tokens + 4 * session.model.n_vocab + text_bytes


def _progress(
    session: Session, bar: ProgressBar, check: Callable[[], None], text_bytes: int
) -> Callable[[int, int], None]:
    """Return a function that moves the bar; after the first micro-batch, it prints an estimate."""
    first: list[tuple[int, float]] = []

    def progress(done: int, total: int) -> None:
        first.append((done, time.perf_counter()))
        if len(first) == 1 and done:
            say(f"continuing after {done} of {total} tokens that were read before")
        if len(first) == 2:
            (begin, start), (end, now) = first
            seconds = (now - start) / max(end - begin, 1) * (total - end)
            most = session.stats().kv_bytes_budget
            disk = expected_bytes(session, total, text_bytes)
            say(
                f"{total} tokens: about {seconds:.0f} s more, at most {most / 2**20:.1f} MiB of KV "
                f"cache, and about {disk / 2**20:.1f} MiB on disk"
            )
        bar.advance_to(done, total)
        check()

    return progress


def _show(path: str) -> int:
    with local_document(path) as file:
        with open_session(file) as reader:
            reader.sections()  # Check the digest of the whole file.
            settings, contents = reader.settings, reader.contents
        size = file.stat().st_size
    note = contents.document
    if note is None:
        raise SessionFileError(f"{path}: is a saved session, not a document")
    start = _beginning(note.text)
    rows = [
        ("read from", ", ".join(note.names) or "-"),
        ("model", settings.model),
        ("policy, budget, type", f"{settings.policy}, {settings.kv_budget}, {settings.kv_type}"),
        ("text", f"{len(note.text)} characters: {start}"),
        *([] if note.system is None else [("system message", _beginning(note.system))]),
        ("tokens", f"{contents.position} of {note.n_tokens}"),
        ("entries", f"{contents.n_entries}, evicted: {contents.evicted}"),
        ("bytes on disk", f"{size / 2**20:.2f} MiB"),
        ("a full cache in f16", f"{note.full_bytes / 2**20:.2f} MiB"),
    ]
    for layer, heads in enumerate(contents.entries):
        kept = sum(heads) / max(len(heads) * contents.position, 1)
        rows.append((f"layer {layer}", f"{sum(heads)} entries ({kept:.1%})"))
    print(format_rows(rows, columns_of(sys.stdout)))
    return 0


def _beginning(text: str) -> str:
    return " ".join(text[:_SHOWN_CHARACTERS].split())
