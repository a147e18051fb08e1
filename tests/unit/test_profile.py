"""EntropyProfile computes its statistics, reads versions 1 and 2 of its file, and refuses damaged
files.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropykv.errors import ProfileError
from entropykv.profile.profile import EntropyProfile

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
