"""Every number that a user can give has limits, and an error names them."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

from entropykv import Budget, BudgetError, EntropyKVError, EntropyLlama, Freezing, Session
from entropykv.cli import main
from entropykv.cli.options import integer
from entropykv.errors import SettingsError
from entropykv.session.memory_plan import make_plan
from entropykv.settings.cache_options import CacheOptions
from entropykv.settings.freezing import Recovery
from entropykv.settings.options import MOST_BYTES, MOST_MICRO_BATCH, MOST_THREADS, MOST_TOKENS
from entropykv.settings.sampling import Sampling

LIMITS: tuple[tuple[str, int, int], ...] = (
    ("n_ctx", 0, MOST_TOKENS),
    ("n_ubatch", 1, MOST_MICRO_BATCH),
    ("n_threads", 0, MOST_THREADS),
    ("n_threads_batch", 0, MOST_THREADS),
    ("n_sinks", 0, MOST_TOKENS),
    ("recent_window", 1, MOST_TOKENS),
)
HUGE = (2**31 - 1, 2**31, 2**32 + 5, 2**63, 2**64, 10**400)


@pytest.mark.parametrize(("name", "least", "most"), LIMITS)
def test_settings_between_two_limits(name: str, least: int, most: int) -> None:
    for value in (least, most):
        assert getattr(CacheOptions(**{name: value}), name) == value  # type: ignore[arg-type]
    for value in (most + 1, *HUGE):
        with pytest.raises(SettingsError, match=f"^{name} cannot be {value}; use {most} or less$"):
            CacheOptions(**{name: value})  # type: ignore[arg-type]
    for value in (least - 1, -(2**63), True, 1.0, "1"):
        with pytest.raises(SettingsError, match=f"{name} cannot be .*; use an integer of {least} "):
            CacheOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "least", "most"), LIMITS)
def test_a_session_and_a_llama_refuse_before_they_read_the_weights(
    tiny_llama: Path, name: str, least: int, most: int
) -> None:
    for value in (most + 1, 2**31 - 1, 2**64, least - 1):
        with pytest.raises(SettingsError, match=f"^{name} cannot be {value}; use "):
            Session(tiny_llama, **{name: value})
        with pytest.raises(SettingsError, match=f"^{name} cannot be {value}; use "):
            EntropyLlama(str(tiny_llama), verbose=False, **{name: value})


@pytest.mark.parametrize("value", [MOST_TOKENS + 1, *HUGE, math.inf, 1e300, "1e99", "9" * 30])
def test_budgets_beyond_every_context(value: Any) -> None:
    with pytest.raises(BudgetError, match=r"a KV budget cannot be "):
        Budget.parse(value)


def test_budgets_at_their_limits() -> None:
    assert Budget.parse(MOST_TOKENS).value == MOST_TOKENS
    assert Budget.parse(f"{MOST_BYTES}B").value == MOST_BYTES
    for value in (f"{MOST_BYTES + 1}B", "999999999999999999GiB"):
        with pytest.raises(BudgetError, match=f"give {MOST_BYTES}B or less"):
            Budget.parse(value)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("limit", MOST_BYTES),
        ("recall_interval", MOST_TOKENS),
        ("recall_prompt", MOST_TOKENS),
        ("window", MOST_TOKENS),
        ("history", MOST_TOKENS),
        ("threshold", 1e9),
        ("rate", 1e6),
    ],
)
def test_freezing_between_limits(name: str, most: float) -> None:
    Freezing(**{name: most})  # type: ignore[arg-type]
    for value in (most * 2, 2**64, 10**400):
        with pytest.raises(SettingsError, match="cannot be"):
            Freezing(**{name: value})  # type: ignore[arg-type]
    if name == "rate":
        with pytest.raises(SettingsError, match="use a number from 1e-06 to 1e"):
            Freezing(rate=1e-300)


@pytest.mark.parametrize(
    "name", ["smooth", "warm_up", "memory", "refractory", "calm", "window", "rewalk"]
)
def test_recovery_between_limits(name: str) -> None:
    with pytest.raises(SettingsError, match=f"^{name} cannot be .*; use {MOST_TOKENS} or less"):
        Recovery(**{name: MOST_TOKENS + 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "hot"},
        {"top_k": -2},
        {"top_k": 2**31},
        {"top_k": 1.5},
        {"repeat_penalty": math.nan},
        {"repeat_penalty": math.inf},
        {"top_p": math.nan},
        {"min_p": math.nan},
    ],
)
def test_sampling_takes_numbers_alone(change: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(change))):
        Sampling(**change)


def test_what_a_session_is_asked_for_later(tiny_llama: Path) -> None:
    with Session(tiny_llama, n_ctx=64, freeze="ram") as session:
        session.decode([5, 6])
        for n_tokens in (-2, MOST_TOKENS + 1, 2**64, 1.5):
            with pytest.raises(SettingsError, match="max_tokens cannot be"):
                next(session.generate([7], n_tokens))  # type: ignore[arg-type]
        for window in (-1, MOST_TOKENS + 1, 2**64):
            with pytest.raises(SettingsError, match="window cannot be"):
                session.cache.thaw(window=window)
        for budget in (MOST_TOKENS + 1, 1e300, f"{2**61}B"):
            with pytest.raises(BudgetError, match="cannot be"):
                session.cache.resize(budget)
        for position in (-1, 3, 2**31, 2**64):
            with pytest.raises(EntropyKVError, match="cannot truncate to position"):
                session.text.truncate(position)
        assert session.position == 2


def test_an_impossible_budget_in_a_huge_context_is_refused_at_once(tiny_llama: Path) -> None:
    """The smallest possible budget is found at once, even in a huge context."""
    with pytest.raises(BudgetError, match="the smallest budget that holds them is 999999999 tok"):
        make_plan(
            tiny_llama,
            CacheOptions(
                n_ctx=MOST_TOKENS,
                kv_budget=100,
                policy="uniform",
                kv_type="f16",
                recent_window=999_999_995,
            ),
        )


@pytest.mark.parametrize(
    "option", ["-c", "-ub", "-t", "--sinks", "--recent-window", "-n", "--top-k", "-b", "-ngl", "-s"]
)
def test_the_command_line_says_the_limit(
    tiny_llama: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-m", str(tiny_llama), "-p", "a", option, str(10**30)]) == 2
    assert f"{10**30} is too much; give " in capsys.readouterr().err


def test_integers_of_the_command_line() -> None:
    assert integer(0, 7)("7") == 7
    for text, words in (("8", "8 is too much; give 7 or less"), ("-1", "not an integer of 0")):
        with pytest.raises(argparse.ArgumentTypeError, match=words):
            integer(0, 7)(text)
