"""Keep the KV cache of a prompt in a file, with llama-completion's --prompt-cache.

The file is a saved session, as --save-session writes it. The difference is that the prompt of the
next run is a whole text, and its beginning is not read again as far as the file contains it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from entropykv.cli.notes import say
from entropykv.cli.saved import load_session, save_session
from entropykv.errors import SettingsError
from entropykv.session.file import check_target
from entropykv.session.reuse import Demand, reuse_of
from entropykv.session.session import Session


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
        """Return the prompt cache that the options ask for, or None. Raises SettingsError or
        SessionFileError.
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
        """Load the beginning of a prompt from the file; returns the tokens that are left to read.

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
