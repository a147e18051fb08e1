"""The biases that a model adds to its keys are read from its file, so that q8_0 stays precise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from entropykv import Session
from entropykv.llamacpp.distributions import mean_divergence
from entropykv.model.geometry import read_geometry
from entropykv.model.key_biases import read_key_biases
from entropykv.settings.freezing import Freezing
from tests.support.command import entropykv
from tests.support.logits import stock_logits, tokens_for
from tests.support.saved_sessions import assert_load_refused, with_settings
from tests.support.tiny_models import write_gpt2, write_llama

LARGE = 200.0
KINDS = ("f16", "q8_0")


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random llama that adds a large bias to the values of keys that RoPE turns slowest."""
    path = tmp_path_factory.mktemp("models") / "biased.gguf"
    write_llama(
        path,
        n_layer=3,
        n_head=6,
        n_head_kv=2,
        head_dim=32,
        weight_type="Q8_0",
        rope_freq_base=1e6,
        key_bias=LARGE,
    )
    return path


def logits_of(path: Path, tokens: list[int], **options: Any) -> npt.NDArray[np.float32]:
    with Session(path, kv_budget=1.0, n_ctx=512, n_threads=1, **options) as session:
        return session.decode(tokens, all_logits=True)


def test_q8_0_keeps_what_f16_knows(biased: Path) -> None:
    """A full cache in q8_0 stays near stock llama.cpp, because keys are stored without their
    biases.

    Keys that are stored with their biases are more than ten times as far away.
    """
    tokens = tokens_for(300)
    stock = stock_logits(biased, tokens)
    lost = {kind: mean_divergence(stock, logits_of(biased, tokens, kv_type=kind)) for kind in KINDS}
    plain = mean_divergence(
        stock, logits_of(biased, tokens, kv_type="q8_0", policy="uniform:products")
    )
    assert lost["q8_0"] < 0.1 * plain
    assert lost["q8_0"] < 2e-3


def test_biases_and_spreads_are_those_of_the_file(biased: Path, tmp_path: Path) -> None:
    found = read_key_biases(read_geometry(biased))
    assert sorted(found) == [0, 1, 2]
    bias, spread = found[1].bias, found[1].spread
    assert bias.shape == spread.shape == (2, 32)
    np.testing.assert_array_equal(bias[:, -2:], LARGE)
    np.testing.assert_array_equal(bias[:, :-2], np.float32(0.1))
    # The rows of the projection have a norm of KEY_SCALE, and are multiplied by the weights of the
    # layer's norm.
    assert 0.2 < spread.min() < spread.max() < 5.0
    joint = tmp_path / "gpt2.gguf"
    write_gpt2(joint, n_ctx_train=64)
    of_joint = read_key_biases(read_geometry(joint))
    assert of_joint[0].bias.shape == (4, 64)
    assert 0.05 < np.std(of_joint[0].bias) < 0.2


def test_models_without_biases_store_keys_as_they_are(tiny_llama: Path) -> None:
    assert not read_geometry(tiny_llama).key_biases
    assert read_key_biases(read_geometry(tiny_llama)) == {}
    with Session(tiny_llama, kv_budget=1.0, n_ctx=64, kv_type="q8_0") as session:
        assert session.config.centres_keys is False
        assert session.stats().centred_layers == 0


def test_plan_and_stats_say_it(biased: Path) -> None:
    for kind, is_centred in (("q8_0", True), ("f16", False)):
        plan = entropykv("plan", "-m", biased, "--kv-type", kind, "--json")
        assert json.loads(plan.stdout)["centres_keys"] is is_centred
        with Session(biased, kv_budget=1.0, n_ctx=64, kv_type=kind) as session:
            assert session.stats().centred_layers == (3 if is_centred else 0)
    assert "without their biases" in entropykv("plan", "-m", biased, "--kv-type", "q8_0").stdout
    flat = entropykv("plan", "-m", biased, "--kv-type", "q8_0", "--store", "flat").stdout
    assert "with their biases" in flat


def test_saved_sessions_hold_keys_of_one_form(biased: Path, tmp_path: Path) -> None:
    """A loaded session continues as if it had not been saved, and keys that are stored in another
    form are refused.
    """
    tokens = tokens_for(200)
    options: dict[str, Any] = {"kv_budget": 0.5, "n_ctx": 512, "kv_type": "q8_0", "n_threads": 1}
    with Session(biased, **options) as session:
        session.decode(tokens)
        session.files.save(tmp_path / "saved.kv")
        expected = session.decode([5])
    with Session(biased, **options) as session:
        session.files.load(tmp_path / "saved.kv")
        np.testing.assert_array_equal(session.decode([5]), expected)
    data = (tmp_path / "saved.kv").read_bytes()
    other = with_settings(data, lambda settings: settings.update(key_centres=None))
    with Session(biased, **options) as session:
        assert_load_refused(session, other, "keys with their biases")


@pytest.mark.parametrize("kind", ["auto", "q4_0"])
def test_frozen_keys_are_searched_and_come_back(biased: Path, kind: str) -> None:
    """Frozen keys are recalled and attended to with their biases, in every type of cold storage."""
    tokens = tokens_for(400)
    options: dict[str, Any] = {"n_ctx": 512, "kv_type": "q8_0", "n_threads": 1}
    with Session(biased, kv_budget=128, freeze=Freezing(kv_type=kind), **options) as session:
        session.decode(tokens)
        assert session.stats().frozen_entries > 0
        assert session.stats().entries_recalled > 0
        rows = session._slot.store.core.rows(0, 0)[2]  # type: ignore[attr-defined]
    assert np.abs(rows[:, -2:] - LARGE).max() < 20.0
    assert np.abs(rows[:, :-2]).max() < 20.0
