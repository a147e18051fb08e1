"""Texts are chosen, rows averaged, results read and profiles shown correctly, without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv.calibration.measure import CalibrationSettings, correlation, measure, quarter_rows
from entropykv.calibration.results import read_results
from entropykv.calibration.texts import (
    HELD_BACK_SHARE,
    LEAST_PIECE,
    Excerpt,
    choose_sequences,
    hold_back,
    long_sequences,
)
from entropykv.cli.profile import compare, format_profile
from entropykv.errors import (
    CalibrationError,
    ContextError,
    EntropyKVError,
    ProfileError,
    SettingsError,
)
from entropykv.evaluation.texts import Text, read_texts
from entropykv.profile.profile import EntropyProfile
from entropykv.report.figures import profile_figure
from tests.support.profiles import example

SIZES = {"a": 50, "b": 9, "c": 30, "d": 20}
TEXTS = [Text(f"{letter}.txt", letter * size) for letter, size in SIZES.items()]


def tokenize(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_the_shipped_texts_are_installed() -> None:
    texts = read_texts(None)
    assert len(texts) == 20
    assert all(len(text.content.split()) > 500 for text in texts)


@pytest.mark.parametrize(
    ("n_tokens", "rows"), [(128, [31, 63, 95, 127]), (4, [0, 1, 2, 3]), (10, [2, 4, 7, 9])]
)
def test_quarters_by_hand(n_tokens: int, rows: list[int]) -> None:
    assert quarter_rows(n_tokens) == rows


@given(st.integers(4, 5000))
def test_quarters_are_four_rows_the_last_one_included(n_tokens: int) -> None:
    rows = quarter_rows(n_tokens)
    assert len(set(rows)) == 4
    assert rows == sorted(rows)
    assert rows[0] >= 0
    assert rows[3] == n_tokens - 1


def chosen(n_sequences: int, max_length: int, seed: int = 0) -> list[Excerpt]:
    return choose_sequences(
        TEXTS, tokenize, n_sequences=n_sequences, max_length=max_length, seed=seed
    )


def test_the_beginning_of_every_text_comes_first() -> None:
    excerpts = chosen(4, 10)
    assert sorted(len(excerpt.tokens) for excerpt in excerpts) == [9, 10, 10, 10]
    assert len({excerpt.name for excerpt in excerpts}) == 4
    assert [excerpt.half for excerpt in excerpts] == [0, 1, 0, 1]
    more = chosen(100, 10)
    assert more[:4] == excerpts
    assert len(more) == 1 + 5 + 3 + 2
    assert sum(len(excerpt.tokens) for excerpt in more) == 109
    for excerpt in more:  # The two halves consist of different texts.
        assert excerpt.half == next(e.half for e in excerpts if e.tokens[0] == excerpt.tokens[0])


def test_the_seed_permutes_the_texts() -> None:
    orders = {tuple(e.name for e in chosen(2, 10, seed)) for seed in range(20)}
    assert len(orders) > 3
    assert chosen(3, 10, 5) == chosen(3, 10, 5)


def test_long_texts_are_joined() -> None:
    def of(n_sequences: int, length: int) -> list[tuple[int, ...]]:
        return long_sequences(TEXTS, tokenize, n_sequences=n_sequences, length=length, seed=0)

    assert [len(tokens) for tokens in of(3, 30)] == [30] * 3
    assert [len(tokens) for tokens in of(1, 70)] == [70]
    assert [len(tokens) for tokens in of(3, 90)] == [90]
    assert [len(tokens) for tokens in of(1, 1000)] == [50 + 9 + 30 + 20 + 6]
    assert of(0, 30) == []
    assert long_sequences(TEXTS[1:2], tokenize, n_sequences=1, length=99, seed=0) == []


def test_mixed_texts_represent_as_many_texts_as_possible() -> None:
    """Mixed texts come from as many files as possible, because a predictor of code alone predicts
    prose badly.
    """
    texts = [Text(letter, f"{letter * 9} " * 200) for letter in "abcdefgh"]
    sizes = {"n_sequences": 2, "seed": 0}
    found = long_sequences(texts, tokenize, length=4 * LEAST_PIECE, mixed=True, **sizes)
    assert [len(tokens) for tokens in found] == [4 * LEAST_PIECE] * 2
    letters = [{chr(token) for token in tokens} - set(" \n") for tokens in found]
    assert [len(of) for of in letters] == [4, 4]
    assert letters[0] | letters[1] == set("abcdefgh")
    for tokens in found:
        first, *others = "".join(map(chr, tokens)).split("\n\n")
        assert LEAST_PIECE - 10 <= len(first) <= LEAST_PIECE
        assert len(others) == 3
        assert first.endswith(first[0] * 9)  # Words are whole.
    for length, mixed in ((2 * LEAST_PIECE - 1, True), (4 * LEAST_PIECE, False)):
        whole = long_sequences(texts, tokenize, length=length, mixed=mixed, **sizes)
        assert [len(set(map(chr, tokens)) - {" "}) for tokens in whole] == [1, 1]


@pytest.mark.parametrize("content", [b"", b"  \n", b"\xff\xfe\xff"])
def test_texts_that_cannot_be_used(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(ContextError, match=r"bad\.txt"):
        read_texts([path])
    with pytest.raises(CalibrationError, match=r"x\.txt: has 3 tokens"):
        choose_sequences([Text("x.txt", "abc")], tokenize, n_sequences=1, max_length=9, seed=0)


@pytest.mark.parametrize(
    "field",
    [
        {"n_sequences": 0},
        {"max_length": 3},
        {"seed": -1},
        {"rows": "some"},
        {"curve_length": 63},
        {"curve_texts": -1},
        {"n_threads": -1},
    ],
)
def test_impossible_settings_are_named(field: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(field))):
        CalibrationSettings(**field)


def test_means_spread_and_stability() -> None:
    """Mean, spread and stability are right for known entropies: (n + 1) * (head + 1) * t / 100 in
    row t of text n.
    """
    excerpts = [Excerpt(str(n), tuple([n] * 8), n % 2) for n in range(4)]

    def entropies(tokens: Any) -> Any:
        rows = np.arange(len(tokens)) / 100 * (tokens[0] + 1)
        return np.broadcast_to(rows[None, :, None] * np.array([1, 2]), (3, 8, 2)).astype(np.float32)

    seen: list[int] = []
    measured = measure(entropies, excerpts, seen.append)
    assert seen == [8] * 4
    by_quarters = measured.summary(CalibrationSettings(), "f16")
    np.testing.assert_allclose(by_quarters.quarters[0], [0.04 * 2.5, 0.08 * 2.5], rtol=1e-5)
    np.testing.assert_allclose(by_quarters.all_rows[0], [0.035 * 2.5, 0.07 * 2.5], rtol=1e-5)
    np.testing.assert_allclose(
        by_quarters.spread[0], np.std([0.04, 0.08, 0.12, 0.16]) * np.arange(1, 3), rtol=1e-5
    )
    assert by_quarters.stability == pytest.approx(1.0)
    by_rows = measured.summary(CalibrationSettings(rows="all"), "f16")
    np.testing.assert_allclose(by_rows.spread * 4, by_quarters.spread * 3.5, rtol=1e-5)
    alone = measure(entropies, excerpts[:1], seen.append).summary(CalibrationSettings(), "f16")
    assert alone.stability is None
    with pytest.raises(CalibrationError, match="not numbers"):
        measure(lambda t: entropies(t) * np.float32("nan"), excerpts, seen.append)


def test_correlation() -> None:
    a = np.array([[1.0, 2.0], [4.0, 3.0]])
    assert correlation(a, 2 * a + 1) == pytest.approx(1.0)
    assert correlation(a, -a) == pytest.approx(-1.0)
    assert correlation(a, np.ones((2, 2))) is None


@pytest.mark.parametrize(
    "content",
    [
        {"head_entropies": {"L0_H0": 1.0, "L0_H1": 2.5}},
        {"L0_H0": 1.0, "layer0_head1": [2.0, 3.0]},
        {"results": [[1.0, {"mean_entropy": 2.5}]], "model": "m", "n_ctx": 64},
        [[{"mean": [0.5, 1.5]}, 2.5]],
    ],
)
def test_results_of_any_usual_shape(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    profile = read_results(path)
    np.testing.assert_allclose(profile.head_entropies, [[1.0, 2.5]])
    assert profile.n_head_kv == 2
    assert "results.json" in profile.source


def test_a_profile_is_a_result_too(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    example().save(path)
    assert read_results(path).to_dict() == example().to_dict()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ('{"head_entropies": {"L0_H0": 1.0', "is not JSON"),
        ("{}", "holds no entropies"),
        ("5", "holds no entropies"),
        ('{"L0_H0": NaN}', "L0_H0 must be a number"),
        ('{"L0_H0": -1}', "L0_H0 must be a number"),
        ('{"L0_H0": []}', "L0_H0 must be a number"),
        ('{"L0_H0": {"median": 1}}', "L0_H0 must be a number"),
        ("[[1, 2], [3, null]]", "entropies[1][1] must be a number"),
        ("[[1, 2], [3]]", "lacks L1_H1"),
        ('{"model": "x"}', "'model' is not the name of a query head"),
        ('{"head_entropies": {"L0_H0": 1}, "n_layer": 2}', "lacks L1_H0"),
    ],
)
def test_bad_results_are_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(EntropyKVError, match=r"results\.json") as caught:
        read_results(path)
    assert message in str(caught.value)


def test_the_table_names_every_head_and_budget() -> None:
    text = format_profile(example())
    for part in ("0.25s", "5.00d", "1.50m", "r = 0.900", "policy entropy", "policy profile", "0.1"):
        assert part in text, text
    plain = EntropyProfile(2, 4, 2, 128, example().head_entropies)
    assert "policy profile" not in format_profile(plain)
    assert "predict" not in format_profile(plain)


def test_the_table_shows_where_heads_look_things_up() -> None:
    lines = format_profile(example()).splitlines()
    assert lines[0].endswith("scores from 1,976 tokens, r = 0.750 in text that was held back")
    assert [line.split() for line in lines[-3:]] == [
        ["layer", "mean", "KV", "heads"],
        ["0", "12", "0", "25"],
        ["1", "28", "50", "5"],
    ]


def test_comparing_two_profiles() -> None:
    first = example()
    changed = first.head_entropies.copy()
    changed[1, 2] += 1.5
    second = EntropyProfile(2, 4, 2, 128, changed)
    lines = compare(first, second, most=2).splitlines()
    r = np.corrcoef(first.head_entropies.ravel(), changed.ravel())[0, 1]
    assert f"correlation {r:.4f}" in lines[0]
    assert "0.1875 bits, 1 of 8" in lines[0]
    assert lines[2] == "  L1_H2: 3.000 -> 4.500 (+1.500)"
    assert len(lines) == 4
    with pytest.raises(ProfileError, match="head_entropies"):
        compare(first, EntropyProfile(1, 4, 2, 128, np.ones((1, 4))))


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plots(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws")
    from entropykv.cli.plots import draw  # noqa: PLC0415

    path = tmp_path / f"profile.{suffix}"
    draw(lambda: profile_figure(example()), path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    assert len(content) > 5000


def test_plots_that_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from entropykv.cli.plots import check_plot  # noqa: PLC0415

    with pytest.raises(SettingsError, match=r"\.png or \.svg"):
        check_plot(tmp_path / "a.pdf")
    with pytest.raises(SettingsError, match="existing directory"):
        check_plot(tmp_path / "none" / "a.png")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=r"entropykv\[plot\]"):
        check_plot(tmp_path / "a.png")


def test_texts_are_held_back_whole_or_in_part() -> None:
    many = [Text(str(i), f"{i} " * 50) for i in range(23)]
    kept, held = hold_back(many, len, 100, seed=0, most=6)
    assert len(held) == 6
    assert [text for text in many if text not in held] == kept
    assert hold_back(many, len, 100, seed=0, most=6) == (kept, held)
    assert hold_back(many, len, 100, seed=1, most=6)[1] != held
    assert hold_back(many, len, 100, seed=0, most=0) == (many, [])
    assert len(hold_back(many[:10], len, 100, seed=0, most=6)[1]) == int(10 * HELD_BACK_SHARE)
    few = [Text("long", "a" * 300 + "b" * 100), Text("short", "c" * 396)]
    assert hold_back(few, len, 100, seed=0, most=6) == (
        [Text("long", "a" * 300), Text("short", "c" * 396)],
        [Text("long", "b" * 100)],
    )


def test_texts_too_short_to_compare_on_are_not_held_back() -> None:
    texts = [Text(str(i), "a" * (99 if i else 100)) for i in range(10)]
    kept, held = hold_back(texts, len, 100, seed=0, most=6)
    assert held == texts[:1]
    assert kept == texts[1:]
