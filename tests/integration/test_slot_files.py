"""A slot's conversation is saved and restored by POST /slots/{id}, as in llama-server."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from entropykv.cli import main
from entropykv.errors import SettingsError
from entropykv.server import ModelOptions, ServerOptions, create_app
from entropykv.server.engine.slot_files import MOST_FILE_NAME, MOST_FILES
from tests.support.running_server import MODEL, Server

TEXT = "The gardener and the fisherman meet at the harbour, and talk of the weather. " * 8
KEYS = ("first-key-of-two", "second-key-of-two")


@pytest.fixture(scope="module", params=[(), ("--parallel", 2)], ids=["one", "pool"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("slots")
    keys = folder / "keys.txt"
    keys.write_text("\n".join(KEYS), encoding="utf-8")
    with Server(
        *("--slot-save-path", folder / "saved", "--api-key-file", keys),
        *request.param,
        usual=("-c", 4096, "-t", 1),
    ) as running:
        yield running, folder / "saved"


def ask(server: Server, path: str, body: Any, key: str = KEYS[0]) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=60)


def complete(server: Server, prompt: str, key: str = KEYS[0]) -> Any:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = ask(server, "/v1/completions", body, key)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def slot_of_latest(server: Server, key: str = KEYS[0]) -> int:
    """Save the first slot that holds a conversation of the key's user; return the slot's number."""
    for number in range(2):
        answer = ask(server, f"/slots/{number}?action=save", {"filename": "probe"}, key)
        if answer.status_code == 200:
            return number
    raise AssertionError(answer.text)


def prompt_tokens_read(server: Server) -> int:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    text = httpx.get(server.url + "/metrics", headers=headers, timeout=60).text
    line = next(x for x in text.splitlines() if x.startswith("entropykv_prompt_tokens_total"))
    return int(float(line.split()[1]))


def test_a_restored_conversation_goes_on_without_reading_it(server: tuple[Server, Path]) -> None:
    running, folder = server
    answer = complete(running, TEXT)
    slot = slot_of_latest(running)
    saved = ask(running, f"/slots/{slot}?action=save", {"filename": "talk.bin"}).json()
    assert saved["id_slot"] == slot
    assert saved["filename"] == "talk.bin"
    assert saved["n_saved"] > 100
    files = list(folder.rglob("talk.bin"))
    assert [each.stat().st_size for each in files] == [saved["n_written"]]
    assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700
    assert ask(running, f"/slots/{slot}?action=erase", {}).json()["n_erased"] == saved["n_saved"]
    assert ask(running, f"/slots/{slot}?action=erase", {}).status_code == 400
    restored = ask(running, f"/slots/{slot}?action=restore", {"filename": "talk.bin"}).json()
    assert restored["n_restored"] == saved["n_saved"]
    assert restored["n_read"] == saved["n_written"]
    assert restored["timings"]["restore_ms"] >= 0
    before = prompt_tokens_read(running)
    assert complete(running, TEXT + answer + " Then")
    assert prompt_tokens_read(running) - before < 20


def test_users_have_files_of_their_own(server: tuple[Server, Path]) -> None:
    running, _ = server
    complete(running, TEXT)
    slot = slot_of_latest(running)
    assert ask(running, f"/slots/{slot}?action=save", {"filename": "mine"}).status_code == 200
    for action in ("save", "erase"):
        other = ask(running, f"/slots/{slot}?action={action}", {"filename": "x"}, KEYS[1])
        assert other.status_code == 400
        assert "of yours" in other.json()["error"]["message"]
    other = ask(running, f"/slots/{slot}?action=restore", {"filename": "mine"}, KEYS[1])
    assert other.status_code == 400
    assert "no such file" in other.json()["error"]["message"]


@pytest.mark.parametrize(
    "name",
    [
        "../keys.txt",
        "/no/such/folder",
        "a/b",
        "..",
        ".hidden",
        "",
        "a\\b",
        "a\0b",
        "x" * 129,
        "ü",
        7,
    ],
)
def test_names_never_leave_the_folder(server: tuple[Server, Path], name: object) -> None:
    running, folder = server
    before = {each for each in folder.parent.rglob("*") if each.name != "probe"}
    for action in ("save", "restore"):
        answer = ask(running, f"/slots/0?action={action}", {"filename": name})
        assert answer.status_code == 400, answer.text
        assert "filename" in answer.json()["error"]["message"]
    assert {each for each in folder.parent.rglob("*") if each.name != "probe"} - before <= {
        each for each in folder.iterdir() if each.is_dir()
    }
    assert len("x" * 129) > MOST_FILE_NAME


def test_what_is_no_saved_conversation_is_refused(server: tuple[Server, Path]) -> None:
    running, folder = server
    complete(running, TEXT)
    slot_of_latest(running)
    mine = next(each for each in folder.rglob("probe")).parent
    (mine / "broken").write_bytes(b"no session")
    answer = ask(running, "/slots/0?action=restore", {"filename": "broken"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("broken: ")
    assert str(folder) not in answer.text
    for path, body in (
        ("/slots/7?action=save", {"filename": "a"}),
        ("/slots/0?action=sell", {"filename": "a"}),
        ("/slots/0", {"filename": "a"}),
        ("/slots/0?action=save", {}),
    ):
        answer = ask(running, path, body)
        assert 400 <= answer.status_code < 500, answer.text
    for number in range(MOST_FILES):
        (mine / f"full{number}").touch()
    full = ask(running, "/slots/0?action=save", {"filename": "more"})
    assert full.status_code == 400
    assert str(MOST_FILES) in full.json()["error"]["message"]
    for number in range(MOST_FILES):
        (mine / f"full{number}").unlink()


def test_without_a_directory_nothing_is_saved(tmp_path: Path) -> None:
    with Server() as server:
        answer = httpx.post(server.url + "/slots/0?action=save", json={"filename": "a"}, timeout=60)
        assert answer.status_code == 501
        assert "--slot-save-path" in answer.json()["error"]["message"]
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(SettingsError, match="--slot-save-path"):
        create_app(
            ModelOptions(model=str(MODEL)), ServerOptions(slot_save_path=str(blocked / "in"))
        )


def test_replicas_have_no_slots_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "-m", str(MODEL), "--replicas", "2", "--slot-save-path", str(tmp_path)]
    assert main(words) == 2
    assert "--sessions DIR" in capsys.readouterr().err
