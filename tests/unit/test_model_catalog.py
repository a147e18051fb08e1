"""A server lists the models of a directory, of a file of presets, and of the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra server")

from entropykv.cli import main
from entropykv.cli.parser import CommandParser
from entropykv.cli.serve import _parser_of_models, add_serve
from entropykv.cli.served_models import models_of, read_options
from entropykv.errors import MissingExtraError, SettingsError
from entropykv.model.identity import parts_of
from entropykv.server import ModelCatalog, ModelOptions, ServedModel, ServerOptions, create_app
from entropykv.server.models.catalog import models_in


def catalog_of(*words: object) -> Any:
    """Return what `entropykv serve` makes of arguments: a catalog, or the options of one model."""
    parser = CommandParser(prog="entropykv")
    add_serve(parser.add_subparsers())
    found: argparse.Namespace = parser.parse_args(["serve", *map(str, words)])
    return models_of(found, read_options(ServerOptions, found), _parser_of_models())


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"GGUF")


def preset(folder: Path, text: str) -> Path:
    path = folder / "models.ini"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_directory_has_its_models_by_name(tmp_path: Path) -> None:
    touch(tmp_path, "b.gguf", "a.Q4_0.gguf", "notes.txt", "mmproj-b.gguf", "sub/only.gguf")
    touch(tmp_path, "s-00002-of-00002.gguf", "s-00001-of-00002.gguf", "two/x.gguf", "two/y.gguf")
    touch(tmp_path, "sub/mmproj-only-f16.gguf", "empty/readme.md")
    found = models_in(str(tmp_path))
    assert sorted(found) == ["a.Q4_0", "b", "s", "sub", "two/x", "two/y"]
    assert found["s"].name == "s-00001-of-00002.gguf"
    assert found["sub"] == tmp_path / "sub" / "only.gguf"
    assert [part.name for part in parts_of(found["s"])] == [
        "s-00001-of-00002.gguf",
        "s-00002-of-00002.gguf",
    ]
    assert parts_of(found["b"]) == [tmp_path / "b.gguf"]


def test_a_directory_without_models_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "mmproj.gguf")
    with pytest.raises(SettingsError, match="no GGUF file"):
        models_in(str(tmp_path))
    with pytest.raises(SettingsError, match="No such file"):
        models_in(str(tmp_path / "away"))
    touch(tmp_path, "m.gguf", "m-00001-of-00002.gguf")
    with pytest.raises(SettingsError, match="two models are called m"):
        models_in(str(tmp_path))


def test_one_model_is_a_server_of_one() -> None:
    assert isinstance(catalog_of("-m", "x.gguf"), ModelOptions)
    assert catalog_of("-m", "x.gguf").model == "x.gguf"
    with pytest.raises(SettingsError, match="no model is given"):
        catalog_of("-c", 512)


def test_several_models_of_the_command_line(tmp_path: Path) -> None:
    touch(tmp_path, "x.gguf", "y.gguf", "z/model.gguf", "z/mmproj-model.gguf")
    found = catalog_of("-m", tmp_path / "x.gguf", "-m", "bitnet", "-c", 512, "--kv-budget", 99)
    assert [each.name for each in found.models] == ["x", "bitnet"]
    assert found.default == "x"
    assert {each.options.n_ctx for each in found.models} == {512}
    assert {each.options.kv_budget for each in found.models} == {"99"}
    assert found.models[1].options.served_name == "bitnet"
    both = catalog_of("--models-dir", tmp_path)
    assert [each.name for each in both.models] == ["x", "y", "z"]
    projectors = [each.options.projector for each in both.models]
    assert projectors == [None, None, str(tmp_path / "z" / "mmproj-model.gguf")]
    assert both.default is None
    with pytest.raises(SettingsError, match="two models are called x"):
        catalog_of("-m", "x.gguf", "--models-dir", tmp_path)
    with pytest.raises(SettingsError, match="--alias"):
        catalog_of("--models-dir", tmp_path, "-a", "name")


def test_several_models_need_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "x.gguf", "y.gguf")
    file = preset(tmp_path, f"[local]\nmodel = {tmp_path / 'x.gguf'}\n[bitnet]\n")
    for name in [name for name in sys.modules if name.startswith("entropykv.hub")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    named = catalog_of("-m", tmp_path / "x.gguf", "-m", tmp_path / "y.gguf")
    assert [each.name for each in named.models] == ["x", "y"]
    assert [each.name for each in catalog_of("--models-preset", file).models] == ["local", "bitnet"]
    with pytest.raises(SettingsError, match="says no model"):
        catalog_of("--models-preset", preset(tmp_path, "[nothing]\n"))
    with pytest.raises(MissingExtraError, match=r"entropykv\[hub\]"):
        catalog_of("--models-preset", preset(tmp_path, "[user/model]\n"))


def test_models_do_not_come_from_variables_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, "x.gguf", "y.gguf")
    monkeypatch.setenv("ENTROPYKV_HF_REPO", "user/model")
    monkeypatch.setenv("ENTROPYKV_MODELS_DIR", str(tmp_path))
    assert [each.options.model for each in catalog_of().models] == [
        str(tmp_path / "x.gguf"),
        str(tmp_path / "y.gguf"),
    ]


def test_a_preset_names_models_and_their_options(tmp_path: Path) -> None:
    touch(tmp_path, "x.gguf", "y.gguf")
    file = preset(
        tmp_path,
        f"""version = 1
        ; what all have
        [*]
        ctx-size = 512
        kv-budget = 0.5
        [x]
        c = 1024   # of this one
        policy = uniform
        kv-type = f16
        np = 2
        mlock = true
        mmap = false
        load-on-startup = true
        sleep-idle-seconds = 60
        [custom]
        model = {tmp_path}/y.gguf
        alias = other, third
        jinja = true
        temp = -0
        [user/model:Q8_0]
        [bitnet]
        """,
    )
    found = catalog_of("--models-preset", file, "--models-dir", tmp_path, "--kv-budget", "0.25")
    models = {each.name: each for each in found.models}
    assert list(models) == ["x", "y", "custom", "user/model:Q8_0", "bitnet"]
    x = models["x"]
    assert (x.options.n_ctx, x.options.policy, x.options.kv_type) == (1024, "uniform", "f16")
    assert (x.options.parallel, x.options.use_mlock, x.options.use_mmap) == (2, True, False)
    assert (x.options.sleep_idle_seconds, x.load_on_startup) == (60, True)
    assert models["y"].options.n_ctx == 512, "what all have, also without a section of its own"
    custom = models["custom"]
    assert custom.options.model == f"{tmp_path}/y.gguf"
    assert custom.aliases == ("other", "third")
    assert (custom.options.temperature, custom.load_on_startup) == (0.0, False)
    assert models["user/model:Q8_0"].options.hf_repo == "user/model:Q8_0"
    assert models["bitnet"].options.model == "bitnet"
    budgets = {each.options.kv_budget for each in found.models}
    assert budgets == {"0.25"}, "the command line goes before presets"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a]\nmodel = a.gguf\nport = 80", r"\[a\]: port is an option of the whole server"),
        ("[a]\nmodel = a.gguf\nwrong = 1", r"\[a\]: 'wrong' is not an option"),
        ("[a]\nmodel = a.gguf\nkv-type = f8", r"\[a\]: .*invalid choice"),
        ("[a]\nmodel = a.gguf\nctx-size = many", r"\[a\]: .*invalid int"),
        ("[a]\nmodel = a.gguf\nmlock = maybe", r"\[a\]: mlock is true or false"),
        ("[a]\nmodel = a.gguf\nload-on-startup = maybe", "load-on-startup is true or false"),
        ("[a]\nmodel = a.gguf\ntools = all", r"\[a\]: --tools is not an option"),
        ("[a]\nkv-budget = 1", r"\[a\] says no model"),
        ("[a]\nmodel = a.gguf\n[a]\n", "line 3: .a. is there twice"),
        ("[a]\nmodel = a.gguf\nmodel = b.gguf", "line 3: .model = b.gguf. is neither"),
        ("[a]\nnonsense", "line 2: .nonsense. is neither"),
        ("[a]\nmodel = a.gguf\nparallel = 1000", "model a: --parallel"),
        ("[a]\nmodel = a\nalias = b\n[b]\nmodel = c", "names two models"),
        ("", "there are 0 models"),
        ("x" * (1 << 20) + "y", "shorten it"),
    ],
)
def test_a_wrong_preset_is_refused_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    file = preset(tmp_path, text)
    with pytest.raises(SettingsError, match=said):
        catalog_of("--models-preset", file)


def test_a_preset_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        catalog_of("--models-preset", tmp_path / "away.ini")


def test_a_catalog_has_each_name_once(tmp_path: Path) -> None:
    options = ModelOptions(model=str(tmp_path / "x.gguf"))
    one = ServedModel.of("one", options, ["uno"])
    with pytest.raises(SettingsError, match="'uno' names two models"):
        ModelCatalog.of_several([one, ServedModel.of("uno", options)])
    with pytest.raises(SettingsError, match="a server has 1 to"):
        ModelCatalog.of_several([ServedModel.of(f"{i}", options) for i in range(1001)])
    for name in ("", "x" * 257, "two\nlines"):
        with pytest.raises(SettingsError, match="is not a name of a model"):
            ServedModel.of(name, options)


@pytest.mark.parametrize("size", ["8", "-1GiB", "0MiB", "many"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(SettingsError, match="--models-memory"):
        _ = ServerOptions(models_memory=size).models_memory_bytes


def test_no_more_models_start_than_may_be_loaded(tmp_path: Path) -> None:
    options = ModelOptions(model=str(tmp_path / "x.gguf"))
    both = [ServedModel.of(name, options, load_on_startup=True) for name in ("one", "two")]
    with pytest.raises(SettingsError, match="--models-max"):
        create_app(ModelCatalog.of_several(both), ServerOptions(models_max=1))


def test_what_cannot_be_is_said_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings that cannot be are refused before a model is loaded; in this process, because
    importing the server takes longer than that.
    """

    def make(model: ModelOptions | ModelCatalog, server: ServerOptions) -> None:
        create_app(model, server)
        pytest.fail("it would serve")

    monkeypatch.setattr("entropykv.server.http.running.serve", make)
    touch(tmp_path, "one.gguf", "two.gguf")
    one, several = ["-m", str(tmp_path / "one.gguf")], ["--models-dir", str(tmp_path)]
    for words, said in (
        ([*several, "--replicas", "2"], "replicas have one model each"),
        ([*one, "--scale-up-seconds", "1"], "needs --replicas"),
        ([*one, "--sessions", "kept"], "--sessions needs --replicas"),
        ([*one, "--replicas", "1", "--scale-down-seconds", "1"], "needs --max-replicas"),
        ([*several, "--kv-budget", "none"], "KV budget"),
        ([*several, "--models-memory", "8"], "--models-memory"),
        (["--models-dir", str(tmp_path / "away")], "--models-dir"),
        ([*one, "--cache", "true"], "conversations are kept anyway"),
        ([*one, "--api-key-file", str(tmp_path / "nowhere")], "keys cannot be read"),
        ([*one, "--show-text", "perhaps"], "--show_text"),
    ):
        assert main(["serve", *words]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("entropykv: "), printed.err
        assert len(printed.err.splitlines()) == 1, printed.err
        assert said in printed.err
