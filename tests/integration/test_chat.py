"""`entropykv chat` holds a conversation in fixed memory, its commands remove a turn or begin anew,
and `--web` opens a browser.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import httpx
import pytest

from benchmarks.chat import MODELS, Result, talk
from entropykv import Session, SessionStats
from entropykv.llamacpp.model import NO_TEMPLATE
from entropykv.model import shipped
from entropykv.model.geometry import read_geometry
from entropykv.model.shipped import DEMOS
from tests.support.chats import GREEDY, Chat, answer_to, open_plain, plain, sentences
from tests.support.command import entropykv
from tests.support.tiny_models import write_gpt2
from tests.support.waiting import wait_for

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_answers_alone_are_on_stdout(tiny_llama: Path, chat: Chat) -> None:
    out, errors = chat(tiny_llama, "the and of\n\n/stats\nto in\n", "--system", "an end")
    with open_plain(tiny_llama) as session:
        assert out == "".join(plain(session, "an end\nthe and of", "to in"))
    assert "answer was cut after 12 tokens" in errors
    assert "2 turns" not in errors
    assert re.search(r"turns +1\n +context +\d+ of 1,000,000 tokens\n", errors)


def test_the_template_makes_the_turns(smollm2: Path, chat: Chat) -> None:
    questions = ("What is the capital of France?", "And of Italy?")
    out, _ = chat(smollm2, "\n".join(questions), "--system", "You are brief.")
    with open_plain(smollm2) as session:
        first = session.model.chat_prompt(questions[0], "You are brief.")
        second = session.model.chat_turn(questions[1])
        assert first is not None
        assert second is not None
        assert "system\nYou are brief.<" in first
        expected = ""
        for text in (first, second):
            expected += answer_to(session, session.tokenize(text, add_bos=False))
    assert out == expected


def test_several_lines_are_one_turn(tiny_llama: Path, chat: Chat) -> None:
    lines = 'a\\\nb\n"""\n/c\n\nd\\\n"""\n"""\ne\nf'
    out, errors = chat(tiny_llama, lines + "\n")
    with open_plain(tiny_llama) as session:
        assert out == "".join(plain(session, "a\nb", "/c\n\nd\\", "e\nf"))
    assert not sentences(errors)
    _, errors = chat(tiny_llama, "a\\\n  b\n/history\nc\\")
    assert "> a\n  b\n" in errors


def test_bytes_that_are_no_text_are_replaced(tiny_llama: Path, chat: Chat) -> None:
    _, errors = chat(tiny_llama, b"the \xff end\n/history\n")
    assert "> the \ufffd end\n" in errors


def test_a_saved_conversation_goes_on_in_another_process(
    tiny_llama: Path, chat: Chat, tmp_path: Path
) -> None:
    file = tmp_path / "talk"
    long = " ".join(["the and of to in"] * 60)
    budget = ("--kv-budget", "100")
    out, errors = chat(tiny_llama, f"{long}\n/save {file}\nto in\nof\n", *budget)
    assert f"saved {file}.ekv: " in errors
    again = entropykv(
        "chat", "-m", tiny_llama, *GREEDY, *budget, stdin=f"/load {file}\n/history\nto in\nof\n"
    )
    assert again.returncode == 0, again.stderr
    assert out.split("\n")[-3:] == again.stdout.split("\n")
    assert long in again.stderr
    other, _ = chat(tiny_llama, "to in\nof", *budget, "--load-session", f"{file}.ekv")
    assert other == again.stdout
    changed, _ = chat(tiny_llama, "to in\nof\n", *budget)
    assert changed != other


def test_reset_forgets(tiny_llama: Path, chat: Chat) -> None:
    out, errors = chat(tiny_llama, "the\nof\n/reset\n/history\nthe\n/exit\nthe\n")
    answers = out.splitlines()
    assert len(answers) == 3
    assert answers[0] == answers[2]
    assert "No turns yet" in errors


def test_the_budget_changes_while_it_runs(tiny_llama: Path, chat: Chat) -> None:
    long = " ".join(["the and of to in"] * 60)
    out, _ = chat(tiny_llama, f"{long}\n/budget 40\nto in\n/stats\n")
    with open_plain(tiny_llama) as session:
        first = plain(session, long)
        session.cache.resize(40)
        assert out == "".join(first + plain(session, "to in"))


def test_a_smaller_budget_is_not_compared_with_a_peak_of_before(
    tiny_llama: Path, chat: Chat
) -> None:
    """After a smaller budget, /stats shows the bytes now instead of the peak; a percentage is of
    the trained context.
    """
    long = " ".join(["the and of to in"] * 60)
    share = 100 * 64 / read_geometry(tiny_llama).n_ctx_train
    _, errors = chat(tiny_llama, f"{long}\n/stats\n/budget {share}%\n/stats\n", "--kv-type", "f16")
    pattern = r"([\d.]+) MiB (at most|now) of a budget of ([\d.]+) MiB"
    (used, at_most, budget), (left, now, smaller) = re.findall(pattern, " ".join(errors.split()))
    assert (at_most, now) == ("at most", "now")
    assert float(left) <= float(smaller) < float(used) <= float(budget)
    with Session(tiny_llama, kv_budget=64, kv_type="f16", n_threads=1) as session:
        size = f"{session.stats().kv_bytes_budget / 2**20:.1f} MiB"
    assert f"The KV budget is {share}% now: {size}." in errors


def test_what_goes_wrong_is_one_sentence(
    tiny_llama: Path, tiny_bitnet: Path, chat: Chat, tmp_path: Path
) -> None:
    (tmp_path / "junk.ekv").write_bytes(b"junk")
    chat(tiny_bitnet, f"the\n/save {tmp_path}/other\n")
    wrong = {
        "/nothing": "unknown command /nothing; /help shows",
        "/budget": "/budget takes B",
        "/budget 2": "smallest budget",
        "/budget x": "cannot be",
        "/reset now": "/reset takes nothing",
        "/load": "/load takes NAME",
        f"/load {tmp_path}/none": "none.ekv: no such file",
        f"/load {tmp_path}/junk": "is not a saved session",
        f"/load {tmp_path}/other": "other.ekv: ",
        f"/save {tmp_path}/none/x": "No such file",
        f"/save {tiny_llama}": "is not a saved session",
        "/save ..": "is a directory",
    }
    out, errors = chat(tiny_llama, "the\n" + "\n".join(wrong) + "\n/budget 1024\nof\n")
    with open_plain(tiny_llama) as session:
        assert out == "".join(plain(session, "the", "of"))  # Failed commands have left no trace.
    said = sentences(errors)
    assert len(said) == len(wrong), said
    for sentence, words in zip(said, wrong.values(), strict=True):
        assert words in sentence


def test_a_model_that_cannot_be_loaded_ends_it(tmp_path: Path) -> None:
    result = entropykv("chat", "-m", tmp_path / "none.gguf", stdin="x\n")
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


def test_after_the_trained_context_a_reset_helps(tmp_path: Path, chat: Chat) -> None:
    path = tmp_path / "gpt2.gguf"
    write_gpt2(path, n_ctx_train=64)
    long = "x" * 60
    out, errors = chat(path, f"{long}\n/history\nthe\n/reset\nthe\n", "--kv-budget", "32")
    said = sentences(errors)
    assert len(said) == 2
    for sentence in said:
        assert "the 64 that the model was trained for" in sentence
        assert "/reset" in sentence
    answers = out.split("\n")
    assert answers[0]  # Some text was written before the interruption.
    assert f"> {long}\n{answers[0]}" in errors
    assert answers[1] == ""
    assert len(answers[2]) > 0


def test_a_full_context(tiny_llama: Path, chat: Chat) -> None:
    out, errors = chat(tiny_llama, f"{'x' * 50}\nthe\n/reset\nthe\n", "-c", "60")
    assert sentences(errors)[0] == "the context is full; /reset starts anew"
    assert "do not fit into a context of 60" in sentences(errors)[1]
    assert out.split("\n")[2]


def talk_far() -> tuple[Result, SessionStats]:
    with Session(DEMOS["bitnet"].path, n_ctx=1_000_000, kv_budget=1024, n_threads=1) as session:
        return talk(session, MODELS["bitnet"], n_turns=60), session.stats()


def test_a_conversation_far_beyond_the_trained_context() -> None:
    """A conversation three times as long as the trained context stays in its bytes, and answers
    most questions rightly.

    It runs in a process of its own, so that memory left by other tests does not count.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        result, stats = alone.submit(talk_far).result()
    assert result.tokens >= 3 * read_geometry(DEMOS["bitnet"].path).n_ctx_train
    assert stats.rebases >= 4
    assert stats.kv_bytes_peak <= stats.kv_bytes_budget
    assert result.rss_growth <= 5 * 2**20
    assert result.right >= 0.8


def test_the_example(
    smollm2: Path,  # noqa: ARG001
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    document = tmp_path / "document.txt"
    text = (EXAMPLES / "lighthouse.txt").read_text(encoding="utf-8")
    document.write_text(text[:2000], encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["long_document.py", str(document)])
    runpy.run_path(str(EXAMPLES / "long_document.py"), run_name="__main__")
    shown = capsys.readouterr().out
    read, again = (
        int(match[1]) for match in re.finditer(r"(?:read )?(\d+) tokens (?:in|read)", shown)
    )
    assert again < read / 4  # The document is not read for every question.
    assert len(re.findall(r"^> .*\n\S", shown, re.MULTILINE)) == 3


def test_regen_gives_the_greedy_answer_again(tiny_llama: Path, chat: Chat) -> None:
    once, _ = chat(tiny_llama, "the cat\n")
    twice, _ = chat(tiny_llama, "the cat\n/regen\n")
    assert twice == once * 2


def test_undo_leaves_a_conversation_that_never_heard_the_turn(tiny_llama: Path, chat: Chat) -> None:
    """After /undo, a conversation goes on as if it had never had the turn; with a budget that
    evicts, the remaining text is read again.
    """
    for budget in ("1.0", "40"):
        options = ("-c", "512", "--kv-budget", budget)
        out, err = chat(tiny_llama, "the cat\n/undo\na dog\n", *options)
        assert "Taken back: the cat" in err
        expected, _ = chat(tiny_llama, "the cat\n/reset\na dog\n", *options)
        assert out == expected


def test_edit_says_something_else_instead(tiny_llama: Path, chat: Chat) -> None:
    out, _ = chat(tiny_llama, "the cat\n/edit a dog\n")
    expected, _ = chat(tiny_llama, "the cat\n/undo\na dog\n")
    assert out == expected


def test_system_begins_anew(tiny_llama: Path, chat: Chat) -> None:
    out, err = chat(tiny_llama, "the cat\n/system in the end\na dog\n/history\n")
    assert "All turns are forgotten" in err
    assert "> the cat" not in err
    expected, _ = chat(tiny_llama, "a dog\n", "-sys", "in the end")
    assert out.endswith(expected)


def test_nothing_to_take_back_is_one_sentence(tiny_llama: Path, chat: Chat) -> None:
    for command in ("/undo", "/regen", "/edit a dog"):
        out, err = chat(tiny_llama, f"{command}\n")
        assert out == ""
        assert "no turn to remove" in err


def test_save_asks_before_it_replaces_a_file(tiny_llama: Path, chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "talk.ekv"
    chat(tiny_llama, f"the cat\n/save {path}\n")
    before = path.read_bytes()
    _, err = chat(tiny_llama, f"a dog\n/save {path}\nn\n")
    assert "stays as it is" in err
    assert path.read_bytes() == before
    chat(tiny_llama, f"a dog\n/save {path}\ny\n")
    assert path.read_bytes() != before


CHAT = [sys.executable, "-m", "entropykv.cli", "chat", "--demo", "bitnet", "--web"]


@pytest.mark.needs("signal.SIGKILL")
def test_the_page_is_opened_with_what_chat_was_told(tmp_path: Path) -> None:
    told = tmp_path / "told"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {told}\n', encoding="utf-8")
    browser.chmod(0o755)
    process = subprocess.Popen(
        [*CHAT, "--temp", "0.3", "-n", "50", "--kv-budget", "200", "-t", "1"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "BROWSER": str(browser)},
    )
    assert process.stderr is not None
    try:
        assert NO_TEMPLATE in process.stderr.readline()
        line = process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/ in a browser", line)
        assert found, line
        url = found[0].split()[0]
        wait_for(lambda: told.exists() and told.read_text(encoding="ascii").strip())
        assert told.read_text(encoding="ascii").strip() == url
        begins = httpx.get(f"{url}v1/web/defaults").json()
        assert begins["question"] == shipped.DEMOS["bitnet"].question
        assert begins["system"].startswith("The heavy harbour")
        assert begins["sampling"]["temperature"] == 0.3
        assert begins["sampling"]["max_tokens"] == 50
        assert httpx.get(f"{url}v1/kv").json()["kv_budget"] == "200"
    finally:
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        process.stderr.close()
        assert process.wait(timeout=30) == 0
    assert "Traceback" not in rest


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--no-chat",), "--no-chat works only in the terminal"),
        (("--show-thoughts",), "--show-thoughts works only in the terminal"),
        (("--mirostat", "2"), "leave other samplers"),
        (("--rope-freq-base", "1000"), "use entropykv serve"),
    ],
)
def test_what_the_page_does_not_have_is_refused(options: tuple[str, ...], says: str) -> None:
    result = subprocess.run([*CHAT, *options], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
