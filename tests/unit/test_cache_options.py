"""CacheOptions accepts the same options at every entry point, checks them once, and resolves them
for a model and for contexts of llama.cpp.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from entropykv import (
    CacheOptions,
    ContextError,
    EntropyLlama,
    Freezing,
    Pool,
    Recovery,
    Rung,
    Session,
    SettingsError,
    _core,
    attach,
)
from entropykv.cli import main, parsers_of
from entropykv.llamacpp.context import decode_one_token
from entropykv.model.geometry import read_geometry
from entropykv.policy.resolved_config import config_for
from entropykv.settings.cache_options import CacheArguments, PoolArguments, SessionArguments
from entropykv.settings.options import KV_TYPES, Budget, declared
from tests.support import option_types

NAMES = {each.name for each in dataclasses.fields(CacheOptions) if each.init}


def test_the_names_of_arguments_are_those_of_the_fields() -> None:
    assert PoolArguments.__annotations__.keys() == NAMES


@pytest.mark.parametrize("name", option_types.SECTIONS)
def test_types_of_options_are_written_from_their_declarations(name: str) -> None:
    """The types of options are those of their declarations; `python -m tests.support.option_types`
    writes them.
    """
    assert option_types.rewritten(name) == (option_types.PACKAGE / name).read_text("utf-8")


def test_the_types_are_those_of_the_extension() -> None:
    assert list(KV_TYPES) == _core.kv_types()


def test_every_field_declares_its_help() -> None:
    assert declared(CacheOptions).keys() == NAMES
    for owner in (CacheOptions, Freezing, Recovery):
        for name, option in declared(owner).items():
            assert option.help, name
            assert option.default == getattr(owner(), name)


def test_the_command_line_has_every_flag_and_its_default() -> None:
    parsers = parsers_of(["run", "plan"])
    run = {flag: a for a in parsers["run"]._actions for flag in a.option_strings}
    plan = {flag: a for a in parsers["plan"]._actions for flag in a.option_strings}
    for name, option in declared(CacheOptions).items():
        for flag in option.flags:
            action = (run | {"-np": plan["-np"], "--parallel": plan["--parallel"]})[flag]
            said = {"kv_budget": "1.0", "n_ubatch": 512, "fixed_threads": None}
            assert action.default == said.get(name, option.default), flag
    for owner in (Freezing, Recovery):
        for option in declared(owner).values():
            for flag in option.flags:
                assert run[flag].default is None
                assert run[flag].help == f"{option.help} (default: {option.shown_default})"


def test_the_server_has_every_option_and_its_default() -> None:
    fields = pytest.importorskip("entropykv.server.options").ModelOptions.model_fields
    # The server's defaults of these two are those of llama_cpp.server.
    of_llama = ("n_ubatch", "n_gpu_layers")
    for name, option in declared(CacheOptions).items():
        assert option.server_name in fields
        if name not in of_llama:
            assert fields[option.server_name].default == option.server_default, name
    for option in (*declared(Freezing).values(), *declared(Recovery).values()):
        if option.flags and option.name != "rewalk":
            assert fields[option.name].default is None


@pytest.mark.parametrize(
    ("door", "arguments"),
    [
        (Session, SessionArguments),
        (Pool, PoolArguments),
        (EntropyLlama, PoolArguments),
        (attach, CacheArguments),
    ],
)
def test_help_lists_what_a_door_takes(door: Any, arguments: type) -> None:
    parameters = inspect.signature(door).parameters
    defaults = CacheOptions()
    for name in arguments.__annotations__:
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == getattr(defaults, name)


def test_what_is_said_is_read_once() -> None:
    options = CacheOptions(kv_budget="64MiB", freeze="ram")
    assert (options.budget, options.freezing) == (Budget("bytes", 64 << 20), Freezing("ram"))
    assert CacheOptions.of(options, {"kv_budget": 0.5}).budget == Budget("fraction", 0.5)
    assert CacheOptions.of(options, {"kv_budget": 0.5}).freezing == Freezing("ram")
    assert (CacheOptions().micro_batch, CacheOptions().pooled().micro_batch) == (512, 128)
    assert CacheOptions(n_ubatch=64).pooled().micro_batch == 64


def test_a_session_holds_one_conversation(tiny_llama: Path) -> None:
    for options in ({"n_sequences": 4}, {"swap": "disk:x"}, {"swap_limit": 100}):
        with pytest.raises(SettingsError, match=r"holds one conversation; .*make a Pool"):
            Session(tiny_llama, **options)  # type: ignore[arg-type]
    for n in (0, 257, True):
        with pytest.raises(SettingsError):
            CacheOptions(n_sequences=n)


def test_checkpoints_of_one_conversation_need_a_pool_of_one(tiny_llama: Path) -> None:
    assert CacheOptions(n_sequences=2).checkpoint_limit == "64MiB"
    assert CacheOptions(n_sequences=2, checkpoints=0).checkpoint_limit == 0
    assert CacheOptions(n_sequences=2).going_back() == CacheOptions(n_sequences=2)
    assert CacheOptions().going_back() == CacheOptions()
    assert CacheOptions(checkpoints="1MiB").going_back().n_sequences == 1
    with pytest.raises(SettingsError, match="n_sequences=1"):
        Session(tiny_llama, checkpoints="1MiB")  # type: ignore[call-arg]
    read = []
    for checkpoints in (None, "1MiB"):
        llm = EntropyLlama(
            str(tiny_llama), n_ctx=256, kv_budget=32, checkpoints=checkpoints, verbose=False
        )
        assert (llm.pool is None) == (checkpoints is None)
        prompt = [5, 6, 7, 8] * 20
        texts = []
        for _ in range(2):
            before = llm.kv_stats().prompt_tokens
            made = llm.create_completion(prompt, max_tokens=8, temperature=0.0)
            texts.append(made["choices"][0]["text"])  # type: ignore[index]
        read.append(llm.kv_stats().prompt_tokens - before)
        assert texts[0] == texts[1]
        llm.close()
    # Entries were evicted, so a session without checkpoints reads everything again.
    assert read == [80, 0]


def test_options_reach_a_session_whole(tiny_llama: Path) -> None:
    recovery = Recovery(highest=Rung.FULL)
    options = CacheOptions(n_ctx=64, kv_budget=32, freeze="ram", recovery=recovery)
    with Session(tiny_llama, options, kv_budget=16) as session:
        assert session.config.options == dataclasses.replace(options, kv_budget=16)
        assert session.recovery == recovery
        assert session.stats().kv_budget == "16"
    llm = EntropyLlama(str(tiny_llama), options, kv_budget=16, verbose=False)
    assert llm._session.config.options.budget == Budget("tokens", 16)
    assert (llm.n_ctx(), llm._session.recovery) == (64, recovery)
    llm.close()


def test_attach_leaves_to_the_model_what_is_its_own() -> None:
    with pytest.raises(SettingsError, match="n_ctx is no argument of attach"):
        attach(None, 0.2, n_ctx=64)  # type: ignore[arg-type, call-arg]


def test_a_resolved_config_says_what_a_session_follows(tiny_llama: Path) -> None:
    """Every figure of a resolved config, which needs no loaded model, is that of the session."""
    for options in (
        CacheOptions(n_ctx=96, kv_budget=0.5),
        CacheOptions(n_ctx=96, kv_budget=48, freeze="ram"),
        CacheOptions(n_ctx=96, kv_budget="1MiB", store="flat"),
        CacheOptions(policy="rolling-freeze", n_ubatch=9),
    ):
        config = config_for(options, read_geometry(tiny_llama))
        with Session(tiny_llama, options) as session:
            assert session.config == config
            assert (session.cache.store, session.config.policy) == (config.store, config.policy)
            assert session.stats().kv_type == config.kv_type
            if config.store == "headwise":
                planned = config.headwise_plan()
                assert session.stats().kv_bytes_budget == planned.pool_bytes


def test_resolving_refuses_options_that_contradict_each_other(tiny_llama: Path) -> None:
    geometry = read_geometry(tiny_llama)
    for options, error, what in (
        (CacheOptions(recovery=Recovery()), SettingsError, "nothing is; use --freeze"),
        (CacheOptions(store="flat", policy="uniform"), SettingsError, "cannot follow policy"),
        (CacheOptions(policy="nobody"), SettingsError, "policy cannot be"),
        (CacheOptions(n_ctx=10_000, n_sinks=5_000), ContextError, "too many"),
    ):
        with pytest.raises(error, match=what):
            config_for(options, geometry)


def test_plan_prints_what_run_follows(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan` prints the policy and the micro-batch of a session, which depend on freezing."""
    common = ["plan", "-m", str(tiny_llama), "-c", "96", "--kv-budget", "0.5", "--json"]
    assert main(common) == 0
    alone = json.loads(capsys.readouterr().out)
    assert main([*common, "--freeze", "ram"]) == 0
    frozen = json.loads(capsys.readouterr().out)
    assert (alone["policy"], alone["freeze"]) == ("adaptive:mass+values+predicted", None)
    assert (frozen["policy"], frozen["freeze"]) == ("uniform", "ram")
    with Session(tiny_llama, n_ctx=96, kv_budget=0.5, freeze="ram") as session:
        assert session.config.policy.name == frozen["policy"]
        assert session.reader.chunk == frozen["n_ubatch"] < alone["n_ubatch"]
        assert session.stats().kv_bytes_budget == frozen["kv_bytes_budget"]
    assert main([*common[:-1], "--store", "flat"]) == 0
    assert "by the flat store" in capsys.readouterr().out


def test_the_token_of_a_probe_lives_while_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a probe's token is not reused by objects that are made before it is decoded."""
    seen = []

    def decode(_context: Any, batch: Any) -> int:
        others = [(llama_cpp.llama_token * 1)(7) for _ in range(1000)]
        seen.append(batch.token[0])
        return len(others) - 1000

    monkeypatch.setattr(llama_cpp, "llama_decode", decode)
    assert decode_one_token(None)
    assert seen == [0]
