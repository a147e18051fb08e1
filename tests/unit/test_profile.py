"""EntropyProfile computes its statistics, is found without being named, reads versions 1 and 2 of
its file, and refuses damaged files.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from entropykv.profile.profile import EntropyProfile
from entropykv.settings.options import Budget
from tests.support.profiles import profile_of
from tests.support.tiny_models import write_llama

SHIPPED = Path(__file__).resolve().parents[2] / "entropy_config.json"


def example() -> EntropyProfile:
    entropies = np.array([[0.25, 1.0, 2.0, 5.0], [0.5, 1.5, 3.0, 4.0]])
    return EntropyProfile(2, 4, 2, 128, entropies, model="tiny", source="made up")


def version_1() -> dict[str, Any]:
    return {
        "format_version": 1,
        "model": "tiny",
        "n_layer": 1,
        "n_head": 2,
        "n_head_kv": 1,
        "n_ctx": 64,
        "head_entropies": {"L0_H0": 1, "L0_H1": 2.5},
        "entropy_stats": {"mean": 1.75, "range_ratio": 2.5},
        "head_types": {"sink": 0, "focused": 1},
        "calibration": {"texts": 20},
    }


def test_statistics_of_the_query_heads() -> None:
    profile = example()
    values = profile.head_entropies
    assert profile.mean == pytest.approx(values.mean())
    assert profile.coefficient_of_variation == pytest.approx(values.std() / values.mean())
    np.testing.assert_allclose(profile.layer_means(), [2.0625, 2.25])
    expected = {"sink": 1, "focused": 2, "moderate": 2, "mixed": 1, "diffuse": 2}
    assert profile.head_types() == expected


def test_a_kv_head_takes_the_maximum_of_its_group() -> None:
    np.testing.assert_array_equal(example().kv_head_entropies(), [[1.0, 5.0], [1.5, 4.0]])
    shared = EntropyProfile(2, 4, 1, 128, example().head_entropies)
    np.testing.assert_array_equal(shared.kv_head_entropies(), [[5.0], [4.0]])
    separate = EntropyProfile(2, 4, 4, 128, example().head_entropies)
    np.testing.assert_array_equal(separate.kv_head_entropies(), example().head_entropies)


def test_coefficient_of_variation_of_zero_entropy_is_zero() -> None:
    assert EntropyProfile(1, 2, 1, 8, np.zeros((1, 2))).coefficient_of_variation == 0.0


def test_the_array_is_a_read_only_copy() -> None:
    given_array = np.ones((1, 2))
    profile = EntropyProfile(1, 2, 1, 8, given_array)
    given_array[0, 0] = 9.0
    assert profile.head_entropies[0, 0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        profile.head_entropies[0, 0] = 2.0


@pytest.mark.parametrize("bad", [np.ones((2, 1)), np.full((1, 2), np.nan), -np.ones((1, 2))])
def test_impossible_arrays_are_refused(bad: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ProfileError, match="head_entropies"):
        EntropyProfile(1, 2, 1, 8, bad)


def test_save_and_load_return_the_same_profile(tmp_path: Path) -> None:
    profile = example()
    path = tmp_path / "entropy_config.json"
    profile.save(path)
    loaded = EntropyProfile.load(path)
    assert loaded.to_dict() == profile.to_dict()
    np.testing.assert_array_equal(loaded.head_entropies, profile.head_entropies)
    assert json.loads(path.read_text())["format_version"] == 2
    assert os.listdir(tmp_path) == ["entropy_config.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ProfileError, match="No space left"):
        example().save(path)
    assert os.listdir(tmp_path) == ["profile.json"]
    assert path.read_text() == "old"


def test_version_1_is_read_liberally() -> None:
    data = version_1()
    profile = EntropyProfile.from_dict(data, "v1")
    np.testing.assert_array_equal(profile.head_entropies, [[1.0, 2.5]])
    assert (profile.model, profile.source, profile.n_ctx) == ("tiny", "", 64)
    del data["format_version"]
    assert EntropyProfile.from_dict(data, "v1").mean == profile.mean


def test_shipped_profile_has_the_published_head_types() -> None:
    profile = EntropyProfile.load(SHIPPED)
    assert (profile.n_layer, profile.n_head, profile.n_head_kv, profile.n_ctx) == (24, 16, 16, 2048)
    assert profile.model == "1bitLLM/bitnet_b1_58-large"
    expected = {"sink": 56, "focused": 135, "moderate": 179, "mixed": 14, "diffuse": 0}
    assert profile.head_types() == expected
    assert profile.mean == pytest.approx(1.5415888, abs=1e-4)
    assert profile.coefficient_of_variation == pytest.approx(0.5515110, abs=1e-4)
    assert "not measured again" in profile.source


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format_version", 3, "format_version 3"),
        ("format_version", True, "format_version True"),
        ("format_version", "2", "format_version '2'"),
        ("n_layer", 0, "n_layer must be a positive integer"),
        ("n_layer", 2, "lacks L1_H0"),
        ("n_layer", 10**15, "lacks L1_H0"),
        ("n_head", -2, "n_head must be a positive integer"),
        ("n_head", 2.0, "n_head must be a positive integer"),
        ("n_head", 3, "lacks L0_H2"),
        ("n_head", True, "n_head must be a positive integer"),
        ("n_head_kv", "1", "n_head_kv must be a positive integer"),
        ("n_head_kv", 4, "n_head 2 is not a multiple of n_head_kv 4"),
        ("n_ctx", None, "n_ctx must be a positive integer"),
        ("head_entropies", [1.0, 2.0], "head_entropies must be an object"),
        ("head_entropies", {"L0_H0": 1.0}, "head_entropies lacks L0_H1"),
        ("head_entropies", {"L0_H0": 1, "L0_H1": 1, "L0_H2": 1}, "holds 'L0_H2'"),
        ("head_entropies", {"L0_H0": 1, "L0_H1": 1, "L0_H01": 1}, "holds 'L0_H01'"),
        ("head_entropies", {"L0_H0": 1, "L0_H1": float("nan")}, "L0_H1 must be a number"),
        ("head_entropies", {"L0_H0": 1, "L0_H1": float("inf")}, "L0_H1 must be a number"),
        ("head_entropies", {"L0_H0": 1, "L0_H1": -0.5}, "L0_H1 must be a number"),
        ("head_entropies", {"L0_H0": 1, "L0_H1": "2"}, "L0_H1 must be a number"),
        ("head_entropies", {"L0_H0": 1, "L0_H1": True}, "L0_H1 must be a number"),
        ("head_entropies", {"L0_H0": 1, "L0_H1": 10**400}, "L0_H1 must be a number"),
    ],
)
def test_damaged_fields_are_named(version: int, field: str, value: object, message: str) -> None:
    data = version_1() if version == 1 else EntropyProfile.from_dict(version_1(), "").to_dict()
    data[field] = value
    with pytest.raises(ProfileError) as caught:
        EntropyProfile.from_dict(data, "entropy_config.json")
    text = str(caught.value)
    assert text.startswith("entropy_config.json: ")
    assert message in text
    assert "calibrate again" in text


@pytest.mark.parametrize("key", ["n_layer", "n_head", "n_head_kv", "n_ctx", "head_entropies"])
def test_missing_keys_are_named(key: str) -> None:
    data = version_1()
    del data[key]
    with pytest.raises(ProfileError, match=f"here: lacks {key}; "):
        EntropyProfile.from_dict(data, "here")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_heads", 2, "unknown key 'n_heads'"),
        ("model", 5, "model and source must be texts"),
        ("entropy_stats", [], "entropy_stats must be an object"),
        ("entropy_stats", {"mean": "1"}, "entropy_stats holds 'mean': '1'"),
        ("head_types", {"sinks": 1}, "head_types holds 'sinks': 1"),
    ],
)
def test_version_2_is_read_strictly(field: str, value: object, message: str) -> None:
    data = example().to_dict()
    data[field] = value
    with pytest.raises(ProfileError, match="here: ") as caught:
        EntropyProfile.from_dict(data, "here")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON or is truncated"),
        (b'{"n_layer": 1, ', "is not JSON or is truncated"),
        (b"[" * 100_000, "is not JSON or is truncated"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"[]", "must hold a JSON object"),
        (b"NaN", "must hold a JSON object"),
    ],
)
def test_files_that_are_no_profile(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=r"profile\.json: ") as caught:
        EntropyProfile.load(path)
    assert message in str(caught.value)


def test_missing_file_and_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"none.json: no such file"):
        EntropyProfile.load(tmp_path / "none.json")
    with pytest.raises(ProfileError, match="is a directory; give the path of a profile file"):
        EntropyProfile.load(tmp_path)
    with pytest.raises(ProfileError, match="cannot be written"):
        example().save(tmp_path / "none" / "profile.json")


@settings(max_examples=200)
@given(cut=st.integers(0, 600), replacement=st.binary(max_size=8))
def test_no_damage_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, cut: int, replacement: bytes
) -> None:
    content = json.dumps(example().to_dict()).encode()
    path = tmp_path_factory.getbasetemp() / "damaged_profile.json"
    path.write_bytes(content[:cut] + replacement + content[cut + len(replacement) :])
    message = ""
    try:
        EntropyProfile.load(path)
    except ProfileError as error:
        message = str(error)
    assert not message or "damaged_profile.json" in message


def test_check_geometry_names_both_sides() -> None:
    example().check_geometry(2, 4, 2, "model")
    with pytest.raises(ProfileError) as caught:
        example().check_geometry(30, 9, 3, "SmolLM2")
    text = str(caught.value)
    assert "the profile of tiny has 2 layers, 4 query heads and 2 KV heads" in text
    assert "SmolLM2 has 30 layers, 9 query heads and 3 KV heads" in text
    assert "calibrate again" in text


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
    """resolve() reads no file, so that equal values mean the same; the profile is read before."""
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
