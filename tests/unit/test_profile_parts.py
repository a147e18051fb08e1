"""The parts of a version 2 profile are read strictly, and its JSON schema agrees with that."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv.errors import ProfileError
from entropykv.model.geometry import read_geometry
from entropykv.profile.curves import LossCurves
from entropykv.profile.find import check_model
from entropykv.profile.parts import Fingerprint
from entropykv.profile.profile import EntropyProfile
from tests.support.profiles import example, with_field

SHIPPED = Path(__file__).resolve().parents[2] / "entropy_config.json"


def test_every_part_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    example().save(path)
    loaded = EntropyProfile.load(path)
    assert loaded.to_dict() == example().to_dict()
    assert loaded.measurement is not None
    assert loaded.measurement.texts == (("a [1, 2].txt", 128), ("b", 100))
    assert loaded.curves is not None
    assert loaded.curves.keep == (0, 8, 32)
    text = path.read_text(encoding="utf-8")
    assert '"keep": [0, 8, 32]' in text
    assert len(text.splitlines()) < 150


def test_files_without_the_new_parts_load() -> None:
    profile = EntropyProfile.load(SHIPPED)
    assert (profile.fingerprint, profile.measurement, profile.curves) == (None, None, None)
    assert set(profile.to_dict()) - set(json.loads(SHIPPED.read_text())) == {"layer_entropies"}


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the JSON of the example with one field changed, or removed if the value is `...`."""
    return with_field(example(), path, value)


NAN = float("nan")
BAD = [
    ("curve", {}, "unknown key 'curve'"),
    ("layer_entropies", ["1"], "layer_entropies"),
    ("fingerprint", [], "fingerprint must be an object"),
    ("fingerprint.n_vocab", ..., "fingerprint lacks n_vocab"),
    ("fingerprint.n_vocab", 1.5, "fingerprint.n_vocab"),
    ("fingerprint.extra", 1, "fingerprint has the unknown key 'extra'"),
    ("fingerprint.architecture", 5, "fingerprint.architecture"),
    ("fingerprint.header_sha256", "0" * 63, "fingerprint.header_sha256"),
    ("fingerprint.norms_sha256", "0" * 63, "fingerprint.norms_sha256"),
    ("fingerprint.norms_sha256", None, "fingerprint.norms_sha256 must be a text"),
    ("measurement", None, "measurement must be an object"),
    ("measurement.rows", "some", "measurement.rows"),
    ("measurement.rows", 1, "measurement.rows"),
    ("measurement.seed", -1, "measurement.seed"),
    ("measurement.seed", True, "measurement.seed"),
    ("measurement.max_length", 0, "measurement.max_length"),
    ("measurement.stability", 1.5, "measurement.stability"),
    ("measurement.stability", "high", "measurement.stability"),
    ("measurement.texts", {}, "measurement.texts must be a list"),
    ("measurement.texts.1", "b", "measurement.texts[1] must be an object"),
    ("measurement.texts.1.tokens", 0, "measurement.texts[1].tokens"),
    ("measurement.texts.0.name", None, "measurement.texts[0].name"),
    ("measurement.quarters.1.2", -0.5, "measurement.quarters[1][2]"),
    ("measurement.all_rows.1", 3, "measurement.all_rows[1] must be a list of 4"),
    ("measurement.spread", ..., "measurement lacks spread"),
    ("curves.mass_lost.0.1.2", 1.5, "curves.mass_lost[0][1][2]"),
    ("curves.mass_lost.0.1.2", None, "curves.mass_lost[0][1][2]"),
    ("curves.output_error.1.0.0", -1, "curves.output_error[1][0][0]"),
    ("curves.keep", [], "curves.keep"),
    ("curves.keep.0", 1, "curves.keep"),
    ("curves.keep.1", -8, "curves.keep[1]"),
    ("curves.keep.1", 0, "curves.keep must ascend"),
    ("curves.length", 0, "curves.length"),
    ("curves.n_texts", "1", "curves.n_texts"),
    ("curves.layer_damage.1", -0.5, "curves.layer_damage[1]"),
    ("curves.layer_damage", 0.5, "curves.layer_damage must be a list of 2"),
    ("curves.importance", "mass", "curves.importance must be one of mass+values+predic"),
    ("curves.importance", 1, "curves.importance"),
    ("curves.more", 1, "curves has the unknown key 'more'"),
    ("predictor", [], "predictor must be an object"),
    ("predictor.n_features.1", 0, "predictor.n_features[1]"),
    ("predictor.n_tokens", True, "predictor.n_tokens"),
    ("predictor.correlation", -1.5, "predictor.correlation"),
    ("predictor.lookups.1.0", 1.5, "predictor.lookups[1][0]"),
    ("predictor.weights", "AAA?", "predictor.weights must be base64"),
    ("predictor.weights", None, "predictor.weights must be a text"),
    ("predictor.more", 1, "predictor has the unknown key 'more'"),
    ("predictor.lookups", ..., "predictor lacks lookups"),
    ("comparison", [], "comparison must be an object"),
    ("comparison.best", "adaptive", "comparison.best must be one of none, adaptive:mass"),
    ("comparison.best", 1, "comparison.best must be a text"),
    ("comparison.best", ..., "comparison lacks best"),
    ("comparison.budgets", 0.1, "comparison.budgets must be a list"),
    ("comparison.budgets.0", 1.5, "comparison.budgets[0]"),
    ("comparison.n_tokens", -1, "comparison.n_tokens"),
    ("comparison.n_facts", [4, 6], "comparison has the unknown key 'n_facts'"),
    ("comparison.repeats", 0.5, "comparison.repeats must be a list"),
    ("comparison.repeats.0", 1.5, "comparison.repeats[0]"),
    ("comparison.compared", {}, "comparison.compared must be a list"),
    ("comparison.compared.1.way", "uniform", "comparison.compared has no way 'uniform'"),
    ("comparison.compared.1.way", 1, "comparison.compared[1].way must be a text"),
    ("comparison.compared.1.divergences.0.1", -0.1, "comparison.compared[1].divergences[0][1]"),
    ("comparison.compared.1.repetitions.0.0", "0", "comparison.compared[1].repetitions[0][0]"),
    ("comparison.compared.1.facts.0.0", 0.5, "comparison.compared[1].facts[0][0]"),
    ("comparison.compared.1.facts.0.1", 2, "comparison.compared[1].facts[0][1]"),
    ("comparison.compared.1.more", 1, "comparison.compared[1] has the unknown key 'more'"),
]
# JSON Schema cannot compare sizes, and its numbers include NaN.
BAD_BEYOND_THE_SCHEMA = [
    ("measurement.quarters", [[1.0] * 4], "measurement.quarters must be a list of 2"),
    ("measurement.all_rows.0", [1.0] * 3, "measurement.all_rows[0] must be a list of 4"),
    ("measurement.quarters.0.0", NAN, "measurement.quarters[0][0]"),
    ("measurement.stability", NAN, "measurement.stability"),
    ("curves.mass_lost.1.1", [0.5], "curves.mass_lost[1][1] must be a list of 3"),
    ("curves.output_error.1", [], "curves.output_error[1] must be a list of 2"),
    ("curves.keep", [0, 32, 8], "curves.keep must ascend"),
    ("curves.keep.2", 65, "curves.keep[2]"),
    ("curves.layer_damage", [0.5], "curves.layer_damage must be a list of 2"),
    ("predictor.n_features", [5, 4], "predictor.weights has 16 values"),
    ("predictor.weights", "AAAAAA==", "predictor.weights has 1 values"),
    ("predictor.lookups", [[0.5, 0.5]], "predictor.lookups must be a list of 2"),
    ("comparison.compared.1.facts", [], "comparison.compared must have a figure for every budget"),
    ("comparison.compared.1.facts.0", [1], "comparison.compared must have a figure for every"),
    ("comparison.compared.1.divergences.0", [0.5], "divergences[0] must be a list of 2"),
    ("comparison.compared.1.divergences.0.0", NAN, "divergences[0][0]"),
]
GOOD = [
    ("fingerprint", ...),
    ("measurement", ...),
    ("curves", ...),
    ("head_types", ...),
    ("measurement.stability", None),
    ("measurement.texts", []),
    ("measurement.rows", "all"),
    ("curves.mass_lost.0.0.0", 1),
    ("curves.layer_damage", ...),
    ("curves.importance", "mass+values+predicted"),
    ("curves.importance", "mass+values+echo"),
    ("predictor", ...),
    ("comparison", ...),
    ("comparison.best", "none"),
    ("comparison.compared", []),
    ("predictor.correlation", None),
    ("predictor.lookups", None),
    ("curves.importance", ...),
    ("fingerprint.n_vocab", 0),
    ("fingerprint.norms_sha256", "a" * 64),
]


@pytest.mark.parametrize(("path", "value", "message"), [*BAD, *BAD_BEYOND_THE_SCHEMA])
def test_damaged_parts_are_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        EntropyProfile.from_dict(changed(path, value), "here")
    assert str(caught.value).startswith("here: ")
    assert message in str(caught.value)
    assert "calibrate again" in str(caught.value)


@pytest.mark.parametrize(
    ("earlier", "now"),
    [("mass+values+echo", "mass+values+predicted"), ("reconstruct", "predicted")],
)
def test_names_of_earlier_versions_mean_what_is_predicted(earlier: str, now: str) -> None:
    """Names of importance in files of earlier versions stand for predictions of what a second
    reading of the text would show.
    """
    curves = EntropyProfile.from_dict(changed("curves.importance", earlier), "here").curves
    assert curves is not None
    assert curves.importance == now


@pytest.mark.parametrize(("path", "value"), GOOD)
def test_good_files_are_read(path: str, value: Any) -> None:
    EntropyProfile.from_dict(changed(path, value), "here")


def test_the_schema_agrees() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="checks the schema")
    schema = json.loads(
        importlib.resources.files("entropykv")
        .joinpath("schemas", "entropy_profile.schema.json")
        .read_text(encoding="utf-8")
    )
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(example().to_dict())
    assert validator.is_valid(json.loads(SHIPPED.read_text()))
    for path, value in GOOD:
        assert validator.is_valid(changed(path, value)), path
    for path, value, _ in BAD:
        assert not validator.is_valid(changed(path, value)), (path, value)


def test_a_predictor_of_another_shape_is_refused() -> None:
    good = example()
    with pytest.raises(ProfileError, match="predictor is not of 2 layers and 4 KV heads"):
        EntropyProfile(2, 4, 4, 128, good.head_entropies, predictor=good.predictor)


def test_curves_of_another_shape_are_refused() -> None:
    good = example()
    with pytest.raises(ProfileError, match="curves"):
        EntropyProfile(2, 4, 4, 128, good.head_entropies, curves=good.curves)
    for arguments in (
        (64, 8, 4, 6, 1, (1, 8), np.zeros((1, 1, 2)), np.zeros((1, 1, 2))),
        (64, 8, 4, 6, 1, (0, 8), np.zeros((1, 1, 3)), np.zeros((1, 1, 2))),
        (64, 8, 4, 6, 1, (0, 8), np.zeros((1, 1, 2)), np.full((1, 1, 2), NAN)),
    ):
        with pytest.raises(ProfileError, match=r"curves\."):
            LossCurves(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [("architecture", "gemma"), ("n_vocab", 5), ("head_dim_k", 99), ("head_dim_v", 99)],
)
def test_the_profile_of_another_model_is_refused(field: str, value: Any, tiny_llama: Path) -> None:
    geometry = read_geometry(tiny_llama)
    right = {"architecture": "llama", "n_vocab": 320, "head_dim_k": 32, "head_dim_v": 32}
    entropies = np.ones((3, 6))

    def profile(**fields: Any) -> EntropyProfile:
        mark = Fingerprint(**fields, header_sha256="0" * 64)
        return EntropyProfile(3, 6, 2, 512, entropies, "other", fingerprint=mark)

    check_model(profile(**right), geometry)
    with pytest.raises(ProfileError, match=f"fingerprint.{field} {value}"):
        check_model(profile(**{**right, field: value}), geometry)
