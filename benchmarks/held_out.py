"""Measure what a profile is worth on held-out texts, as `calibrate` does on those it holds back.

From each text comes a passage of up to 1,024 tokens with eight planted facts. It is read inside 20
and 10 % of the bytes of its full f16 cache: as policy auto does without a profile, with a predictor
that was learnt from eight other texts, and in the way that the profile names (or --ways). Prints
the table, and how much less each way loses than none, in standard deviations of chance.

python benchmarks/held_out.py qwen-0.5b qwen-0.5b.entropy.json --resume kept
python benchmarks/held_out.py smollm2 smollm2.entropy.json --texts "heldout_prose_0*.txt"
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from unittest import mock

from entropykv import EntropyProfile
from entropykv.calibration import comparing
from entropykv.calibration.spread import Spread, StepSettings
from entropykv.cli.profile import comparison_lines
from entropykv.evaluation.texts import Text
from entropykv.evaluation.texts import read_texts as texts_of_calibrations
from entropykv.llamacpp.model import Model
from entropykv.model.shipped import path_of_model
from entropykv.profile.ways import NO_PROFILE, WayComparison, advantage
from inputs import find_model, read_texts

TEXTS = "heldout_*_0[2-5].txt"
SEED = 100


def passages_and_lessons(
    path: str, texts: str
) -> tuple[list[comparing.PlantedPassage], list[tuple[int, ...]]]:
    """Return a passage of each of the texts, and the tokens of the texts that teach a model without
    a profile.
    """
    with closing(Model(path, n_gpu_layers=0, verbose=False)) as model:

        def tokenize(text: str) -> list[int]:
            return model.tokenize(text, add_bos=model.adds_bos, special=False)

        longest = model.geometry.n_ctx_train
        found = [Text(name, content) for name, content in read_texts(texts).items()]
        passages = comparing.passages_of(found, tokenize, model.tokenize_within, longest, SEED)
        return passages, comparing.lessons_of(texts_of_calibrations(), tokenize, longest)


def compare(
    path: str, profile: EntropyProfile, ways: Sequence[str], texts: str, spread: Spread
) -> WayComparison:
    """Return a comparison of the ways in passages of the texts."""
    passages, taught = passages_and_lessons(path, texts)
    settings = StepSettings.of(path, n_ctx=0, n_threads=1, profile=profile)
    with mock.patch.object(comparing, "ways_of", return_value=list(ways)):
        return comparing.compare_ways(spread, settings, passages, taught)


def main() -> None:
    """Print what a model loses in each of the ways, and how much better each is than none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("profile")
    parser.add_argument("--ways", help="compare these with none; commas separate them")
    parser.add_argument("--texts", default=TEXTS, help="pattern of names in benchmarks/texts")
    parser.add_argument("--resume", help="directory to keep results in, of one profile and ways")
    options = parser.parse_args()
    profile = EntropyProfile.load(options.profile)
    best = profile.comparison.best if profile.comparison else NO_PROFILE
    ways = [NO_PROFILE, *(options.ways or best).split(",")]
    if ways == [NO_PROFILE] * 2:
        raise SystemExit("the profile names no way but none, which is the same; give --ways")
    spread = Spread(directory=options.resume)
    found = compare(path_of_model(find_model(options.model)), profile, ways, options.texts, spread)
    print("\n".join(comparison_lines(found)[:-1]))
    none, *others = found.compared
    for each in others:
        print(f"{each.way}: {advantage(none, each, found):+.2f}")


if __name__ == "__main__":
    main()
