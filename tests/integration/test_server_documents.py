"""A server reads documents in the background, keeps them, and answers questions about them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from entropykv.errors import SettingsError
from entropykv.server import ModelOptions, ServerOptions, create_app
from tests.support.running_server import MODEL, Server
from tests.support.waiting import wait_for

SENTENCE = "The quick brown fox jumps over the lazy dog. "
TEXT = SENTENCE * 12
LONG = SENTENCE * 420
"""A text of about 13,000 tokens, which take a second or more to read."""
QUESTION = "Who jumps?"
USUAL: tuple[object, ...] = ("-c", 16384, "-t", 1, "--kv-budget", 4096)
KEYS = ("first-key-of-two", "second-key-of-two")


class Client:
    """Send each request through a connection of its own, which is closed afterwards."""

    def __init__(self, server: Server, key: str | None) -> None:
        self._url = server.url
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._options: dict[str, Any] = {"headers": headers, "timeout": 60}

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self._url + path, **self._options)

    def post(self, path: str, **content: Any) -> httpx.Response:
        return httpx.post(self._url + path, **content, **self._options)

    def delete(self, path: str) -> httpx.Response:
        return httpx.delete(self._url + path, **self._options)

    def stream(self, path: str, body: Any) -> AbstractContextManager[httpx.Response]:
        return httpx.stream("POST", self._url + path, json=body, **self._options)


class Asker:
    """Send requests about documents to a server."""

    def __init__(self, server: Server, key: str | None = None) -> None:
        self.client = Client(server, key)

    def post(self, name: str, text: str = TEXT, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/documents", json={"name": name, "text": text, **fields})

    def status(self, name: str) -> Any:
        return self.client.get(f"/v1/documents/{name}").json()

    def until(self, name: str, *wanted: str) -> Any:
        wait_for(lambda: self.status(name).get("status") in wanted)
        return self.status(name)

    def read(self, name: str, text: str = TEXT) -> Any:
        assert self.post(name, text).status_code == 202
        return self.until(name, "ready")

    def ask(self, document: str | None, question: str = QUESTION, **fields: Any) -> httpx.Response:
        body = {"prompt": question, "max_tokens": 8, "temperature": 0, **fields}
        return self.client.post(
            "/v1/completions", json={**body, "document": document} if document else body
        )

    def answer(self, document: str | None, question: str = QUESTION) -> str:
        answer = self.ask(document, question)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def n_read(self) -> int:
        """Return the number of prompt tokens read so far, without those of documents."""
        lines = self.client.get("/metrics").text.splitlines()
        line = next(x for x in lines if x.startswith("entropykv_prompt_tokens_total"))
        return int(float(line.split()[1]))

    def names(self) -> list[str]:
        return [each["id"] for each in self.client.get("/v1/documents").json()["data"]]


def message_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


@pytest.fixture(scope="module", params=[(), ("--parallel", 2)], ids=["one", "pool"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("documents")
    with Server("--documents", folder, *request.param, usual=USUAL) as running:
        yield running


@pytest.fixture
def asker(server: Server) -> Asker:
    asker = Asker(server)
    for name in asker.names():
        asker.client.delete(f"/v1/documents/{name}")
    return asker


def test_a_question_reads_its_own_tokens_alone_and_gets_the_answer_of_the_whole_text(
    asker: Asker,
) -> None:
    text = TEXT.replace("fox", "cat")  # No other test uses this text, so no cache knows it.
    status = asker.read("book", text)
    assert status["tokens_read"] == status["tokens"] > 100
    assert status["bytes"] > 0
    answers = {}
    for question in (QUESTION, "What is lazy?", "Why?"):
        tokens = asker.client.post("/tokenize", json={"content": question}).json()["tokens"]
        before = asker.n_read()
        answers[question] = asker.answer("book", question)
        assert asker.n_read() - before == len(tokens)
    for question, answer in answers.items():
        assert answer == asker.answer(None, f"{text}\n{question}")


def test_the_sequence_that_reads_documents_is_no_conversation(
    server: Server, request: pytest.FixtureRequest
) -> None:
    n = "2 conversations" if request.node.callspec.id == "pool" else "1 conversation"
    assert f" for {n} and the document that is read" in "".join(server.log)


def test_a_request_waits_for_a_document_that_is_being_read(asker: Asker) -> None:
    assert asker.post("book", LONG).status_code == 202
    assert asker.answer("book")
    status = asker.status("book")
    assert (status["status"], status["tokens_read"]) == ("ready", status["tokens"])


def test_the_progress_of_reading_can_be_watched(asker: Asker) -> None:
    assert asker.post("book", LONG).status_code == 202
    seen = set()
    while (status := asker.status("book"))["status"] != "ready":
        assert status["status"] in ("queued", "reading")
        seen.add(status["tokens_read"])
    assert len(seen) > 3


def test_others_write_and_read_while_a_document_is_read(asker: Asker) -> None:
    assert asker.post("book", LONG).status_code == 202
    asker.until("book", "reading", "ready")
    body = {"prompt": TEXT, "max_tokens": 20, "temperature": 0, "stream": True, "min_tokens": 20}
    positions = []
    with asker.client.stream("/v1/completions", body) as stream:
        chunks = (line for line in stream.iter_lines() if line.startswith("data: {"))
        positions.extend(asker.status("book")["tokens_read"] for _ in chunks)
    assert len(positions) >= 20
    assert 0 < positions[0] < positions[-1], "the document did not go on meanwhile"
    assert asker.status("book")["status"] == "reading", "the stream waited for the document"


def test_a_client_that_goes_away_stops_waiting_but_not_the_reading(
    asker: Asker, server: Server
) -> None:
    assert asker.post("book", LONG).status_code == 202
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/v1/completions",
            json={"document": "book", "prompt": QUESTION},
            timeout=0.2,
        )
    server.idle_figures(5)
    assert asker.status("book")["status"] == "reading"
    asker.until("book", "ready")


def test_chats_name_a_document_in_a_field_or_in_a_part_of_a_message(asker: Asker) -> None:
    asker.read("book")
    file = {"type": "file", "file": {"file_id": "book"}}
    text = {"type": "text", "text": QUESTION}
    usual = {"max_tokens": 8, "temperature": 0}
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": QUESTION}], "document": "book"},
        {"messages": [{"role": "user", "content": [file, text]}]},
    ]
    answers = []
    for body in bodies:
        before = asker.n_read()
        answer = asker.client.post("/v1/chat/completions", json={**body, **usual})
        assert answer.status_code == 200, answer.text
        assert asker.n_read() - before < 30
        answers.append(answer.json()["choices"][0]["message"]["content"])
    assert answers[0] == answers[1]


def test_other_apis_ask_documents_too(asker: Asker) -> None:
    asker.read("book")
    part = {"type": "input_file", "file_id": "book"}
    item = {"role": "user", "content": [part, {"type": "input_text", "text": QUESTION}]}
    ollama = {"model": "any", "stream": False, "options": {"num_predict": 4}}
    message = {"role": "user", "content": QUESTION}
    for path, body in (
        ("/v1/responses", {"input": [item], "max_output_tokens": 4}),
        ("/v1/responses", {"input": QUESTION, "document": "book", "max_output_tokens": 4}),
        ("/api/generate", {**ollama, "document": "book", "prompt": QUESTION}),
        ("/api/chat", {**ollama, "document": "book", "messages": [message]}),
    ):
        before = asker.n_read()
        answer = asker.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert asker.n_read() - before < 30


def test_the_next_turn_goes_on_from_the_last_answer(asker: Asker) -> None:
    asker.read("book")
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION * 30}]
    for _ in range(2):
        before = asker.n_read()
        body = {"messages": messages, "document": "book", "max_tokens": 8, "temperature": 0}
        answer = asker.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        n_read = asker.n_read() - before
        said = answer.json()["choices"][0]["message"]
        messages += [said, {"role": "user", "content": "And then?"}]
    assert n_read < 60


def test_a_system_message_stands_behind_the_document(asker: Asker) -> None:
    asker.read("book")
    system = {"role": "system", "content": "Answer with one word."}
    user = {"role": "user", "content": QUESTION}
    before = asker.n_read()
    body = {"messages": [system, user], "document": "book", "max_tokens": 2}
    assert asker.client.post("/v1/chat/completions", json=body).status_code == 200
    assert asker.n_read() - before < 60


def test_several_choices_and_streams_ask_one_document(asker: Asker) -> None:
    asker.read("book")
    answer = asker.ask("book", n=3)
    assert len(answer.json()["choices"]) == 3
    body = {"prompt": QUESTION, "document": "book", "stream": True, "max_tokens": 4}
    with asker.client.stream("/v1/completions", body) as stream:
        assert sum(line.startswith("data: {") for line in stream.iter_lines()) >= 4


def test_a_file_can_be_sent_as_a_form(asker: Asker) -> None:
    file = {"file": ("The book.txt", TEXT.replace("\n", "\r\n").encode())}
    # The name has a space.
    assert asker.client.post("/v1/documents", files=file).status_code == 400
    named = asker.client.post("/v1/documents", files=file, data={"name": "book"})
    assert named.status_code == 202, named.text
    unnamed = asker.client.post("/v1/documents", files={"file": ("a.txt", TEXT.encode())})
    assert unnamed.json()["id"] == "a"
    asker.until("a", "ready")
    assert asker.answer("a") == asker.answer("book")


def test_the_same_text_is_not_read_twice(asker: Asker) -> None:
    asker.read("book")
    again = asker.post("book")
    assert (again.status_code, again.json()["status"]) == (200, "ready")
    other = asker.post("book", TEXT + "!")
    assert other.status_code == 409
    assert "another text" in message_of(other)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/b", "..", ".x", "", "a\0", "x" * 129, "ü", 7]
)
def test_names_that_are_no_names_are_refused(asker: Asker, name: Any) -> None:
    refused = asker.post(name)
    assert refused.status_code == 400
    assert "name" in message_of(refused)
    if isinstance(name, str) and name:
        assert asker.ask(name).status_code == 400


def test_impossible_documents_are_refused(asker: Asker) -> None:
    assert asker.post("book", "  \n").status_code == 400
    assert asker.post("book", "x" * (8 * 2**20 + 1)).status_code == 413
    assert asker.client.post("/v1/documents", json={"name": "book"}).status_code == 400
    bad = asker.client.post("/v1/documents", files={"file": ("a.txt", b"\xff\xfe")})
    assert "UTF-8" in message_of(bad)
    assert asker.names() == []


def test_a_text_beyond_the_context_fails_with_a_sentence(asker: Asker) -> None:
    assert asker.post("book", SENTENCE * 4000).status_code == 202
    failed = asker.until("book", "failed")
    assert "more than the context" in failed["error"]
    asked = asker.ask("book")
    assert asked.status_code == 409
    assert "more than the context" in message_of(asked)
    assert asker.post("book").status_code == 202, "it can be read anew"
    asker.until("book", "ready")


def test_requests_that_cannot_ask_are_refused(asker: Asker) -> None:
    unknown = asker.ask("unknown")
    assert unknown.status_code == 404
    assert "POST /v1/documents" in message_of(unknown)
    asker.read("book")
    assert asker.ask("book", echo=True).status_code == 400
    assert asker.ask("book", suffix="x").status_code == 400
    file = {"type": "file", "file": {"file_id": "other"}}
    several = {"messages": [{"role": "user", "content": [file]}], "document": "book"}
    refused = asker.client.post("/v1/chat/completions", json=several)
    assert refused.status_code == 400
    assert "one document" in message_of(refused)
    inline = {"type": "file", "file": {"file_data": "data:text/plain;base64,aGk="}}
    body = {"messages": [{"role": "user", "content": [inline]}]}
    refused = asker.client.post("/v1/chat/completions", json=body)
    assert "file_id" in message_of(refused)
    late = {"messages": [{"role": "assistant", "content": "x"}], "document": "book"}
    assert asker.client.post("/v1/chat/completions", json=late).status_code == 400


def test_a_document_is_asked_with_the_template_that_it_was_read_with(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    said = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}
    for given, status in ((("--chat-template", template), 200), ((), 409)):
        with Server("--documents", tmp_path, *given, usual=USUAL) as running:
            asker = Asker(running)
            if status == 200:
                asker.read("book")
            for path, body in (("chat/completions", said), ("completions", {"prompt": QUESTION})):
                answer = asker.client.post(f"/v1/{path}", json={**body, "document": "book"})
                assert answer.status_code == status, answer.text
            if status == 200:
                assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
            else:
                assert "read with another chat template" in message_of(answer)


def test_a_server_without_a_directory_says_how_to_get_one(tmp_path: Path) -> None:
    with Server(usual=("-c", 512, "-t", 1)) as running:
        for answer in (Asker(running).post("book"), Asker(running).ask("book")):
            assert answer.status_code == 501
            assert "--documents DIR" in message_of(answer)
    blocked = tmp_path / "file"
    blocked.write_text("x")
    model = ModelOptions(model=str(MODEL))
    for options, said in (
        (ServerOptions(documents=str(blocked / "in")), "--documents"),
        (ServerOptions(documents=str(tmp_path), documents_limit="many"), "--documents-limit"),
    ):
        with pytest.raises(SettingsError, match=said):
            create_app(model, options)


def test_deleting_a_document_that_is_being_read_stops_it(asker: Asker) -> None:
    assert asker.post("book", LONG).status_code == 202
    asker.until("book", "reading", "ready")
    assert asker.client.delete("/v1/documents/book").json()["deleted"]
    assert asker.names() == []
    asker.read("book")  # The name is free again, and may be used for another text.


def test_the_least_recently_used_document_makes_room(tmp_path: Path) -> None:
    running = Server("--documents", tmp_path, usual=USUAL)
    asker = Asker(running)
    size = asker.read("probe")["bytes"]
    running.end()
    (tmp_path / "probe.kv").unlink()
    limit = ("--documents-limit", f"{int(2.5 * size / 1024)}KiB")
    with Server("--documents", tmp_path, *limit, usual=USUAL) as running:
        asker = Asker(running)
        for name in ("a", "b"):
            asker.read(name)
        asker.answer("a")  # Now b was not used for the longest time.
        asker.read("c")
        assert asker.names() == ["a", "c"]
        body = {"prompt": QUESTION, "document": "a", "stream": True, "max_tokens": 4000}
        body["min_tokens"] = 4000
        with asker.client.stream("/v1/completions", body) as stream:
            lines = stream.iter_lines()
            next(lines)
            # a was not used for the longest time, but a request uses it now.
            for name in ("d", "e"):
                asker.read(name)
            assert asker.names() == ["a", "e"]
        assert asker.post("large", TEXT * 4).status_code == 202
        assert "--documents-limit" in asker.until("large", "failed")["error"]
        assert asker.names() == ["a", "e", "large"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.kv", "e.kv"]


def test_users_see_and_ask_their_own_documents_only(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("\n".join(KEYS), encoding="utf-8")
    with Server(
        *("--documents", tmp_path / "kept", "--api-key-file", keys), usual=USUAL
    ) as running:
        first, second = (Asker(running, key) for key in KEYS)
        first.read("book")
        assert (first.names(), second.names()) == (["book"], [])
        for answer in (
            second.client.get("/v1/documents/book"),
            second.client.delete("/v1/documents/book"),
            second.ask("book"),
        ):
            assert answer.status_code == 404
        second.read("book", "A cat sleeps. " * 20)
        before = first.n_read()
        first.answer("book")
        assert first.n_read() - before < 20
        assert len(list((tmp_path / "kept").glob("*/book.kv"))) == 2


def test_a_document_belongs_to_one_of_several_models(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.gguf").symlink_to(MODEL)
    with Server(
        *("--models-dir", tmp_path, "--documents", tmp_path / "kept"), model=None, usual=USUAL
    ) as running:
        asker = Asker(running)
        (one, two) = (each["id"] for each in asker.client.get("/v1/models").json()["data"])
        assert asker.post("book", model=one).status_code == 202
        asker.until("book", "ready")
        assert asker.ask("book", model=one).status_code == 200
        other = asker.ask("book", model=two)
        assert other.status_code == 400
        assert repr(one) in message_of(other)
        assert asker.client.get("/v1/documents").json()["data"][0]["model"] == one
        assert asker.client.delete("/v1/documents/book").status_code == 200


def test_documents_are_there_after_a_restart(tmp_path: Path) -> None:
    running = Server("--documents", tmp_path, usual=USUAL)
    asker = Asker(running)
    asker.read("book")
    expected = asker.answer("book")
    running.end()
    with Server("--documents", tmp_path, usual=USUAL) as running:
        asker = Asker(running)
        assert asker.status("book")["status"] == "ready"
        assert asker.answer("book") == expected
        assert asker.n_read() < 20


@pytest.mark.needs("signal.SIGKILL")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_no_accepted_text_is_lost_by_a_server_that_dies(tmp_path: Path, name: str) -> None:
    running = Server("--documents", tmp_path, usual=USUAL)
    asker = Asker(running)
    names = ["long", "first", "second"]
    asker.post("long", LONG)
    for number, waiting in enumerate(names[1:]):
        assert asker.post(waiting, f"{number} {TEXT}").status_code == 202
        assert asker.status(waiting)["status"] == "queued"
    wait_for((tmp_path / "long.kv.partial").exists)
    running.end(signal.Signals[name])
    left = {path.name for path in tmp_path.iterdir()}
    assert {f"{each}.kv.text" for each in names} <= left
    assert not any(path.suffix == ".kv" for path in tmp_path.iterdir())
    with Server("--documents", tmp_path, usual=USUAL) as running:
        asker = Asker(running)
        assert sorted(asker.names()) == sorted(names)
        for waiting in names:
            status = asker.until(waiting, "ready")
            assert status["tokens_read"] == status["tokens"]
        answer = asker.answer("second")
        assert asker.post("second", f"1 {TEXT}").status_code == 200, "it has another text"
        asker.client.delete("/v1/documents/second")
        asker.read("second", f"1 {TEXT}")
        assert asker.answer("second") == answer
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "first.kv", "long.kv", "second.kv"
        ]  # fmt: skip


@pytest.mark.needs("signal.SIGKILL")
def test_a_second_server_waits_for_what_the_first_one_reads(tmp_path: Path) -> None:
    with (
        Server("--documents", tmp_path, usual=USUAL) as first,
        Server("--documents", tmp_path, usual=USUAL) as second,
    ):
        one, two = Asker(first), Asker(second)
        one.post("book", LONG)
        one.until("book", "reading", "ready")
        again = two.post("book", LONG)
        assert again.json()["status"] in ("reading", "ready", "queued")
        assert two.answer("book") == one.answer("book")
        one.client.delete("/v1/documents/book")
        assert two.ask("book").status_code == 404
        one.post("other", LONG)
        wait_for((tmp_path / "other.kv.partial").exists)
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(two.answer("other")))
        asking.start()
        first.end(signal.SIGKILL)
        asking.join(60)
        assert answers


@pytest.mark.needs("fcntl.flock")
def test_a_document_that_another_server_uses_stays(tmp_path: Path) -> None:
    with (
        Server("--documents", tmp_path, usual=USUAL) as first,
        Server("--documents", tmp_path, usual=USUAL) as second,
    ):
        one, two = Asker(first), Asker(second)
        one.read("book")
        body = {"prompt": QUESTION, "document": "book", "stream": True, "max_tokens": 4000}
        with one.client.stream("/v1/completions", {**body, "min_tokens": 4000}) as stream:
            lines = stream.iter_lines()
            next(lines)
            refused = two.client.delete("/v1/documents/book")
            assert refused.status_code == 409
            assert "in use" in message_of(refused)
            assert one.status("book")["status"] == "ready"
        wait_for(lambda: two.client.delete("/v1/documents/book").status_code != 409)
        assert one.ask("book").status_code == 404
        # The second server reads another text under the same name; the first one must answer about
        # the new text.
        two.read("book", TEXT[::-1])
        assert one.answer("book") == two.answer("book")


def test_machines_share_documents_by_object_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    address, askers = (tmp_path / "stored").as_uri(), list[Asker]()
    with contextlib.ExitStack() as stack:
        for name in ("one", "two"):
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
            server = Server("--documents", address, usual=USUAL)
            askers.append(Asker(stack.enter_context(server)))
        one, two = askers
        told = one.read("book")
        assert (tmp_path / "stored" / "book.kv").exists()
        assert two.names() == ["book"]
        seen = two.status("book")
        assert [seen[key] for key in ("status", "tokens", "bytes")] == [
            told[key] for key in ("status", "tokens", "bytes")
        ]
        assert two.answer("book") == one.answer("book")
        assert two.post("book").status_code == 200, "it was read again"
        assert two.client.delete("/v1/documents/book").json()["deleted"]
        assert one.ask("book").status_code == two.ask("book").status_code == 404
        one.read("book", TEXT[::-1])
        assert two.answer("book") == one.answer("book")
