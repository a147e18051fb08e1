"""Users are recognised by their keys, and texts are shown only where that is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entropykv import SettingsError

pytest.importorskip("fastapi", reason="needs the extra server")

from entropykv.server.http.access import Caller, Keys, shows_text
from entropykv.server.options import ServerOptions


@pytest.fixture(autouse=True)
def _no_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEY", "API_KEY_FILE", "SHOW_TEXT"):
        monkeypatch.delenv(f"ENTROPYKV_{name}", raising=False)


def options(**given: Any) -> ServerOptions:
    return ServerOptions(**given)


def test_every_key_of_a_file_is_a_user(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "\ufeff# of the library\n\nanna-key\n  ben-key  \nanna-key\n#ben\n", encoding="utf-8"
    )
    keys = Keys.of(options(api_key="own-key", api_key_file=str(file)))
    assert len(keys) == 3
    users = [keys.user_of(f"Bearer {key}".encode()) for key in ("own-key", "anna-key", "ben-key")]
    assert None not in users
    assert len(set(users)) == 3
    assert all("key" not in str(user) for user in users), "an id tells the key"
    again = Keys.of(options(api_key_file=str(file)))
    assert again.user_of(b"Bearer anna-key") == users[1], "another replica knows her as another"


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"anna-key",
        b"Bearer ",
        b"Bearer anna-ke",
        b"Basic anna-key",
        b"Bearer # of",
        b"BEARER ",
    ],
)
def test_a_wrong_key_identifies_no_user(given: bytes) -> None:
    assert Keys(["anna-key"]).user_of(given) is None


def test_without_keys_all_are_one_user() -> None:
    keys = Keys.of(options())
    assert len(keys) == 0
    assert keys.user_of(b"") == keys.user_of(b"Bearer anything") is not None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\n# nobody yet\n", "it contains no key"),
        (b"\xff\xfe", "not text"),
        (None, "No such"),
        (b"".join(b"key %d\n" % n for n in range(1001)), "1001 keys are more than 1000"),
    ],
)
def test_a_file_that_has_not_the_right_keys_is_refused(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=f"{says}.*--api-key-file"):
        Keys.of(options(api_key_file=str(file)))


@pytest.mark.parametrize(
    ("given", "shows"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),  # noqa: S104  (nothing listens)
        ({"host": "192.168.0.7"}, False),
        ({"host": "example.org"}, False),
        ({"api_key": "a"}, False),
        ({"api_key": "a", "show_text": True}, True),
        ({"host": "192.168.0.7", "show_text": True}, True),
        ({"show_text": False}, False),
    ],
)
def test_texts_are_shown_where_only_this_machine_asks(given: Any, shows: bool) -> None:
    server = options(**given)
    assert shows_text(server, Keys.of(server)) == shows


def test_whose_prefixes_are_shared() -> None:
    anna, chat = Caller("anna", "work"), Caller("anna", "chat")
    ben = Caller("ben", "work")
    assert anna.tenant(shared_prefixes=True) == chat.tenant(shared_prefixes=True)
    assert anna.tenant(shared_prefixes=True) != ben.tenant(shared_prefixes=True)
    assert anna.tenant(shared_prefixes=False) != chat.tenant(shared_prefixes=False)
