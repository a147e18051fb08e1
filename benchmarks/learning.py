r"""Measure what learning a profile costs a session, and write the profiles learnt from so many
tokens.

A copy of the model with one bit of a norm changed has no profile. Each text length is read
alternately with and without `learn`, in a budget of 0.2, with one thread; seconds are CPU time. The
profiles are written to a folder, for `entropykv eval --entropy-config FILE`:

python benchmarks/learning.py --tokens 1024,2048 -o build/learnt
cd benchmarks/texts
entropykv eval -m smollm2 --text heldout_prose_0[135].txt heldout_code_01.txt --equal-bytes \
    --kv-budget 0.2 --kv-type q8_0 --greedy 0 --policy profile:mass+values+echo,profile \
    --entropy-config ../../build/learnt/1024.entropy.json
# and for facts: --kv-budget 0.1 --continuation 0 --passkeys 3 --facts-per-text 4
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from pathlib import Path

from entropykv import Session
from entropykv.model.header import HeaderReader
from entropykv.profile.find import profile_beside
from entropykv.session import learning
from inputs import find_model, read_texts


def copy_without_profile(model: str, folder: Path) -> Path:
    """Copy a model, and change the last bit of one norm, because profiles are found by the
    norms.
    """
    path = folder / "model.gguf"
    data = bytearray(Path(model).read_bytes())
    data[HeaderReader(Path(model)).norms["output_norm.weight"][0]] ^= 1
    path.write_bytes(data)
    return path


def read(model: Path, n_tokens: int, *, learn: bool) -> tuple[float, int]:
    """Return CPU seconds, and the number of tokens that were learnt from."""
    text = next(iter(read_texts("tuning_*").values()))
    options = {"n_ctx": n_tokens, "kv_budget": 0.2, "n_threads": 1, "learn": learn}
    with Session(model, **options) as session:
        tokens = session.tokenize(text)[:n_tokens]
        before = time.process_time()
        session.decode(tokens)
        seconds = time.process_time() - before
        return seconds, session.learner.n_tokens if session.learner else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--tokens", default="1024,2048")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = copy_without_profile(find_model(options.model), Path(folder))
        profile = profile_beside(model)
        for n_tokens in map(int, options.tokens.split(",")):
            learning.LEAST_TOKENS = n_tokens  # Learn only at the end of the text.
            _, shown = read(model, n_tokens, learn=True)
            learning.LEAST_TOKENS = shown
            plain, learnt = [], []
            for _ in range(options.rounds):
                plain.append(read(model, n_tokens, learn=False)[0])
                learnt.append(read(model, n_tokens, learn=True)[0])
                shutil.move(profile, options.output / f"{n_tokens}.entropy.json")
            rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"{n_tokens} tokens, {shown} of them read twice: {min(plain):.2f} s without "
                f"learning, {min(learnt):.2f} s with it; {rss:.0f} MiB resident at most",
                flush=True,
            )


if __name__ == "__main__":
    main()
