"""attach() puts a loaded Llama inside a budget, in place, and detach() removes the budget."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from entropykv import BudgetError, EntropyKVError, EntropyLlama, SettingsError, attach, detach
from tests.support.command import python
from tests.support.llamas import PROMPT, QUIET, as_long, content

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_attach_in_place_and_back(tiny_llama: Path, store: str) -> None:
    stock = Llama(str(tiny_llama), n_ctx=200, **QUIET)
    handle = stock.model
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0}
    before = content(stock(PROMPT, **options))
    old_context = stock._ctx
    llm = attach(stock, kv_budget=0.5, kv_type="f16", store=store, n_sinks=2, recent_window=20)
    assert llm is stock
    assert isinstance(stock, EntropyLlama)
    assert old_context.ctx is None  # The stock context was freed.
    assert stock.model == handle  # The model was not loaded again.
    assert stock.n_tokens == 0
    assert stock.n_ctx() == 200
    assert content(stock(PROMPT, **as_long(options, before))) == before
    assert llm.kv_stats().kv_budget == "0.5"
    assert llm.kv_stats().store == store
    assert detach(llm) is stock
    assert type(stock) is Llama
    assert stock.n_tokens == 0
    assert content(stock(PROMPT, **options)) == before
    again = attach(stock, kv_budget=64)
    assert again(PROMPT, max_tokens=5, temperature=0.0)["usage"]["completion_tokens"] > 0
    stock.close()


def test_an_entropy_llama_can_be_detached(tiny_llama: Path) -> None:
    llm = EntropyLlama(str(tiny_llama), n_ctx=256, n_batch=64, kv_type="f16", **QUIET)
    expected = content(llm(PROMPT * 4, max_tokens=20, temperature=0.0))
    stock = detach(llm)
    assert type(stock) is Llama
    assert stock.n_ctx() == 256
    assert content(stock(PROMPT * 4, max_tokens=20, temperature=0.0)) == expected
    stock.close()


def test_attach_and_detach_of_the_wrong_thing(tiny_llama: Path) -> None:
    class Mine(Llama):  # type: ignore[misc]
        pass

    stock = Llama(str(tiny_llama), n_ctx=64, **QUIET)
    with pytest.raises(SettingsError, match=r"not inside a KV budget; attach\(\)"):
        detach(stock)  # type: ignore[arg-type]
    attach(stock)
    with pytest.raises(SettingsError, match=r"inside a KV budget already; detach\(\)"):
        attach(stock)
    stock.close()
    with pytest.raises(EntropyKVError, match="closed"):
        detach(stock)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="not str"):
        attach("model.gguf")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="not Mine"):
        attach(Mine(str(tiny_llama), n_ctx=64, **QUIET))
    cached = Llama(str(tiny_llama), n_ctx=64, **QUIET)
    cached.set_cache(llama_cpp.LlamaRAMCache())
    with pytest.raises(SettingsError, match=r"set_cache\(None\)"):
        attach(cached)
    closed = Llama(str(tiny_llama), n_ctx=64, **QUIET)
    closed.close()
    with pytest.raises(EntropyKVError, match="closed"):
        attach(closed)
    embedder = Llama(str(tiny_llama), n_ctx=64, embedding=True, **QUIET)
    with pytest.raises(SettingsError, match="embedding"):
        attach(embedder)


def test_an_attach_that_fails_changes_nothing(tiny_llama: Path) -> None:
    stock = Llama(str(tiny_llama), n_ctx=200, **QUIET)
    expected = content(stock(PROMPT, max_tokens=10, temperature=0.0))
    for arguments, error in (({"kv_budget": 2}, BudgetError), ({"kv_type": "q2"}, SettingsError)):
        with pytest.raises(error):
            attach(stock, **arguments)  # type: ignore[arg-type]
    stock.draft_model = LlamaPromptLookupDecoding()
    with pytest.raises(SettingsError, match="guessed ahead"):
        attach(stock, 0.5, policy="layer")
    stock.draft_model = None
    assert type(stock) is Llama
    assert stock.n_tokens > 0
    assert content(stock(PROMPT, max_tokens=10, temperature=0.0)) == expected
    stock.close()


# This program prints the size of the process after each step. It runs alone, because memory that
# other tests have left behind might be freed in between. Its first session also maps libraries.
SIZES = """
import json, sys
from pathlib import Path
from llama_cpp import Llama
from entropykv import EntropyLlama, attach

def allocated():
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("RssAnon:")[1].split()[0]) * 1024

path, n_ctx = sys.argv[1], int(sys.argv[2])
options = {"n_threads": 2, "verbose": False}
sizes, llms = [], []
for length in (512, 512, n_ctx):
    llms.append(EntropyLlama(path, n_ctx=length, kv_budget=256, **options))
    sizes.append(allocated())
llms.append(Llama(path, n_ctx=n_ctx, **options))
sizes.append(allocated())
attach(llms[-1], kv_budget=256)
print(json.dumps([*sizes, allocated()]))
"""


@pytest.mark.needs("/proc/self/status")
def test_the_stock_cache_costs_no_memory(smollm2: Path) -> None:
    """attach() frees stock's cache (180 MiB for 8,192 cells), and EntropyLlama never has it."""
    n_ctx, cache_bytes = 8192, 8192 * 30 * 2 * 3 * 64 * 2
    sizes = json.loads(python(SIZES, smollm2, n_ctx).stdout)
    _, short, long, full, attached = np.diff(sizes, prepend=0)
    assert long < short + cache_bytes / 5
    assert full > cache_bytes
    assert attached < -cache_bytes / 2


def test_the_stub_has_hardly_any_cells(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context that llama-cpp-python makes, and that is replaced afterwards, has few cells."""
    cells = []
    original = llama_cpp.llama_init_from_model

    def recorded(model: Any, parameters: Any) -> Any:
        context = original(model, parameters)
        cells.append(llama_cpp.llama_n_ctx(context))
        return context

    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_init_from_model", recorded)
    EntropyLlama(str(tiny_llama), n_ctx=100_000, **QUIET).close()
    assert cells == [256]


def test_the_example(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: ARG001
    runpy.run_path(str(EXAMPLES / "embed_llama.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "entries evicted at" in printed
    assert re.search(r"\d+ tokens read, \d+ written", printed)
