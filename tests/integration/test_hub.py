"""Models are fetched from a fake hub by their names, which -hf does on the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, scan_cache_dir

from entropykv.cli import main
from entropykv.convert.known import known_models
from entropykv.hub.client import HubCache
from entropykv.model.identity import norms_of
from entropykv.profile.find import profile_beside
from entropykv.profile.profile import EntropyProfile
from tests.support.command import Result, assert_refused
from tests.support.fake_hub import FakeHub, digest
from tests.support.hf_files import hf_config, hf_tensors, write_hf
from tests.support.i2s_files import I2sModel
from tests.support.profiles import profile_of
from tests.support.running_server import Server
from tests.support.tiny_models import write_llama

REPO = "user/tiny-GGUF"
RUN = ("-c", 64, "-t", 1, "-p", "the", "-n", 3, "--no-chat", "--temp", 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of a repository like real ones: three quantisations of the same weights, and
    a projector.
    """
    folder = tmp_path_factory.mktemp("hub")
    files = {}
    for kind in ("F16", "F32", "Q8_0"):
        write_llama(folder / "tiny.gguf", head_dim=32, weight_type=kind)
        files[f"tiny-{kind}.gguf"] = (folder / "tiny.gguf").read_bytes()
    return {**files, "README.md": b"# Tiny\n", "mmproj-tiny-Q8_0.gguf": b"GGUF"}


@pytest.fixture
def hub(models: dict[str, bytes]) -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add(REPO, models)
        yield hub


FETCH = "import sys, entropykv.hub; print(entropykv.hub.fetch_model(*sys.argv[1:]))"


class Machine:
    """Simulate a machine with an empty cache, whose commands use the fake hub."""

    def __init__(self, hub: FakeHub, folder: Path) -> None:
        self.hub, self.folder = hub, folder
        self.environment = {**os.environ, **hub.environment(folder)}
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
            self.environment.pop(name, None)

    def cache(self, repo: str = REPO) -> HubCache:
        return HubCache(self.folder / "hub", repo)

    def start(self, *arguments: object, python: str | None = None) -> subprocess.Popen[str]:
        what = ["-c", python] if python is not None else ["-m", "entropykv.cli"]
        return subprocess.Popen(
            [sys.executable, *what, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def run(self, *arguments: object, python: str | None = None) -> Result:
        with self.start(*arguments, python=python) as process:
            out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def fetch(self, *arguments: object) -> Path:
        """Run a program that fetches the model of the arguments; return the model's path."""
        result = self.run(*arguments, python=FETCH)
        assert result.returncode == 0, result.stderr
        return Path(result.stdout.strip())


@pytest.fixture
def machine(hub: FakeHub, tmp_path: Path) -> Machine:
    return Machine(hub, tmp_path / "home")


def test_from_nothing_to_the_first_token_and_without_a_network_after_it(
    machine: Machine, models: dict[str, bytes], tmp_path: Path
) -> None:
    # Show the hub's progress bar although this is not a terminal.
    machine.environment["TQDM_POSITION"] = "-1"
    first = machine.run("run", "-hf", REPO, *RUN)
    assert first.returncode == 0, first.stderr
    size = len(models["tiny-Q8_0.gguf"])
    assert (
        f"entropykv: fetching {REPO}: tiny-Q8_0.gguf, {size / 2**20:,.1f} MiB, to "
        f"{machine.folder / 'hub'}\n"
    ) in first.stderr
    assert first.stderr.index("fetching") < first.stderr.index("100%")
    assert machine.hub.contents() == [("tiny-Q8_0.gguf", None)]
    local = tmp_path / "tiny.gguf"
    local.write_bytes(models["tiny-Q8_0.gguf"])
    assert machine.run("run", "-m", local, *RUN).stdout == first.stdout

    asked = len(machine.hub.requests)
    second = machine.run("run", "-hf", REPO, *RUN)
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert "fetching" not in second.stderr
    assert machine.hub.requests[asked:] == [("GET", f"/api/models/{REPO}", None)]

    machine.environment["HF_HUB_OFFLINE"] = "1"
    asked = len(machine.hub.requests)
    offline = machine.run("run", "-hf", REPO, *RUN)
    assert (offline.returncode, offline.stdout) == (0, first.stdout)
    assert len(machine.hub.requests) == asked
    refused = machine.run("run", "-hf", f"{REPO}:F16", *RUN)
    assert_refused(refused, "no GGUF file of quantisation F16", "it has Q8_0")
    refused = machine.run("run", "-hf", "user/other", *RUN)
    assert_refused(refused, "user/other", "HF_HUB_OFFLINE", "unset it")

    del machine.environment["HF_HUB_OFFLINE"]
    machine.hub.repositories[REPO].status = 503
    busy = machine.run("run", "-hf", REPO, *RUN)
    assert (busy.returncode, busy.stdout) == (0, first.stdout)
    assert f"no answer from the hub: {REPO} is taken from" in busy.stderr


@pytest.mark.needs("signal.SIGKILL")
def test_an_interrupted_download_goes_on_where_it_ended(
    machine: Machine, models: dict[str, bytes]
) -> None:
    data = models["tiny-F32.gguf"] + bytes(24 << 20)  # huggingface_hub writes 10 MiB at a time.
    repository = machine.hub.add(REPO, {"tiny-F32.gguf": data}, stall_after=16 << 20)
    with machine.start("run", "-hf", f"{REPO}:F32", *RUN) as process:
        assert machine.hub.stalled.wait(60)
        part = machine.cache().part(digest("tiny-F32.gguf", data))
        while not part.exists() or part.stat().st_size == 0:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("entropykv: interrupted: the downloaded part is kept")
    there = part.stat().st_size
    assert 0 < there < len(data)

    result = machine.run("run", "-hf", f"{REPO}:F32", *RUN)
    assert result.returncode == 0, result.stderr
    assert f"{len(data) / 2**20:,.1f} MiB, {there / 2**20:,.1f} of them from earlier" in (
        result.stderr
    )
    assert machine.hub.contents()[1:] == [("tiny-F32.gguf", f"bytes={there}-")]
    cache = machine.cache()
    assert not part.exists()
    assert (cache.snapshot(repository.commit) / "tiny-F32.gguf").read_bytes() == data


def test_a_connection_that_breaks_is_made_again(machine: Machine, models: dict[str, bytes]) -> None:
    machine.hub.repositories[REPO].cut_after = 1 << 16
    path = machine.fetch(f"{REPO}:F32")
    assert path.read_bytes() == models["tiny-F32.gguf"]
    assert len(machine.hub.contents()) == 2


def test_what_an_earlier_download_has_damaged_is_found(
    machine: Machine, models: dict[str, bytes]
) -> None:
    part = machine.cache().part(digest("tiny-F32.gguf", models["tiny-F32.gguf"]))
    part.parent.mkdir(parents=True)
    part.write_bytes(b"GGUF" + bytes(1000))
    refused = machine.run("plan", "-hf", f"{REPO}:F32")
    assert refused.returncode == 2
    assert "tiny-F32.gguf: what an earlier download has left was damaged" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not part.exists()
    assert machine.fetch(f"{REPO}:F32").read_bytes() == models["tiny-F32.gguf"]


def test_a_quantisation_and_a_file_can_be_chosen(machine: Machine) -> None:
    for arguments, name in (
        (("-hf", f"{REPO}:f16"), "tiny-F16.gguf"),
        (("-hfr", REPO, "-hff", "tiny-F32.gguf"), "tiny-F32.gguf"),
        (("--hf-repo", REPO, "--hf-file", "*Q8*"), "tiny-Q8_0.gguf"),
    ):
        result = machine.run("plan", *arguments)
        assert result.returncode == 0, result.stderr
        assert machine.hub.contents()[-1] == (name, None)
    names = {path.name for path in machine.cache().folder.rglob("*.gguf")}
    assert names == {"tiny-F16.gguf", "tiny-F32.gguf", "tiny-Q8_0.gguf"}


def test_all_parts_of_a_split_model_are_fetched(
    machine: Machine, models: dict[str, bytes], tmp_path: Path
) -> None:
    parts = split_in_two(models["tiny-Q8_0.gguf"], tmp_path)
    assert norms_of(parts[0]) == norms_of(tmp_path / "whole.gguf") is not None
    machine.hub.add("user/split", {f"Q8_0/{path.name}": path for path in parts})
    whole = machine.run("run", "-hf", REPO, *RUN)
    result = machine.run("run", "-hf", "user/split:Q8_0", *RUN)
    assert result.returncode == 0, result.stderr
    assert result.stdout == whole.stdout
    assert "-00001-of-00002.gguf and 1 more" in result.stderr
    machine.environment["HF_HUB_OFFLINE"] = "1"
    assert machine.fetch("user/split").name == parts[0].name
    second = next(machine.cache("user/split").folder.rglob(parts[1].name))
    second.unlink()
    refused = machine.run("plan", "-hf", "user/split")
    assert_refused(refused, "part 2 of 2", "is not there")


def split_in_two(data: bytes, folder: Path) -> list[Path]:
    """Split a model in two, with llama.cpp's own names and metadata."""
    import numpy as np  # noqa: PLC0415
    from gguf import GGUFReader, GGUFValueType, GGUFWriter  # noqa: PLC0415

    source = folder / "whole.gguf"
    source.write_bytes(data)
    reader = GGUFReader(source)
    paths = [folder / f"tiny-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    half = len(reader.tensors) // 2
    for number, path in enumerate(paths):
        writer = GGUFWriter(path, "llama")
        if number == 0:
            for name, field in reader.fields.items():
                if name.startswith("GGUF.") or name == "general.architecture":
                    continue
                kind = field.types[0]
                inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), kind, sub_type=inner)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[half * number : half if number == 0 else None]:
            values = np.array(tensor.data)
            writer.add_tensor(tensor.name, values, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_a_profile_of_the_repository_serves_every_quantisation(
    machine: Machine, models: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(models["tiny-F16.gguf"])
    profile = profile_of(tmp_path / "tiny.gguf")
    profile.save(tmp_path / "tiny.entropy.json")
    saved = (tmp_path / "tiny.entropy.json").read_bytes()
    files = {**models, "tiny.entropy.json": saved, "other.entropy.json": b"{"}
    machine.hub.add(REPO, files)
    path = machine.fetch(REPO)
    assert path.name == "tiny-Q8_0.gguf"
    assert EntropyProfile.load(path.with_name("tiny.entropy.json")).to_dict() == profile.to_dict()
    ran = machine.run("run", "-hf", REPO, "--policy", "entropy", "--kv-budget", 0.5, *RUN)
    assert ran.returncode == 0, ran.stderr
    assert "another file" not in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-hf", "user/absent"), ("user/absent", "no such model", "hf auth login")),
        (("-hf", f"{REPO}:Q3_K_S"), ("no GGUF file of quantisation Q3_K_S", "F16, F32, Q8_0")),
        (("-hf", REPO, "-hff", "mmproj*"), ("belongs to a model and is none",)),
        (("-hf", "user/texts"), ("user/texts has no GGUF file of a model",)),
        (("-hf", "user/gated"), ("is gated", "/user/gated", "HF_TOKEN")),
        (("-hf", "user/private"), ("user/private", "a private one", "HF_TOKEN")),
        (("-hf", "user/broken"), ("answered with 500", "run it again later")),
        (("-hf", "user/odd"), ("its answer about user/odd cannot be read", "HF_ENDPOINT")),
        (("-hf", "user/huge"), ("more than 16 MiB", "HF_ENDPOINT")),
        (("-hf", "tiny"), ("'tiny' is not the name of a model of the hub", "USER/MODEL")),
        (("-hf", f"{REPO}:F16", "-hff", "a.gguf"), ("give one of them",)),
        (("-hf", REPO, "-m", "a.gguf"), ("-m/--model: not allowed with argument -hf",)),
        (("-m", "a.gguf", "-hff", "a.gguf"), ("--hf-file", "give that with -hf")),
        (("-hf", REPO, "-hft", "secret"), ("-hft is not an option", "set HF_TOKEN")),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_said_in_a_sentence(
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    says: tuple[str, ...],
) -> None:
    """An error of fetching is one sentence that says what to do; all cases run in this process."""
    huggingface = constants.ENDPOINT
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    url = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(huggingface, hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hub.add("user/texts", {"README.md": b"nothing"})
    hub.add("user/gated", {"a.gguf": b"GGUF"}, gated=True)
    hub.add("user/private", {"a.gguf": b"GGUF"}, private=True)
    hub.add("user/broken", {"a.gguf": b"GGUF"}, status=500)
    hub.add("user/odd", {}, answer=b'{"siblings": 5}')
    hub.add("user/huge", {}, answer=b" " * (17 << 20))
    code = main(["plan", *arguments])
    printed = capsys.readouterr()
    assert_refused(Result([], code, printed.out, printed.err.splitlines()[-1]), *says)
    assert not hub.contents()


def test_a_token_opens_what_is_gated(machine: Machine, models: dict[str, bytes]) -> None:
    machine.hub.add("user/gated", {"a.gguf": models["tiny-Q8_0.gguf"]}, gated=True)
    machine.hub.token = machine.environment["HF_TOKEN"] = "hf_tests"  # noqa: S105
    assert machine.fetch("user/gated").name == "a.gguf"


def test_no_network_and_no_place_are_said(machine: Machine, tmp_path: Path) -> None:
    machine.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    assert_refused(machine.run("plan", "-hf", REPO), REPO, "no answer from http://127.0.0.1:9")
    machine.environment["HF_ENDPOINT"] = machine.hub.url
    (tmp_path / "file").write_text("not a folder")
    machine.environment["HF_HUB_CACHE"] = str(tmp_path / "file" / "hub")
    result = machine.run("plan", "-hf", REPO)
    assert result.returncode == 2
    assert "cannot be kept" in result.stderr
    assert "HF_HUB_CACHE" in result.stderr
    assert "Traceback" not in result.stderr


WITH_LITTLE_DISK = """
import shutil, sys
usage = shutil.disk_usage(".")
shutil.disk_usage = lambda _: usage._replace(free=1 << 16)
from entropykv.cli import main
sys.exit(main(["plan", "-hf", sys.argv[1]]))
"""
WITH_A_FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
from entropykv.cli import main
sys.exit(main(["plan", "-hf", sys.argv[1]]))
"""


@pytest.mark.needs("resource.setrlimit")
def test_a_disk_without_room_is_found_before_and_during_the_download(machine: Machine) -> None:
    before = machine.run(REPO, python=WITH_LITTLE_DISK)
    assert_refused(before, "has 0 MiB free", REPO, "HF_HUB_CACHE")
    assert not machine.hub.contents()
    during = machine.run(REPO, python=WITH_A_FULL_DISK)
    assert during.returncode == 2
    assert f"{REPO}: the disk is full" in during.stderr
    assert "Traceback" not in during.stderr
    assert machine.fetch(REPO).name == "tiny-Q8_0.gguf"
    assert machine.hub.contents()[-1][1] is not None  # The first part of the data was kept.


WITHOUT_THE_EXTRA = """
import sys
sys.modules["huggingface_hub"] = None
from entropykv.cli import main
sys.exit(main(["plan", "-hf", "user/model"]))
"""


def test_without_the_extra_a_sentence_says_how_to_install_it(machine: Machine) -> None:
    result = machine.run(python=WITHOUT_THE_EXTRA)
    assert_refused(result, "huggingface_hub", 'pip install "entropykv[hub]"')


def test_a_checkpoint_of_a_known_model_is_converted_once(machine: Machine, tmp_path: Path) -> None:
    known = next(model for model in known_models() if model.name.startswith("microsoft/"))
    model = I2sModel(n_head=16, n_head_kv=4, n_embd=16 * known.shape.head_dim, n_ff=512)
    folder = write_hf(tmp_path / "checkpoint", hf_config(model), hf_tensors(model))
    (folder / "README.md").write_text("# A model")
    machine.hub.add_folder(known.name, folder)
    first = machine.run("run", "-hf", known.name, *RUN)
    assert first.returncode == 0, first.stderr
    assert f"converting {known.name} once" in first.stderr
    target = machine.fetch(known.name)
    assert target.name == f"{known.name.split('/')[1]}.entropykv.gguf"
    assert machine.cache(known.name).folder in target.parents
    sent = machine.hub.contents()
    assert not (target.parent / "README.md").exists()
    when = target.stat().st_mtime_ns
    machine.environment["HF_HUB_OFFLINE"] = "1"
    second = machine.run("run", "-hf", known.name, *RUN)
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert "converting" not in second.stderr
    assert target.stat().st_mtime_ns == when
    assert machine.hub.contents() == sent
    for path in target.parent.glob("*.safetensors"):
        path.unlink()  # A user may remove a converted checkpoint to make room.
    assert machine.fetch(known.name) == target
    assert scan_cache_dir(machine.folder / "hub").warnings == []
    refused = machine.run("plan", "-hf", f"{known.name}:Q8_0")
    assert_refused(refused, "its checkpoint is converted", "leave Q8_0 out")


def test_the_same_checkpoint_under_another_name_is_refused(
    machine: Machine, tmp_path: Path
) -> None:
    model = I2sModel()
    folder = write_hf(tmp_path / "checkpoint", hf_config(model), hf_tensors(model))
    machine.hub.add_folder("user/checkpoint", folder)
    refused = machine.run("plan", "-hf", "user/checkpoint")
    assert_refused(refused, "has no GGUF file of a model", "-GGUF")


def test_an_i2s_file_is_converted_once(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "ggml-model-i2_s.gguf"
    I2sModel().write(path)
    machine.hub.add("user/ternary-gguf", {path.name: path})
    target = machine.fetch("user/ternary-gguf")
    assert target.name == "ggml-model-i2_s.entropykv.gguf"
    sent = machine.hub.contents()
    again = machine.run("run", "-hf", "user/ternary-gguf", *RUN)
    assert again.returncode == 0, again.stderr
    assert "converting" not in again.stderr
    assert machine.hub.contents() == sent

    profile_of(target).save(profile_beside(target))
    machine.hub.add("user/ternary-gguf", {path.name: path, "README.md": b"of a later commit"})
    later = machine.fetch("user/ternary-gguf")
    assert later.parent != target.parent
    assert later.samefile(target)
    assert profile_beside(later).samefile(profile_beside(target))
    assert machine.hub.contents() == sent
    I2sModel(seed=1).write(path)
    machine.hub.add("user/ternary-gguf", {path.name: path})
    assert not machine.fetch("user/ternary-gguf").samefile(target)


def test_every_command_takes_it(machine: Machine, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 30)
    output = tmp_path / "profile.json"
    for arguments in (
        ("bench", "-hf", REPO, "--lengths", 16, "--rounds", 1, "-n", 16, "--kv-types", "f16",
         "--budgets", "1.0", "-t", 1),
        ("eval", "-hf", REPO, "--text", text, "--prompt", 32, "--continuation", 8, "--greedy", 0,
         "--kv-type", "f16", "--policy", "uniform", "--kv-budget", "1.0", "-t", 1),
        ("calibrate", "-hf", REPO, "--text", text, "--curve-texts", 0, "-t", 1, "-o", output),
        ("chat", "-hf", REPO, "-n", 2, "--no-chat", "-t", 1),
    ):  # fmt: skip
        result = machine.run(*arguments)
        assert result.returncode == 0, (arguments, result.stderr)
    assert len(machine.hub.contents()) == 1
    assert output.exists()


FROM_PRETRAINED = """
import sys
from entropykv import EntropyLlama, Session
repo, name = sys.argv[1:]
with Session.from_pretrained(repo, n_ctx=64, kv_budget=0.5) as session:
    print(session.decode([1, 2, 3]).argmax())
with Session.from_pretrained(repo, "*q8_0.gguf", n_ctx=64) as session:
    print(session.decode([1, 2, 3]).argmax())
llm = EntropyLlama.from_pretrained(
    repo + ":Q8_0", n_ctx=64, kv_budget=0.5, verbose=False, additional_files=["README*"]
)
llm.eval([1, 2, 3])
print(llm.scores[-1].argmax(), llm.model_path)
llm.close()
llm = EntropyLlama.from_pretrained(repo, "tiny-F16.gguf", local_dir=name, n_ctx=64, verbose=False)
print(llm.model_path)
llm.close()
"""


def test_both_classes_are_made_from_a_name(machine: Machine, tmp_path: Path) -> None:
    result = machine.run(REPO, tmp_path / "here", python=FROM_PRETRAINED)
    assert result.returncode == 0, result.stderr
    first, second, third, local = result.stdout.splitlines()
    token, path = third.split(" ", 1)
    assert first == second == token
    assert Path(path).name == "tiny-Q8_0.gguf"
    assert Path(path).with_name("README.md").exists()
    assert local == str(tmp_path / "here" / "tiny-F16.gguf")


def test_a_server_fetches_its_model(machine: Machine) -> None:
    environment = {key: machine.environment[key] for key in machine.hub.environment(Path())}
    usual = ("--kv-budget", 64, "--n_ctx", 128, "-t", 1, "-hf", f"{REPO}:Q8_0")
    with Server(model=None, port=0, usual=usual, **environment) as server:
        answer = server.client().completions.create(model="any", prompt="the", max_tokens=2)
        assert answer.choices[0].finish_reason == "length"
        assert server.get("/v1/models").json()["data"][0]["id"] == f"{REPO}:Q8_0"
    for arguments, says in (
        (("-hf", "user/absent"), "no such model"),
        (("-hf", REPO, "-m", "a.gguf"), "-m and -hf name a model each"),
        (("--hf_model_repo_id", REPO, "--model", "*Q3*"), "has no GGUF file of the name '*Q3*'"),
        ((), "no model is given"),
    ):
        result = machine.run("serve", "--port", 0, *arguments)
        assert result.returncode == 2, arguments
        assert says in result.stderr
        assert "Traceback" not in result.stderr
