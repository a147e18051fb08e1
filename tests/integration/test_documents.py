"""A document that was read once answers as one that has just been read."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
import stat
from collections.abc import Hashable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from entropykv import ContextError, EntropyLlama, Pool, Session, SessionFileError, system
from entropykv.cli.read import expected_bytes
from entropykv.model.geometry import read_geometry
from entropykv.server.documents.library import DocumentLibrary
from entropykv.server.documents.readings import DocumentId
from entropykv.session.document import read_document
from entropykv.session.file import open_session
from entropykv.session.session_files import document_header
from entropykv.store.step import Part
from entropykv.system import lock
from tests.support.command import assert_refused, entropykv, started
from tests.support.running_server import MODEL, Server
from tests.support.saved_sessions import all_entries, session_of
from tests.support.waiting import wait_for

TEXT = "the quick brown fox jumps over the lazy dog. " * 12
SYSTEM = "Answer briefly."


class StopError(Exception):
    """Raised in the middle of reading."""


def read(
    model: Path,
    path: Path,
    text: str = TEXT,
    progress: Any = None,
    system: str | None = None,
    **options: Any,
) -> bytes:
    with session_of(model, **options) as session:
        read_document(session, text, path, names=["a.txt"], system=system, progress=progress)
    return path.read_bytes()


def answer(session: Session, question: str = "who jumps?") -> list[int]:
    return list(session.generate(session.question(question), 20))


def test_an_opened_document_answers_as_one_that_was_just_read(
    tiny_llama: Path, tmp_path: Path
) -> None:
    path = tmp_path / "book.kv"
    with session_of(tiny_llama) as session:
        contents = read_document(session, TEXT, path)
        assert session.stats().evictions > 0
        kept, expected = all_entries(session), answer(session)
    assert contents.document is not None
    assert contents.document.n_tokens == contents.position
    with session_of(tiny_llama) as session:
        session.files.open_document(path)
        assert all_entries(session) == kept
        assert answer(session) == expected
        session.files.open_document(path)
        assert answer(session) == expected
    assert sorted(os.listdir(tmp_path)) == ["book.kv"]


def test_a_document_is_read_like_the_beginning_of_the_whole_prompt(
    tiny_llama: Path, tmp_path: Path
) -> None:
    read(tiny_llama, tmp_path / "book.kv")
    with session_of(tiny_llama) as session:
        session.files.open_document(tmp_path / "book.kv")
        tokens = session.tokens + session.question("who jumps?")
        prompt = session.model.chat_prompt(f"{TEXT}\nwho jumps?")
        add_bos = None if prompt is None else False
        whole = session.tokenize(prompt or f"{TEXT}\nwho jumps?", add_bos=add_bos)
        assert session.detokenize(tokens, special=True) == session.detokenize(whole, special=True)


def test_several_documents_are_read_in_the_order_asked(tiny_llama: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.kv", tmp_path / "b.kv"
    read(tiny_llama, first, TEXT[:200], kv_budget=512)
    read(tiny_llama, second, "a cat sleeps. " * 6, kv_budget=512)
    with session_of(tiny_llama, kv_budget=512) as session:
        contents = session.files.open_document(first, second)
        text = session.detokenize(session.tokens)
        assert session.position > contents.position
        assert text.index("quick brown") < text.index("a cat sleeps")
        with pytest.raises(ContextError, match="1 to 16 documents"):
            session.files.open_document(*[first] * 17)


def test_a_document_belongs_to_its_model_and_not_to_a_path(
    tiny_llama: Path, tiny_bitnet: Path, tmp_path: Path
) -> None:
    path, copy = tmp_path / "book.kv", tmp_path / "another name.gguf"
    read(tiny_llama, path)
    copy.write_bytes(tiny_llama.read_bytes())
    with session_of(copy) as session:
        session.files.open_document(path)
    with session_of(tiny_bitnet) as session:
        with pytest.raises(SessionFileError, match="another model file"):
            session.files.open_document(path)
        assert session.position == 0


def test_a_changed_byte_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "book.kv"
    data = bytearray(read(tiny_llama, path))
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with session_of(tiny_llama) as session, pytest.raises(SessionFileError, match="damaged"):
        session.files.open_document(path)


@pytest.mark.needs("os.fchmod")
def test_only_its_owner_can_read_a_document_or_a_saved_session(
    tiny_llama: Path, tmp_path: Path
) -> None:
    before = os.umask(0)
    try:
        interrupted(tiny_llama, tmp_path / "book.kv")
        read(tiny_llama, tmp_path / "whole.kv")
        with session_of(tiny_llama) as session:
            session.decode([1, 2, 3])
            session.files.save(tmp_path / "x.ekv")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(["book.kv.partial", "whole.kv", "x.ekv"], 0o600)


def test_a_session_is_no_document(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.ekv"
    with session_of(tiny_llama) as session:
        session.decode([1, 2, 3])
        session.files.save(path)
        with pytest.raises(SessionFileError, match="is a saved session, not a document"):
            session.files.open_document(path)


@pytest.mark.parametrize(
    ("text", "words"), [(" \n", "is empty"), ("x" * 9_000_000, "split it"), (TEXT * 9, "raise -c")]
)
def test_texts_that_cannot_be_documents(
    tiny_llama: Path, tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(ContextError, match=words):
        read(tiny_llama, tmp_path / "book.kv", text)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("checkpoints", [None, "4MiB"])
def test_a_llama_asks_a_document(tiny_llama: Path, tmp_path: Path, checkpoints: str | None) -> None:
    path = tmp_path / "book.kv"
    read(tiny_llama, path)
    options: dict[str, Any] = {"n_ctx": 512, "kv_budget": 96, "n_ubatch": 64, "n_threads": 1}
    with closing(
        EntropyLlama(tiny_llama, document=path, checkpoints=checkpoints, verbose=False, **options)
    ) as llama:
        texts = []
        llama_tokens = llama.n_tokens
        for question in ("who jumps?", "who sleeps?", "who jumps?"):
            prompt = llama.question(question)
            # Without checkpoints, the document is loaded again, and counting starts from 0.
            before = llama.kv_stats().prompt_tokens if checkpoints else 0
            result = llama.create_completion(prompt, max_tokens=8, temperature=0.0)
            texts.append(result["choices"][0]["text"])
            n_read = llama.kv_stats().prompt_tokens - before
            assert n_read <= len(prompt) - llama_tokens, "the document was read again"
    assert texts[0] == texts[2]
    with session_of(tiny_llama) as session:
        session.files.open_document(path)
        tokens = list(session.generate(session.question("who jumps?"), 8, temperature=0.0))
        assert texts[0] == b"".join(map(session.token_bytes, tokens)).decode(errors="ignore")


def test_prompts_that_arrive_while_a_document_is_read_come_first(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Pool(tiny_llama, n_ctx=1024, kv_budget=512, n_ubatch=64, n_threads=1) as pool:
        scheduler = pool.runner.scheduler
        submit = scheduler.submit
        arrivals: list[int] = []
        others: list[int] = []

        def noted(owner: Hashable, part: Part, arrival: int) -> None:
            arrivals.append(arrival)
            submit(owner, part, arrival)

        monkeypatch.setattr(scheduler, "submit", noted)
        session = pool.session()
        read_document(
            session, TEXT, tmp_path / "a.kv", progress=lambda *_: others.append(scheduler.arrive())
        )
    assert len(arrivals) > 3
    # Before each micro-batch of the document, the test draws an arrival number, as another text
    # would. The number of the micro-batch must be later.
    assert all(before < arrival for before, arrival in zip(others, arrivals, strict=False)), (
        "a later micro-batch of the document goes before the prompt"
    )


def interrupted(model: Path, path: Path, text: str = TEXT, **options: Any) -> int:
    """Stop reading a document after half of it; return how many tokens its partial file has."""

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise StopError

    with pytest.raises(StopError):
        read(model, path, text, stop, **options)
    with open_session(path.with_name(path.name + ".partial")) as reader:
        return reader.contents.position


def starts(model: Path, path: Path, text: str = TEXT, **options: Any) -> int:
    """Read a document; return the number of tokens that were read already when reading began."""
    seen: list[int] = []
    read(model, path, text, lambda done, _: seen.append(done), **options)
    return seen[0]


def test_reading_continues_where_it_stopped_with_the_same_bytes(
    tiny_llama: Path, tmp_path: Path
) -> None:
    expected = read(tiny_llama, tmp_path / "whole.kv")
    path = tmp_path / "book.kv"
    n_read = interrupted(tiny_llama, path)
    assert n_read > 0
    assert not path.exists()
    with pytest.raises(SessionFileError, match="run `entropykv read` again"):
        document_header(tmp_path / "book.kv.partial")
    assert starts(tiny_llama, path) == n_read
    assert path.read_bytes() == expected
    assert sorted(os.listdir(tmp_path)) == ["book.kv", "whole.kv"]


def test_a_document_that_was_read_but_not_stored_is_not_read_again(
    tiny_llama: Path, tmp_path: Path
) -> None:
    path, partial = tmp_path / "book.kv", tmp_path / "book.kv.partial"
    expected = read(tiny_llama, path)
    with open_session(path) as reader:
        n_tokens = reader.contents.position
    path.replace(partial)
    assert starts(tiny_llama, path) == n_tokens
    assert path.read_bytes() == expected


def test_only_the_same_text_with_the_same_settings_is_continued(
    tiny_llama: Path, tiny_bitnet: Path, tmp_path: Path
) -> None:
    path = tmp_path / "book.kv"
    others: list[tuple[Path, str, dict[str, Any]]] = [
        (tiny_llama, TEXT + "more", {}),
        (tiny_llama, TEXT, {"kv_budget": 128}),
        (tiny_bitnet, TEXT, {}),
    ]
    for model, text, options in others:
        interrupted(tiny_llama, path)
        assert starts(model, path, text, **options) == 0


def test_the_system_message_of_an_interrupted_reading_is_kept_with_it(
    smollm2: Path, tmp_path: Path
) -> None:
    path = tmp_path / "book.kv"
    n_read = interrupted(smollm2, path, system=SYSTEM)
    library = DocumentLibrary(tmp_path, None, several=False)
    reading = library.resumed(DocumentId("", "", "book"))
    assert reading is not None
    assert reading.system == SYSTEM
    assert starts(smollm2, path, reading.text, system=None) == 0
    interrupted(smollm2, path, system=SYSTEM)
    assert starts(smollm2, path, reading.text, system=reading.system) == n_read
    with open_session(path) as reader:
        note = reader.contents.document
    assert note is not None
    assert note.system == SYSTEM


def test_a_damaged_partial_file_is_read_from_the_start(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "book.kv"
    interrupted(tiny_llama, path)
    partial = tmp_path / "book.kv.partial"
    partial.write_bytes(partial.read_bytes()[:-5])
    assert starts(tiny_llama, path) == 0


def test_two_processes_do_not_read_into_one_file(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "book.kv"
    descriptor = os.open(tmp_path / "book.kv.lock", os.O_RDWR | os.O_CREAT)
    assert lock(descriptor)
    with pytest.raises(SessionFileError, match="another process is reading this document"):
        read(tiny_llama, path)
    assert not path.exists()
    os.close(descriptor)  # The lock file stays, as if the other process was killed.
    read(tiny_llama, path)
    assert os.listdir(tmp_path) == ["book.kv"]


def _read_with_little_disk(model: Path, path: Path, sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    try:
        read(model, path)
    except SessionFileError as error:
        sender.send(str(error))


def test_a_full_disk_leaves_no_document_and_one_sentence(tiny_llama: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(
        target=_read_with_little_disk, args=(tiny_llama, tmp_path / "book.kv", sender)
    )
    process.start()
    assert receiver.poll(60)
    assert "cannot be written (File too large)" in receiver.recv()
    process.join()
    assert os.listdir(tmp_path) == []


def _die_while_saving(model: Path, path: Path, target: Path) -> None:
    """Read a document, and kill this process while the file `target` is saved."""
    sync = system.sync

    def die(part: Path) -> None:
        if part.name.startswith(f".{target.name}.") and part.name.count(".") == (
            target.name.count(".") + 3
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        sync(part)

    system.sync = die  # type: ignore[assignment]  # In a process of its own.
    read(model, path)


@pytest.mark.parametrize("name", ["book.kv", "book.kv.partial"])
def test_what_a_reader_leaves_that_was_killed_while_saving_is_removed_by_the_next_one(
    tiny_llama: Path, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "book.kv"
    others = [".book.kv.notes.part", ".abook.kv.01234567.part", ".book.kv.0123456.part"]
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_die_while_saving, args=(tiny_llama, path, tmp_path / name))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert len([each for each in os.listdir(tmp_path) if each.endswith(".part")]) == 1
    for other in others:
        (tmp_path / other).touch()
    expected = read(tiny_llama, tmp_path / "whole.kv")
    assert read(tiny_llama, path) == expected
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "book.kv", "whole.kv"])


def test_deleting_removes_what_a_killed_reader_left_while_saving(
    tiny_llama: Path, tmp_path: Path
) -> None:
    path = tmp_path / "book.kv"
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_die_while_saving, args=(tiny_llama, path, path))
    process.start()
    process.join(60)
    library = DocumentLibrary(tmp_path, None, several=False)
    assert library.remove(DocumentId("", "", "book")).refusal is None
    assert os.listdir(tmp_path) == []


def test_a_killed_reader_leaves_a_part_that_is_continued(tiny_llama: Path, tmp_path: Path) -> None:
    source, path = tmp_path / "a.txt", tmp_path / "book.kv"
    source.write_text(TEXT * 40)
    options = ["-o", path, "--kv-budget", "96", "-ub", "64", "-t", "1"]
    with started("read", source, "-m", tiny_llama, *options) as reader:
        wait_for((tmp_path / "book.kv.partial").exists)
        reader.kill()
    assert not path.exists()
    result = entropykv("read", source, "-m", tiny_llama, *options)
    assert result.returncode == 0, result.stderr
    assert "continuing after" in result.stderr
    assert document_header(path).note.text == TEXT * 40


def test_the_command_line_reads_shows_and_asks(tiny_llama: Path, tmp_path: Path) -> None:
    source, path = tmp_path / "a.txt", tmp_path / "book.kv"
    source.write_text(TEXT)
    read_in = ("--kv-budget", "64", "-c", "512", "-ub", "64", "-t", "1")
    result = entropykv(
        "read", source, "-", "-m", tiny_llama, "-o", path, *read_in, stdin="the end of it"
    )
    assert result.returncode == 0, result.stderr
    assert "on disk" in result.stderr
    shown = entropykv("read", "--show", path)
    assert shown.returncode == 0, shown.stderr
    for words in ("quick brown fox", "a full cache in f16", "layer 0", "a.txt, -"):
        assert words in shown.stdout
    run = entropykv(
        "run", "-m", tiny_llama, "--document", path, "-p", "who?", "-n", 8, "--temp", 0, "-t", 1
    )
    assert run.returncode == 0, run.stderr
    chat = entropykv(
        "chat", "-m", tiny_llama, "--document", path, "-n", 8, "--temp", 0, "-t", 1, stdin="who?\n"
    )
    assert chat.returncode == 0, chat.stderr
    assert run.stdout.strip() == chat.stdout.strip()


def test_the_bytes_of_a_document_are_said_before_it_is_read(smollm2: Path, tmp_path: Path) -> None:
    """The bytes of a file are estimated well, though the logits of a large vocabulary are a good
    part of it.
    """
    path = tmp_path / "book.kv"
    with Session(smollm2, n_ctx=512, kv_budget=64, n_threads=1) as session:
        read_document(session, TEXT, path)
        expected = expected_bytes(session, session.position, len(TEXT))
    assert path.stat().st_size == pytest.approx(expected, rel=0.1)


def test_the_command_line_reads_into_and_asks_object_storage(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text, address = tmp_path / "a.txt", (tmp_path / "stored").as_uri()
    text.write_text(TEXT, encoding="utf-8")
    model = ("-m", tiny_llama, "-t", 1)
    written = entropykv("read", text, *model, "-c", 1024, "-o", f"{address}/a.kv")
    assert f"wrote {address}/a.kv" in written.stderr
    shutil.rmtree(tmp_path / "cache")
    shown = entropykv("read", "--show", f"{address}/a.kv").stdout
    assert "the quick brown fox" in shown
    asked = ("run", *model, "-p", "who jumps?", "-n", 8, "--temp", 0, "--document")
    answers = [
        entropykv(*asked, name).stdout for name in (f"{address}/a.kv", tmp_path / "stored/a.kv")
    ]
    assert answers[0] == answers[1]
    assert_refused(entropykv(*asked, f"{address}/b.kv"), "b.kv: no such file")
    refused = entropykv("read", text, *model, "--each", "--out", address)
    assert_refused(refused, "--each writes into a directory")


def test_an_answer_without_a_limit_ends_where_the_context_of_the_model_would(
    tiny_llama: Path, tmp_path: Path
) -> None:
    source, path = tmp_path / "a.txt", tmp_path / "book.kv"
    source.write_text(TEXT)
    result = entropykv("read", source, "-m", tiny_llama, "-o", path, "-t", 1)
    assert result.returncode == 0, result.stderr
    trained = read_geometry(tiny_llama).n_ctx_train
    stats = tmp_path / "stats.json"
    words = ("run", "-m", tiny_llama, "--document", path, "-p", "who?", "--ignore-eos", "-t", 1)
    result = entropykv(*words, "--stats-json", stats)
    assert result.returncode == 0, result.stderr
    figures = json.loads(stats.read_text())
    assert figures["prompt_tokens"] + figures["generated_tokens"] <= trained


def test_a_document_of_another_model_is_refused_though_its_policy_needs_a_profile(
    smollm2: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    path = tmp_path / "book.kv"
    read(smollm2, path)
    assert "profile:" in document_header(path).settings.policy
    result = entropykv("run", "-m", tiny_llama, "-p", "x", "--document", path)
    assert_refused(result, "another model file", "Smollm2")


def test_options_that_do_not_go_with_a_document_are_refused(
    tiny_llama: Path, tmp_path: Path
) -> None:
    path = tmp_path / "book.kv"
    read(tiny_llama, path)
    ask = ("run", "-m", tiny_llama, "-p", "x", "--document", path)
    assert_refused(entropykv(*ask, "--load-session", path), "give one of them")
    assert_refused(entropykv(*ask, "-sys", "x"), "entropykv read")
    assert_refused(
        entropykv("run", "-m", tiny_llama, "-p", "x", "--load-session", path), "--document"
    )
    assert_refused(entropykv("read", "-m", tiny_llama), "-o")


@pytest.mark.parametrize("parallel", [(), ("--parallel", 2)], ids=["one", "pool"])
def test_a_server_goes_on_from_a_document_in_its_folder_of_slots(
    tmp_path: Path, parallel: tuple[Any, ...]
) -> None:
    """A prompt of the document's text, a line break and a question continues from the document."""
    source = tmp_path / "a.txt"
    source.write_text(TEXT)
    result = entropykv("read", source, "-m", MODEL, "-o", tmp_path / "book.kv", "-t", 1)
    assert result.returncode == 0, result.stderr
    with Server("--slot-save-path", tmp_path, *parallel, usual=("-c", 4096, "-t", 1)) as server:
        restored = httpx.post(
            f"{server.url}/slots/0?action=restore", json={"filename": "book.kv"}, timeout=60
        )
        assert restored.status_code == 200, restored.text
        n_tokens = restored.json()["n_restored"]
        body = {"prompt": f"{TEXT}\nwho jumps?", "max_tokens": 2}  # The model has no template.
        asked = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        figures = httpx.get(server.url + "/metrics", timeout=60).text.splitlines()
        line = next(x for x in figures if x.startswith("entropykv_prompt_tokens_total"))
        n_read = int(float(line.split()[1]))
        assert n_read <= asked["usage"]["prompt_tokens"] - n_tokens + 1
