"""Start a Ray cluster of three nodes on this machine, and kill nodes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

HEAD = """
import sys
from ray.cluster_utils import Cluster
memory = {"object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **memory})
nodes = [cluster.add_node(num_cpus=1, **memory) for _ in range(2)]
print("ADDRESS", cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(nodes.pop(), allow_graceful=False)
    print("KILLED", flush=True)
cluster.shutdown()
"""
"""A program that runs a cluster of three nodes; each line on stdin kills a node that runs tasks."""


class ThreeNodes:
    """Hold the process of a cluster, and its address."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._wait_for("ADDRESS")

    def kill_a_node(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("kill\n")
        self._process.stdin.flush()
        self._wait_for("KILLED")

    def _wait_for(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise AssertionError("the cluster ended")


@contextmanager
def three_nodes() -> Iterator[ThreeNodes]:
    """Run a cluster in its own process, because Ray allows a process to be in one cluster only."""
    # A busy machine starts Ray Serve's proxy more slowly than Ray allows by default.
    environment = {**os.environ, "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120"}
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield ThreeNodes(process)
    finally:
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a cluster that does not end, and its nodes, which would slow down later tests."""
    left = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in left:
        with suppress(psutil.Error):
            each.kill()
    process.communicate()
