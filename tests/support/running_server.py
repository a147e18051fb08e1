"""Start `entropykv serve` in a process of its own, and talk to it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from entropykv.model import shipped
from tests.support.ending import ask_to_end, creation_flags

KEY = "a-secret"
N_CTX = 16384
MODEL = shipped.DEMOS["bitnet"].path
OPTIONS = ("--kv-budget", 256, "--n_ctx", N_CTX, "-t", 1)


class Server:
    """Run `entropykv serve` on the loopback interface, and send requests to it."""

    def __init__(
        self,
        *options: object,
        model: Path | None = MODEL,
        port: int = 0,
        usual: tuple[object, ...] = OPTIONS,
        program: tuple[str, ...] = ("-m", "entropykv.cli"),
        **environment: str,
    ) -> None:
        command = [sys.executable, *program, "serve", "--port", port, *usual]
        self.process = subprocess.Popen(
            [str(part) for part in (*command, *(() if model is None else ("-m", model)), *options)],
            stderr=subprocess.PIPE,
            encoding="utf-8",
            creationflags=creation_flags(),
            env={**os.environ, **environment},
        )
        assert self.process.stderr is not None
        self.log = []
        found = None
        while found is None:
            line = self.process.stderr.readline()
            assert line, "it ended: " + "".join(self.log)
            self.log.append(line)
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
        self._n_starting = len(self.log)
        self._reader = threading.Thread(target=self.log.extend, args=(self.process.stderr,))
        # A thread reads the log, because the server would block on a full pipe.
        self._reader.start()
        self.url = found[0]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the server if the test has not; if the test succeeded, the server must end without an
        error.
        """
        if self.process.poll() is None:
            code, log = self.end()
            assert kind is not None or (code == 0 and "Traceback" not in log), log

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def post(self, path: str, content: Any, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        return httpx.post(self.url + path, content=content, headers=headers, timeout=60, **options)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers={"authorization": f"Bearer {KEY}"}, timeout=60)

    def kv(self) -> Any:
        return self.get("/v1/kv").json()

    def idle_figures(self, seconds: float) -> Any:
        """Return the metrics once no request runs; fails if that takes longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while (figures := self.kv())["requests"]["waiting"]:
            assert time.monotonic() < deadline, "the generation went on"
            time.sleep(0.01)
        return figures

    def rss(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def end(self, number: int | None = None) -> tuple[int, str]:
        """Ask the server to end, or send signal `number`.

        Returns the exit code, and the log after the line with the server's address.
        """
        if number is None:
            ask_to_end(self.process)
        else:
            self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code, "".join(self.log[self._n_starting :])
