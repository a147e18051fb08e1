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

    def __init__(self):
        self.goes_on, self.is_asked = threading.Event(), threading.Event()
        super().__init__()

    def _buffer_type(self):
        address, cpu = super()._buffer_type(), PlainMemoryDevice._buffer_type(self)
        main = threading.get_ident()
        def alignment(_):
            if self.fails and threading.get_ident() != main:
                self.is_asked.set()
                self.goes_on.wait()
            return self._base.ggml_backend_buft_get_alignment(cpu)
        self._memory.get_alignment = type(self._memory.get_alignment)(alignment)
        return address

    def _compute(self, _, graph):
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
print(json.dumps(done))
"""


@pytest.mark.skipif(
    not plain_memory_device.is_known(), reason="another llama.cpp, whose devices look different"
)
def test_whatever_waits_for_decisions_lets_the_device_answer(tmp_path: Path) -> None:
    """Each operation of the device store that waits for decisions about a failed step releases the
    GIL; otherwise the device, which runs in Python here, could not answer, and the program would
    hang.
    """
    model = tmp_path / "llama.gguf"
    write_llama(model, head_dim=64, weight_type="F32")
    output = python(PROGRAM, model, cwd=ROOT).stdout
    done = json.loads(output.splitlines()[-1])
    expected = ["importance", "save_layer", "rebase", "truncate", "resize", "load", "acquire"]
    assert done == [*expected, "release"]
