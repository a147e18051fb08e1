"""`run` and `serve` keep the predictor that first texts teach, and say so; `models --learnt` lists
and removes it.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from entropykv import Session
from entropykv.cli import main
from entropykv.session.second_readings import LEAST_TEXTS
from tests.support.command import assert_refused, entropykv
from tests.support.learnt import kept_in, need_texts
from tests.support.running_server import Server

N_CTX = 2048


def prompt_of(n_letters: int, seed: int = 1) -> str:
    """Return a text of random letters, which does not repeat itself."""
    letters = list("abcdefghijklmnopqrstuvwxyz")
    return "".join(str(each) for each in np.random.default_rng(seed).choice(letters, n_letters))


def run(own_llama: Path, *options: object, seed: int = 1) -> subprocess.CompletedProcess[str]:
    usual = ("-n", 2, "--temp", 0, "-t", 1, "-c", N_CTX, "--kv-budget", 0.2, "--no-chat")
    result = entropykv(
        "run", "-m", own_llama, *usual, "-f", "-", *options, stdin=prompt_of(1400, seed)
    )
    assert result.returncode == 0, result.stderr
    return result


def learn_at_once(own_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a predictor that is complete after one text."""
    with monkeypatch.context() as patch:
        need_texts(patch, 1)
        with Session(own_llama, n_ctx=N_CTX, kv_budget=0.2, n_threads=1) as session:
            session.decode(session.tokenize(prompt_of(1400)))


def test_later_runs_read_less_twice(
    own_llama: Path, learnt_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(own_llama)
    before, _, after = first.stderr.partition(
        "are read twice to learn it, and fewer of later texts"
    )
    assert "--policy fast reads every text once" in after
    assert "tokens/s" in after  # The report comes before the text is read.
    assert "tokens/s" not in before
    assert "tokens were read twice" in after
    assert f"1 of {LEAST_TEXTS} texts have taught something" in first.stderr
    second = run(own_llama, seed=2)
    assert "nothing is known yet" not in second.stderr
    assert f"2 of {LEAST_TEXTS} texts have taught something" in second.stderr
    assert not kept_in(learnt_folder).complete
    (file,) = learnt_folder.glob("*.json")
    file.unlink()
    learn_at_once(own_llama, monkeypatch)
    assert kept_in(learnt_folder).complete
    later = run(own_llama, seed=3)
    assert "read twice" not in later.stderr
    off = run(own_llama, "--learn", "off")
    assert f"1 of {LEAST_TEXTS} texts have taught something" in off.stderr
    assert off.stdout == first.stdout
    assert_refused(entropykv("run", "-m", own_llama, "-p", "a", "--learn", "maybe"), "--learn")


def test_what_was_learnt_is_listed_and_removed(
    own_llama: Path,
    learnt_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for words in (["models", "--learnt"], ["models", "--learnt", "--remove"]):
        assert main(words) == 0
        assert "nothing was learnt" in capsys.readouterr().out
    learn_at_once(own_llama, monkeypatch)
    assert main(["models", "--learnt", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["complete"]
    assert row["n_texts"] == 1
    assert Path(row["path"]).parent == learnt_folder
    assert main(["models", "--learnt"]) == 0
    assert (
        f"{row['model']}: learnt from {row['n_tokens']} tokens of 1 text (predictions and "
        "look-ups correlate by 0." in capsys.readouterr().out
    )
    assert main(["models", "--learnt", "--remove", "another"]) == 1
    assert "nothing was learnt of another" in capsys.readouterr().err
    assert main(["models", "--learnt", "--remove", row["model"]]) == 0
    assert f"{row['path']}: removed" in capsys.readouterr().out
    assert not list(learnt_folder.glob("*.json"))
    (learnt_folder / "x.predictor.json").write_text("{")
    assert main(["models", "--learnt"]) == 0
    assert "x.predictor.json: is damaged" in capsys.readouterr().out
    assert main(["models", "--remove"]) == 2
    assert "--remove is of --learnt" in capsys.readouterr().err


@pytest.mark.parametrize("several", [(), ("--parallel", 2)])
def test_a_server_keeps_what_several_conversations_agree_on(
    several: tuple[object, ...], own_llama: Path, learnt_folder: Path
) -> None:
    usual = ("--kv-budget", 256, "--n_ctx", N_CTX, "-t", 1, *several)

    def ask(server: Server, seed: int) -> None:
        body = json.dumps({"prompt": prompt_of(1200, seed), "max_tokens": 2})
        assert server.post("/v1/completions", body).status_code == 200

    with Server(model=own_llama, usual=usual) as server:
        # The same conversation again does not count as another text, even if a fork continues it.
        for seed in (1, *range(1, LEAST_TEXTS + 1)):
            assert not learnt_folder.exists() or not kept_in(learnt_folder).complete
            ask(server, seed)
            assert kept_in(learnt_folder).n_texts == seed
        assert kept_in(learnt_folder).complete
    assert "".join(server.log).count(f"kept in {learnt_folder}") == 1
    with Server(model=own_llama, usual=usual) as again:
        ask(again, 3)
    assert "read twice" not in "".join(again.log)
