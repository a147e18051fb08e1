"""`entropykv run`: read a prompt and continue it, inside the budget."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from entropykv.cli.answer import (
    Answer,
    add_thinking_options,
    add_thinking_to_template,
    thinking_options_of,
    write_answer,
)
from entropykv.cli.engine import (
    add_engine_options,
    dropped_row,
    open_engine,
    say_learnt,
    say_reading_twice,
)
from entropykv.cli.options import (
    RUN,
    add_budget_options,
    add_no_chat,
    add_prompt_options,
    add_system_options,
    check_writable,
    demo_of,
    write_output,
)
from entropykv.cli.parser import CommandParser
from entropykv.cli.plots import check_plot, draw
from entropykv.cli.request_options import (
    add_image_options,
    add_sampling_options,
    ending_never,
    image_files,
    open_projector,
    prompt_of,
    read_prompt,
    sampling_of,
    with_places,
)
from entropykv.cli.saved import (
    PromptCache,
    add_document_option,
    add_prompt_cache,
    add_session_options,
    check_chat,
    load_session,
    open_documents,
    save_session,
    use_document,
)
from entropykv.cli.terminal import EXIT_INTERRUPTED, columns_of, say
from entropykv.errors import ContextError, SettingsError
from entropykv.generation.prompt import GenerationRequest, Prompt
from entropykv.llamacpp.model import NO_TEMPLATE, plain_chat
from entropykv.policy.resolved_config import freezing_of
from entropykv.session.file import SavedContents, check_target
from entropykv.session.session import Session
from entropykv.session.stats import format_rows, stats_rows
from entropykv.settings.flags import STATS_JSON


def add_run(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the parser of `entropykv run`."""
    parser = commands.add_parser("run", usage=RUN.usage, description=RUN.description)
    add_budget_options(parser)
    _add_prompt_options(parser)
    add_sampling_options(parser, n_predict=None)
    add_thinking_options(parser)
    engine = add_engine_options(parser)
    STATS_JSON.add(engine)
    engine.add_argument(
        "--plot",
        metavar="FILE",
        help="draw how many entries are in attention and frozen (.png or .svg)",
    )
    sessions = add_session_options(parser)
    add_prompt_cache(sessions)
    add_document_option(parser, sessions)
    RUN.show_in(parser)
    parser.set_defaults(command=run)


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt")
    add_prompt_options(group, "the prompt")
    add_image_options(group, "the prompt")
    add_system_options(group, "the prompt")
    add_no_chat(group)


def run(options: argparse.Namespace) -> int:
    """Run `entropykv run`; returns the exit code."""
    sampling = sampling_of(options)
    thinking = thinking_options_of(options)
    add_thinking_to_template(options)
    if options.document is not None:
        use_document(options)
    asked = _use_demo(options)
    text = _prompt_text(options)
    check_writable(options.stats_json)
    if options.plot is not None:
        _check_plot(options)
    if options.save_session is not None:
        check_target(options.save_session)
    cache = PromptCache.of(options)
    files = image_files(options.image)
    with open_engine(options) as session:
        open_projector(session, options, files)
        loaded = None
        if options.load_session is not None:
            loaded = load_session(session, options.load_session)
        if asked:
            say(f"asking {asked!r} about {options.file}")
        prompt, chat = _prompt_of(session, text, files, options, loaded)
        if cache is not None:
            rest = cache.go_on_from(session, prompt.tokens)
            prompt = dataclasses.replace(prompt, tokens=rest)
        say_reading_twice(session, len(prompt.tokens))
        answer = Answer()
        request = GenerationRequest(
            prompt,
            ending_never(sampling, session) if options.ignore_eos else sampling,
            _most_written(session, prompt.tokens, options),
            tuple(options.reverse_prompt),
            thinking,
        )
        write_answer(
            session,
            request,
            answer,
            to_question=bool(chat) or options.demo is not None,
            when_read=None if cache is None else lambda: cache.keep_prompt(session, chat=chat),
        )
        _report(session, options)
        if options.save_session is not None:
            _save(session, options.save_session, answer, chat=chat)
        elif cache is not None and cache.keeps_answer:
            _save(session, cache.path, answer, chat=chat)
        elif loaded and not prompt.tokens and not answer.tokens:
            say("the saved answer was complete; give a new prompt with -p")
        say_learnt(session)
    return EXIT_INTERRUPTED if answer.interrupted else 0


def _most_written(session: Session, tokens: list[int], options: argparse.Namespace) -> int:
    """Return the most tokens of the answer; -1: until the model ends it or the context is full.

    A document has a context of a million tokens, so an answer about it ends where it would end
    without a document: at the length that the model was trained for.
    """
    if options.n_predict is not None:
        return int(options.n_predict)
    if options.document is None or options.ctx_size != options.document_headers[0].settings.n_ctx:
        return -1
    return max(1, session.config.geometry.n_ctx_train - len(tokens))


def _save(session: Session, path: str, answer: Answer, *, chat: bool | None) -> None:
    if answer.unread is None:
        say(f"interrupted while the prompt was read: {path} is not written")
    else:
        save_session(session, path, answer.unread, chat=chat)


def _check_plot(options: argparse.Namespace) -> None:
    check_plot(options.plot)
    if freezing_of(options) is None:
        raise SettingsError("--plot draws what is frozen; give --freeze ram, or leave --plot out")


def _report(session: Session, options: argparse.Namespace) -> None:
    stats = session.stats()
    rows = [*stats_rows(stats), dropped_row(session)]
    print(format_rows(rows, columns_of(sys.stderr)), file=sys.stderr)
    trajectory = session.cache.trajectory.to_json() if session.cache.trajectory else None
    if options.stats_json is not None:
        figures = dataclasses.asdict(stats)
        if trajectory is not None:
            figures["trajectory"] = trajectory
        write_output(options.stats_json, json.dumps(figures, indent=2) + "\n")
    if options.plot is not None and trajectory is not None:
        from entropykv.report.figures import trajectory_figure  # noqa: PLC0415  # few need it

        draw(lambda: trajectory_figure({"": trajectory}), options.plot)


def _use_demo(options: argparse.Namespace) -> str | None:
    """Use the demo's document as -f, and its question as -p without one; returns the question if it
    is used, else None.

    Neither is used with -f, whose file is the prompt, or with a loaded session, which has already
    read a document.
    """
    demo = demo_of(options)
    if demo is None or options.load_session is not None:
        return None
    if options.file is not None:
        return None
    options.file = str(demo.document)
    if options.prompt is not None:
        return None
    options.prompt = demo.question
    return demo.question


def _prompt_text(options: argparse.Namespace) -> str:
    text = read_prompt(options)
    if not text.strip() and options.load_session is None:
        piped = not sys.stdin.isatty() and options.file is None
        way_out = "-p or -f" if not piped else "-p or -f; -f - reads what is piped in"
        raise ContextError(f"the prompt is empty; give one with {way_out}")
    return text


def _prompt_of(
    session: Session,
    text: str,
    files: list[bytes],
    options: argparse.Namespace,
    loaded: SavedContents | None,
) -> tuple[Prompt, bool | None]:
    """Open the documents that were given; return what is read, and whether the session is a chat
    (None if unknown).
    """
    if options.document is not None:
        document = open_documents(session, options)
        asks = session.question_text(text, chat=bool(document.chat))
        is_chat = bool(document.chat)
        prompt = prompt_of(session, asks, files, add_bos=False, is_answer=is_chat)
        _check_room(session, prompt, "the document")
        return prompt, document.chat
    if loaded and not text.strip():
        if session.logits is None:
            raise ContextError("the saved session ends within a text; give a prompt with -p or -f")
        return Prompt([]), loaded.chat
    text = with_places(text, len(files)) if files else text
    turn = None
    if not options.no_chat:
        if loaded and options.system is not None:
            raise SettingsError(
                "-sys belongs before the first turn, which the saved session already has"
            )
        turn = (
            session.model.chat_turn(text)
            if loaded
            else session.model.chat_prompt(text, options.system)
        )
    if turn is None and options.system is not None:
        if options.no_chat:
            raise SettingsError(
                "-sys belongs to a chat; leave --no-chat out, or put the text into -p"
            )
        say(NO_TEMPLATE)
        text = plain_chat([options.system, text])
    if loaded:
        check_chat(loaded, turn is not None, options.load_session)
    add_bos = None if turn is None and not loaded else False
    is_chat = turn is not None
    text = text if turn is None else turn
    prompt = prompt_of(session, text, files, add_bos=add_bos, is_answer=is_chat)
    _check_room(session, prompt, "the saved session")
    return prompt, is_chat


def _check_room(session: Session, prompt: Prompt, before: str) -> None:
    """Raise ContextError if the context cannot hold the prompt behind what was read before."""
    n_tokens = len(prompt.tokens)
    if session.position + n_tokens > session.config.n_ctx:
        after = f" after {session.position} of {before}" if session.position else ""
        raise ContextError(
            f"the prompt has {n_tokens} tokens{after}, more than the context of "
            f"{session.config.n_ctx}; shorten it or raise -c"
        )
