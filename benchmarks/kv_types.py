"""Measure what types of K and V lose inside the same bytes.

From each text comes a passage of up to 1,024 tokens with eight planted facts. It is read inside 20
and 10 % of the bytes of its full f16 cache by policy auto, which has learnt a predictor from eight
other texts. Prints for every budget and type the KL divergence from the full cache in the 128
tokens that follow, and how many of the facts that the full cache knows are known.

python benchmarks/kv_types.py smollm2 --types q8_0,q8_0/iq4_nl --texts "heldout_prose_0[38].txt"
"""

from __future__ import annotations

import argparse
from contextlib import closing

import numpy as np

from entropykv import EntropyProfile
from entropykv.calibration import comparing
from entropykv.calibration.spread import StepSettings
from entropykv.evaluation.texts import Text
from entropykv.evaluation.texts import read_texts as texts_of_calibrations
from entropykv.llamacpp.distributions import mean_divergence
from entropykv.llamacpp.model import Model
from entropykv.model.shipped import path_of_model
from entropykv.profile.predictor import ScorePredictor
from entropykv.session.session import Session
from entropykv.settings.options import Budget
from inputs import find_model, read_texts

BUDGETS = (0.2, 0.1)
SEED = 100


def learnt(model: Model, texts: list[tuple[int, ...]]) -> ScorePredictor | None:
    """Return the predictor that sessions learn from the texts; None if they teach too little."""
    longest = max(map(len, texts))
    full_bytes = 2 * model.geometry.cached_values * longest
    with Session(
        model.share(),
        n_ctx=longest,
        kv_budget=Budget("bytes", int(BUDGETS[0] * full_bytes)),
        store="headwise",
        learn=False,
        n_threads=1,
        n_threads_batch=1,
    ) as session:
        for tokens in texts:
            session.reset()
            session.decode(tokens)
        fit = session.cache.predictor_fit
        known = None if fit is None else fit.usable
    return None if known is None else ScorePredictor(known.weights, sum(map(len, texts)))


def main() -> None:
    """Print the figures of every text, budget and type."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--types", default="q8_0,q8_0/iq4_nl", help="commas separate them")
    parser.add_argument("--texts", default="heldout_prose_*.txt", help="in benchmarks/texts")
    options = parser.parse_args()
    path = str(path_of_model(find_model(options.model)))
    settings = StepSettings.of(path, n_ctx=0, n_threads=1)
    with closing(Model(path, n_gpu_layers=0, verbose=False)) as model:

        def tokenize(text: str, *, add_bos: bool = False) -> list[int]:
            return model.tokenize(text, add_bos=add_bos, special=False)

        def tokenize_begin(text: str) -> list[int]:
            return tokenize(text, add_bos=model.adds_bos)

        geometry = model.geometry
        found = [Text(name, content) for name, content in read_texts(options.texts).items()]
        passages = comparing.passages_of(
            found, tokenize_begin, tokenize, geometry.n_ctx_train, SEED
        )
        lessons = comparing.lessons_of(
            texts_of_calibrations(), tokenize_begin, geometry.n_ctx_train
        )
        profile = EntropyProfile(
            n_layer=geometry.n_layer,
            n_head=geometry.n_head,
            n_head_kv=max(geometry.kv_heads_per_layer),
            n_ctx=comparing.PASSAGE,
            head_entropies=np.full((geometry.n_layer, geometry.n_head), 3.0),
            predictor=learnt(model, lessons),
        )
        for text, passage in zip(found, passages, strict=True):
            reader = comparing._Reader(model, settings, passage, lambda _: None)  # noqa: SLF001
            whole = reader.read_whole(profile)
            for fraction in BUDGETS:
                n_bytes = fraction * 2 * geometry.cached_values * len(passage.tokens)
                for kv_type in options.types.split(","):
                    budget = Budget("bytes", int(n_bytes))
                    inside = reader._read(profile, "auto", kv_type, budget)  # noqa: SLF001
                    divergence = mean_divergence(whole.continuing, inside.continuing)
                    right = np.count_nonzero(inside.right & whole.right)
                    print(
                        f"{text.name}  {fraction:.0%}  {kv_type:<12} KL {divergence:.4f}  "
                        f"facts {right} of {np.count_nonzero(whole.right)}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
