"""Requests reach the replica that has read their text, documents are shared, and no finished turn
is lost with a replica.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ray_cluster import ThreeNodes
from tests.support.replicas import Served, start_replicas, two_replicas
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


pytest.importorskip("ray", reason="needs the extra ray")

TEXT = "the winding road to the land of the king is far from the sea and " * 12


def test_all_replicas_answer_about_a_document_that_one_has_read(
    cluster: ThreeNodes, tmp_path: Path
) -> None:
    with two_replicas(cluster, tmp_path, "--documents", "kept") as served:
        documents = served.client
        sent = documents.post("/v1/documents", files={"file": ("book.txt", TEXT.encode())})
        assert sent.status_code == 202, sent.text
        wait_for(lambda: documents.get("/v1/documents/book").json()["status"] == "ready")
        assert (tmp_path / "kept" / "book.kv").exists(), "the path is not that of the command"
        # Conversations are spread over replicas by their names, and each of them reads only its
        # question.
        answers = {
            served.ask("Where is it?", f"conversation {number}", document="book")
            for number in range(12)
        }
        assert len({replica for _, replica, _ in answers}) == 2
        assert len({answer for answer, _, _ in answers}) == 1
        assert max(n_read for _, _, n_read in answers) < 20
        deleted = documents.delete("/v1/documents/book")
        assert deleted.json()["deleted"], deleted.text
        assert not list((tmp_path / "kept").glob("book*"))
        gone = documents.post("/v1/completions", json={"prompt": "x", "document": "book"})
        assert gone.status_code == 404


def test_replicas_that_do_not_share_their_documents_are_refused(
    cluster: ThreeNodes, tmp_path: Path
) -> None:
    """Replicas with documents in memory are refused, because those belong to one process."""
    pytest.importorskip("fsspec")
    log = tmp_path / "log"
    process, _ = start_replicas(
        cluster, tmp_path, log, "--documents", f"memory://{uuid.uuid4()}/kept"
    )
    try:
        assert process.wait(240) != 0
    finally:
        process.kill()
        process.wait()
    said = log.read_text(errors="replace")
    assert "do not see the documents that the others keep there" in said
    assert "Traceback" not in said
