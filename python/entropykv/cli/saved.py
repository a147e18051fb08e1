"""Declare options of files that hold what was read, and print what was saved and loaded.

They are saved sessions (--save-session, --load-session), prompts (--prompt-cache, as
llama-completion has it: the prompt of the next run is a whole text, and its beginning is not read
again as far as the file contains it), and documents (--document).
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

from entropykv.cli.answer import read_rest
from entropykv.cli.terminal import say
from entropykv.errors import SettingsError
from entropykv.session.file import SavedContents, check_target, open_session
from entropykv.session.reuse import Demand, reuse_of
from entropykv.session.session import Session
from entropykv.session.session_files import DocumentHeader, document_header
from entropykv.settings.flags import DOCUMENT, SAVE_SESSION


def add_session_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add --save-session and --load-session; returns their group."""
    group = parser.add_argument_group("sessions on disk")
    SAVE_SESSION.add(group)
    add_load_option(
        group,
        "continue a saved session: the prompt follows the text that it has read, as a new turn "
        "if it is a chat; without a prompt, the answer is continued",
    )
    return group


def add_load_option(group: argparse._ActionsContainer, description: str) -> None:
    """Add --load-session alone."""
    group.add_argument("--load-session", metavar="FILE", help=description)


def load_session(session: Session, path: str) -> SavedContents:
    """Load the session at `path`, and print a note. Raises SettingsError for a document, and
    SessionFileError for a file that cannot be loaded.
    """
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


def add_prompt_cache(group: argparse._ActionsContainer) -> None:
    """Add --prompt-cache and the options of what is written to it; PromptCache.of() reads them."""
    group.add_argument(
        "--prompt-cache",
        metavar="FILE",
        help="keep what the prompt left in the KV cache: a prompt that begins the same is not read "
        "again, and a FILE that is not there is made",
    )
    group.add_argument(
        "--prompt-cache-all", action="store_true", help="keep the answer in that file, too"
    )
    group.add_argument(
        "--prompt-cache-ro", action="store_true", help="continue from that file, and never write it"
    )


@dataclass(frozen=True)
class PromptCache:
    """Hold the file of --prompt-cache, and what is written to it."""

    path: str
    keeps_answer: bool
    is_written: bool

    @classmethod
    def of(cls, options: argparse.Namespace) -> PromptCache | None:
        """Return the prompt cache that the options ask for; None if they ask for none. Raises
        SettingsError for options that contradict each other, and SessionFileError for a file that
        cannot be written.
        """
        path = options.prompt_cache
        if path is None:
            if options.prompt_cache_all or options.prompt_cache_ro:
                raise SettingsError(
                    "--prompt-cache-all and --prompt-cache-ro say what becomes of a file; give it "
                    "with --prompt-cache FILE"
                )
            return None
        if options.load_session is not None or options.save_session is not None:
            raise SettingsError(
                "--prompt-cache loads and saves a session, too; leave --load-session and "
                "--save-session out"
            )
        if options.prompt_cache_all and options.prompt_cache_ro:
            raise SettingsError("--prompt-cache-ro writes nothing; leave --prompt-cache-all out")
        if not options.prompt_cache_ro:
            check_target(path)
        return cls(path, options.prompt_cache_all, not options.prompt_cache_ro)

    def go_on_from(self, session: Session, tokens: list[int]) -> list[int]:
        """Load the beginning of a prompt from the file; returns the tokens that are left to read:
        all if there is no file.

        If the file contains more than the beginning of the prompt, the last common token is read
        again, because its logits are needed for the answer.
        """
        if not Path(self.path).exists():
            return tokens
        load_session(session, self.path)
        reuse = reuse_of(session.text.held(), tokens, Demand(is_cut=False))
        if reuse.position < session.position:
            session.text.truncate(reuse.position)
        say(f"{session.position} of {len(tokens)} tokens of the prompt are in {self.path}")
        return tokens[session.position :]

    def keep_prompt(self, session: Session, *, chat: bool | None) -> None:
        """Write the file after the prompt was read, unless the file is read-only or will include
        the answer.
        """
        if self.is_written and not self.keeps_answer:
            save_session(session, self.path, [], chat=chat)


_TAKEN = {
    "ctx_size": "n_ctx",
    "kv_budget": "kv_budget",
    "policy": "policy",
    "kv_type": "kv_type",
    "store": "store",
}
"""The options that get the document's values unless the user gives them. A headwise store is not
taken from the document: the device store can read the same file, and where the layers are
decides which of the two is better.
"""


def add_document_option(parser: argparse.ArgumentParser, group: argparse._ActionsContainer) -> None:
    """Add --document; all options of the cache must have been added before."""
    DOCUMENT.add(group, action="append")
    parser.set_defaults(before_document={name: parser.get_default(name) for name in _TAKEN})


def use_document(options: argparse.Namespace) -> None:
    """Read the headers of the documents into `options`, and take the first one's context, budget,
    policy, type and store where the user gave none.

    Raises SettingsError for options that cannot go with a document, and as document_header() does.
    """
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
        value = getattr(settings, field)
        if value != "headwise" and getattr(options, name) == options.before_document[name]:
            setattr(options, name, value)


def open_documents(session: Session, options: argparse.Namespace) -> SavedContents:
    """Open the documents of --document, and print a note; returns the first one's contents."""
    paths: list[str] = options.document
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
