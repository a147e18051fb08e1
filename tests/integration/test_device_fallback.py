"""If a device refuses a layer's attention, it is computed in main memory; the other layers attend
on the device.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from entropykv.cli import main
from tests.architectures import MODELS
from tests.support import plain_memory_device
from tests.support.command import python
from tests.support.releases import write_known
from tests.support.tiny_models import write_llama

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import contextlib, json, sys
from tests.support.refusing_device import RefusingDevice
path, layers, *refused, copies_rows, options = map(json.loads, sys.argv[1:])
device = RefusingDevice(*refused, copies_rows=copies_rows)
import numpy as np
from entropykv import Pool, Session
from tests.support.logits import relative_error, tokens_for
from tests.support.saved_sessions import all_entries

options = {"n_ctx": 256, "n_ubatch": 24, "policy": "uniform", "kv_type": "f16"} | options
options["n_threads"] = 1

def read(session):
    tokens = tokens_for(140)
    rows = [session.decode(tokens[:120], all_logits=True)]
    rows += [np.atleast_2d(session.decode([token])) for token in tokens[120:]]
    return np.concatenate(rows)

alone = {name: value for name, value in options.items() if name != "n_sequences"}
alone |= {"store": "headwise", "n_gpu_layers": 0}
alone["kv_budget"] //= options.get("n_sequences", 1)
with Session(path, **alone) as session:
    expected, entries = read(session), all_entries(session)
    state = session.files.save_state()
given = {"store": "device", **options, "n_gpu_layers": layers}
with contextlib.ExitStack() as stack:
    if "n_sequences" in options:
        pool = stack.enter_context(Pool(path, **given))
        other, session = pool.session(), pool.session()
        read(other)
    else:
        session = stack.enter_context(Session(path, **given))
    rows = read(session)
    kept = all_entries(session)
    stats = session.stats()
    session.files.load_state(state)
    loaded = all_entries(session) == entries
    pool.resize(128) if "n_sequences" in options else session.cache.resize(0.5)
    session.decode(tokens_for(30, seed=8))
    print(json.dumps({
        "store": session.cache.store,
        "fallback": session.config.fallback,
        "on_host": session.cache.on_host,
        "error": float(relative_error(rows, expected)),
        "same": sum(len(set(a) & set(b)) for a, b in zip(kept, entries)) / sum(map(len, entries)),
        "devices": stats.kv_bytes_on_devices,
        "within": stats.kv_bytes_peak <= stats.kv_bytes_budget,
        "loaded": loaded,
        "refused": device.refused,
        "overflows": device.overflows,
    }))
"""

pytestmark = pytest.mark.skipif(
    not plain_memory_device.is_known(), reason="another llama.cpp, whose devices look different"
)

KINDS = ("gemma2", "gpt-oss", "llama4", "gemma3n", "deepseek2", "bloom")
"""One model each with sliding windows, sinks, chunked windows, shared K and V, MLA, and ALiBi."""


def read_on_device(
    path: Path,
    head_dims: Collection[int] = (),
    operations: Collection[str] = (),
    of_views: Collection[str] = (),
    copies_rows: bool = False,
    layers: int = 99,
    **options: Any,
) -> dict[str, Any]:
    """Read a text with layers on a device that refuses something, in a process of its own.

    The device refuses heads of the sizes `head_dims`, `operations`, and operations on views
    (`of_views`). With `copies_rows` its attention needs room for a copy of its rows. Returns what
    the session reports, and how its logits compare with those of the headwise store on the CPU.
    """
    refused = map(sorted, (head_dims, operations, of_views))
    arguments = (str(path), layers, *refused, copies_rows, options)
    done = python(CHILD, *map(json.dumps, arguments), cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    # Nothing was computed on the device that it does not support.
    assert found["refused"] == []
    # Nothing was written beyond the memory of a node.
    assert found["overflows"] == []
    assert found["within"]
    assert found["loaded"]
    return found


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "llama.gguf"
    write_llama(path, head_dim=64, weight_type="F32")
    return path


@pytest.mark.parametrize("layers", [99, 2])
def test_layers_whose_heads_a_device_refuses_attend_in_main_memory(
    llama: Path, layers: int
) -> None:
    found = read_on_device(llama, head_dims=[64], layers=layers, kv_budget=48)
    named = "layers 0 to 1 are" if layers == 99 else "layer 1 are"
    assert found["on_host"] == (
        f"K, V and attention of {named} in main memory, because REFUSING cannot compute "
        "FLASH_ATTN_EXT for heads of 64 values"
    )
    assert list(found["devices"]) == ["CPU"]
    assert found["error"] < 2e-3
    assert found["same"] == 1.0


def test_layers_whose_heads_it_takes_stay_on_the_device(llama: Path) -> None:
    found = read_on_device(llama, head_dims=[32], kv_budget=48)
    assert found["on_host"] is None
    assert list(found["devices"]) == ["REFUSING"]
    assert found["error"] < 2e-3


def test_sums_that_a_device_does_not_compute_as_products_are_computed_there(llama: Path) -> None:
    """A device that cannot multiply views, as Vulkan cannot, sums over queries without products."""
    found = read_on_device(llama, of_views=["OUT_PROD"], kv_budget=48)
    assert found["on_host"] is None
    assert list(found["devices"]) == ["REFUSING"]
    assert found["error"] < 2e-3


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("options", [{}, {"n_ctx": 2048, "kv_budget": 1400}])
def test_attention_that_copies_its_rows_gets_the_room_that_it_needs(
    llama: Path, kv_type: str, options: dict[str, int]
) -> None:
    """The device has room for copied rows of the store's cache, more than llama.cpp's own."""
    given: dict[str, Any] = {"kv_budget": 48, "kv_type": kv_type, **options}
    found = read_on_device(llama, copies_rows=True, **given)
    assert found["on_host"] is None
    assert list(found["devices"]) == ["REFUSING"]
    assert found["error"] < (2e-3 if kv_type == "f16" else 5e-2)


def test_of_layers_with_unlike_heads_only_those_that_it_refuses_move(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_known(path, MODELS["gemma4"])
    found = read_on_device(path, head_dims=[32], kv_budget=48)
    assert found["on_host"].endswith("for heads of 32 values")
    assert sorted(found["devices"]) == ["CPU", "REFUSING"]
    assert found["error"] < 5e-2
    assert found["same"] > 0.95


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("refuses", ["attention", "masks"])
def test_all_kinds_of_attention_can_move(name: str, refuses: str, tmp_path: Path) -> None:
    """Every kind of attention can be computed in main memory, whether a device refuses llama.cpp's
    own attention, or an operation that the store adds to it.
    """
    path = tmp_path / "model.gguf"
    write_known(path, MODELS[name])
    operations = ["FLASH_ATTN_EXT"] if refuses == "attention" else ["CLAMP"]
    found = read_on_device(path, operations=operations, kv_budget=48)
    assert f"REFUSING cannot compute {operations[0]}" in found["on_host"]
    assert list(found["devices"]) == ["CPU"]
    assert found["error"] < 5e-2 + 2 * MODELS[name].rounding
    assert found["same"] > 0.95


@pytest.mark.parametrize(
    ("operations", "store"), [(["FLASH_ATTN_EXT"], "headwise"), (["CLAMP"], "device")]
)
def test_auto_takes_headwise_where_llama_cpp_attends_on_the_cpu_anyway(
    llama: Path, operations: list[str], store: str
) -> None:
    found = read_on_device(llama, operations=operations, kv_budget=48, store="auto")
    assert found["store"] == store
    assert (found["fallback"] is None) == (store == "headwise")
    assert (found["on_host"] is None) == (store == "headwise")


ASK = """
import json, sys
from tests.support.refusing_device import RefusingDevice
device = RefusingDevice([], [], [])
from entropykv.cli import main
sys.exit(main(json.loads(sys.argv[1])))
"""


def test_a_document_whose_policy_no_device_can_follow_is_asked_on_the_cpu(
    llama: Path, tmp_path: Path
) -> None:
    """The refusal names `-ngl 0` as the way out, not one of the flat store, which is tried last."""
    text, document = tmp_path / "text.txt", tmp_path / "book.kv"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 6, encoding="utf-8")
    model = ["-m", str(llama), "-t", "1"]
    cache = ["--policy", "adaptive", "-c", "512", "-o", str(document)]
    assert main(["read", str(text), *model, *cache]) == 0
    question = ["run", *model, "--document", str(document), "-p", "who?", "-n", "4"]
    options: dict[str, Any] = {"cwd": ROOT, "code": 2}
    refused = python(ASK, json.dumps([*question, "-ngl", "99"]), **options)
    assert "the device store cannot follow policy adaptive" in refused.stderr
    assert "on the CPU (-ngl 0)" in refused.stderr
    freezes = [*question, "-ngl", "99", "--freeze", "ram"]
    assert "on the CPU (-ngl 0" in python(ASK, json.dumps(freezes), **options).stderr
    python(ASK, json.dumps([*question, "-ngl", "0"]), cwd=ROOT)


def test_conversations_of_a_pool_attend_there_too(llama: Path) -> None:
    found = read_on_device(llama, operations=["CLAMP"], kv_budget=64, n_sequences=2)
    assert found["on_host"] is not None
    assert found["same"] == 1.0
