"""Requests reach the replica that has read their text, and no finished turn is lost with a
replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ray_cluster import ThreeNodes
from tests.support.replicas import Served, two_replicas
from tests.support.waiting import wait_for

pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.replicas

SYSTEM = "the winding road to the land of the king is far from the sea and " * 12


@pytest.fixture
def served(cluster: ThreeNodes, tmp_path: Path) -> Iterator[Served]:
    with two_replicas(cluster, tmp_path) as server:
        yield server


def test_requests_find_their_text_and_a_node_that_dies_loses_no_finished_turn(
    served: Served, cluster: ThreeNodes
) -> None:
    # A text that was read before is continued where it was read.
    first, replica, whole = served.ask(f"once {SYSTEM}")
    for _ in range(3):
        answer, again, read = served.ask(f"once {SYSTEM}")
        assert (answer, again) == (first, replica)
        assert read < whole / 4
    # Texts without a common beginning are spread over the replicas.
    opened = {served.ask(f"{number} {SYSTEM}")[1] for number in range(12)}
    assert len(opened) == 2
    # Streams and refusals pass through the proxy unchanged.
    assert served.stream(f"once {SYSTEM}").rstrip().endswith("data: [DONE]")
    assert served.post(b"{").status_code == 400
    assert served.post(b" " * (2 << 20)).status_code == 413

    texts = {f"named {number}": f"{number} {SYSTEM}" for number in range(12)}
    where = {}
    for name, text in texts.items():
        answer, where[name], _ = served.ask(text, name)
        texts[name] = f"{text}{answer} and then the king said"
    assert len(set(where.values())) == 2
    cluster.kill_a_node()
    for name, text in texts.items():
        answer, _, read = served.ask(text, name)
        assert answer
        # The finished turn was not read again. If the node died after its answer but before the
        # client had it, the text is sent again. It then continues from the checkpoint after the
        # first prompt, or from its own, and then nothing is left to read.
        assert read < whole / 4
    # The processes of a node that died may answer a little longer.
    wait_for(lambda: len({served.ask(text, name)[1] for name, text in texts.items()}) == 1)
