"""Options of `entropykv serve`: the names of both servers, and the recovery ladder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from entropykv.cli.instead import AT_SERVE, INSTEAD
from entropykv.cli.parser import CommandParser
from entropykv.cli.serve import add_serve
from entropykv.errors import SettingsError
from entropykv.server import ModelOptions, ServerOptions, create_app
from entropykv.settings.cores import usable_cores
from tests.support.running_server import KEY, MODEL, Server
from tests.support.served import ORIGIN, served


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from served("--alias", "tiny", "--cors-origins", ORIGIN, "--api-key", KEY)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made


# --- the command ----------------------------------------------------------------------------------


def options_of(*given: str) -> Any:
    parser = CommandParser(prog="entropykv")
    add_serve(parser.add_subparsers(), chosen=True)
    return parser.parse_args(["serve", *given])


@pytest.mark.parametrize(
    ("spellings", "field", "value"),
    [
        (("-m", "--model"), "model", "x.gguf"),
        (("-c", "--ctx-size", "--n_ctx", "--n-ctx"), "n_ctx", 4096),
        (("-b", "--batch-size", "--n_batch"), "n_batch", 64),
        (("-ub", "--ubatch-size", "--n_ubatch"), "n_ubatch", 32),
        (("-t", "--threads", "--n_threads"), "n_threads", 2),
        (("-tb", "--threads-batch", "--n_threads_batch"), "n_threads_batch", 2),
        (("-np", "--parallel"), "parallel", 1),
        (("--host",), "host", "0.0.0.0"),  # noqa: S104
        (("--port",), "port", 8080),
        (("--api-key", "--api_key"), "api_key", "key"),
        (("--api-key-file", "--api_key_file"), "api_key_file", "keys"),
        (("--show-text", "--show_text"), "show_text", "true"),
        (("-a", "--alias", "--model_alias", "--model-alias"), "model_alias", "name"),
        (("-ngl", "--gpu-layers", "--n_gpu_layers", "--n-gpu-layers"), "n_gpu_layers", 1),
        (("-s", "--seed"), "seed", 3),
        (("--cors-origins", "--cors_origins"), "cors_origins", "*"),
    ],
)
def test_options_have_the_names_of_both_servers(
    spellings: tuple[str, ...], field: str, value: object
) -> None:
    for spelling in spellings:
        assert getattr(options_of(spelling, str(value)), field) == value


def test_options_without_a_value_switch_what_they_name() -> None:
    assert options_of("--show-text").show_text == "true"
    assert options_of("--no-shared-prefixes").shared_prefixes is False
    assert options_of().shared_prefixes is options_of().show_text is None


@pytest.mark.parametrize("again", ["-m", "--model"])
def test_a_second_model_is_refused_in_a_sentence(again: str) -> None:
    with pytest.raises(SettingsError, match="is given twice"):
        options_of("-m", "a.gguf", again, "b.gguf")


def test_options_that_serve_has_not_say_what_to_do() -> None:
    assert AT_SERVE["-ctk"] == "K and V have one type; use --kv-type"
    assert AT_SERVE["-cb"] != INSTEAD["-cb"]
    for flag in (AT_SERVE.keys() - INSTEAD.keys()) | {"-hft", "-cb", "-md"}:
        with pytest.raises(SettingsError) as refused:
            options_of("-m", "a.gguf", flag, "value")
        assert f"{flag} is not an option of entropykv serve; {AT_SERVE[flag]}" == str(refused.value)


def test_threads_are_as_run_has_them() -> None:
    assert ModelOptions(model="m", n_threads=-1).n_threads == usable_cores()
    assert ModelOptions(model="m", n_threads=3).n_threads_batch == 3
    assert ModelOptions(model="m", n_threads=3, n_threads_batch=2).n_threads_batch == 2


def test_a_model_without_an_alias_has_the_name_of_its_file() -> None:
    assert ModelOptions(model="/somewhere/file.gguf").served_name == "file.gguf"


# --- freezing and recovery ------------------------------------------------------------------------


def test_the_ladder_is_climbed_and_shown() -> None:
    options = {"freeze": "ram", "kv_budget": "32", "recovery": "full", "recovery_deviations": 0.01}

    async def talk() -> dict[str, int]:
        app = create_app(ModelOptions(model=str(MODEL), n_threads=1, **options), ServerOptions())
        transport = httpx.ASGITransport(app)
        body = {"prompt": "Another text " * 40, "max_tokens": 60, "temperature": 2.0, "seed": 1}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            climbs = (await client.get("/v1/kv")).json()["climbs"]
        app.state.engine.close()
        return dict(climbs)

    climbs = asyncio.run(talk())
    assert climbs
    assert climbs.keys() <= {"soft", "window", "full"}


@pytest.mark.parametrize("options", [{"recovery": "full"}, {"recovery_window": 3}])
def test_a_ladder_that_would_change_nothing_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"--freeze ram|--recovery soft"):
        create_app(ModelOptions(model=str(MODEL), **options), ServerOptions())
