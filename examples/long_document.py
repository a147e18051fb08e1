"""Ask several questions about a long document, read once: each starts from the saved state."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from entropykv import EntropyLlama
from entropykv.model import shipped

HERE = Path(__file__).parent


def main() -> None:
    """Read the document inside a budget, save the state, and ask every question from there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("document", nargs="?", type=Path, default=HERE / "lighthouse.txt")
    path = parser.parse_args().document
    if not path.is_file():
        parser.error(f"{path}: no such file; give a text in UTF-8")
    document = path.read_text(encoding="utf-8")
    name = (HERE / "lighthouse.question.txt").read_text(encoding="utf-8").strip()
    questions = (name, "Who keeps the light?", "What is the sea like?")
    before, after = (
        "<|im_start|>user\n" + document + "\n\n",
        "<|im_end|>\n<|im_start|>assistant\n",
    )  # This is SmolLM2's chat template.

    llm = EntropyLlama(
        str(shipped.smollm2().path), n_ctx=8192, kv_budget=1536, n_threads=2, verbose=False
    )
    start = time.perf_counter()
    prefix = llm.tokenize(before.encode(), add_bos=False, special=True)
    llm.eval(prefix)
    state = llm.save_state()  # The state has the entries that the budget keeps: 1,536 per KV head.
    print(
        f"read {len(prefix)} tokens in {time.perf_counter() - start:.1f} s; "
        f"the state has {state.llama_state_size / 2**20:.1f} MiB"
    )

    for question in questions:
        start = time.perf_counter()
        llm.load_state(state)
        tokens = llm.tokenize((question + after).encode(), add_bos=False, special=True)
        answer = llm(prefix + tokens, max_tokens=32, temperature=0.0)
        print(f"\n> {question}\n{answer['choices'][0]['text'].strip()}")
        print(f"  [{time.perf_counter() - start:.1f} s]")
    print(f"\n{llm.kv_stats().prompt_tokens} tokens read since the state was loaded")
    llm.close()


if __name__ == "__main__":
    main()
