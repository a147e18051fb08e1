"""Threads that wait for decisions of the device store let a device written in Python answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import plain_memory_device
from tests.support.command import python
from tests.support.tiny_models import write_llama

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys, threading
from tests.support.plain_memory_device import PlainMemoryDevice, Tensor
from tests.support.refusing_device import RefusingDevice

class HeldDevice(RefusingDevice):
    fails = False  # whether it computes nothing, and other threads wait before it answers them
    breaks = False  # whether it computes nothing in the background
    main = threading.get_ident()

    def __init__(self):
        self.goes_on, self.is_asked = threading.Event(), threading.Event()
        super().__init__()

    def _buffer_type(self):
        address, cpu = super()._buffer_type(), PlainMemoryDevice._buffer_type(self)
        def alignment(_):
            if self.fails and threading.get_ident() != self.main:
                self.is_asked.set()
                self.goes_on.wait()
            return self._base.ggml_backend_buft_get_alignment(cpu)
        self._memory.get_alignment = type(self._memory.get_alignment)(alignment)
        return address

    def _compute(self, _, graph):
        if self.breaks and threading.get_ident() != self.main:
            return -1
        nodes = (self._base.ggml_graph_node(graph, i)
                 for i in range(self._base.ggml_graph_n_nodes(graph)))
        attends = any(self._operation(Tensor.from_address(node)) == b"FLASH_ATTN_EXT"
                      for node in nodes)
        if not self.fails or not attends:
            return super()._compute(_, graph)
        self.is_asked.wait()  # The step fails when its decisions have begun.
        return -1

device = HeldDevice()
from entropykv import EntropyKVError, Session
from tests.support.logits import tokens_for

with Session(sys.argv[1], n_ctx=256, n_ubatch=24, n_gpu_layers=99, n_threads=1, store="device",
             policy="uniform", kv_type="f16", kv_budget=64) as session:
    store = session._slot.store
    core, hook = store.core, store.context.hook
    ropes = [node.rope for node in hook.nodes]
    heads = [(layer, head) for layer, shape in enumerate(store.layers)
             for head in range(shape.n_head_kv)]
    session.decode(tokens_for(72))
    states = [bytearray(state) for layer in range(len(store.layers))
              for state in core.save_layer(layer)]
    counts = [core.count(*head) for head in heads]
    budgets = [core.budget(*head) for head in heads]
    operations = {
        "importance": lambda: core.importance(0, 0),
        "save_layer": lambda: core.save_layer(0),
        "rebase": lambda: core.rebase(ropes, 4, 0, 1),
        "truncate": lambda: core.truncate(5),
        "resize": lambda: core.__class__.resize([core], budgets, 4, 16),
        "load": lambda: core.load(counts, states),
        "acquire": lambda: core.acquire(0),
        "release": lambda: core.release(),
    }
    done = []
    # No thread gives up Python's lock but where it waits for something.
    sys.setswitchinterval(1000)
    for name, operation in operations.items():
        session.reset()
        session.decode(tokens_for(72))
        core.entries  # waits for the decisions about these tokens
        device.goes_on.clear()
        device.is_asked.clear()
        device.fails = True
        try:
            session.decode(tokens_for(24, seed=2))
        except EntropyKVError as error:
            device.goes_on.set()
            operation()
            done.append(name)
        device.fails = False
    operations |= {
        "entries": lambda: core.entries,
        "positions": lambda: core.positions(0, 0),
        "count": lambda: core.count(0, 0),
        "scratch_bytes": lambda: core.scratch_bytes,
        "device_bytes": lambda: core.device_bytes,
        "traffic": lambda: store.context.devices.traffic,
        "most_drafts": lambda: core.most_drafts(72, 1),
    }
    core.acquire(0)
    # The device is asked in the background after the last step, which is successful.
    for name, operation in operations.items():
        if name != "release":
            session.reset()
            session.decode(tokens_for(72))
            operation()
            done.append(name)
    session.reset()
    logits = session.decode(tokens_for(90)).tolist()
    session.reset()
    session.decode(tokens_for(48))
    core.entries
    device.breaks = True
    session.decode(tokens_for(24, seed=2))
    try:
        session.decode([5])
    except EntropyKVError as error:
        done.append(str(error))
    device.breaks = False
    session.reset()
    done.append(session.decode(tokens_for(90)).tolist() == logits)
print(json.dumps(done))
"""


@pytest.mark.skipif(
    not plain_memory_device.is_known(), reason="another llama.cpp, whose devices look different"
)
def test_whatever_waits_for_decisions_lets_the_device_answer(tmp_path: Path) -> None:
    """Each operation of the device store that waits for decisions releases the GIL, after a failed
    step and after a prompt's micro-batch; otherwise the device, which runs in Python here, could
    not answer, and the program would hang. If the device fails in the background, the next step
    says so.
    """
    model = tmp_path / "llama.gguf"
    write_llama(model, head_dim=64, weight_type="F32")
    output = python(PROGRAM, model, cwd=ROOT).stdout
    done = json.loads(output.splitlines()[-1])
    expected = ["importance", "save_layer", "rebase", "truncate", "resize", "load", "acquire"]
    readers = ["entries", "positions", "count", "scratch_bytes", "device_bytes", "traffic"]
    error, same = done[-2:]
    assert done[:-2] == [*expected, "release", *expected, *readers, "most_drafts"]
    assert error.startswith("a step could not be computed: a device could not compute")
    assert same


POOL = """
import json, sys, threading
from tests.support.refusing_device import RefusingDevice
device = RefusingDevice()
from entropykv import Pool, Session
from tests.support.logits import tokens_for
from tests.support.saved_sessions import all_entries

options = {"n_ctx": 256, "n_ubatch": 24, "policy": "uniform", "kv_type": "f16", "n_threads": 1}
texts = [tokens_for(150, seed=seed) for seed in range(3)]

def read(session, text):
    for begin in range(0, 120, 24):
        session.decode(text[begin : begin + 24])
    for token in text[120:]:
        session.decode([token])

expected, kept, is_read = [], [], threading.Event()
for text in texts:
    with Session(sys.argv[1], store="headwise", n_gpu_layers=0, kv_budget=48, **options) as session:
        read(session, text)
        expected.append(all_entries(session))
with Pool(sys.argv[1], store="device", n_gpu_layers=99, kv_budget=144, n_sequences=3,
          **options) as pool:
    sessions = [pool.session() for _ in texts]
    def ask():
        while not is_read.is_set():
            for session in sessions:
                session.stats()
    asking = threading.Thread(target=ask)
    asking.start()
    reading = [threading.Thread(target=read, args=pair) for pair in zip(sessions, texts)]
    for thread in reading:
        thread.start()
    for thread in reading:
        thread.join()
    is_read.set()
    asking.join()
    kept = [all_entries(session) for session in sessions]
print(json.dumps(kept == expected))
"""


@pytest.mark.skipif(
    not plain_memory_device.is_known(), reason="another llama.cpp, whose devices look different"
)
def test_conversations_read_while_another_is_decided_about(tmp_path: Path) -> None:
    """Three conversations of a pool that read at once, while a thread asks for their figures, keep
    the entries that the headwise store keeps of each.
    """
    model = tmp_path / "llama.gguf"
    write_llama(model, head_dim=64, weight_type="F32")
    assert json.loads(python(POOL, model, cwd=ROOT).stdout.splitlines()[-1])
