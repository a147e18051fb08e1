"""Show how many tokens the turns of a thinking model read, hold and write on a server.

    python benchmarks/thinking_turns.py [-m MODEL] [--turns 5] [--thought 400]

The BitNet of the package writes no thoughts itself. So the chat template begins a thought, as
DeepSeek's template does, and --reasoning-budget ends it. The server runs twice: with the
checkpoints that it keeps for such a model, and without any. For every turn, a table shows the
tokens of the prompt, how many of them were read, how many were written in the thought and in the
answer, and the bytes of the KV cache.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from entropykv.model import shipped

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ m.content.split('</think>')[-1] + '\n' }}{% else %}{{ m.content + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
)
SYSTEM = "Simon lives in Oslo. Ines plays the harp. The quiet barn stood below the square. " * 12
ANSWER_TOKENS = 24
TAG_TOKENS = 12
"""The most tokens that the tag at the end of a thought may have."""


@contextmanager
def serving(options: list[str]) -> Iterator[str]:
    """Run a server, and yield its address."""
    command = [sys.executable, "-m", "entropykv.cli", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    log = process.stderr or sys.stdin
    lines = iter(log.readline, "")
    address = next(
        found[0] for line in lines if (found := re.search(r"http://[\d.]+:\d+", line)) is not None
    )
    # A thread reads the log, because a full pipe would block the server.
    reader = threading.Thread(target=log.read, daemon=True)
    reader.start()
    try:
        yield address
    finally:
        process.terminate()
        process.wait()


def turns(address: str, n_turns: int, thought: int) -> Iterator[dict[str, Any]]:
    """Hold a conversation, and yield the figures of each turn."""
    messages = [{"role": "system", "content": SYSTEM}]
    read = 0
    for turn in range(n_turns):
        messages.append({"role": "user", "content": f"Where does Simon live? ({turn + 1})"})
        length = thought + TAG_TOKENS + ANSWER_TOKENS
        body = {"messages": messages, "temperature": 0, "max_tokens": length, "min_tokens": length}
        answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=600).json()
        figures = httpx.get(f"{address}/v1/kv", timeout=60).json()
        usage = answer["usage"]
        n_thought = usage["completion_tokens_details"]["reasoning_tokens"]
        yield {
            "turn": turn + 1,
            "prompt": usage["prompt_tokens"],
            "read": figures["prompt_tokens"] - read,
            "thought": n_thought,
            "answered": usage["completion_tokens"] - n_thought,
            "KiB": round(figures["kv_bytes_now"] / 1024),
            "budget KiB": round(figures["kv_bytes_budget"] / 1024),
        }
        read = figures["prompt_tokens"]
        message = answer["choices"][0]["message"]
        messages.append({"role": "assistant", "content": message["content"]})


def main() -> None:
    """Print a table for each of the two servers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default=str(shipped.DEMOS["bitnet"].path))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--thought", type=int, default=400, help="tokens of a thought")
    parser.add_argument("--kv-budget", default="160")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "template.jinja"
        path.write_text(TEMPLATE, encoding="utf-8")
        given = ["-m", options.model, "--chat-template-file", str(path), "-c", "16384", "-t", "1"]
        given += ["--reasoning-budget", str(options.thought), "--kv-budget", options.kv_budget]
        for title, more in (("with checkpoints", []), ("without", ["--checkpoints", "0"])):
            print(title)
            with serving([*given, *more]) as address:
                for row in turns(address, options.turns, options.thought):
                    print(*(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
