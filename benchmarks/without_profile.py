"""Measure what policy auto loses without a profile, by types of K and V and recent windows.

From each text comes a passage of up to 1,024 tokens with eight planted facts. It is read inside a
fraction of the bytes of its full f16 cache by policy auto, which has learnt a predictor from eight
other texts. Prints for every text, fraction, type and window the KL divergence from the full cache
in the 128 tokens that follow, and how many of the facts that the full cache knows are known; and at
the end the means and sums.

python benchmarks/without_profile.py smollm2 --types q8_0,q8_0/iq4_nl --texts "heldout_prose_0[38]*"
python benchmarks/without_profile.py qwen-0.5b --eighths 4,3 --fractions 0.1
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import product
from typing import NamedTuple
from unittest import mock

import numpy as np

from entropykv import EntropyProfile
from entropykv.calibration.comparing import PassageReader, PlantedPassage, learnt_from
from entropykv.calibration.spread import Spread, StepSettings
from entropykv.llamacpp.distributions import mean_divergence
from entropykv.llamacpp.model import Model
from entropykv.model.geometry import read_geometry
from entropykv.model.shipped import path_of_model
from entropykv.policy import policy
from held_out import passages_and_lessons
from inputs import find_model, read_texts


class Case(NamedTuple):
    """Name how a passage is read."""

    fraction: float
    """The fraction of the bytes of a full f16 cache."""
    kv_type: str
    eighths: int
    """How many eighths of the mean budget the recent window takes."""

    def line(self, name: str, divergence: float, n_right: int, n_known: int) -> str:
        """Return the line of the table for the passage `name`, or for all."""
        case = f"{self.fraction:.0%}  {self.kv_type:<12} window {self.eighths}/8"
        return f"{name:<18} {case}  KL {divergence:.4f}  facts {n_right} of {n_known}"


class Loss(NamedTuple):
    """Hold what a passage loses in one case."""

    divergence: float
    n_right: int
    n_known: int
    """How many facts the full cache knows."""


def losses(reader: PassageReader, profile: EntropyProfile, cases: list[Case]) -> Iterator[Loss]:
    """Yield what a passage loses in each of the cases."""
    whole = reader.read_whole(profile)
    for case in cases:
        with mock.patch.object(policy, "WINDOW_EIGHTHS_WITH_LOOKUPS", case.eighths):
            inside = reader.read_inside(profile, case.fraction, case.kv_type)
        yield Loss(
            mean_divergence(whole.continuing, inside.continuing),
            int(np.count_nonzero(inside.right & whole.right)),
            int(np.count_nonzero(whole.right)),
        )


def taught_profile(path: str, lessons: list[tuple[int, ...]]) -> EntropyProfile:
    """Return a profile that has only the predictor that sessions learn from the texts."""
    geometry = read_geometry(path)
    bare = EntropyProfile(
        n_layer=geometry.n_layer,
        n_head=geometry.n_head,
        n_head_kv=max(geometry.kv_heads_per_layer),
        n_ctx=geometry.n_ctx_train,
        head_entropies=np.full((geometry.n_layer, geometry.n_head), 3.0),
    )
    settings = StepSettings.of(path, n_ctx=0, n_threads=1, profile=bare)
    return replace(bare, predictor=learnt_from(lessons, Spread(), settings))


def measure(
    path: str, profile: EntropyProfile, passages: dict[str, PlantedPassage], cases: list[Case]
) -> None:
    """Print a line for every passage and case, and one for every case with the mean and sums."""
    settings = StepSettings.of(path, n_ctx=0, n_threads=1)
    found: list[list[Loss]] = []
    with closing(Model(path, n_gpu_layers=0, verbose=False)) as model:
        for name, passage in passages.items():
            reader = PassageReader(model, settings, passage, lambda _: None)
            found.append([])
            for case, loss in zip(cases, losses(reader, profile, cases), strict=True):
                found[-1].append(loss)
                print(case.line(name, *loss), flush=True)
    for case, of_case in zip(cases, zip(*found, strict=True), strict=True):
        divergences, right, known = zip(*of_case, strict=True)
        print(case.line("all", float(np.mean(divergences)), sum(right), sum(known)))


def main() -> None:
    """Read the options, and print the figures of every text and case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--fractions", default="0.2,0.1", help="commas separate them")
    parser.add_argument("--types", default="q8_0", help="commas separate them")
    parser.add_argument(
        "--eighths",
        default=str(policy.WINDOW_EIGHTHS_WITH_LOOKUPS),
        help="recent windows in eighths of the mean budget; commas separate them",
    )
    parser.add_argument("--texts", default="heldout_prose_*", help="in benchmarks/texts")
    options = parser.parse_args()
    path = str(path_of_model(find_model(options.model)))
    fractions, eighths = (
        [number(text) for text in texts.split(",")]
        for number, texts in ((float, options.fractions), (int, options.eighths))
    )
    cases = [Case(*each) for each in product(fractions, options.types.split(","), eighths)]
    passages, lessons = passages_and_lessons(path, options.texts)
    names = read_texts(options.texts)
    measure(path, taught_profile(path, lessons), dict(zip(names, passages, strict=True)), cases)


if __name__ == "__main__":
    main()
