"""`entropykv run`: read a prompt and write a text, inside the budget."""

from __future__ import annotations

import argparse
import codecs
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from entropykv.cli.interrupts import InterruptionError, noted_interrupts
from entropykv.cli.options import add_budget_options, check_writable, demo_of, integer
from entropykv.cli.saved import (
    add_session_options,
    check_chat,
    load_session,
    save_session,
    say,
)
from entropykv.config import STORES, Settings
from entropykv.errors import ContextError, SettingsError
from entropykv.generate import Sampling, generate
from entropykv.session import Session
from entropykv.session_file import SavedContents, check_target
from entropykv.stats import SessionStats
from entropykv.text_file import read_text

EXIT_INTERRUPTED = 130

_DEFAULTS = Settings()


def add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "run",
        help="generate text with a model inside a KV budget",
        description="Read a prompt and generate text inside a KV budget. The text goes to stdout, "
        "progress and the final table to stderr.",
    )
    add_budget_options(parser)
    _add_prompt_options(parser)
    _add_sampling_options(parser)
    _add_engine_options(parser)
    add_session_options(parser)
    parser.set_defaults(command=run)


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt")
    group.add_argument("-p", "--prompt", metavar="TEXT", help="prompt; after -f's text if both")
    group.add_argument(
        "-f", "--file", metavar="FILE", help="read the prompt from a file (-: stdin)"
    )
    group.add_argument(
        "--no-chat",
        action="store_true",
        help="complete the prompt as it is, without the model's chat template",
    )
    group.add_argument(
        "-n",
        "--n-predict",
        type=integer(-1),
        default=-1,
        metavar="N",
        help="tokens to generate (-1, the default: until the model or the context ends)",
    )


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temp", type=float, default=0.8, help="0: greedy (default: %(default)s)")
    group.add_argument("--top-k", type=integer(0), default=40, help="0: off (default: %(default)s)")
    group.add_argument("--top-p", type=float, default=0.95, help="1: off (default: %(default)s)")
    group.add_argument("--min-p", type=float, default=0.05, help="0: off (default: %(default)s)")
    group.add_argument(
        "--repeat-penalty", type=float, default=1.0, help="1: off (default: %(default)s)"
    )
    group.add_argument(
        "-s", "--seed", type=integer(-1), default=-1, help="-1, the default: another every time"
    )


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--store",
        choices=STORES,
        default=_DEFAULTS.store,
        help="headwise: per KV head, on the CPU; flat: llama.cpp's own cache, any model and "
        "backend; auto: headwise where it can serve the model (default: %(default)s)",
    )
    group.add_argument(
        "-t", "--threads", type=integer(0), default=0, help="0, the default: all cores"
    )
    group.add_argument(
        "-b",
        "--batch-size",
        type=integer(1),
        default=2048,
        help="accepted for llama-cli's sake: a micro-batch is never larger (default: %(default)s)",
    )
    group.add_argument(
        "-ub",
        "--ubatch-size",
        type=integer(1),
        default=_DEFAULTS.n_ubatch,
        help="tokens of the prompt read at a time (default: %(default)s)",
    )
    group.add_argument(
        "-ngl", "--n-gpu-layers", type=integer(0), default=0, help="layers on the GPU (flat store)"
    )
    group.add_argument("--stats-json", metavar="FILE", help="write the final figures as JSON")
    group.add_argument("-v", "--verbose", action="store_true", help="llama.cpp's own log")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    sampling = Sampling(
        temperature=options.temp,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repeat_penalty=options.repeat_penalty,
        seed=None if options.seed < 0 else options.seed,
    )
    if options.n_predict == 0:
        raise SettingsError("-n 0 generates nothing; use -1 or a number of tokens")
    asked = _use_demo(options)
    text = _prompt_text(options)
    check_writable(options.stats_json)
    if options.save_session is not None:
        check_target(options.save_session)
    with Session(
        options.model,
        n_ctx=options.ctx_size,
        kv_budget=options.kv_budget,
        policy=options.policy,
        kv_type=options.kv_type,
        store=options.store,
        entropy_config=options.entropy_config,
        n_ubatch=min(options.ubatch_size, options.batch_size),
        n_threads=options.threads,
        n_gpu_layers=options.n_gpu_layers,
        n_sinks=options.sinks,
        recent_window=options.recent_window,
        verbose=options.verbose,
    ) as session:
        if session.fallback:
            say(f"going on with the flat store: {session.fallback}")
        if note := session.other_file():
            say(note)
        loaded = load_session(session, options.load_session)
        if asked:
            say(f"asking {asked!r} about {options.file}")
        tokens, chat = _prompt_tokens(session, text, options, loaded)
        answer = _generate(session, tokens, options.n_predict, sampling)
        _report(session.stats(), options.stats_json)
        if options.save_session is not None:
            _save(session, options.save_session, answer, chat=chat)
        elif loaded and not tokens and not answer.tokens:
            say("the saved answer was complete; give a new prompt with -p")
    return EXIT_INTERRUPTED if answer.interrupted else 0


def _save(session: Session, path: str, answer: _Answer, *, chat: bool | None) -> None:
    if answer.unread is None:
        say(f"interrupted while the prompt was read: {path} is not written")
    else:
        save_session(session, path, answer.unread, chat=chat)


def _report(stats: SessionStats, path: str | None) -> None:
    print(format_stats(stats), file=sys.stderr)
    if path is not None:
        text = json.dumps(dataclasses.asdict(stats), indent=2) + "\n"
        Path(path).write_text(text, encoding="utf-8")


def _use_demo(options: argparse.Namespace) -> str | None:
    """With --demo, -f and -p are the demo's unless they are given; returns the demo's question.

    A loaded session has read a document.
    """
    demo = demo_of(options)
    if demo is None or options.load_session is not None:
        return None
    if options.file is None:
        options.file = str(demo.document)
    if options.prompt is not None:
        return None
    options.prompt = demo.question
    return demo.question


def _prompt_text(options: argparse.Namespace) -> str:
    parts = []
    if options.file == "-":
        parts.append(sys.stdin.read())
    elif options.file is not None:
        parts.append(read_text(options.file, ContextError))
    if options.prompt is not None:
        parts.append(options.prompt)
    text = "\n".join(parts)
    if not text.strip() and options.load_session is None:
        raise ContextError("the prompt is empty; give one with -p or -f")
    return text


def _prompt_tokens(
    session: Session, text: str, options: argparse.Namespace, loaded: SavedContents | None
) -> tuple[list[int], bool | None]:
    """Tokens to read, and whether the session is a chat (None: nobody knows)."""
    if loaded and not text.strip():
        if session.logits is None:
            raise ContextError("the saved session ends within a text; give a prompt with -p or -f")
        return [], loaded.chat
    turn = None
    if not options.no_chat:
        turn = session.chat_turn(text) if loaded else session.chat_prompt(text)
    if loaded:
        check_chat(loaded, turn is not None, options.load_session)
    add_bos = None if turn is None and not loaded else False
    tokens = session.tokenize(text if turn is None else turn, add_bos=add_bos)
    if session.position + len(tokens) > session.n_ctx:
        after = f" after {session.position} of the saved session" if loaded else ""
        raise ContextError(
            f"the prompt has {len(tokens)} tokens{after}, more than the context of "
            f"{session.n_ctx}; shorten it or raise -c"
        )
    return tokens, turn is not None


@dataclasses.dataclass
class _Answer:
    tokens: list[int]
    unread: list[int] | None = None
    """The last token, where the session has not read it; None where not even the prompt is read."""
    interrupted: bool = False


def _generate(session: Session, tokens: list[int], max_tokens: int, sampling: Sampling) -> _Answer:
    """Write the answer to stdout as it comes."""
    answer = _Answer([])
    end_of_prompt = len(session.tokens) + len(tokens)
    bar = tqdm(total=len(tokens), desc="reading the prompt", unit=" tokens", leave=False, delay=0.5)
    with noted_interrupts() as interrupts, bar:

        def on_prompt(done: int) -> None:
            bar.update(done - bar.n)
            if done == len(tokens):
                bar.close()
            interrupts.check()

        stream = generate(session, tokens, max_tokens, sampling, on_prompt)
        try:
            for piece in _text_pieces(session, stream, answer.tokens):
                sys.stdout.write(piece)
                sys.stdout.flush()
                interrupts.check()
        except InterruptionError:
            answer.interrupted = True
        finally:
            sys.stdout.write("\n")
            sys.stdout.flush()
    n_read = len(session.tokens) - end_of_prompt
    answer.unread = answer.tokens[n_read:] if n_read >= 0 else None
    return answer


def _text_pieces(session: Session, stream: Iterator[int], tokens: list[int]) -> Iterator[str]:
    """Text, maybe empty, for every token, which is added to `tokens`.

    A character may be spread over several tokens: it comes with the last one.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in stream:
        tokens.append(token)
        yield decoder.decode(session.token_bytes(token))
    yield decoder.decode(b"", final=True)


def format_stats(stats: SessionStats) -> str:
    """The final table."""
    kept = stats.entries_kept / stats.entries_full if stats.entries_full else 1.0
    rows = [
        ("model", f"{stats.model}, {stats.store} store, policy {stats.policy}, {stats.kv_type}"),
        ("prompt", f"{stats.prompt_tokens} tokens, {stats.prompt_speed:.1f} tokens/s"),
        ("generated", f"{stats.generated_tokens} tokens, {stats.decode_speed:.1f} tokens/s"),
        (
            "KV cache",
            f"{_mib(stats.kv_bytes_peak)} at most of a budget of {_mib(stats.kv_bytes_budget)}; "
            f"{_mib(stats.kv_bytes_full)} without (f16)",
        ),
        (
            "entries",
            f"{stats.entries_kept} of {stats.entries_full} kept ({kept:.1%}); "
            f"{stats.evictions} evicted in {stats.eviction_seconds:.3f} s",
        ),
        *([("positions", f"re-based {stats.rebases} times")] if stats.rebases else []),
        ("peak RSS", _mib(stats.peak_rss_bytes)),
    ]
    return "\n".join(f"{name:>10}  {value}" for name, value in rows)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
