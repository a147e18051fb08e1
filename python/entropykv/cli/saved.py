"""Declare options of saved sessions, and print what was saved and loaded."""

from __future__ import annotations

import argparse
import os
import time

from entropykv.cli.answer import read_rest
from entropykv.cli.notes import say
from entropykv.errors import SettingsError
from entropykv.session.file import SavedContents, open_session
from entropykv.session.session import Session


def add_session_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add --save-session and --load-session; returns their group."""
    group = parser.add_argument_group("sessions on disk")
    group.add_argument(
        "--save-session",
        metavar="FILE",
        help="save the session at the end, after Ctrl-C too: what the KV cache holds, not the text",
    )
    add_load_option(
        group,
        "continue a saved session: the prompt follows the text that it has read, as a new turn "
        "if it is a chat; without a prompt, the answer is continued",
    )
    return group


def add_load_option(group: argparse._ActionsContainer, description: str) -> None:
    """Add --load-session alone."""
    group.add_argument("--load-session", metavar="FILE", help=description)


def load_session(session: Session, path: str | None) -> SavedContents | None:
    """Load a session if `path` is given, and print a note."""
    if path is None:
        return None
    with open_session(path) as reader:
        if reader.contents.document is not None:
            raise SettingsError(f"{path}: is a document; give --document {path}")
    start = time.perf_counter()
    contents = session.files.load(path)
    say_what("loaded", path, contents, time.perf_counter() - start)
    evicted = contents.n_entries - session.stats().entries_kept
    if evicted:
        say(f"{evicted} entries were evicted: the KV budget is smaller than the saved session's")
    return contents


def check_chat(contents: SavedContents, chat: bool, path: str) -> None:
    """Raise SettingsError if a saved chat would be continued as plain text, or plain text as a
    chat.
    """
    if contents.chat is None or contents.chat == chat:
        return
    way_out = "leave --no-chat out" if contents.chat else "give --no-chat"
    kind = "a chat" if contents.chat else "plain text"
    raise SettingsError(f"{path}: was saved as {kind}; {way_out} to continue it")


def save_session(session: Session, path: str, unread: list[int], *, chat: bool | None) -> None:
    """Save a session, and print a note; `unread` are tokens of the answer that it has not
    read yet.
    """
    start = time.perf_counter()
    if not read_rest(session, unread):
        say("the context is full: the saved session ends before the last token of the answer")
    contents = session.files.save(path, chat=chat)
    say_what("saved", path, contents, time.perf_counter() - start)


def say_what(
    what: str,
    path: str,
    contents: SavedContents,
    seconds: float,
    file: str | os.PathLike[str] | None = None,
) -> None:
    """Print what was done to the file of a session, and what it holds.

    `file` is the file on the disk if `path` is an address in object storage.
    """
    size = os.path.getsize(file or path) / 2**20
    say(
        f"{what} {path}: {contents.n_tokens} tokens, {contents.n_entries} entries, {size:.1f} MiB "
        f"in {seconds:.2f} s"
    )
