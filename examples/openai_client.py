"""Use `entropykv serve` from OpenAI's client: a chat, and the figures of the KV cache.

entropykv serve -m model.gguf --kv-budget 0.2 &
python openai_client.py http://127.0.0.1:8000 [API key]
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from openai import APIConnectionError, OpenAI

QUESTIONS = ("What is the capital of France?", "And of Italy?")


def main() -> None:
    """Ask the server of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("key", nargs="?", default="none", help="API key of the server")
    options = parser.parse_args()
    try:
        ask(options.url, options.key)
    except APIConnectionError:
        sys.exit(f"no server answers at {options.url}; start one: entropykv serve -m model.gguf")


def ask(url: str, key: str) -> None:
    """Ask the questions in one conversation; every turn reads only new tokens."""
    with OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        messages: list[Any] = []
        for question in QUESTIONS:
            print(f"> {question}")
            messages.append({"role": "user", "content": question})
            reply = ""
            for chunk in client.chat.completions.create(
                model="any", messages=messages, max_tokens=40, temperature=0.0, stream=True
            ):
                text = chunk.choices[0].delta.content or ""
                print(text, end="", flush=True)
                reply += text
            print()
            messages.append({"role": "assistant", "content": reply})
        figures: Any = client.get("/kv", cast_to=object)
    print(f"{figures['kv_bytes_peak']} of {figures['kv_bytes_budget']} KV bytes used")


if __name__ == "__main__":
    main()
