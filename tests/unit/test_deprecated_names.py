"""Names of the previous release still work, with a warning that says the new name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entropykv import CacheOptions, Pool, Session
from entropykv.cli import main, parser_with
from entropykv.policy.names import policy_named
from entropykv.session import pool as pool_module
from entropykv.session.model_runner import ModelRunner


@pytest.mark.parametrize("make", [CacheOptions, lambda **given: CacheOptions.of(None, given)])
def test_options_are_taken_by_their_earlier_names(make: Any) -> None:
    with pytest.warns(DeprecationWarning, match="park_limit is called swap_limit"):
        options = make(park_limit="3MiB")
    assert options == CacheOptions(swap_limit="3MiB")


@pytest.mark.parametrize(
    ("earlier", "current"),
    [("freeze:products", "rolling-freeze:products"), ("adaptive-heads", "adaptive")],
)
def test_a_policy_is_taken_by_its_earlier_name(earlier: str, current: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{current} since version 0.2.0"):
        policy = policy_named(earlier, None, "headwise")
    assert policy == policy_named(current, None, "headwise")


def test_commands_say_once_that_a_policy_is_deprecated(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python hides DeprecationWarnings of packages from those who only run commands."""
    assert main(["plan", "-m", str(tiny_llama), "--policy", "adaptive-heads"]) == 0
    assert capsys.readouterr().err == (
        "entropykv: policy adaptive-heads is called adaptive since version 0.2.0, and goes with "
        "the next release\n"
    )


@pytest.mark.parametrize(("earlier", "current"), [("park", "swap"), ("park_limit", "swap_limit")])
def test_serve_takes_earlier_names_of_options(earlier: str, current: str) -> None:
    pytest.importorskip("llama_cpp.server.settings")
    flag = f"--{earlier.replace('_', '-')}"
    with pytest.warns(DeprecationWarning, match=f"{flag} is called --{current}".replace("_", "-")):
        options = parser_with(["serve"])[0].parse_args(["serve", "-m", "x.gguf", flag, "ram"])
    assert getattr(options, current) == "ram"


def test_attributes_have_their_earlier_names(tiny_llama: Path) -> None:
    with Pool(tiny_llama, n_ctx=64, kv_budget=1.0, n_threads=1, n_sequences=1) as pool:
        session = pool.session()
        with pytest.warns(DeprecationWarning, match=r"Session\.recipe is called config"):
            assert session.recipe is session.config
        with pytest.warns(DeprecationWarning, match=r"Pool\.host is called runner"):
            assert isinstance(pool.host, ModelRunner)
        session.decode([1, 2, 3])
        with pytest.warns(DeprecationWarning, match=r"Session\.park is called swap_out"):
            session.park()
        with pytest.warns(DeprecationWarning, match="standing is called pool_status"):
            assert session.standing().is_swapped_out
        with pytest.warns(DeprecationWarning, match=r"PoolStats\.parked is called swapped_out"):
            assert pool.stats().parked == 1
        with pytest.warns(DeprecationWarning, match="parked_bytes is called swapped_bytes"):
            assert pool.stats().parked_bytes == pool.stats().swapped_bytes


def test_sessions_of_a_pool_have_no_class_of_their_own_any_more(tiny_llama: Path) -> None:
    with pytest.warns(DeprecationWarning, match="PoolSession is called Session"):
        earlier = pool_module.PoolSession
    assert earlier is Session
    with Pool(tiny_llama, n_ctx=64, kv_budget=1.0, n_threads=1, n_sequences=1) as pool:
        assert type(pool.session()) is Session
    with pytest.raises(AttributeError, match="no attribute 'Pond'"):
        pool_module.Pond  # noqa: B018
