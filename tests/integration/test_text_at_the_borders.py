"""Text comes in and goes out as UTF-8 with any locale, and through streams that are closed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "entropykv.cli"]
BOM = "\ufeff"
BAD = b"caf\xe9"
GREEDY = ("-t", 1, "-n", 4, "--temp", 0)


def command(
    *arguments: object, stdin: bytes | None = b"", **options: Any
) -> subprocess.CompletedProcess[bytes]:
    words = [each if isinstance(each, bytes) else str(each).encode() for each in arguments]
    given = {"timeout": 120, "capture_output": True, **options}
    return subprocess.run([*COMMAND, *words], input=stdin, check=False, **given)


def run(model: Path, *arguments: object, stdin: bytes = b"", **options: Any) -> bytes:
    """Run `entropykv run`, which must succeed; return what it writes to stdout."""
    words = ("run", "-m", model, *GREEDY, *arguments)
    result = command(*words, stdin=stdin, **options)
    assert result.returncode == 0, result.stderr
    return bytes(result.stdout)


def assert_refused(result: subprocess.CompletedProcess[bytes], words: bytes) -> None:
    assert result.returncode == 2, result.stderr
    assert words in result.stderr
    assert b"Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["-p", BAD],
        ["-p", "a", "-sys", BAD],
        ["-p", "a", "-r", BAD],
        ["-p", "a", "--grammar", b'root ::= "' + BAD + b'"'],
        ["-p", "a", "-j", b'{"const": "' + BAD + b'"}'],
        ["-p", "a", "--chat-template", b"{{ '" + BAD + b"' }}"],
        ["-p", "a", "--dry-sequence-breaker", BAD],
        ["-p", "a", "--reasoning-budget-message", BAD],
    ],
    ids=lambda given: str(given[-2]),
)
def test_a_text_in_another_encoding_is_refused_as_an_argument(
    tiny_llama: Path, arguments: list[object]
) -> None:
    result = command("run", "-m", tiny_llama, *arguments)
    assert_refused(result, b"not a text in UTF-8; convert it first, for example with `iconv -f")


@pytest.mark.parametrize("how", [["run", "-f", "-"], ["read", "-", "-o", "x.kv"]])
def test_a_text_in_another_encoding_is_refused_on_standard_input(
    tiny_llama: Path, tmp_path: Path, how: list[str]
) -> None:
    result = command(*how, "-m", tiny_llama, stdin=BAD, cwd=tmp_path)
    assert_refused(result, b"standard input: not a text in UTF-8")


def test_a_file_may_have_a_name_of_any_bytes(tiny_llama: Path, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/" + BAD + b".gguf"
    os.symlink(tiny_llama, path)
    result = command("run", "-m", path, "-p", "the", "-n", 1, "-t", 1)
    assert result.returncode == 0, result.stderr
    missing = os.fsencode(tmp_path) + b"/missing" + BAD
    assert_refused(command("run", "-m", missing, "-p", "the"), b"no such file")


def test_a_byte_order_mark_is_no_part_of_a_text(tiny_llama: Path, tmp_path: Path) -> None:
    expected = run(tiny_llama, "-p", "the land")
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(BOM + "the land", encoding="utf-8")
    assert run(tiny_llama, "-f", prompt) == expected
    assert run(tiny_llama, "-f", "-", stdin=(BOM + "the land").encode()) == expected
    schema = tmp_path / "schema.json"
    schema.write_text(BOM + '{"const": "and"}', encoding="utf-8")
    assert run(tiny_llama, "-p", "the", "-jf", schema, "-n", 20) == b'"and"\n'
    grammar = tmp_path / "grammar.gbnf"
    grammar.write_text(BOM + 'root ::= "and"', encoding="utf-8")
    assert run(tiny_llama, "-p", "the", "--grammar-file", grammar, "-n", 20) == b"and\n"
    chat = command("chat", "-m", tiny_llama, *GREEDY, stdin=(BOM + "the land\n").encode())
    assert chat.stdout == expected


def test_an_empty_text_ends_no_answer(tiny_llama: Path) -> None:
    assert run(tiny_llama, "-p", "the land", "-r", "") == run(tiny_llama, "-p", "the land")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_answer_is_written_in_utf8_in_any_locale(tiny_llama: Path, encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    grammar = 'root ::= "Grüße 数"'
    written = run(tiny_llama, "-p", "für", "--grammar", grammar, "-n", 40, env=environment)
    assert written.decode("utf-8") == "Grüße 数\n"
    read = run(tiny_llama, "-f", "-", stdin="für".encode(), env=environment)
    assert read == run(tiny_llama, "-p", "für")


def closing(descriptor: int) -> Callable[[], None]:
    return lambda: os.close(descriptor)


@pytest.mark.needs("os.fork")
def test_a_closed_stream_is_nobody_s_and_no_error(tiny_llama: Path, tmp_path: Path) -> None:
    words = ("run", "-m", tiny_llama, "-p", "the land", *GREEDY)
    expected = command(*words).stdout
    without_stdin = command(*words, stdin=None, preexec_fn=closing(0))
    assert (without_stdin.returncode, without_stdin.stdout) == (0, expected)
    assert_refused(command("run", "-m", tiny_llama, stdin=None, preexec_fn=closing(0)), b"empty")
    without_stderr = command(*words, stdin=None, preexec_fn=closing(2))
    assert (without_stderr.returncode, without_stderr.stdout) == (0, expected)
    saved = tmp_path / "saved.ekv"
    without_stdout = command(*words, "--save-session", saved, stdin=None, preexec_fn=closing(1))
    assert without_stdout.returncode == 1
    assert b"the output cannot be written" in without_stdout.stderr
    assert b"Traceback" not in without_stdout.stderr


@pytest.mark.needs("os.fork")
def test_too_little_memory_is_not_called_a_damaged_file(tmp_path: Path) -> None:
    from tests.support.tiny_models import write_llama  # noqa: PLC0415

    path = tmp_path / "large.gguf"
    write_llama(path, n_layer=2, n_ff=64)
    with path.open("r+b") as file:
        file.truncate(64 << 30)  # The file is sparse, so that it takes no room on the disk.
    limits = (32 << 30, 32 << 30)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, limits)

    result = command("run", "-m", path, "-p", "the", preexec_fn=limited)
    assert_refused(result, b"ulimit -v")
    assert b"damaged" not in result.stderr
    assert b"complete" not in result.stderr
