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

from entropykv.cli.options import add_budget_options, check_writable, demo_of, integer
from entropykv.config import STORES, Settings
from entropykv.errors import ContextError, SettingsError
from entropykv.generate import Sampling, generate
from entropykv.session import Session
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
            print(f"entropykv: going on with the flat store: {session.fallback}", file=sys.stderr)
        if note := session.other_file():
            print(f"entropykv: {note}", file=sys.stderr)
        if asked:
            print(f"entropykv: asking {asked!r} about {options.file}", file=sys.stderr)
        code = _generate(session, text, options, sampling)
        stats = session.stats()
    print(format_stats(stats), file=sys.stderr)
    if options.stats_json:
        Path(options.stats_json).write_text(
            json.dumps(dataclasses.asdict(stats), indent=2) + "\n", encoding="utf-8"
        )
    return code


def _use_demo(options: argparse.Namespace) -> str | None:
    """With --demo, -f and -p are the demo's unless they are given; returns the demo's question."""
    demo = demo_of(options)
    if demo is None:
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
    if not text.strip():
        raise ContextError("the prompt is empty; give one with -p or -f")
    return text


def _generate(session: Session, text: str, options: argparse.Namespace, sampling: Sampling) -> int:
    prompt = None if options.no_chat else session.chat_prompt(text)
    tokens = session.tokenize(text) if prompt is None else session.tokenize(prompt, add_bos=False)
    if len(tokens) > session.n_ctx:
        raise ContextError(
            f"the prompt has {len(tokens)} tokens, more than the context of {session.n_ctx}; "
            "shorten it or raise -c"
        )
    with tqdm(
        total=len(tokens), desc="reading the prompt", unit=" tokens", leave=False, delay=0.5
    ) as bar:

        def on_prompt(done: int) -> None:
            bar.update(done - bar.n)
            if done == len(tokens):
                bar.close()

        stream = generate(session, tokens, options.n_predict, sampling, on_prompt)
        try:
            for piece in _text_pieces(session, stream):
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        finally:
            sys.stdout.write("\n")
            sys.stdout.flush()
    return 0


def _text_pieces(session: Session, tokens: Iterator[int]) -> Iterator[str]:
    """Text as it becomes complete: a character may be spread over several tokens."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        piece = decoder.decode(session.token_bytes(token))
        if piece:
            yield piece
    rest = decoder.decode(b"", final=True)
    if rest:
        yield rest


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
