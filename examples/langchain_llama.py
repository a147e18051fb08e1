"""Use `entropykv serve` from LangChain (pip install langchain-openai).

entropykv serve -m model.gguf --kv-budget 0.2 &
python langchain_llama.py http://127.0.0.1:8000 [API key]
"""

from __future__ import annotations

import sys

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import SecretStr


def main() -> None:
    """Ask one question through a chain, first for a whole answer and then for a stream."""
    url, key = [*sys.argv[1:], "http://127.0.0.1:8000"][0], [*sys.argv[2:], "none"][0]
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
