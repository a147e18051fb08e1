"""Options of `entropykv serve` work: those named as in llama-server and llama_cpp.server, and those
of the recovery ladder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from entropykv.cli.parser import CommandParser
from entropykv.cli.serve import add_serve
from entropykv.cli.served_models import models_of, read_options
from entropykv.errors import SettingsError
from entropykv.model.shipped import DEMOS
from entropykv.server import ModelOptions, ServerOptions, create_app
from entropykv.server.models.loading import path_of
from entropykv.settings.cores import usable_cores
from tests.support.running_server import KEY, MODEL, Server
from tests.support.served import ORIGIN, client_of, served


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from served("--alias", "tiny", "--cors-origins", ORIGIN, "--api-key", KEY)


def options_of(*given: str) -> Any:
    parser = CommandParser(prog="entropykv")
    add_serve(parser.add_subparsers())
    return parser.parse_args(["serve", *given])


@pytest.mark.parametrize(
    ("spellings", "field", "value"),
    [
        (("-m", "--model"), "model", ["x.gguf"]),
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
        given = value[0] if isinstance(value, list) else value
        assert getattr(options_of(spelling, str(given)), field) == value


def test_options_without_a_value_switch_what_they_name() -> None:
    assert options_of("--show-text").show_text == "true"
    assert options_of("--no-shared-prefixes").shared_prefixes is False
    assert options_of().shared_prefixes is options_of().show_text is None


@pytest.mark.parametrize("again", ["-a", "--alias"])
def test_a_second_value_is_refused_in_a_sentence(again: str) -> None:
    with pytest.raises(SettingsError, match="is given twice"):
        options_of("-a", "one", again, "two")


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["-ngl", "all"], {"n_gpu_layers": -1}),
        (["-ngl", "auto"], {"n_gpu_layers": -1}),
        (["-fa"], {"flash_attn": True}),
        (["-fa", "auto"], {"flash_attn": True}),
        (["-fa", "off"], {"flash_attn": False}),
        (["-v"], {"verbose": True}),
        (["--verbose", "--ui"], {"verbose": True, "web": True}),
        (["--no-ui"], {"web": False}),
        (["-ctk", "q8_0", "-ctv", "iq4_nl"], {"type_k": 8, "type_v": 20}),
        (["--keep", "2"], {"sinks": 4}),
        (["--keep", "64"], {"sinks": 64}),
        (["-sm", "row", "-ts", "3,1", "-mg", "1"], {"split_mode": 2, "tensor_split": [3.0, 1.0]}),
        (["--tensor_split", "3", "1"], {"tensor_split": [3.0, 1.0]}),
        (
            ["--override-kv", "a=int:1", "--override-kv", "b=int:2"],
            {"kv_overrides": ["a=int:1", "b=int:2"]},
        ),
        (["-ctxcp", "0", "-cram", "8"], {"checkpoints": "0", "swap_limit": f"{8 << 20}B"}),
        (
            ["--ctx-checkpoints", "32", "--cache-ram", "-1"],
            {"checkpoints": "64MiB", "swap_limit": f"{1 << 60}B"},
        ),
        (["-lm", "none"], {"use_mmap": False, "use_mlock": False}),
        (["-lm", "mlock"], {"use_mmap": False, "use_mlock": True}),
        (
            ["--rope-scaling", "yarn", "--rope-scale", "4"],
            {"rope_scaling_type": 2, "rope_freq_scale": 0.25},
        ),
        (["--numa", "distribute"], {"numa": 1}),
        (["-to", "30"], {"client_seconds": 30}),
        (
            ["--temp", "0.6", "--top-k", "20", "--min-p", "0"],
            {"temperature": 0.6, "top_k": 20, "min_p": 0.0},
        ),
        (["-n", "-1", "-r", "END", "-r", "stop"], {"max_tokens": -1, "stop": ["END", "stop"]}),
        (["--spec-type", "draft-simple", "-md", "d.gguf"], {"spec_type": "draft"}),
        *[
            (["--spec-type", f"ngram-{kind}"], {"spec_type": "ngram"})
            for kind in ("simple", "map-k", "map-k4v", "mod", "cache")
        ],
    ],
    ids=str,
)
def test_words_of_llama_server_mean_what_they_mean_there(
    words: list[str], fields: dict[str, Any]
) -> None:
    found = options_of("-m", "x.gguf", *words)
    assert {name: getattr(found, name) for name in fields} == fields
    server = read_options(ServerOptions, found)
    model = models_of(found, server, CommandParser())
    for name, value in fields.items():
        assert getattr(model if hasattr(model, name) else server, name) == value


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        (["-ctk", "q4_0"], "as one of f16, q8_0, q8_0/iq4_nl"),
        (["--cache-ram", "-7"], "whole number"),
        (["--cache-ram", str(2**60)], "whole number"),
        (["--rope-scale", "0"], "above 0"),
        (["-sm", "sideways"], "row"),
        (["--flash-attn", "perhaps"], "neither on nor off"),
        (["-ts", "1,x"], "such as 3,1"),
        (["--chat-template-file", "/no/such/file"], "/no/such/file"),
        (["--keep", "-1"], "give a number"),
    ],
    ids=str,
)
def test_other_words_are_refused_in_a_sentence(words: list[str], way_out: str) -> None:
    with pytest.raises(SettingsError, match=way_out):
        options_of("-m", "x.gguf", *words)


async def test_what_requests_leave_out_comes_from_the_command_line(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m['content'] }}{% endfor %} {{ mood }}", encoding="utf-8"
    )
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 3, "n_ctx": 512}
    model = ModelOptions(
        model=str(MODEL),
        n_threads=1,
        chat_template=template.read_text(encoding="utf-8"),
        chat_template_kwargs={"mood": "cheerfully"},
        **options,
    )

    app = create_app(model, ServerOptions())
    texts: list[str] = []
    async with client_of(app) as client:
        for _ in range(2):  # Both requests are greedy.
            answer = await client.post("/v1/completions", json={"prompt": "The old"})
            assert answer.json()["usage"]["completion_tokens"] == 3
            texts.append(answer.json()["choices"][0]["text"])
        longer = await client.post("/v1/completions", json={"prompt": "The old", "max_tokens": 5})
        assert longer.json()["usage"]["completion_tokens"] == 5
        chat = {"messages": [{"role": "user", "content": "The old"}]}
        answer = await client.post("/v1/chat/completions", json=chat)
        tokens = app.state.engine.model.tokenize("The old cheerfully")
        assert answer.json()["usage"]["prompt_tokens"] == len(tokens)
        assert answer.json()["usage"]["completion_tokens"] == 3
        props = (await client.get("/props")).json()
        assert props["chat_template"] == model.chat_template
        assert props["default_generation_settings"]["params"]["temperature"] == 0.0
    app.state.engine.close()
    assert texts[0] == texts[1]
    with pytest.raises(SettingsError, match="--chat-template-file"):
        create_app(
            ModelOptions(model=str(MODEL), n_ctx=512, chat_template="{% for %}"), ServerOptions()
        )
    with pytest.raises(SettingsError, match="no chat template named 'nonsense'"):
        create_app(
            ModelOptions(model=str(MODEL), n_ctx=512, chat_template="nonsense"), ServerOptions()
        )


def test_threads_are_as_run_has_them() -> None:
    assert ModelOptions(model="m", n_threads=-1).n_threads == usable_cores()
    assert ModelOptions(model="m", n_threads=3).n_threads_batch == 3
    assert ModelOptions(model="m", n_threads=3, n_threads_batch=2).n_threads_batch == 2


def test_a_model_without_an_alias_has_the_name_of_its_file() -> None:
    assert ModelOptions(model="/somewhere/file.gguf").served_name == "file.gguf"


async def test_the_ladder_is_climbed_and_shown() -> None:
    options = {"freeze": "ram", "kv_budget": "32", "recovery": "full", "recovery_deviations": 0.01}

    app = create_app(ModelOptions(model=str(MODEL), n_threads=1, **options), ServerOptions())
    body = {"prompt": "Another text " * 40, "max_tokens": 60, "temperature": 2.0, "seed": 1}
    async with client_of(app) as client:
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        climbs = (await client.get("/v1/kv")).json()["climbs"]
    app.state.engine.close()
    assert climbs
    assert climbs.keys() <= {"soft", "window", "full"}


@pytest.mark.parametrize("options", [{"recovery": "full"}, {"recovery_window": 3}])
def test_a_ladder_that_would_change_nothing_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"--freeze ram|--recovery soft"):
        create_app(ModelOptions(model=str(MODEL), **options), ServerOptions())


def test_a_model_of_this_machine_is_served_by_its_name() -> None:
    options = ModelOptions(model="bitnet")
    assert path_of(options) == DEMOS["bitnet"].path
    assert options.served_name == "bitnet"
    assert path_of(ModelOptions(model="no-such-name")) == Path("no-such-name")
