"""A full disk fails only the document that needs room, not the server or other documents."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.running_server import Server
from tests.support.waiting import wait_for

TEXT = "The quick brown fox jumps over the lazy dog. " * 40
DISK_BYTES = 4 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of a few megabytes; skips the test unless the user is root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None:
        pytest.skip("this system has no mount")
    command = [mount, "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)  # noqa: S607


@pytest.mark.needs("/proc/mounts")
def test_reading_fails_with_a_sentence_and_succeeds_once_there_is_room(disk: Path) -> None:
    with Server("--documents", disk, usual=("-c", 4096, "-t", 1, "--kv-budget", 1024)) as running:
        url = running.url

        def send(name: str, text: str) -> Any:
            sent = httpx.post(f"{url}/v1/documents", json={"name": name, "text": text}, timeout=60)
            assert sent.status_code == 202, sent.text

            def status() -> Any:
                return httpx.get(f"{url}/v1/documents/{name}").json()

            wait_for(lambda: status()["status"] not in ("queued", "reading"))
            return status()

        def answer(name: str) -> str:
            body = {"prompt": "Who?", "document": name, "max_tokens": 8, "temperature": 0}
            asked = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert asked.status_code == 200, asked.text
            return str(asked.json()["choices"][0]["text"])

        assert send("first", "A cat sleeps. " * 20)["status"] == "ready"
        expected = answer("first")
        filler = disk / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(disk).free - (16 << 10)))
        failed = send("second", TEXT)
        assert failed["status"] == "failed"
        assert failed["error"].startswith("the disk has 0.0 MiB free, but the session needs ")
        assert str(disk) not in json.dumps(failed)
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "first.kv"]
        assert answer("first") == expected
        filler.unlink()
        assert send("second", TEXT)["status"] == "ready"
        assert answer("second")
