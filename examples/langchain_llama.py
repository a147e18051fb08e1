"""Use `entropykv serve` from LangChain (pip install langchain-openai).

entropykv serve -m model.gguf --kv-budget 0.2 &
python langchain_llama.py http://127.0.0.1:8000 [API key]
"""

from __future__ import annotations

import argparse
import sys

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from openai import APIConnectionError
from pydantic import SecretStr


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
    """Ask one question through a chain, first for a whole answer and then for a stream."""
    model = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key=SecretStr(key),
        model="any",
        temperature=0.0,
        max_completion_tokens=24,
    )
    chain = (
        ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")]) | model
    )
    print("answer:", chain.invoke({"country": "France"}).content)
    for chunk in chain.stream({"country": "Italy"}):
        print(chunk.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
