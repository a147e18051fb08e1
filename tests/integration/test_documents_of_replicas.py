"""Replicas share documents: one reads them, and all answer questions about them."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.support.ray_cluster import ThreeNodes
from tests.support.replicas import start_replicas, two_replicas
from tests.support.waiting import wait_for

pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.replicas

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
    """Documents in memory belong to one process, so that replicas cannot share them."""
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
