"""The command line works as users run it: in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from entropykv import EntropyProfile, Session
from tests.support.command import assert_refused, entropykv, started
from tests.support.ending import ask_to_end, creation_flags

SLOW_COMMAND = """
import sys, time
from entropykv import cli
from entropykv.files import new_file

class Parser:
    def parse_args(self, given):
        return self
    def command(self, options):
        with new_file(sys.argv[1]) as part:
            part.write_bytes(b"half of it")
            print("writing", flush=True)
            time.sleep(60)

cli.parser_with = lambda names: (Parser(), {})
sys.exit(cli.main(["convert"]))
"""
STATS_FIELDS = {
    "model",
    "store",
    "policy",
    "kv_type",
    "prompt_tokens",
    "generated_tokens",
    "prompt_seconds",
    "decode_seconds",
    "kv_bytes_budget",
    "kv_bytes_peak",
    "kv_bytes_full",
    "entries_kept",
    "entries_full",
    "evictions",
    "eviction_seconds",
    "rebases",
    "peak_rss_bytes",
}


def test_run_writes_the_text_alone_to_stdout(tiny_llama: Path, tmp_path: Path) -> None:
    stats_file = tmp_path / "stats.json"
    prompt_file = tmp_path / "prompt.txt"
    prompt_file.write_text("the and of to in " * 40, encoding="utf-8")
    arguments = ("-m", tiny_llama, "-f", prompt_file, "-p", "the end", "-c", 400, "-n", 20)
    result = entropykv(
        "run", *arguments, "--kv-budget", 0.2, "--temp", 0, "--stats-json", stats_file
    )
    assert result.returncode == 0, result.stderr
    stats = json.loads(stats_file.read_text(encoding="utf-8"))
    assert set(stats) >= STATS_FIELDS
    assert stats["generated_tokens"] == 20
    assert stats["kv_bytes_peak"] <= stats["kv_bytes_budget"] < stats["kv_bytes_full"]
    assert stats["entries_kept"] + stats["evictions"] == stats["entries_full"]
    assert "KV cache" in result.stderr
    with Session(tiny_llama, n_ctx=400, kv_budget=0.2) as session:
        text = prompt_file.read_text(encoding="utf-8") + "\nthe end"
        expected = session.detokenize(list(session.generate(session.tokenize(text), 20)))
    assert result.stdout == expected + "\n"


def test_a_seed_repeats_and_options_reach_the_sampler(tiny_llama: Path) -> None:
    arguments = ("run", "-m", tiny_llama, "-p", "the", "-c", 64, "-n", 12, "--top-k", 20)
    first = entropykv(*arguments, "-s", 7, "--repeat-penalty", 1.2)
    again = entropykv(*arguments, "-s", 7, "--repeat-penalty", 1.2)
    other = entropykv(*arguments, "-s", 8, "--repeat-penalty", 1.2)
    assert first.returncode == 0, first.stderr
    assert first.stdout == again.stdout
    assert first.stdout != other.stdout


def test_prompt_from_stdin_and_flat_store(tiny_llama: Path) -> None:
    result = entropykv(
        *("run", "-m", tiny_llama, "-f", "-", "-c", 200, "-n", 5, "--store", "flat"),
        stdin="the and of",
    )
    assert result.returncode == 0, result.stderr
    assert "flat store, policy recency" in result.stderr


@pytest.mark.needs("signal.SIGKILL")
def test_interrupt_ends_cleanly_with_the_table(smollm2: Path) -> None:
    # The model does not end its answer to this prompt soon.
    prompt = "Once upon a time, in a village by the sea,"
    options = ("-m", str(smollm2), "-p", prompt, "--no-chat", "--temp", "0", "-c", "4096")
    with started("run", *options) as process:
        assert process.stdout is not None
        process.stdout.read(1)  # This character shows that generation has begun.
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "peak RSS" in errors


def test_the_chat_template_is_applied_unless_told_otherwise(smollm2: Path) -> None:
    answers = {}
    for flag in ((), ("--no-chat",)):
        question = "What is the capital of France? Answer in one word."
        result = entropykv(
            *("run", "-m", smollm2, "-p", question, "-c", 256, "-n", 16, "--temp", 0, *flag)
        )
        assert result.returncode == 0, result.stderr
        answers[flag] = result
    assert "Paris" in answers[()].stdout
    assert "<|im_" not in answers[()].stdout
    tokens = [int(r.stderr.split("prompt  ")[1].split()[0]) for r in answers.values()]
    assert tokens[0] > tokens[1]


def truncated(path: Path, tmp_path: Path) -> Path:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return cut


def test_files_that_are_no_models(tiny_llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("this is no model", encoding="utf-8")
    unknown = tmp_path / "unknown.gguf"
    writer = GGUFWriter(str(unknown), "perceptron")
    writer.add_block_count(1)
    writer.add_embedding_length(32)
    writer.add_head_count(1)
    writer.add_context_length(128)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*"abcdefgh", *(f"<0x{byte:02X}>" for byte in range(256))])
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for model, word in (
        (tmp_path / "absent.gguf", "no such file"),
        (text, "GGUF"),
        (truncated(tiny_llama, tmp_path), "truncated"),
        (unknown, "perceptron"),
    ):
        assert_refused(entropykv("run", "-m", model, "-p", "x"), model.name, word)


@pytest.mark.parametrize("words", ["run {} -p x", "chat {}", "plan -m {} {}", "serve {}"])
def test_a_model_without_an_option_before_it(tiny_llama: Path, words: str) -> None:
    """Other programs take a model without an option, so the refusal names -m as the way out."""
    result = entropykv(*words.replace("{}", str(tiny_llama)).split())
    assert_refused(result, f"{tiny_llama} has no option before it", f"-m {tiny_llama}")


@pytest.mark.parametrize(
    ("words", "help_of"),
    [("models x", "models"), ("convert a -o b", "convert"), ("plan --demo bitnet x", "plan")],
)
def test_words_that_a_command_does_not_have(words: str, help_of: str) -> None:
    assert_refused(entropykv(*words.split()), f"see entropykv {help_of} --help")


def test_an_empty_name_of_a_model() -> None:
    assert_refused(entropykv("plan", "-m", ""), "-m/--model: the name is empty")


@pytest.mark.parametrize(("command", "budget"), [("run", "-1"), ("plan", "abc")])
def test_impossible_budgets(tiny_llama: Path, budget: str, command: str) -> None:
    prompt = ("-p", "x") if command == "run" else ()
    result = entropykv(command, "-m", tiny_llama, f"--kv-budget={budget}", *prompt)
    assert_refused(result, "KV budget", budget)


@pytest.mark.parametrize(("store", "smallest"), [("headwise", 5), ("flat", 7)])
def test_a_budget_too_small_for_what_it_protects(
    tiny_llama: Path, store: str, smallest: int
) -> None:
    """A budget that is too small for what it protects is refused, with the smallest one. Without a
    profile, the headwise store protects a shorter recent window than the flat one.
    """
    given = ("-m", tiny_llama, "--store", store, "--kv-budget")
    result = entropykv("run", *given, smallest - 1, "-p", "x")
    assert_refused(result, "smallest budget", f"{smallest} tokens")
    assert entropykv("plan", *given, smallest).returncode == 0
    result = entropykv("run", "-m", tiny_llama, "-p", "x", "--kv-budget", 40, "--recent-window", 60)
    assert_refused(result, "recent window of 60", "64 tokens")


def test_prompts_that_cannot_be_read(tiny_llama: Path, tmp_path: Path) -> None:
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    run = ("run", "-m", tiny_llama, "-c", 32)
    assert_refused(entropykv(*run), "prompt is empty")
    assert_refused(entropykv(*run, "-p", "  "), "prompt is empty")
    assert_refused(entropykv(*run, "-p", "the and of " * 50), "context of 32")
    assert_refused(entropykv(*run, "-f", tmp_path / "absent.txt"), "absent.txt")
    assert_refused(entropykv(*run, "-f", binary), "UTF-8")
    assert_refused(entropykv(*run, "-p", "x", "-n", 0), "-n 0")
    assert_refused(entropykv(*run, "-p", "x", "--stats-json", tmp_path), "directory")
    assert_refused(entropykv(*run, "-p", "x", "--top-p", 1.5), "top_p")


def test_profiles_that_do_not_fit(tiny_llama: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    EntropyProfile(2, 8, 8, 512, np.ones((2, 8))).save(other)
    damaged = tmp_path / "damaged.json"
    damaged.write_text(other.read_text(encoding="utf-8")[:100], encoding="utf-8")
    run = ("run", "-m", tiny_llama, "-p", "x", "--entropy-config")
    assert_refused(entropykv(*run, other), "2 layers", "3 layers")
    assert_refused(entropykv(*run, damaged), "damaged.json")
    assert_refused(entropykv(*run, tmp_path / "absent.json"), "absent.json")
    assert_refused(entropykv("plan", "-m", tiny_llama, "--entropy-config", other), "2 layers")


def test_plan_says_one_number_of_entries(tiny_llama: Path) -> None:
    """`plan` says beside the bytes the number of entries of its table: those of whole pages, not
    the fraction of the context.
    """
    text = entropykv("plan", "-m", tiny_llama, "-c", 1000, "--kv-budget", 0.25).stdout
    said = re.search(r"(\d+) of 1000 entries per KV head on average", text)
    table = re.search(r"(\d+) in each of 3 layers", text)
    assert said is not None
    assert table is not None
    assert said[1] == table[1] != "250"
    with Session(tiny_llama, n_ctx=1000, kv_budget=0.25, n_threads=1) as session:
        assert session.cache.budgets()[0][0] == int(said[1])


def test_plan_says_what_a_session_does(tiny_llama: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    rng = np.random.default_rng(0)
    EntropyProfile(3, 6, 2, 512, rng.uniform(0.1, 4.0, (3, 6))).save(profile)
    arguments = ("-m", tiny_llama, "-c", 1000, "--kv-budget", 0.3, "--entropy-config", profile)
    result = entropykv("plan", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    with Session(tiny_llama, n_ctx=1000, kv_budget=0.3, entropy_config=profile) as session:
        assert plan["budgets"] == [list(layer) for layer in session.cache.budgets()]
        assert plan["kv_bytes_budget"] == session.stats().kv_bytes_budget
    assert plan["kv_bytes_f16"] == 1000 * 3 * 2 * 64 * 2
    assert plan["saved_bytes"] == plan["kv_bytes_f16"] - plan["kv_bytes_budget"]
    text = entropykv("plan", *arguments)
    assert f"{plan['budgets'][0][0]} of 1000 entries" in text.stdout


@pytest.mark.parametrize(
    ("command", "policy", "words"),
    [
        ("run", "best", ("'best'", "uniform")),
        ("plan", "uniform:best", ("'best'", "mass, attention, products, reconstruct, predicted")),
        ("bench", "uniform:mass+best", ("'best'", "values, echo, predicted")),
    ],
)
def test_policies_that_do_not_exist_are_refused_by_name(
    tiny_llama: Path, command: str, policy: str, words: tuple[str, ...]
) -> None:
    prompt = ("-p", "x") if command == "run" else ()
    assert_refused(entropykv(command, "-m", tiny_llama, "--policy", policy, *prompt), *words)


@pytest.mark.parametrize("command", [(), ("run",), ("plan",), ("eval",)])
def test_help_names_every_option(command: tuple[str, ...]) -> None:
    result = entropykv(*command, "--help-all" if command else "--help")
    assert result.returncode == 0
    if command == ("run",):
        for option in (
            *("-m", "-p", "-f", "-n", "-c", "-t", "-b", "-ub", "-s"),
            *("--temp", "--top-k", "--top-p", "--min-p", "--seed"),
            *("adaptive", "guided", "profile", "uniform", "recency", "streaming"),
        ):
            assert option in result.stdout
    assert "None" not in result.stdout


def test_a_command_that_is_asked_to_end_leaves_no_half_written_file(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"what was there")
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_COMMAND, str(target)],
        stdout=subprocess.PIPE,
        text=True,
        creationflags=creation_flags(),
    )
    assert process.stdout
    assert process.stdout.readline() == "writing\n"
    assert len(os.listdir(tmp_path)) == 2
    ask_to_end(process)
    process.stdout.close()
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert os.listdir(tmp_path) == ["target"]
    assert target.read_bytes() == b"what was there"
