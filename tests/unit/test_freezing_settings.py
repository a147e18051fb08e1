"""Settings of freezing have limits, can be given as options, and reach a session."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropykv import EntropyLlama, Freezing, Session, SettingsError, UnsupportedModelError
from entropykv.cli.options import add_freeze_options
from entropykv.policy.resolved_config import freezing_of
from entropykv.settings.freezing import COLD_CHOICES
from entropykv.settings.options import KV_TYPES, Budget, parse_bytes


def test_the_defaults_are_the_document_s() -> None:
    freezing = Freezing()
    assert (freezing.window, freezing.rate) == (32, 2.0)
    # Without a value, the threshold depends on the measure: it is 0.5 for |q.k|, the measure of
    # Metinov et al.
    assert freezing.threshold is None
    assert freezing.recall_interval == 1
    assert (freezing.where, freezing.directory, freezing.limit_bytes) == ("ram", None, None)


@pytest.mark.parametrize(
    ("value", "directory"),
    [("ram", None), ("disk:/var/cold", "/var/cold"), ("disk:a b:c", "a b:c")],
)
def test_where_it_is_kept(value: str, directory: str | None) -> None:
    freezing = Freezing.parse(value)
    assert freezing is not None
    assert (freezing.where, freezing.directory) == (value, directory)
    assert Freezing.parse(freezing) is freezing
    assert Freezing.parse(None) is None


@pytest.mark.parametrize("value", ["", "disk", "disk:", "RAM", "cold", 5, True, Path("disk:x")])
def test_places_that_are_none(value: Any) -> None:
    with pytest.raises(SettingsError, match=r"freeze cannot be .*ram"):
        Freezing.parse(value)


@given(st.integers(1, 2**30), st.sampled_from(["B", "KiB", "MB", "gib"]))
def test_sizes_are_read_as_those_of_a_budget(number: int, unit: str) -> None:
    text = f"{number} {unit}"
    n_bytes = parse_bytes(text)
    assert Freezing(limit=text).limit_bytes == n_bytes == Budget.parse(text).value
    assert Freezing(limit=n_bytes).limit_bytes == n_bytes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"limit": "1000"}, "limit of frozen entries cannot be '1000'; give bytes such as"),
        ({"limit": "0MiB"}, "give bytes"),
        ({"limit": 0}, "give bytes"),
        ({"limit": True}, "give bytes"),
        ({"limit": 1.5}, "give bytes"),
        ({"kv_type": "q5_0"}, "type of frozen entries cannot be 'q5_0'; use one of auto, f16"),
        ({"kv_type": None}, "use one of auto"),
        ({"recall_interval": -1}, "recall_interval cannot be -1; use an integer of 0 or more"),
        ({"recall_interval": 1.0}, "recall_interval"),
        ({"recall_prompt": 0}, "recall_prompt cannot be 0; use an integer of 1 or more"),
        ({"window": 0}, "window of freezing cannot be 0; use an integer of 1 or more"),
        ({"history": -1}, "history of freezing"),
        ({"threshold": -0.1}, "threshold of freezing cannot be -0.1; use a number from 0 to"),
        ({"threshold": math.nan}, "threshold"),
        ({"threshold": "0.5"}, "threshold"),
        ({"rate": 0}, "rate of freezing cannot be 0; use a number from 1e-06"),
        ({"rate": math.inf}, "rate"),
        ({"rate": True}, "rate"),
    ],
)
def test_impossible_values_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Freezing(**change)


@given(st.sampled_from(COLD_CHOICES[1:]), st.sampled_from(KV_TYPES))
def test_frozen_entries_are_never_wider_than_the_store_s(cold: str, hot: str) -> None:
    bits = {"f16": (16, 16), "q8_0": (8, 8), "q4_0": (4, 4), "q8_0/iq4_nl": (8, 4)}
    freezing = Freezing(kv_type=cold)
    narrower = all(c <= h for c, h in zip(bits[cold], bits[hot], strict=True))
    # The type with only values in 4 bits needs a store of the same type.
    if narrower and (cold == hot or cold != "q8_0/iq4_nl"):
        assert freezing.type_for(hot) == cold
    else:
        with pytest.raises(SettingsError, match=f"cannot be {cold} where the store has {hot}; use"):
            freezing.type_for(hot)
    assert Freezing().type_for(hot) == hot
    assert freezing.type_for("auto") == cold  # The type of the store is not decided yet.


def parsed(*arguments: object, policy: str | list[str] = "adaptive") -> Freezing | None:
    parser = argparse.ArgumentParser()
    add_freeze_options(parser)
    options = parser.parse_args([str(argument) for argument in arguments])
    options.policy = policy
    return freezing_of(options)


SCHEDULE = ("--freeze-window", 8, "--freeze-threshold", 0.25, "--freeze-rate", 1)


def test_every_option_reaches_its_setting() -> None:
    assert parsed() is None
    assert parsed("--freeze", "ram") == Freezing()
    everything = ("--freeze", "disk:x", "--freeze-limit", "1MiB", "--freeze-type", "q4_0")
    everything += ("--recall-interval", 3, *SCHEDULE, "--freeze-history", 9, "--recall-prompt", 70)
    expected = Freezing("disk:x", "1MiB", "q4_0", 3, 8, 0.25, 1.0, 9, 70)
    # Each policy ignores some options of the other, so both are given.
    assert parsed(*everything, policy=["uniform", "rolling-freeze"]) == expected
    for field in dataclasses.fields(Freezing):
        assert getattr(expected, field.name) != field.default, field.name


def test_policy_freeze_freezes_into_memory() -> None:
    assert parsed(policy="rolling-freeze") == Freezing()
    assert parsed(*SCHEDULE, policy="rolling-freeze") == Freezing(
        window=8, threshold=0.25, rate=1.0
    )
    assert parsed("--freeze", "disk:x", policy="rolling-freeze") == Freezing("disk:x")


def test_of_several_policies_all_freeze_or_only_those_that_always_do() -> None:
    mixed = ["uniform", "rolling-freeze"]
    # A session of policy rolling-freeze freezes by default, so that nothing is set here.
    assert parsed(policy=mixed) is None
    expected = Freezing(window=8, threshold=0.25, rate=1.0)
    assert parsed("--freeze", "ram", *SCHEDULE, policy=mixed) == expected
    with pytest.raises(SettingsError, match="--freeze-rate is of no use where nothing is frozen"):
        parsed(*SCHEDULE, policy=mixed)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--freeze-limit", "1MiB"), "--freeze-limit is of no use.*give --freeze ram"),
        (("--freeze-type", "f16"), "--freeze-type is of no use"),
        (("--recall-interval", 0), "--recall-interval is of no use"),
        (("--recall-prompt", 9), "--recall-prompt is of no use"),
        (("--freeze-history", 0), "--freeze-history is of no use"),
        (
            ("--freeze", "ram", "--freeze-window", 8),
            "--freeze-window belongs to --policy rolling-freeze",
        ),
        (("--freeze", "ram", "--recall-prompt", 9, "--recall-interval", 0), "brings none back"),
        (("--freeze", ""), "freeze cannot be ''"),
        (("--freeze", "ram", "--freeze-limit", "many"), "'many'"),
    ],
)
def test_options_that_change_nothing_are_refused(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        parsed(*arguments)


def test_a_schedule_searches_no_prompts() -> None:
    with pytest.raises(SettingsError, match="--recall-prompt is of no use with --policy rolling"):
        parsed("--recall-prompt", 9, policy="rolling-freeze")


def test_a_session_knows_what_it_freezes_with(tiny_llama: Path) -> None:
    for freeze, kv_type, expected in (
        (None, "f16", None),
        ("ram", "q8_0", Freezing(kv_type="q8_0")),
        (Freezing("ram", kv_type="q4_0", window=9), "f16", Freezing(kv_type="q4_0", window=9)),
    ):
        with Session(tiny_llama, n_ctx=64, kv_type=kv_type, freeze=freeze, n_threads=1) as session:
            assert session.config.freezing == expected
            assert session.stats().freeze == (None if expected is None else "ram")
            assert (session.cache.trajectory is None) == (expected is None)
            assert session.files.settings.freeze == (expected and expected.kv_type)
    with Session(
        tiny_llama, n_ctx=64, kv_type="f16", policy="rolling-freeze", n_threads=1
    ) as session:
        assert session.config.freezing == Freezing(kv_type="f16")
        assert session.config.policy.name == "rolling-freeze"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"freeze": "ram", "store": "flat"}, "no cold storage; use --store headwise, or leave"),
        (
            {"policy": "rolling-freeze", "store": "flat"},
            "cannot follow policy rolling-freeze.*--store headwise",
        ),
        ({"freeze": "tape"}, "freeze cannot be 'tape'"),
        (
            {"freeze": Freezing(kv_type="f16"), "kv_type": "q8_0"},
            "cannot be f16 where the store has q8_0",
        ),
    ],
)
@pytest.mark.parametrize("kind", [Session, EntropyLlama])
def test_freezing_that_cannot_be_is_refused_before_the_weights_are_read(
    tiny_llama: Path,
    kind: Any,
    arguments: dict[str, Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llama_cpp.llama_model_load_from_file", None)
    with pytest.raises(SettingsError, match=words):
        kind(str(tiny_llama), n_ctx=64, **arguments)


def test_a_type_that_turns_out_too_wide_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be f16 where the store has q8_0; use"):
        Session(tiny_llama, n_ctx=64, kv_budget=0.5, freeze=Freezing(kv_type="f16"))


@pytest.mark.parametrize("arguments", [{"freeze": "ram"}, {"policy": "rolling-freeze"}])
def test_auto_does_not_go_on_without_what_was_asked_for(
    tiny_llama: Path, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_cpp.llama_model_has_encoder", lambda _: True)
    words = r"an encoder.*flat store cannot freeze: use it without --freeze"
    with pytest.raises(UnsupportedModelError, match=words):
        Session(tiny_llama, n_ctx=64, **arguments)
