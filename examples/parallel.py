"""Hold several conversations with one model at the same time, in one KV budget.

First with threads, then with asyncio:

python examples/parallel.py model.gguf
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

from entropykv import EntropyLlama, Pool

QUESTIONS = [
    "Why is the sky blue?",
    "What does a lighthouse do?",
    "Name three rivers.",
    "How long is a year?",
]


def with_threads(path: str) -> None:
    """Use sessions of a pool, each in its own thread; the pool reads their tokens together."""
    with Pool(path, n_sequences=len(QUESTIONS), n_ctx=2048, kv_budget=4096) as pool:

        def answer(question: str) -> str:
            with pool.session() as session:
                chat = session.model.chat_prompt(question)
                prompt = session.tokenize(chat or question, add_bos=chat is None)
                return session.detokenize(list(session.generate(prompt, max_tokens=60)))

        with ThreadPoolExecutor(len(QUESTIONS)) as threads:
            for question, text in zip(QUESTIONS, threads.map(answer, QUESTIONS), strict=True):
                print(f"{question}\n  {text.strip()}\n")
        stats = pool.stats()
        print(f"{stats.kv_bytes_peak:,} of {stats.kv_bytes_budget:,} bytes were in use at most")


async def with_asyncio(path: str) -> None:
    """Use llama-cpp-python's interface: two objects of one pool, each for one request at a time."""
    first = EntropyLlama(
        path, n_sequences=2, n_ctx=2048, n_ubatch=128, kv_budget=4096, verbose=False
    )
    free: asyncio.Queue[EntropyLlama] = asyncio.Queue()
    for llama in (first, first.another()):
        free.put_nowait(llama)

    async def answer(question: str) -> str:
        llama = await free.get()
        try:
            result = await asyncio.to_thread(llama, f"Q: {question} A:", max_tokens=40)
        finally:
            free.put_nowait(llama)
        return str(result["choices"][0]["text"])

    for question, text in zip(
        QUESTIONS, await asyncio.gather(*map(answer, QUESTIONS)), strict=True
    ):
        print(f"{question}\n  {text.strip()}\n")
    first.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with_threads(sys.argv[1])
    asyncio.run(with_asyncio(sys.argv[1]))
