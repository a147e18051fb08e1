"""Run llama-cpp-python's own tests with llama_cpp.Llama, and with EntropyLlama in its place.

python -m tests.peers.llama_cpp_python SOURCES

SOURCES: the folder of llama-cpp-python's sources. Ends with 1 if a test that is not in OF_THE_CLASS
fails with EntropyLlama, but not with llama_cpp.Llama and the same models.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from entropykv.errors import ModelFileError
from entropykv.model import shipped
from tests.architectures import MODELS
from tests.peers.judgement import OF_THE_CLASS
from tests.peers.peer_models import write_talkative
from tests.support.architecture_models import written

ROOT = Path(__file__).resolve().parents[2]


def models_in(folder: Path) -> dict[str, str]:
    """Write models that replace those of the Hub; return their paths by repository."""
    talkative = folder / "talkative.gguf"
    write_talkative(talkative)
    try:
        real = shipped.smollm2().path
    except ModelFileError:
        real = talkative
    return {
        "lmstudio-community/Qwen3.5-0.8B-GGUF": str(real),
        "ggml-org/models": str(talkative),
        "QuantFactory/mamba-130m-hf-GGUF": str(written(MODELS["mamba"], folder)),
        "tiiuae/Falcon-H1-Tiny-90M-Instruct-GGUF": str(written(MODELS["falcon-h1"], folder)),
    }


def outcomes(sources: Path, models: dict[str, str], kind: str) -> dict[str, dict[str, str]]:
    """Run the tests with llama_cpp.Llama, or EntropyLlama if `kind` is set; return the report."""
    work = sources.parent.resolve()
    report = work / f"report-{kind or 'Llama'}.json"
    report.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PEER_MODELS": json.dumps(models),
        "PEER_REPORT": str(report),
        "PEER_CLASS": kind,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p"]
    command += ["tests.peers.drop_in_plugin", "tests"]
    with (work / f"log-{kind or 'Llama'}.txt").open("wb") as log:
        subprocess.run(command, cwd=sources, env=environment, stdout=log, stderr=log, check=False)
    found: dict[str, dict[str, str]] = json.loads(report.read_text(encoding="utf-8"))
    return found


def main() -> int:
    """Compare the outcomes of both classes; return 1 if EntropyLlama fails a test that it should
    pass, or if the numbers of tests differ.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path)
    options = parser.parse_args()
    folder = (options.sources.parent / "models").resolve()
    folder.mkdir(exist_ok=True)
    models = models_in(folder)
    stock = outcomes(options.sources, models, "")["outcomes"]
    report = outcomes(options.sources, models, "EntropyLlama")
    ours = report["outcomes"]
    new = [name for name in ours if ours[name] == "failed" and stock.get(name) != "failed"]
    worse = [name for name in new if name not in OF_THE_CLASS]
    for title, found in (("llama_cpp.Llama", stock), ("EntropyLlama", ours)):
        passed = sum(each == "passed" for each in found.values())
        print(f"{title:18}{passed:4} passed{len(found) - passed:4} not")
    both = [name for name in ours if ours[name] == stock.get(name) == "failed"]
    print("\nFail with both, because their models are only at the Hub:\n  " + "\n  ".join(both))
    print("\n".join(f"\n{name}: {OF_THE_CLASS[name]}" for name in new if name in OF_THE_CLASS))
    print("\n".join(f"\n{name} fails: {report['reasons'].get(name, '')}" for name in worse))
    return 1 if worse or len(ours) != len(stock) else 0


if __name__ == "__main__":
    sys.exit(main())
