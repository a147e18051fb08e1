"""Calibration measures the entropies, loss curves and damage that numpy computes of a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from entropykv import EntropyProfile, ProfileError, Session
from entropykv.calibration.damage import RECENT_WINDOW, damage_of_text, mean_damage
from entropykv.calibration.measure import CalibrationSettings, calibrate, correlation, excerpts_of
from entropykv.calibration.observe import Observer
from entropykv.calibration.predictions import LEAST_TEXT
from entropykv.profile.curves import CurveRules, average_curves
from entropykv.session.second_readings import OVERLAP, REQUEST
from tests.support import reference
from tests.support.calibration_texts import QUICK, some_texts
from tests.support.command import assert_refused, entropykv
from tests.support.logits import tokens_for
from tests.support.model_reference import ModelReference, log_probabilities_after
from tests.support.tiny_models import write_llama


def attention_of(path: Path, tokens: list[int]) -> Sequence[tuple[npt.NDArray[Any], ...]]:
    """Return q, k, v and attention weights of every layer, each [head][token][...]; k and v are
    repeated for every query head.
    """
    model = ModelReference(path, "silu")
    model.stored = reference.round_f16
    model.logits(tokens)
    return model.attended


def entropies_of(path: Path, tokens: list[int]) -> npt.NDArray[np.float64]:
    """Return the entropies of attention in the reference, in bits, (n_layer, n_tokens, n_head)."""
    rows = []
    for *_, p in attention_of(path, tokens):
        rows.append(-(p * np.log2(np.maximum(p, 1e-300))).sum(axis=2).T)
    return np.array(rows)


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_bitnet"])
def test_rows_are_those_of_the_definition(model: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(model)
    tokens = tokens_for(150)
    expected = entropies_of(path, tokens)
    for n_ubatch in (512, 40):
        with Observer(path, n_ctx=256, n_threads=2, n_ubatch=n_ubatch) as observer:
            # An earlier text must not influence the next one.
            observer.entropies(tokens_for(200, seed=9))
            rows = observer.entropies(tokens)
        # A key between two values of f16 may be rounded to the other one.
        np.testing.assert_allclose(rows, expected, atol=3e-3)
    assert expected.std() > 0.1


def test_a_profile_is_the_mean_over_quarters(tiny_llama: Path) -> None:
    texts = some_texts()
    profile = calibrate(tiny_llama, texts, QUICK)
    with Observer(tiny_llama, n_ctx=64) as observer:
        excerpts = excerpts_of(texts, observer.tokenize, QUICK)
    rows = [entropies_of(tiny_llama, list(excerpt.tokens)) for excerpt in excerpts]
    quarters = np.array([of_text[:, [15, 31, 47, 63]].mean(axis=1) for of_text in rows])
    np.testing.assert_allclose(profile.head_entropies, quarters.mean(axis=0), atol=1e-3)
    measured = profile.measurement
    assert measured is not None
    np.testing.assert_allclose(measured.spread, quarters.std(axis=0), atol=1e-3)
    all_rows = np.array([of_text.mean(axis=1) for of_text in rows])
    np.testing.assert_allclose(measured.all_rows, all_rows.mean(axis=0), atol=1e-3)
    halves = quarters[::2].mean(axis=0), quarters[1::2].mean(axis=0)
    assert measured.stability == pytest.approx(correlation(*halves), abs=2e-3)
    assert [tokens for _, tokens in measured.texts] == [64] * 4
    assert (profile.n_layer, profile.n_head, profile.n_head_kv, profile.n_ctx) == (3, 6, 2, 2048)
    assert profile.fingerprint is not None
    assert profile.curves is not None


def test_threads_do_not_matter(tiny_llama: Path) -> None:
    texts = some_texts()
    profiles = [
        calibrate(tiny_llama, texts, CalibrationSettings(4, 64, n_threads=n, curve_length=96))
        for n in (1, 2, 3)
    ]
    assert profiles[0].to_dict() == profiles[1].to_dict() == profiles[2].to_dict()


def test_another_seed_reads_other_texts(tiny_llama: Path) -> None:
    names = set()
    for seed in range(3):
        settings = CalibrationSettings(2, 32, seed, curve_texts=0, n_threads=2)
        measured = calibrate(tiny_llama, some_texts(), settings).measurement
        assert measured is not None
        names.add(tuple(name for name, _ in measured.texts))
    assert len(names) >= 2


@pytest.mark.parametrize("n_ubatch", [512, 300])
def test_curves_are_those_of_brute_force(tiny_llama: Path, n_ubatch: int) -> None:
    """Loss curves are those of importance, kept entries, attention mass and outputs that are
    computed in float64 from their definitions.
    """
    rules = CurveRules.for_length(320)
    tokens = tokens_for(rules.length)
    with Observer(tiny_llama, n_ctx=320, n_threads=2, n_ubatch=n_ubatch) as observer:
        curves = average_curves(rules, [observer.losses(tokens, rules)])
    for layer, (q, k, v, p) in enumerate(attention_of(tiny_llama, tokens)):
        for head in range(2):
            group = slice(3 * head, 3 * head + 3)
            distance = np.arange(rules.n_read)[:, None] - np.arange(rules.n_read)[None, :]
            scoring = np.where(
                distance >= reference.NEIGHBOURHOOD,
                p[group, : rules.n_read, : rules.n_read] ** 2,
                0,
            )
            importance = scoring.sum(axis=(0, 1))
            mass, dropped, whole = reference.curve_losses(
                q[group, rules.n_read :].transpose(1, 0, 2),
                k[3 * head],
                v[3 * head],
                importance,
                rules,
                reference.Options(32**-0.5),
            )
            np.testing.assert_allclose(curves.mass_lost[layer, head], mass, atol=2e-3)
            error = np.sqrt(dropped / whole)
            np.testing.assert_allclose(curves.output_error[layer, head], error, atol=4e-3)
            assert mass[0] > 0.1


def test_damage_is_that_of_a_layer_that_forgets(tiny_llama: Path) -> None:
    """The damage by each layer is that of a reference in which later queries do not see what the
    layer has dropped.
    """
    tokens = tokens_for(320)
    half, n_continued, n_repeated = 160, 40, 20
    with Observer(tiny_llama, n_ctx=320, n_threads=2) as observer:
        request = observer.tokenize_plainly(REQUEST)
        damage = mean_damage([damage_of_text(observer, tokens)])
        again = mean_damage([damage_of_text(observer, tokens) for _ in range(2)])
    repeated = tokens[OVERLAP : OVERLAP + n_repeated]
    expected = np.zeros(3)
    for before, following in (([], tokens[half : half + n_continued]), (request, repeated)):
        text = [*tokens[:half], *before, *following]
        first = half + len(before)
        whole = log_probabilities_after(tiny_llama, text, first)
        right = np.mean(whole[:-1].argmax(axis=1) == np.array(following[1:])) if before else 1.0
        for layer in range(3):
            hidden = np.zeros((len(text), len(text)))
            hidden[half:, 4 : half - RECENT_WINDOW] = -np.inf
            rows = log_probabilities_after(tiny_llama, text, first, {layer: hidden})
            expected[layer] += right * (np.exp(whole) * (whole - rows)).sum(axis=1).mean()
    assert damage is not None
    assert again is not None
    np.testing.assert_allclose(damage, expected, rtol=0.05)
    np.testing.assert_allclose(again, damage)
    assert expected.min() > 1e-3


def test_short_texts_show_no_damage(tiny_llama: Path) -> None:
    settings = CalibrationSettings(2, 32, n_threads=1, curve_length=LEAST_TEXT - 1)
    curves = calibrate(tiny_llama, some_texts(), settings).curves
    assert curves is not None
    assert curves.layer_damage is None


def test_policy_profile_runs_and_stays_inside_the_budget(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile = calibrate(tiny_llama, some_texts(), QUICK)
    profile.save(path)
    with Session(
        tiny_llama,
        n_ctx=512,
        kv_budget=0.25,
        policy="profile",
        n_ubatch=64,
        n_threads=2,
        entropy_config=path,
    ) as session:
        assert session.config.other_file() is None
        session.decode(tokens_for(400))
        stats = session.stats()
        budgets = np.array(session.cache.budgets())
        assert stats.policy == "profile"
        assert stats.kv_bytes_peak <= stats.kv_bytes_budget
        assert budgets.min() >= 68
        assert budgets.sum() <= 128 * budgets.size
        assert len(set(budgets.ravel().tolist())) > 1
    arguments = ("-m", tiny_llama, "-c", 512, "--kv-budget", 0.25, "--entropy-config", path)
    plan = entropykv("plan", *arguments, "--policy", "profile", "--json")
    assert json.loads(plan.stdout)["budgets"] == budgets.tolist()
    run = entropykv("run", *arguments, "--policy", "profile", "-p", "the", "-n", 5, "--no-chat")
    assert run.returncode == 0, run.stderr
    EntropyProfile(3, 6, 2, 512, profile.head_entropies).save(path)
    refused = entropykv("run", *arguments, "--policy", "profile", "-p", "the", "-n", 5)
    assert_refused(refused, "loss curves", "entropykv calibrate")


def test_a_model_of_the_same_shape_is_noted(tiny_llama: Path, tmp_path: Path) -> None:
    """The profile of another model with the same shape is noted, but not that of another
    quantisation of the same weights.
    """
    shape = {"n_layer": 3, "n_head": 6, "n_head_kv": 2, "head_dim": 32}
    for seed, noted in ((0, False), (1, True)):
        other = tmp_path / f"{seed}.gguf"
        write_llama(other, **shape, weight_type="F16", seed=seed)
        profile = calibrate(other, some_texts(), CalibrationSettings(2, 32, curve_texts=0))
        with Session(tiny_llama, n_ctx=64, entropy_config=profile) as session:
            note = session.config.other_file()
            assert (note is not None) == noted
            assert note is None or "another file" in note


def test_the_profile_of_another_model_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    other = tmp_path / "other.gguf"
    write_llama(other, n_layer=3, n_head=6, n_head_kv=2, head_dim=16, weight_type="F16")
    profile = calibrate(other, some_texts(), CalibrationSettings(2, 32, curve_texts=0))
    for store in ("headwise", "flat"):
        with pytest.raises(ProfileError, match="head_dim_k 16"):
            Session(tiny_llama, n_ctx=64, entropy_config=profile, store=store)
