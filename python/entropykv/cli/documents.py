"""Declare --document, and open the documents that it names."""

from __future__ import annotations

import argparse
import time

from entropykv.cli.notes import say
from entropykv.cli.saved import check_chat, say_what
from entropykv.errors import SettingsError
from entropykv.session.file import SavedContents
from entropykv.session.session import Session
from entropykv.session.session_files import DocumentHeader, document_header

_TAKEN = {
    "ctx_size": "n_ctx",
    "kv_budget": "kv_budget",
    "policy": "policy",
    "kv_type": "kv_type",
    "store": "store",
}
"""The options that have the document's values where the user gives none."""


def add_document_option(parser: argparse.ArgumentParser, group: argparse._ActionsContainer) -> None:
    """Add --document; all options of the cache must have been added before."""
    group.add_argument(
        "--document",
        action="append",
        metavar="FILE",
        help="ask about a document that `entropykv read` wrote, which is not read again; given "
        "several times, the texts of the later ones are read behind the first",
    )
    parser.set_defaults(before_document={name: parser.get_default(name) for name in _TAKEN})


def use_document(options: argparse.Namespace) -> None:
    """Take the document's context, budget, policy, type and store where the user gave none.

    Raises SettingsError for options that cannot go with a document, and SessionFileError.
    """
    if options.document is None:
        return
    for flag, given in (
        ("--load-session", options.load_session),
        ("--prompt-cache", getattr(options, "prompt_cache", None)),
    ):
        if given is not None:
            raise SettingsError(f"{flag} loads a session, as --document does; give one of them")
    if options.system is not None:
        raise SettingsError("-sys belongs before the document; give it to `entropykv read`")
    if options.demo is not None:
        raise SettingsError("--demo has a document of its own; leave --document out, or give -m")
    options.document_headers = [document_header(path) for path in options.document]
    settings = options.document_headers[0].settings
    for name, field in _TAKEN.items():
        if getattr(options, name) == options.before_document[name]:
            setattr(options, name, getattr(settings, field))


def open_given(session: Session, options: argparse.Namespace) -> SavedContents | None:
    """Open the documents that were given, if any, and print a note; returns the first one's
    contents.
    """
    paths: list[str] | None = options.document
    if paths is None:
        return None
    headers: list[DocumentHeader] = options.document_headers
    check_chat(headers[0].contents, _is_chat(session, options), paths[0])
    start = time.perf_counter()
    contents = session.files.open_document(*headers)
    say_what("opened", paths[0], contents, time.perf_counter() - start, headers[0].path)
    if paths[1:]:
        n_read = session.position - contents.position
        say(f"{n_read} tokens of {', '.join(paths[1:])} were read behind it")
    return contents


def _is_chat(session: Session, options: argparse.Namespace) -> bool:
    return not options.no_chat and session.model.chat_prompt("-") is not None
