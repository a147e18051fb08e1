"""`entropykv read`: read a document once, and keep it in a file that can be asked."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropykv.cli.chat import BUDGET
from entropykv.cli.engine import add_engine_options, open_engine, say_learnt
from entropykv.cli.options import add_budget_options, add_system_options, fetch_named
from entropykv.cli.parser import CommandParser
from entropykv.cli.progress import ProgressBar
from entropykv.cli.saved import say_what
from entropykv.cli.terminal import (
    EXIT_INTERRUPTED,
    InterruptionError,
    columns_of,
    noted_interrupts,
    say,
)
from entropykv.cluster import RAY_HELP, TaskKind, connected
from entropykv.errors import ContextError, DocumentBusyError, SessionFileError, SettingsError
from entropykv.files import read_standard_input, read_text
from entropykv.model.geometry import read_geometry
from entropykv.model.identity import identity_of
from entropykv.session.document import complete_document, read_document
from entropykv.session.document_folder import local_document, written_document
from entropykv.session.file import SavedContents, check_target, open_session
from entropykv.session.object_storage import is_address
from entropykv.session.session import Session
from entropykv.session.stats import format_rows
from entropykv.settings.cores import usable_cores

SUFFIX = ".kv"
_LOCK_SECONDS = 60.0
"""How long a task waits for the lock of a document."""
_LOCK_POLL_SECONDS = 0.2


def add_each_options(group: argparse._ActionsContainer) -> None:
    """Add --each, --out and --ray."""
    group.add_argument(
        "--each",
        action="store_true",
        help=f"read each file as a document of its own: book.txt becomes book{SUFFIX} beside it; "
        "documents that are complete are not read again",
    )
    group.add_argument(
        "--out", metavar="DIR", help="write the documents of --each into this directory"
    )
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        help=f"spread the files of --each over a Ray cluster: {RAY_HELP}; every node needs the "
        "model and the directory of the documents at the same path",
    )


def is_each(options: argparse.Namespace) -> bool:
    """Tell whether every file becomes a document of its own."""
    return bool(options.each or options.out is not None or options.ray is not None)


@dataclass(frozen=True)
class DocumentTask:
    """Name a file, and the document that it becomes."""

    name: str
    target: str
    text: str


@dataclass(frozen=True)
class DocumentRead:
    """Describe the result of reading a file."""

    n_tokens: int
    n_bytes: int
    seconds: float
    was_there: bool
    """True if the document was complete before."""


@dataclass(frozen=True)
class _Reading:
    """Hold what all documents have in common."""

    options: argparse.Namespace
    identity: Mapping[str, Any]
    """What identity_of() says of the model that the documents are for."""

    def read(self, task: DocumentTask, check: Callable[[], object] = lambda: None) -> DocumentRead:
        """Read a document on this machine, unless it is complete; `check` may raise to stop.

        The model is loaded for each document, because a session that has read another text before
        may keep other entries (policies that learn). Raises SettingsError if this machine has
        another model at the path.
        """
        if identity_of(read_geometry(self.options.model)) != self.identity:
            raise SettingsError(
                f"{self.options.model}: a node of the cluster has another model at this path; put "
                "the same file there on every node"
            )
        start = time.perf_counter()
        with open_engine(self.options) as session:
            given = {"names": [task.name], "system": self.options.system}
            there = complete_document(session, task.text, task.target, **given)
            contents = there or self._read(session, task, given, check)
        size = Path(task.target).stat().st_size
        seconds = time.perf_counter() - start
        return DocumentRead(contents.n_tokens, size, seconds, there is not None)

    @staticmethod
    def _read(
        session: Session,
        task: DocumentTask,
        given: Mapping[str, Any],
        check: Callable[[], object],
    ) -> SavedContents:
        """Read a document when its lock is free: a worker that died holds it a moment longer."""
        end = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                return read_document(
                    session,
                    task.text,
                    task.target,
                    progress=lambda _done, _total: check(),
                    **given,
                )
            except DocumentBusyError:
                if time.monotonic() > end:
                    raise
            check()
            time.sleep(_LOCK_POLL_SECONDS)


def _read_on_node(reading: _Reading, task: DocumentTask) -> DocumentRead:
    return reading.read(task)


def read_each(options: argparse.Namespace) -> int:
    """Read every file as a document of its own; returns the exit code. Raises the errors of
    open_engine() and read_document(), SettingsError for options that do not go with --each, and
    SessionFileError for a document that a node wrote where this machine cannot see it.
    """
    tasks = _tasks(options)
    _check(options)
    fetch_named(options)
    options.model = os.path.abspath(options.model)
    options.threads = options.threads or usable_cores()
    reading = _Reading(options, identity_of(read_geometry(options.model)))
    bar = ProgressBar(total=len(tasks), unit="document")
    n_read = 0

    def receive(task: DocumentTask, done: DocumentRead) -> None:
        nonlocal n_read
        if not Path(task.target).is_file():
            raise SessionFileError(
                f"{task.target}: a node of the cluster wrote it, and it is not here; give a "
                "directory that all nodes share (--out)"
            )
        bar.clear()
        what = "has been read before" if done.was_there else f"read in {done.seconds:.1f} s"
        print(
            f"{task.target}: {done.n_tokens} tokens, {done.n_bytes / 2**20:.1f} MiB, {what}",
            flush=True,
        )
        n_read += 1
        bar.update(1)

    try:
        with bar, noted_interrupts() as interrupts:
            if options.ray is None:
                for task in tasks:
                    interrupts.check()
                    receive(task, reading.read(task, interrupts.check))
            else:
                kind = TaskKind(_read_on_node, reading, lambda task: task.name, _most(options))
                with connected(options.ray, interrupts.check) as cluster:
                    cluster.run(kind, tasks, receive)
    except InterruptionError:
        say(f"interrupted after {n_read} of {len(tasks)} documents; the same command continues")
        return EXIT_INTERRUPTED
    return 0


def _most(options: argparse.Namespace) -> int:
    return int(max(options.threads, options.threads_batch or 0))


def _check(options: argparse.Namespace) -> None:
    """Check the options that are used with --each, and make the directory of --out. With --ray,
    `options.learn` becomes False, because documents must not depend on the machine.

    Raises SettingsError for options that do not go with --each, and if that directory cannot be
    made.
    """
    if options.output is not None:
        raise SettingsError("-o is of one document; give --out DIR, or leave --each and --ray out")
    if options.ray is not None and options.learn:
        raise SettingsError(
            "--learn on would let a document depend on those that its machine has read before; run "
            "`entropykv calibrate` first, or leave --learn out"
        )
    if options.ray is not None:
        options.learn = False
    if options.out is not None:
        if is_address(options.out):
            raise SettingsError("--each writes into a directory; give -o for an address")
        try:
            Path(options.out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(
                f"{options.out}: is no directory for documents ({error.strerror}); give another "
                "--out"
            ) from None


def _tasks(options: argparse.Namespace) -> Sequence[DocumentTask]:
    """Return the documents to read; raises SettingsError if there are none, or two would become one
    file, and ContextError for a file that cannot be read.
    """
    if not options.files:
        raise SettingsError("give the files to read")
    tasks: dict[str, DocumentTask] = {}
    for name in options.files:
        if name == "-":
            raise SettingsError("standard input has no name for a document; give files, or -o")
        path = Path(name)
        folder = path.parent if options.out is None else Path(options.out)
        target = os.path.abspath(folder / (path.stem + SUFFIX))
        if target in tasks:
            raise SettingsError(
                f"{tasks[target].name} and {name} would both become {target}; rename one, or read "
                "them into different directories (--out)"
            )
        tasks[target] = DocumentTask(name, target, read_text(name, ContextError))
    return [*tasks.values()]


_SHOWN_CHARACTERS = 200


def add_read(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the parser of `entropykv read`."""
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
        example="entropykv read book.txt -m model.gguf --kv-budget 4096 -o book.kv",
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
