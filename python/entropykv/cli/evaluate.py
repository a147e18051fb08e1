"""`entropykv eval`: what a budget costs, on the user's model and texts."""

from __future__ import annotations

import argparse
import dataclasses
import json
from contextlib import ExitStack, closing

from entropykv.cli.eval_options import add_eval_options, engine_of, log_settings, request_of
from entropykv.cli.eval_table import EvalTable
from entropykv.cli.interrupts import InterruptionError, Interrupts, noted_interrupts
from entropykv.cli.options import add_model_options, check_output, demo_of
from entropykv.cli.plots import check_plot, draw_eval
from entropykv.cli.progress import ProgressBar
from entropykv.cli.run import EXIT_INTERRUPTED
from entropykv.cli.saved import say
from entropykv.errors import SettingsError
from entropykv.evaluation.combination import combinations
from entropykv.evaluation.continuation import DEFAULT_PROMPT
from entropykv.evaluation.results import ResultLog
from entropykv.evaluation.runs import Evaluation
from entropykv.files import new_file
from entropykv.llamacpp.model import Model


def add_evaluate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "eval",
        help="measure what a budget costs in quality",
        description="Compare budgets with stock llama.cpp's full f16 cache: predictions and "
        "greedy texts after prompts, recall of planted facts, and answers to a data set. The "
        "table goes to stdout, progress to stderr.",
    )
    add_model_options(parser)
    add_eval_options(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE", help="write all figures as JSON")
    group.add_argument("--plot", metavar="FILE", help="draw KL over bytes (.png or .svg)")
    group.add_argument(
        "--resume",
        metavar="FILE",
        help="keep each figure in this file as it is measured (JSON lines), and go on from there",
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    demo_of(options)
    for path in (options.json, options.resume):
        if path is not None:
            check_output(path)
    if options.plot:
        check_plot(options.plot)
    request = request_of(options)
    if options.plot and not (request.texts and request.continuation):
        raise SettingsError("--plot draws the KL divergence of texts; give some with --text")
    wanted = combinations(options.policy, options.kv_type, options.kv_budget)
    engine = engine_of(options)
    with ExitStack() as stack:
        with closing(Model(options.model, n_gpu_layers=0, verbose=False)) as model:
            request = request.with_prompt(model)
            parts = request.parts(model, stack)
            about = {"name": model.name, **model.identity}
        if options.prompt is None and request.prompt not in (None, DEFAULT_PROMPT):
            say(f"prompts have {request.prompt} tokens: texts and context allow no more")
        settings = {**request.settings(), **log_settings(options, engine)}
        log = ResultLog(options.resume, about, settings)
        evaluation = Evaluation(engine, wanted, parts, log)
        for note in evaluation.check():
            say(note)
        log.begin()
        with noted_interrupts() as interrupts:
            complete = _print_rows(evaluation, EvalTable([part.name for part in parts]), interrupts)
    rows = evaluation.rows()
    if options.json:
        content = {"model": about, "settings": settings, "complete": complete}
        content |= {
            "rows": [dataclasses.asdict(row) for row in rows],
            "items": [vars(record) for record in evaluation.records()],
        }
        _write_json(options.json, content)
    if options.plot:
        draw_eval(rows, options.plot)
    return 0 if complete else EXIT_INTERRUPTED


def _print_rows(evaluation: Evaluation, table: EvalTable, interrupts: Interrupts) -> bool:
    """Measure and print row by row; returns whether all was measured."""
    print(table.header(), flush=True)
    n_done = 0
    with ProgressBar(total=evaluation.n_steps, unit=" tokens", leave=False, delay=0.5) as bar:

        def tick(n_tokens: int) -> None:
            bar.update(n_tokens)
            interrupts.check()

        try:
            for row in evaluation.run(tick):
                bar.clear()
                print(table.line(row), flush=True)
                n_done += 1
        except InterruptionError:
            bar.close()
            for row in evaluation.rows()[n_done : n_done + 1]:
                print(table.line(row))
            say("interrupted: the last row has only what was measured; --resume FILE keeps it")
            return False
    return True


def _write_json(path: str, content: dict[str, object]) -> None:
    try:
        with new_file(path) as file:
            file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; give a file that can be written") from None
