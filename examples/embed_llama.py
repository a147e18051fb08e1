"""Use llama-cpp-python's interface in a KV budget: chat, then put a loaded model into a budget."""

from __future__ import annotations

from typing import Any

from llama_cpp import Llama

from entropykv import EntropyLlama, EvictionEvent, attach, detach
from entropykv.model import shipped

MODEL = str(shipped.smollm2().path)
QUESTIONS = ("Why is the sky blue?", "And in the evening?", "What does a lighthouse do?")


def dropped(event: EvictionEvent) -> None:
    """Print what an eviction dropped and kept."""
    print(f"\n  [{event.evicted} entries evicted at {event.position} tokens, {event.kept} kept]")


def chat(llm: Llama) -> None:
    """Ask the questions in one conversation; every turn reads only new tokens."""
    messages: list[Any] = []
    for question in QUESTIONS:
        print(f"\n> {question}")
        messages.append({"role": "user", "content": question})
        reply = ""
        for chunk in llm.create_chat_completion(
            messages, stream=True, max_tokens=40, temperature=0.0
        ):
            text = chunk["choices"][0]["delta"].get("content") or ""
            print(text, end="", flush=True)
            reply += text
        messages.append({"role": "assistant", "content": reply})


def main() -> None:
    """Chat in a budget of 64 tokens per KV head; then attach() to a plain Llama, and detach()."""
    llm = EntropyLlama(MODEL, n_ctx=4096, kv_budget=64, on_evict=dropped, verbose=False)
    chat(llm)
    stats = llm.kv_stats()
    print(f"\n{stats.prompt_tokens} tokens read, {stats.generated_tokens} written,", end=" ")
    print(f"{stats.kv_bytes_peak / 2**20:.1f} of {stats.kv_bytes_budget / 2**20:.1f} MiB used")
    llm.close()

    plain = Llama(MODEL, n_ctx=2048, verbose=False)
    # The model is changed in place: every reference to it now has the budget.
    attach(plain, kv_budget="4MiB")
    print(plain("The sea is", max_tokens=8, temperature=0.0)["choices"][0]["text"])
    detach(plain)
    plain.close()


if __name__ == "__main__":
    main()
