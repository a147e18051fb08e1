"""`entropykv eval`: measure what a budget costs, on the user's model and texts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from entropykv._version import VERSION
from entropykv.cli.options import (
    add_freeze_options,
    add_model_options,
    add_option,
    add_protection_options,
    add_recovery_options,
    add_store_options,
    check_output,
    demo_of,
    fetch_named,
    fraction,
    integer,
    list_of,
    utf8,
    write_output,
)
from entropykv.cli.parser import CommandParser
from entropykv.cli.plots import check_plot, draw
from entropykv.cli.progress import ProgressBar
from entropykv.cli.terminal import (
    EXIT_INTERRUPTED,
    InterruptionError,
    Interrupts,
    noted_interrupts,
    say,
)
from entropykv.cluster import RAY_HELP
from entropykv.errors import ProfileError, SettingsError
from entropykv.evaluation import columns
from entropykv.evaluation.cluster import ClusterJob, measure_on_cluster, with_fixed_threads
from entropykv.evaluation.combination import COMPARED_TYPES, EngineSettings, combinations
from entropykv.evaluation.continuation import DEFAULT_PROMPT
from entropykv.evaluation.dataset import DEFAULT_TEMPLATE, read_dataset
from entropykv.evaluation.metrics import disagreement_note
from entropykv.evaluation.reading import EvalPart, Tick, Values
from entropykv.evaluation.request import EvalRequest
from entropykv.evaluation.results import ResultLog
from entropykv.evaluation.rows import EvalRow
from entropykv.evaluation.ruler.scores import QUESTIONS, TASKS, RulerPart, Suite
from entropykv.evaluation.runs import Evaluation
from entropykv.evaluation.texts import PARTS, digest_of, part_of, read_texts
from entropykv.files import read_text
from entropykv.llamacpp.model import Model
from entropykv.model.geometry import read_geometry
from entropykv.policy.policy import AUTO
from entropykv.policy.resolved_config import freezing_of, recovery_of
from entropykv.profile.find import given_profile, profile_path
from entropykv.report.figures import eval_figure, suite_figure
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.freezing import WITHOUT_REWALK
from entropykv.settings.options import KV_TYPES

_DEFAULTS = EvalRequest


def add_eval_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is compared, on which texts, and by which measures."""
    _add_combination_options(parser)
    _add_text_options(parser)
    _add_passkey_options(parser)
    _add_dataset_options(parser)
    _add_suite_options(parser)


def _add_combination_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is compared, in every combination")
    group.add_argument(
        "--kv-budget",
        type=list_of(str),
        default=["0.2"],
        metavar="B,...",
        help="fractions of each prompt in (0, 1], tokens per KV head, or bytes such as 64MiB "
        "(default: 0.2)",
    )
    group.add_argument(
        "--equal-bytes",
        action="store_true",
        help="fractions are those of the bytes of the prompt's full f16 cache, for every type, and "
        "not of its entries",
    )
    group.add_argument(
        "--policy",
        type=list_of(str),
        default=[AUTO],
        metavar="P,...",
        help=f"as --policy of `entropykv run` (default: {AUTO})",
    )
    group.add_argument(
        "--kv-type",
        type=list_of(str),
        default=[*COMPARED_TYPES],
        metavar="T,...",
        help=f"of {', '.join(KV_TYPES)} (default: {','.join(COMPARED_TYPES)})",
    )
    add_option(group, CacheOptions, "entropy_config")
    add_protection_options(group)
    add_store_options(parser.add_argument_group("engine"))
    add_freeze_options(parser)
    add_recovery_options(parser, rewalks=False)


def _add_text_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("texts")
    group.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="texts to read")
    group.add_argument(
        "--part",
        choices=PARTS,
        default="all",
        help="which texts: tuning and held-out never share one (default: %(default)s)",
    )
    group.add_argument(
        "--tuning-share",
        type=fraction,
        default=0.3,
        metavar="F",
        help="texts of the tuning part, by a hash of their content (default: %(default)s)",
    )
    group.add_argument(
        "--prompt",
        type=integer(1),
        metavar="N",
        help=f"tokens read inside the budget (default: {DEFAULT_PROMPT}, or what texts and context "
        "allow)",
    )
    group.add_argument(
        "--continuation",
        type=integer(0),
        default=_DEFAULTS.continuation,
        metavar="N",
        help="tokens of each text that follow and are predicted (0: none, and no greedy texts; "
        "default: %(default)s)",
    )
    group.add_argument(
        "--greedy",
        type=integer(0),
        default=_DEFAULTS.greedy,
        metavar="N",
        help="tokens written greedily after each prompt (0: none; default: %(default)s)",
    )
    group.add_argument(
        "--inside",
        action="store_true",
        help="the budget does not grow for what follows a prompt, here and with --dataset or "
        "--suite",
    )


def _add_passkey_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("recall of facts that are planted into the texts")
    for name, least, default, what in (
        ("--passkeys", 0, _DEFAULTS.passkeys, "passages to read"),
        ("--passkey-tokens", 16, _DEFAULTS.passkey_tokens, "tokens of a passage"),
        ("--facts-per-text", 1, _DEFAULTS.facts_per_text, "facts in a passage"),
        ("--seed", 0, _DEFAULTS.seed, "choice of passages, facts and places"),
    ):
        group.add_argument(
            name, type=integer(least), default=default, metavar="N", help=f"{what} (%(default)s)"
        )


def _add_dataset_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("answers to a data set, scored by ROUGE (extra eval)")
    group.add_argument(
        "--dataset", metavar="FILE", help="JSON lines with context, input, answers (LongBench)"
    )
    group.add_argument(
        "--prompt-template",
        type=utf8,
        default=DEFAULT_TEMPLATE,
        metavar="TEXT",
        help="with {context} and {input} (default: one after the other)",
    )
    group.add_argument(
        "--max-tokens",
        type=integer(1),
        default=_DEFAULTS.max_tokens,
        metavar="N",
        help="of an answer (default: %(default)s)",
    )
    group.add_argument(
        "-c",
        "--ctx-size",
        type=integer(0),
        default=_DEFAULTS.n_ctx,
        metavar="N",
        help="longest prompt with its answer; of longer ones the middle is left out (0, the "
        "default: what the model was trained for)",
    )


def _add_suite_options(parser: argparse.ArgumentParser) -> None:
    defaults = Suite()
    group = parser.add_argument_group("RULER, measured in place of all else (extra eval)")
    group.add_argument(
        "--suite",
        choices=("ruler",),
        help="RULER's synthetic tasks by their published definition; its essays are replaced by "
        "--text, or by English prose that comes with entropykv",
    )
    group.add_argument(
        "--tasks",
        type=list_of(str),
        default=list(TASKS),
        metavar="T,...",
        help=f"of {', '.join(TASKS)} (default: all)",
    )
    group.add_argument(
        "--lengths",
        type=list_of(integer(1)),
        default=list(defaults.lengths),
        metavar="N,...",
        help="tokens of a prompt with its answer, by the model's tokenizer; a table for each "
        f"(default: {','.join(map(str, defaults.lengths))})",
    )
    group.add_argument(
        "--samples",
        type=integer(1),
        default=defaults.n_samples,
        metavar="N",
        help="of each task at each length, by --seed (default: %(default)s)",
    )
    group.add_argument(
        "--question",
        choices=(*QUESTIONS, "both"),
        default=QUESTIONS[0],
        help="unknown: the context is read before the question is known; known: both are one "
        "prompt; both: a table for each (default: %(default)s)",
    )


def _suite_of(options: argparse.Namespace) -> Suite | None:
    if options.suite is None:
        return None
    questions = QUESTIONS if options.question == "both" else [options.question]
    return Suite(options.lengths, options.tasks, options.samples, questions)


def request_of(options: argparse.Namespace) -> EvalRequest:
    """Read the texts and questions that the options name. Raises ContextError if one cannot be
    read, and SettingsError for a request that is impossible.
    """
    texts = read_texts(options.text or [])
    return EvalRequest(
        texts=part_of(texts, options.part, options.tuning_share) if texts else texts,
        prompt=options.prompt,
        continuation=options.continuation,
        greedy=options.greedy,
        inside=options.inside,
        passkeys=options.passkeys,
        passkey_tokens=options.passkey_tokens,
        facts_per_text=options.facts_per_text,
        seed=options.seed,
        questions=read_dataset(options.dataset) if options.dataset else [],
        prompt_template=options.prompt_template,
        max_tokens=options.max_tokens,
        n_ctx=options.ctx_size,
        suite=_suite_of(options),
    )


def engine_of(options: argparse.Namespace) -> EngineSettings:
    """Return the settings of all sessions, without policy, budget and types, which are compared."""
    cache = CacheOptions(
        store=options.store,
        entropy_config=given_profile(options.entropy_config),
        learn=False,  # Figures must not depend on what earlier processes have read.
        n_ubatch=options.ubatch_size,
        n_threads=options.threads,
        fixed_threads=True,
        n_sinks=options.sinks,
        recent_window=options.recent_window,
        freeze=freezing_of(options),
        recovery=recovery_of(options, WITHOUT_REWALK),
    )
    return EngineSettings(str(options.model), cache, options.equal_bytes)


def log_settings(options: argparse.Namespace, engine: EngineSettings) -> dict[str, object]:
    """Return the settings that figures depend on, in addition to the request."""
    cache = engine.options
    path = options.entropy_config or profile_path(read_geometry(options.model))
    return {
        "store": cache.store,
        "n_ubatch": cache.micro_batch,
        "n_threads": cache.threads,
        "n_sinks": cache.n_sinks,
        "recent_window": cache.recent_window,
        "equal_bytes": engine.equal_bytes,
        "freezing": None if cache.freezing is None else dataclasses.asdict(cache.freezing),
        "recovery": None if cache.recovery is None else dataclasses.asdict(cache.recovery),
        "entropy_config": None if path is None else digest_of(read_text(path, ProfileError)),
        "entropykv": VERSION,
    }


def add_evaluate(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the parser of `entropykv eval`."""
    parser = commands.add_parser(
        "eval",
        usage="%(prog)s (-m MODEL | -hf USER/MODEL | --demo NAME) [options]",
        description="Compare budgets with stock llama.cpp's full f16 cache: predictions and "
        "greedy texts after prompts, recall of planted facts, answers to a data set, or RULER. "
        "Tables go to stdout, progress to stderr.",
    )
    add_model_options(parser)
    add_eval_options(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE", help="write all figures as JSON")
    group.add_argument(
        "--plot",
        metavar="FILE",
        help="draw KL, or the scores of a suite, over bytes (.png or .svg)",
    )
    group.add_argument(
        "--resume",
        metavar="FILE",
        help="keep each figure in this file as it is measured (JSON lines), and continue from it; "
        "what stock predicts is kept beside it until all figures are known",
    )
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        help=f"spread texts and cases over a Ray cluster: {RAY_HELP}; every node needs the model "
        "at the same path",
    )
    parser.show_first(
        *("-m", "-hf", "--demo", "--kv-budget", "--policy", "--kv-type", "--freeze", "--text"),
        *("--prompt", "--continuation", "--passkeys", "--dataset", "--suite", "-t", "--json"),
        *("--plot", "--resume"),
        example="entropykv eval -m model.gguf --kv-budget 0.1,0.2 --passkeys 20",
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Run `entropykv eval`; returns the exit code."""
    demo_of(options)
    for path in (options.json, options.resume):
        if path is not None:
            check_output(path)
    if options.plot:
        check_plot(options.plot)
    request = request_of(options)
    if options.plot and request.suite is None and not (request.texts and request.continuation):
        raise SettingsError("--plot draws the KL divergence of texts; give some with --text")
    wanted = combinations(options.policy, options.kv_type, options.kv_budget)
    fetch_named(options)
    engine = engine_of(options)
    if options.ray is not None:
        engine = with_fixed_threads(engine)
    with ExitStack() as stack:
        with closing(Model(options.model, n_gpu_layers=0, verbose=False)) as model:
            request = request.with_prompt(model)
            identity = model.identity
            about = {"name": model.name, **identity}
            settings = {**request.settings(), **log_settings(options, engine)}
            kept = _references_of(options.resume, about, settings)
            parts = request.parts(model, stack, kept)
        if options.prompt is None and request.prompt not in (None, DEFAULT_PROMPT):
            say(f"prompts have {request.prompt} tokens: texts and context allow no more")
        log = ResultLog(options.resume, about, settings)
        tables = [parts] if request.suite is None else [[part] for part in parts]
        evaluations = [(Evaluation(engine, wanted, each, log), EvalTable(each)) for each in tables]
        # The lengths of a suite are sorted, so the first evaluation has the shortest prompts, by
        # which check() finds a budget that is too small.
        for note in evaluations[0][0].check():
            say(note)
        log.begin()
        with noted_interrupts() as interrupts:
            complete = True
            if options.ray is not None:
                job = ClusterJob(request, engine, wanted, identity)
                complete = _measure_on_cluster(options.ray, job, parts, log, interrupts)
            complete = complete and _print_tables(evaluations, interrupts)
    rows = [row for evaluation, _ in evaluations for row in evaluation.rows()]
    if disagree := disagreement_note(row.disagreement or 0.0 for row in rows):
        say(disagree)
    _remove(kept if complete else None)
    content: dict[str, object] = {"model": about, "settings": settings, "complete": complete}
    _write_figures(options, content, [evaluation for evaluation, _ in evaluations])
    return 0 if complete else EXIT_INTERRUPTED


def _references_of(resume: str | None, about: Values, settings: Values) -> Path | None:
    """Return the folder beside the file of --resume for what stock predicts with these settings;
    None without --resume.
    """
    if resume is None:
        return None
    return Path(f"{resume}.{digest_of(json.dumps([about, settings]))}")


def _remove(references: Path | None) -> None:
    if references is not None:
        shutil.rmtree(references, ignore_errors=True)


@contextmanager
def _progress(n_steps: int, interrupts: Interrupts) -> Iterator[tuple[ProgressBar, Tick]]:
    """Yield a bar of tokens, and the function that moves it and ends the work after Ctrl-C."""
    with ProgressBar(total=n_steps, unit=" tokens", leave=False, delay=0.5) as bar:

        def tick(n_tokens: int) -> None:
            bar.update(n_tokens)
            interrupts.check()

        yield bar, tick


def _measure_on_cluster(
    address: str,
    job: ClusterJob,
    parts: Sequence[EvalPart],
    log: ResultLog,
    interrupts: Interrupts,
) -> bool:
    """Add all figures to the log; returns whether everything was measured."""
    n_steps = Evaluation(job.engine, job.combinations, parts, log).n_steps
    with _progress(n_steps, interrupts) as (bar, tick):
        try:
            measure_on_cluster(address, job, parts, log, tick)
        except InterruptionError:
            bar.close()
            say("interrupted: items that were complete are in the file of --resume, if given")
            return False
    return True


def _print_tables(
    evaluations: Sequence[tuple[Evaluation, EvalTable]], interrupts: Interrupts
) -> bool:
    """Measure one table after the other; returns whether everything was measured."""
    n_steps = sum(evaluation.n_steps for evaluation, _ in evaluations)
    with _progress(n_steps, interrupts) as (bar, tick):
        for number, (evaluation, table) in enumerate(evaluations):
            bar.clear()
            head = ("\n" if number else "") + table.header()
            if not _print_rows(evaluation, table, head, tick, bar):
                say("interrupted: the last row has only what was measured; --resume FILE keeps it")
                return False
    return True


def _print_rows(
    evaluation: Evaluation, table: EvalTable, head: str, tick: Tick, bar: ProgressBar
) -> bool:
    """Measure and print row by row, `head` before the first one; after an interrupt, print what was
    measured of the last row, and return False.
    """
    n_done = 0

    def show(row: EvalRow) -> None:
        print(table.line(row) if n_done else f"{head}\n{table.line(row)}", flush=True)

    try:
        for row in evaluation.run(tick):
            bar.clear()
            show(row)
            n_done += 1
    except InterruptionError:
        bar.close()
        for row in evaluation.rows()[n_done : n_done + 1]:
            show(row)
        return False
    return True


def _write_figures(
    options: argparse.Namespace, content: dict[str, object], evaluations: Sequence[Evaluation]
) -> None:
    """Write the files that --json and --plot name."""
    rows = [row for evaluation in evaluations for row in evaluation.rows()]
    if options.json:
        records = [record for evaluation in evaluations for record in evaluation.records()]
        figures = {
            "rows": [dataclasses.asdict(row) for row in rows],
            "items": [vars(record) for record in records],
        }
        write_output(options.json, json.dumps(content | figures, indent=2) + "\n")
    if options.plot:
        figure = eval_figure if options.suite is None else suite_figure
        draw(lambda: figure({"": rows}), options.plot)


class EvalTable:
    """Format a table that has the columns of the measured parts."""

    def __init__(self, parts: Sequence[EvalPart]) -> None:
        """Use the columns of these parts, or those of the suite if there is one."""
        self._title = ""
        self._columns = [*columns.SETTINGS, *columns.SIZES]
        for part in parts:
            if isinstance(part, RulerPart):
                self._title = part.title + "\n\n"
                self._columns += [columns.of_task(task) for task in part.tasks]
                self._columns += columns.OF_SUITES
            else:
                self._columns += columns.OF_PARTS[part.name]

    def header(self) -> str:
        """Return the lines above the rows."""
        titles = " | ".join(column.title for column in self._columns)
        return f"{self._title}| {titles} |\n{'|---' * len(self._columns)}|"

    def line(self, row: EvalRow) -> str:
        """Return one row as a line."""
        return f"| {' | '.join(column.cell(row) for column in self._columns)} |"
