"""Files of learnt predictors are read back; damaged ones and those of other models are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from entropykv import system
from entropykv.errors import ProfileError
from entropykv.model.geometry import read_geometry
from entropykv.model.header import HeaderReader
from entropykv.profile import learnt
from entropykv.profile.growing import MOST_WEIGHT
from entropykv.profile.learnt import (
    LearntFile,
    LearntPredictor,
    find_learnt,
    learnt_files,
    remove_learnt,
)
from entropykv.profile.predictor import ScorePredictor
from tests.support.learnt import own_cache
from tests.support.tiny_models import write_llama


def predictor(seed: int = 1, *, complete: bool = False) -> LearntPredictor:
    """Return a predictor of two layers that differ in their KV heads and features."""
    random = np.random.default_rng(seed)
    shapes = ((2, 5), (3, 7))
    weights = tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)
    return LearntPredictor(ScorePredictor(weights, 480, 0.625), "a model", 2, complete)


def assert_same(found: LearntPredictor | None, expected: LearntPredictor) -> None:
    assert found is not None
    for ours, theirs in zip(found.predictor.weights, expected.predictor.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for name in ("n_tokens", "correlation"):
        assert getattr(found.predictor, name) == getattr(expected.predictor, name)
    for name in ("model", "n_texts", "complete"):
        assert getattr(found, name) == getattr(expected, name)


def test_what_is_kept_is_read_back(tmp_path: Path) -> None:
    file = LearntFile(tmp_path / "new" / "a.predictor.json")
    assert file.read() is None
    assert file.keep(predictor())
    assert_same(file.read(), predictor())
    assert system.WINDOWS or file.path.stat().st_mode & 0o077 == 0


def test_a_complete_one_stays(tmp_path: Path) -> None:
    file = LearntFile(tmp_path / "a.predictor.json")
    file.keep(predictor(1))
    assert file.keep(predictor(2, complete=True), predictor(1))
    assert not file.keep(predictor(3, complete=True), predictor(1))
    assert_same(file.read(), predictor(2, complete=True))


def grown(before: LearntPredictor, n_tokens: int, seed: int) -> LearntPredictor:
    """Return a predictor that has learnt from one text of `n_tokens` tokens more."""
    known, more = before.predictor, predictor(seed).predictor.weights
    total = known.n_tokens + n_tokens
    weights = tuple(
        (known.n_tokens * old + n_tokens * new) / total
        for old, new in zip(known.weights, more, strict=True)
    )
    return LearntPredictor(
        ScorePredictor(weights, total, 0.5), before.model, before.n_texts + 1, complete=False
    )


def test_what_two_processes_add_at_once_counts_together(tmp_path: Path) -> None:
    """What two processes add counts together, though both read the file before one wrote it."""
    file = LearntFile(tmp_path / "a.predictor.json")
    begin = predictor(1)
    file.keep(begin)
    first, second = grown(begin, 300, 2), grown(begin, 240, 3)
    third = grown(first, 500, 4)
    seen: list[int] = []

    def note(joined: LearntPredictor) -> bool:
        seen.append(joined.n_texts)
        return False

    for found, known in ((first, begin), (second, begin), (third, first)):
        assert file.keep(found, known, note)
    assert seen == [3, 4, 5]
    expected = grown(grown(grown(begin, 300, 2), 240, 3), 500, 4)
    found = file.read()
    assert found is not None
    assert (found.n_texts, found.predictor.n_tokens) == (5, 480 + 300 + 240 + 500)
    for ours, theirs in zip(found.predictor.weights, expected.predictor.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_sum_of_two_processes_may_be_complete(tmp_path: Path) -> None:
    file = LearntFile(tmp_path / "a.predictor.json")
    file.keep(predictor(1))
    file.keep(predictor(2), None, lambda joined: joined.n_texts >= 4)
    found = file.read()
    assert found is not None
    assert found.complete
    assert found.n_texts == 4


def test_what_does_not_fit_together_is_replaced(tmp_path: Path) -> None:
    file = LearntFile(tmp_path / "a.predictor.json")
    smaller = dataclasses.replace(
        predictor(1),
        predictor=ScorePredictor(tuple(w[:, 1:] for w in predictor(1).predictor.weights), 500),
    )
    file.keep(smaller)
    file.keep(predictor(2))
    assert_same(file.read(), predictor(2))
    # Another process did not trust what was known, and began anew.
    known = grown(predictor(2), 900, 3)
    later = grown(known, 300, 4)
    file.keep(later, known)
    assert_same(file.read(), later)


def test_any_damage_is_noticed_and_replaced(tmp_path: Path) -> None:
    file = LearntFile(tmp_path / "a.predictor.json")
    file.keep(predictor(complete=True))
    data = file.path.read_bytes()
    for at in range(0, len(data), 7):
        changed = bytearray(data)
        changed[at] ^= 1
        for damaged in (bytes(changed), data[:at]):
            file.path.write_bytes(damaged)
            with pytest.raises(ProfileError, match=r"a\.predictor\.json: is damaged"):
                file.read()
    assert file.keep(predictor(2), predictor())
    assert_same(file.read(), predictor(2))


@pytest.mark.parametrize(
    "change",
    [
        {"format_version": 2},
        {"complete": 1},
        {"n_tokens": 0},
        {"correlation": 1.5},
        {"shapes": [[2, 5], [3, 6]]},
        {"shapes": [[2, -5], [3, 7]]},
        {"shapes": 3},
        {"weights": "AAAA"},
        {"weights": 5},
        {"more": 1},
    ],
)
def test_impossible_values_with_a_right_checksum_are_refused(
    change: dict[str, object], tmp_path: Path
) -> None:
    file = LearntFile(tmp_path / "a.predictor.json")
    content = json.dumps({**predictor().to_json(), **change}).encode()
    checksum = hashlib.sha256(content).hexdigest().encode()
    file.path.write_bytes(checksum + b"\n" + content + b"\n")
    with pytest.raises(ProfileError, match="is damaged, or of another version"):
        file.read()


@pytest.mark.parametrize("weight", [np.nan, np.inf, 2 * MOST_WEIGHT])
def test_impossible_weights_are_refused(weight: float) -> None:
    value = predictor()
    data = value.to_json()
    changed = [of_layer.copy() for of_layer in value.predictor.weights]
    changed[1][2, 3] = weight
    object.__setattr__(value.predictor, "weights", tuple(changed))
    data["weights"] = value.to_json()["weights"]
    with pytest.raises(ProfileError):
        LearntPredictor.from_json(data, "a file")


def test_a_file_without_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LearntFile(tmp_path / "a.predictor.json")
    file.keep(predictor())
    monkeypatch.setattr(learnt, "MOST_BYTES", 100)
    with pytest.raises(ProfileError, match="too large"):
        file.read()


def test_writers_at_once_leave_one_complete_file(tmp_path: Path) -> None:
    file = LearntFile(tmp_path / "a.predictor.json")
    threads = [
        threading.Thread(target=file.keep, args=(predictor(seed, complete=seed % 2 == 0),))
        for seed in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = file.read()
    assert found is not None
    assert found.complete
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "a.predictor.json"]


def test_every_quantisation_of_the_same_weights_has_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache(monkeypatch, tmp_path)
    paths = {name: tmp_path / f"{name}.gguf" for name in ("F32", "Q8_0", "trained", "larger")}
    for name in ("F32", "Q8_0"):
        write_llama(paths[name], weight_type=name, head_dim=32)
    data = bytearray(paths["F32"].read_bytes())
    data[HeaderReader(paths["F32"]).places["output_norm.weight"].offset] ^= 1
    paths["trained"].write_bytes(data)
    write_llama(paths["larger"], weight_type="F32", head_dim=32, n_layer=3)
    files = {name: LearntFile.of(read_geometry(path)).path for name, path in paths.items()}
    assert files["F32"] == files["Q8_0"]
    assert len(set(files.values())) == 3
    LearntFile(files["F32"]).keep(predictor())
    assert_same(find_learnt(read_geometry(paths["Q8_0"])), predictor())
    assert find_learnt(read_geometry(paths["trained"])) is None


def test_they_are_listed_and_removed_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_cache(monkeypatch, tmp_path)
    assert list(learnt_files()) == []
    for name in ("a", "b", "c"):
        made = dataclasses.replace(predictor(), model=f"model {name}")
        LearntFile(folder / f"{name}.predictor.json").keep(made)
    (folder / "c.predictor.json").write_text("{")
    assert [file.path.name[0] for file in learnt_files()] == ["a", "b", "c"]
    assert [path.name[0] for path in remove_learnt(["model b"])] == ["b"]
    assert remove_learnt(["model b"]) == []
    assert [path.name[0] for path in remove_learnt(["c.predictor.json"])] == ["c"]
    assert [path.name[0] for path in remove_learnt([])] == ["a"]
    assert list(learnt_files()) == []


def test_nobody_needs_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    write_llama(tmp_path / "model.gguf", head_dim=32)
    monkeypatch.setattr("entropykv.system.cache_folder", no_home)
    assert find_learnt(read_geometry(tmp_path / "model.gguf")) is None
    assert list(learnt_files()) == []
