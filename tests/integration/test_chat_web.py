"""`entropykv chat --web` starts its own server, and opens a browser with its address."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from entropykv.llamacpp.model import NO_TEMPLATE
from entropykv.model import shipped
from tests.support.waiting import wait_for

CHAT = [sys.executable, "-m", "entropykv.cli", "chat", "--demo", "bitnet", "--web"]


@pytest.mark.needs("signal.SIGKILL")
def test_the_page_is_opened_with_what_chat_was_told(tmp_path: Path) -> None:
    told = tmp_path / "told"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {told}\n', encoding="utf-8")
    browser.chmod(0o755)
    process = subprocess.Popen(
        [*CHAT, "--temp", "0.3", "-n", "50", "--kv-budget", "200", "-t", "1"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "BROWSER": str(browser)},
    )
    assert process.stderr is not None
    try:
        assert NO_TEMPLATE in process.stderr.readline()
        line = process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/ in a browser", line)
        assert found, line
        url = found[0].split()[0]
        wait_for(lambda: told.exists() and told.read_text(encoding="ascii").strip())
        assert told.read_text(encoding="ascii").strip() == url
        begins = httpx.get(f"{url}v1/web/defaults").json()
        assert begins["question"] == shipped.DEMOS["bitnet"].question
        assert begins["system"].startswith("The heavy harbour")
        assert begins["sampling"]["temperature"] == 0.3
        assert begins["sampling"]["max_tokens"] == 50
        assert httpx.get(f"{url}v1/kv").json()["kv_budget"] == "200"
    finally:
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        process.stderr.close()
        assert process.wait(timeout=30) == 0
    assert "Traceback" not in rest


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--no-chat",), "--no-chat works only in the terminal"),
        (("--show-thoughts",), "--show-thoughts works only in the terminal"),
        (("--mirostat", "2"), "leave other samplers"),
        (("--rope-freq-base", "1000"), "use entropykv serve"),
    ],
)
def test_what_the_page_does_not_have_is_refused(options: tuple[str, ...], says: str) -> None:
    result = subprocess.run([*CHAT, *options], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
