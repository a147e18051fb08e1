"""`entropykv chat`: hold a conversation of any length in fixed memory."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from entropykv import system
from entropykv.cli.answer import (
    Answer,
    add_thinking_options,
    add_thinking_to_template,
    thinking_options_of,
)
from entropykv.cli.chat_web import chat_in_browser
from entropykv.cli.conversation import Conversation
from entropykv.cli.engine import (
    add_engine_options,
    open_engine,
    say_learnt,
    say_reading_twice,
    what_is_kept,
)
from entropykv.cli.options import (
    add_budget_options,
    add_no_chat,
    add_prompt_options,
    add_system_options,
    demo_of,
)
from entropykv.cli.parser import CommandParser
from entropykv.cli.request_options import (
    add_image_options,
    add_sampling_options,
    ending_never,
    image_file,
    image_files,
    open_projector,
    read_prompt,
    sampling_of,
)
from entropykv.cli.saved import add_document_option, add_load_option, open_documents, use_document
from entropykv.cli.terminal import noted_interrupts, say
from entropykv.errors import ContextError, EntropyKVError, SettingsError
from entropykv.files import read_text
from entropykv.llamacpp.model import NO_TEMPLATE
from entropykv.session.file import check_target
from entropykv.session.memory_plan import describe_budget
from entropykv.session.stats import format_rows, stats_rows
from entropykv.settings.options import Budget

BLOCK = '"""'
_MOST_LINES = 1000
"""The most lines that are kept for later chats."""


class TurnInput:
    """Read texts that a user types, or that are piped in.

    In a terminal, lines are edited with readline where Python has it: with a history that other
    chats continue, and commands that Tab completes.
    """

    def __init__(self, commands: Sequence[str], history: Path) -> None:
        """Find out whether stdin is a terminal; `commands` are completed, and `history` is the file
        of lines that were typed.
        """
        self.is_terminal = sys.stdin.isatty()
        self._commands = commands
        self._history = history
        self._before: list[str] = []
        """The lines of a text that is not complete."""
        self._readline: ModuleType | None = None
        if self.is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: PLC0415  (loading it changes what input() does)

                self._readline = readline
                self._prepare(readline)

    def _prepare(self, readline: ModuleType) -> None:
        with contextlib.suppress(OSError):
            readline.read_history_file(self._history)
        readline.set_history_length(_MOST_LINES)
        readline.set_completer_delims(" ")
        readline.set_completer(self._complete)
        readline.parse_and_bind("tab: complete")

    def _complete(self, text: str, number: int) -> str | None:
        """Return the first (number 0), second ... command that completes a text; None: no more."""
        found = [name for name in self._commands if text.startswith("/") and name.startswith(text)]
        return f"{found[number]} " if number < len(found) else None

    def keep_history(self) -> None:
        """Write the lines that were typed to the history file, which only this user can read.

        Nothing is raised if the file cannot be written.
        """
        if self._readline is None:
            return
        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=0o600)
            self._readline.write_history_file(self._history)

    def read(self) -> tuple[str, bool]:
        """Return one text, and whether it is a command.

        A text is a line, several lines of which all but the last end with a backslash, or a block.
        A block is never a command. Raises EOFError at the end of the input.
        """
        self._before = []
        line = self._line("> ")
        if line.strip() == BLOCK:
            return self._block(), False
        lines = self._before = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._line(". "))
            except EOFError:
                break
        return "\n".join(lines), line.startswith("/")

    @property
    def is_begun(self) -> bool:
        """Tell, after Ctrl-C, whether a text was begun, which is dropped as in a shell."""
        typed = "" if self._readline is None else self._readline.get_line_buffer()
        return bool(self._before or typed)

    def _block(self) -> str:
        lines: list[str] = []
        self._before = [BLOCK]
        with contextlib.suppress(EOFError):  # The end of the input also ends a block.
            while (line := self._line(". ")).strip() != BLOCK:
                lines.append(line)
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        if not self.is_terminal:
            return input()
        if sys.stdout.isatty():
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)
        return input()

    def agrees(self, question: str) -> bool:
        """Ask a question, and return whether the next line that is typed or piped in says yes."""
        try:
            return self._line(question).strip().lower() in ("y", "yes")
        except EOFError:
            return False


BUDGET = 1024
"""Entries per KV head: enough for about ten turns, half of which are kept word for word."""

ANSWER_TOKENS = BUDGET
"""The most tokens of an answer; a longer one would evict the whole question."""

SUFFIX = ".ekv"
HISTORY = "chat_history"
"""The name of the file with the lines that were typed, in the user's cache folder."""


def add_chat(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the parser of `entropykv chat`."""
    parser = commands.add_parser(
        "chat",
        usage="%(prog)s (-m MODEL | -hf USER/MODEL | --demo NAME) [options]",
        description="A conversation in fixed memory, however long. /help shows the commands. The "
        "answers alone go to stdout; turns may be piped in, one a line.",
    )
    add_budget_options(parser, endless=True, kv_budget=str(BUDGET))
    group = parser.add_argument_group("conversation")
    add_system_options(group, "the first turn")
    add_prompt_options(group, "the first turn")
    add_image_options(group, "the first turn")
    group.add_argument(
        "-st", "--single-turn", action="store_true", help="end after the first answer"
    )
    group.add_argument(
        "--web",
        action="store_true",
        help="in the browser, with the cache beside it: from a server that this machine alone can "
        "reach (needs the extra server)",
    )
    add_no_chat(group)
    add_load_option(group, "continue a conversation that /save or `run --save-session` saved")
    add_sampling_options(parser, n_predict=ANSWER_TOKENS)
    add_thinking_options(parser).add_argument(
        "--show-thoughts", action="store_true", help="show what is thought, not only how long it is"
    )
    add_engine_options(parser)
    add_document_option(parser, group)
    parser.show_first(
        *("-m", "-hf", "--demo", "-sys", "-f", "-n", "--temp", "-c", "--kv-budget", "--policy"),
        *("--freeze", "-t", "-ngl", "--web", "--document", "--load-session"),
        example="entropykv chat -m model.gguf --kv-budget 2048",
    )
    parser.set_defaults(command=_chat)


def _chat(options: argparse.Namespace) -> int:
    sampling = sampling_of(options)
    thinking = thinking_options_of(options)
    first = read_prompt(options)
    if options.document is not None:
        use_document(options)
        if options.web:
            raise SettingsError("the page asks about no --document yet; leave --web out")
    if options.web:
        return chat_in_browser(options, sampling)
    demo = demo_of(options)
    if demo is not None and options.system is None and options.load_session is None:
        options.system = read_text(str(demo.document), ContextError)
        say(f"the first turn comes with {demo.document}; ask: {demo.question}")
    files = image_files(options.image)
    add_thinking_to_template(options)
    with open_engine(options, goes_back=True) as session:
        open_projector(session, options, files)
        if not options.no_chat and demo is None and session.model.chat_prompt("-") is None:
            say(NO_TEMPLATE)
        conversation = Conversation(
            session,
            ending_never(sampling, session) if options.ignore_eos else sampling,
            max_tokens=options.n_predict,
            stops=options.reverse_prompt,
            system=options.system,
            use_template=not options.no_chat,
            thinking=thinking,
            folds=not options.show_thoughts,
        )
        if options.load_session is not None:
            conversation.load(options.load_session)
        if options.document is not None:
            open_documents(session, options)
            conversation.begin_after_document()
        conversation.files = files
        trained = session.config.geometry.n_ctx_train
        fraction_of = trained if options.ctx_size is None else session.config.n_ctx
        code = _Terminal(conversation, fraction_of).run(first, single=options.single_turn)
        say_learnt(session)
        return code


class _Terminal:
    """Read turns and commands from stdin; only answers are written to stdout."""

    def __init__(self, conversation: Conversation, fraction_of: int) -> None:
        """Use `fraction_of`, the tokens of which a budget that is a fraction is taken."""
        self._conversation = conversation
        self._fraction_of = fraction_of
        self._commands: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "/help": ("", "show this", self._help),
            "/stats": ("", "speed, memory and entries", self._stats),
            "/history": ("", "show the turns", self._history),
            "/budget": ("B", "another KV budget: 512, 20% or 64MiB", self._budget),
            "/image": ("FILE", "show an image with the next turn (needs --mmproj)", self._image),
            "/regen": ("", "answer the last turn again", self._regen),
            "/undo": ("", "take back the last turn and its answer", self._undo),
            "/edit": ("TEXT", "say something else instead of the last turn", self._edit),
            "/system": ("TEXT", "forget all turns, and begin with this", self._system),
            "/save": ("NAME", "save the conversation to a file", self._save),
            "/load": ("NAME", "continue a saved conversation", self._load),
            "/reset": ("", "forget all turns", self._reset),
            "/exit": ("", "end; as Ctrl-D, or Ctrl-C twice", self._exit),
        }
        self._ended = self._told_of_reading_twice = False
        self._input = TurnInput(tuple(self._commands), system.cache_folder() / HISTORY)

    def run(self, first: str = "", *, single: bool = False) -> int:
        """Answer turns until stdin ends or the user quits; returns the exit code.

        `first`: a turn before those of the user, unless it is empty. `single`: the conversation
        ends after its first answer.
        """
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
        if self._input.is_terminal:
            self._greet()
        try:
            self._talk(first, single=single)
        finally:
            self._input.keep_history()
        return 0

    def _greet(self) -> None:
        session = self._conversation.session
        stats = session.stats()
        self._show(f"{stats.model}: {describe_budget(session.config, stats.kv_bytes_budget)}.")
        self._show("Say something; /help shows the commands, and Tab completes them.")

    def _talk(self, first: str, *, single: bool) -> None:
        interrupted = False
        if first.strip():
            self._take(first, is_command=False)
            self._ended = single
        while not self._ended:
            try:
                text, is_command = self._input.read()
            except EOFError:
                break
            except KeyboardInterrupt:
                if not self._input.is_terminal:
                    raise
                print(file=sys.stderr)
                if self._input.is_begun:
                    interrupted = False
                    continue
                if interrupted:
                    break
                interrupted = True
                keeps = "; /save NAME keeps it" if self._conversation.turns else ""
                self._show(f"Ctrl-C again, or Ctrl-D, ends the conversation{keeps}.")
                continue
            interrupted = False
            self._take(text, is_command=is_command)
            self._ended = self._ended or (single and not is_command and bool(text.strip()))

    def _take(self, text: str, *, is_command: bool) -> None:
        """Run a command or answer a turn; an error is reported in one sentence."""
        try:
            if is_command and text.split(maxsplit=1)[0] in ("/regen", "/edit"):
                self._command(text)  # A command may write an answer, which Ctrl-C must end.
            elif is_command:
                with noted_interrupts():
                    self._command(text)
            elif text.strip():
                self._ask(text)
        except ContextError as error:
            say(f"{error} (here: /reset)")
        except EntropyKVError as error:
            say(str(error))

    def _command(self, text: str) -> None:
        name, _, argument = text.strip().partition(" ")
        if name not in self._commands:
            raise SettingsError(
                f"unknown command {name}; /help shows the commands, and a blank before the slash "
                "makes it a text"
            )
        wanted, _, command = self._commands[name]
        argument = argument.strip()
        if bool(argument) != bool(wanted):
            raise SettingsError(f"{name} takes {wanted or 'nothing'}; type {name} {wanted}".strip())
        command(argument)

    def _ask(self, text: str) -> None:
        session = self._conversation.session
        if not self._told_of_reading_twice:
            n_tokens = len(session.tokenize(text, add_bos=False))
            self._told_of_reading_twice = say_reading_twice(session, n_tokens)
        self._tell(self._conversation.ask(text))

    def _tell(self, answer: Answer) -> None:
        """Print notes about an answer, such as that it was cut off."""
        conversation = self._conversation
        if answer.unread is None:
            say("interrupted while the turn was read: it does not count")
        elif not answer.interrupted and conversation.was_cut(answer):
            say(f"the answer was cut after {len(answer.tokens)} tokens; raise -n for longer ones")
        elif conversation.session.position >= conversation.session.config.n_ctx:
            say("the context is full; /reset starts anew")
        if self._input.is_terminal and answer.unread is not None:
            self._show(f"[{what_is_kept(conversation.session)}]")

    def _show(self, text: str) -> None:
        print(textwrap.fill(text, _columns()), file=sys.stderr)

    def _help(self, _: str) -> None:
        rows = [
            (f"{name} {argument}".strip(), summary)
            for name, (argument, summary, _) in self._commands.items()
        ]
        print(format_rows(rows, _columns()), file=sys.stderr)
        self._show(
            f"A line that ends with a backslash continues in the next one; so do lines between two "
            f"lines of {BLOCK}. Ctrl-C stops an answer."
        )

    def _stats(self, _: str) -> None:
        session = self._conversation.session
        rows = [
            ("turns", str(len(self._conversation.turns))),
            ("context", f"{session.position:,} of {session.config.n_ctx:,} tokens"),
            *stats_rows(session.stats()),
        ]
        print(format_rows(rows, _columns()), file=sys.stderr)

    def _history(self, _: str) -> None:
        conversation = self._conversation
        if conversation.loaded_text:
            print(conversation.loaded_text, file=sys.stderr)
        for turn in conversation.turns:
            print(f"> {turn.text}\n{turn.answer}", file=sys.stderr)
        if not conversation.turns and not conversation.loaded_text:
            self._show("No turns yet.")

    def _budget(self, budget: str) -> None:
        session = self._conversation.session
        session.cache.resize(Budget.parse(budget).of_context(self._fraction_of))
        size = session.stats().kv_bytes_budget / 2**20
        self._show(f"The KV budget is {budget} now: {size:.1f} MiB.")

    def _regen(self, _: str) -> None:
        self._tell(self._conversation.ask_again())

    def _image(self, path: str) -> None:
        conversation = self._conversation
        if conversation.session.images is None:
            raise SettingsError("no images are read here; start with --mmproj FILE")
        data = image_file(path)
        conversation.session.images.check([*conversation.files, data])
        conversation.files.append(data)
        self._show(f"{path} is shown with the next turn.")

    def _undo(self, _: str) -> None:
        turn = self._conversation.undo()
        self._show(f"Taken back: {textwrap.shorten(turn.text, 60)}")

    def _edit(self, text: str) -> None:
        turn = self._conversation.undo()
        self._conversation.files = list(turn.files)
        self._ask(text)

    def _system(self, text: str) -> None:
        self._conversation.begin_with(text)
        self._show("All turns are forgotten; the next one begins with this text.")

    def _save(self, name: str) -> None:
        path = _session_path(name)
        check_target(path)
        if Path(path).exists() and not self._input.agrees(
            f"{path} is there already; replace it? [y/N] "
        ):
            say(f"{path} stays as it is; give another name")
            return
        self._conversation.save(path)

    def _load(self, name: str) -> None:
        self._conversation.load(_session_path(name))

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._show("All turns are forgotten.")

    def _exit(self, _: str) -> None:
        self._ended = True


def _session_path(name: str) -> str:
    path = Path(name)
    return name if path.suffix or path.is_dir() else name + SUFFIX


def _columns() -> int:
    return shutil.get_terminal_size().columns
