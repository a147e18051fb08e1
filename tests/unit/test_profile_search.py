"""Profiles are found without being named, and `auto` chooses a KV type."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest

from entropykv import CacheOptions, Session
from entropykv.errors import ProfileError
from entropykv.model.geometry import read_geometry
from entropykv.model.shipped import DEMOS
from entropykv.policy.plan import kv_type_for
from entropykv.policy.resolved_config import config_for, resolve
from entropykv.profile.find import (
    find_profile,
    fingerprint_of,
    other_file,
    profile_beside,
    profile_path,
)
from entropykv.settings.options import Budget
from tests.support.profiles import profile_of
from tests.support.tiny_models import write_llama


def test_a_profile_beside_the_model_is_found(own_llama: Path) -> None:
    profile = profile_of(own_llama)
    assert find_profile(read_geometry(own_llama)) is None
    profile.save(profile_beside(own_llama))
    found = find_profile(read_geometry(own_llama))
    assert found is not None
    assert found.fingerprint == profile.fingerprint
    with Session(own_llama, n_ctx=64) as session:
        # This profile has no loss curves.
        assert session.config.policy.name == "adaptive:mass+values+predicted"
        assert session.config.profile is not None
    with Session(own_llama, n_ctx=64, policy="entropy") as session:
        assert session.config.profile is not None
    with Session(own_llama, n_ctx=64, policy="uniform") as session:
        assert session.config.profile is None


def test_what_is_resolved_reads_no_file(own_llama: Path) -> None:
    """resolve() reads no file, so that the same values always mean the same; the profile is read
    before.
    """
    profile = profile_of(own_llama)
    nowhere = dataclasses.replace(read_geometry(own_llama), path=Path("nowhere.gguf"))
    for policy in ("auto", "entropy", "uniform"):
        config = resolve(CacheOptions(policy=policy, n_ctx=64), nowhere, profile)
        assert config == resolve(CacheOptions(policy=policy, n_ctx=64), nowhere, profile)
        assert config.profile is profile
    assert config_for(CacheOptions(policy="uniform"), read_geometry(own_llama)).profile is None


def test_without_a_profile_budgets_follow_the_text(own_llama: Path) -> None:
    with Session(own_llama, n_ctx=64) as session:
        assert session.config.policy.name == "adaptive:mass+values+predicted"
    with Session(own_llama, n_ctx=64, policy="fast") as session:
        assert session.config.policy.name == "adaptive"
    with Session(own_llama, n_ctx=64, store="flat") as session:
        assert session.config.policy.name == "recency"


def test_a_profile_that_is_given_comes_first(own_llama: Path) -> None:
    profile_of(own_llama).save(profile_beside(own_llama))
    given = profile_of(own_llama)
    with Session(own_llama, n_ctx=64, entropy_config=given) as session:
        assert session.config.profile is given


def test_a_damaged_profile_beside_the_model_is_refused_by_name(own_llama: Path) -> None:
    profile_beside(own_llama).write_text("{", encoding="utf-8")
    with pytest.raises(ProfileError, match=r"model\.entropy\.json"):
        Session(own_llama, n_ctx=64)
    with Session(own_llama, n_ctx=64, policy="uniform"):
        pass


def test_one_profile_serves_every_quantisation_of_the_same_weights(tmp_path: Path) -> None:
    for name, seed in (("q8", 0), ("f16", 0), ("other", 1)):
        kind = "Q8_0" if name == "q8" else "F16"
        write_llama(tmp_path / f"{name}.gguf", head_dim=32, weight_type=kind, seed=seed)
    profile = profile_of(tmp_path / "f16.gguf")
    (tmp_path / "damaged.entropy.json").write_text("{", encoding="utf-8")
    profile.save(tmp_path / "any name.entropy.json")
    for name, finds in (("f16", True), ("q8", True), ("other", False)):
        geometry = read_geometry(tmp_path / f"{name}.gguf")
        found = find_profile(geometry)
        assert (found is not None) == finds, name
        assert found is None or other_file(found, geometry) is None
    mark = profile.fingerprint
    assert mark is not None
    assert mark.norms_sha256 is not None
    own = fingerprint_of(read_geometry(tmp_path / "q8.gguf"))
    assert not mark.is_of_file(own)
    assert not replace(mark, n_vocab=5, header_sha256="0" * 64).is_of_weights(own)
    assert not replace(mark, norms_sha256=None).is_of_weights(own)


def test_a_profile_of_the_file_itself_comes_before_another_one_of_the_weights(
    tmp_path: Path,
) -> None:
    for kind in ("Q8_0", "F16"):
        write_llama(tmp_path / f"{kind}.gguf", head_dim=32, weight_type=kind)
    profile_of(tmp_path / "Q8_0.gguf").save(tmp_path / "a.entropy.json")
    profile_of(tmp_path / "F16.gguf").save(tmp_path / "b.entropy.json")
    assert profile_path(read_geometry(tmp_path / "F16.gguf")) == tmp_path / "b.entropy.json"


def test_models_at_hand_have_a_profile_with_curves(smollm2: Path) -> None:
    for path in (DEMOS["bitnet"].path, smollm2):
        geometry = read_geometry(path)
        profile = find_profile(geometry)
        assert profile is not None
        assert profile.curves is not None
        assert profile.fingerprint == fingerprint_of(geometry)


def test_auto_is_f16_where_a_budget_in_bytes_holds_all(own_llama: Path) -> None:
    geometry = read_geometry(own_llama)
    with Session(own_llama, n_ctx=256, kv_budget=1.0, kv_type="f16") as session:
        full = session.stats().kv_bytes_budget
    for budget, expected in (
        (Budget("bytes", full), "f16"),
        (Budget("bytes", full - 1), "q8_0"),
        (Budget("fraction", 1.0), "q8_0"),
        (Budget("tokens", 256), "q8_0"),
    ):
        assert kv_type_for("auto", budget, geometry, 256) == expected
        assert kv_type_for("f16", budget, geometry, 256) == "f16"
        with Session(own_llama, n_ctx=256, kv_budget=budget) as session:
            assert session.stats().kv_type == expected
            assert session.stats().kv_bytes_budget <= full
