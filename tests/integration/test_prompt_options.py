"""Options of the text that a model reads first work: -sysf, --prompt-cache, templates, and the
first turn.
"""

from __future__ import annotations

import argparse
import re
import shutil
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from entropykv import Session
from entropykv.cli import main
from entropykv.cli.engine import add_model_tuning, model_options_of
from entropykv.errors import EntropyKVError
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.model_options import LoadOptions

GREEDY = ["-t", "1", "-c", "512", "--temp", "0", "-n", "8"]
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
    "{% if mood %}{{ mood }}{% endif %}"
)


def out_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_system_text_may_come_from_a_file(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "system.txt"
    text.write_text("Answer in French.", encoding="utf-8")
    run = ["run", "-m", smollm2, "-p", "Hello", *GREEDY]
    typed = out_of(capsys, *run, "-sys", "Answer in French.")
    assert out_of(capsys, *run, "-sysf", text) == typed
    assert out_of(capsys, *run, "--system-prompt-file", text) == typed != out_of(capsys, *run)


def test_a_template_takes_arguments(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"mood": "gaily"}
    options = LoadOptions(chat_template=TEMPLATE, template_arguments=arguments)
    model = Model(tiny_llama, n_gpu_layers=0, verbose=False, options=options)
    assert model.chat_prompt("Hi") == "[user] Hi gaily"
    model.close()
    run = ["run", "-m", tiny_llama, "-p", "the cat", *GREEDY, "--chat-template"]
    told = out_of(capsys, *run, TEMPLATE, "--chat-template-kwargs", '{"mood": "gaily"}')
    assert told == out_of(
        capsys, *run, TEMPLATE.replace("{{ mood }}", "gaily").replace("if mood", "if 1")
    )
    assert told != out_of(capsys, *run, TEMPLATE)
    words = [str(each) for each in (*run, TEMPLATE)]
    assert main([*words, "--chat-template-kwargs", '{"messages": 1}']) == 2
    assert "template" in capsys.readouterr().err


@pytest.mark.needs("/proc/self/maps")
def test_metadata_is_overridden_and_weights_are_read_as_asked(
    tiny_llama: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copy(tiny_llama, tmp_path / "own.gguf"))  # No other process maps this copy.

    def model(**options: object) -> Model:
        return Model(
            path,
            n_gpu_layers=0,
            verbose=False,
            options=LoadOptions(**options),  # type: ignore[arg-type]
        )

    def maps() -> bool:
        return str(path) in Path("/proc/self/maps").read_text(encoding="ascii")

    plain = model()
    added = plain.adds_bos
    assert maps()
    plain.close()
    other = model(overrides={"tokenizer.ggml.add_bos_token": not added, "some.text": "x" * 127})
    assert other.adds_bos is not added
    other.close()
    read = model(use_mmap=False)
    assert not maps()
    read.close()


def test_keep_protects_first_tokens(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "-m", tiny_llama, "-c", "512", "--kv-budget", "64"]
    assert "each keeps 24 sinks" in out_of(capsys, *plan, "--keep", "24")
    assert "each keeps 4 sinks" in out_of(capsys, *plan, "--keep", "1")


def test_scaled_adapters_are_spelled_as_now_and_as_before() -> None:
    def adapters(*words: str) -> object:
        parser = argparse.ArgumentParser()
        add_model_tuning(parser)
        for name in ("split_mode", "main_gpu"):
            parser.set_defaults(**{name: None})
        parser.set_defaults(tensor_split=())
        return model_options_of(parser.parse_args(words)).adapters

    assert adapters("--lora-scaled", "a.gguf:0.5,b.gguf:2") == [("a.gguf", 0.5), ("b.gguf", 2.0)]
    assert adapters("--lora-scaled", "a.gguf", "0.5") == [("a.gguf", 0.5)]
    assert adapters("--lora-scaled", "C:/a.gguf:1") == [("C:/a.gguf", 1.0)]
    assert adapters("--lora", "a.gguf,b.gguf") == [("a.gguf", 1.0), ("b.gguf", 1.0)]
    for words in (("a.gguf",), (":0.5",), ("a.gguf:x",), ("a.gguf:1", "b.gguf", "c")):
        with pytest.raises(EntropyKVError, match="FILE:SCALE"):
            adapters("--lora-scaled", *words)


def read_of(err: str) -> str:
    return next((line for line in err.splitlines() if "of the prompt are in" in line), "")


def test_a_prompt_in_a_cache_is_not_read_again(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "prompt.bin"
    text = "the cat and the dog and the bird and the house by the sea " * 4
    run = ["run", "-m", str(tiny_llama), "--no-chat", *GREEDY]
    cached = [*run, "--prompt-cache", str(cache)]
    expected = out_of(capsys, *run, "-p", text)
    assert out_of(capsys, *cached, "-p", text) == expected
    assert cache.exists()
    assert main([*cached, "-p", text]) == 0
    shown = capsys.readouterr()
    assert shown.out == expected
    with Session(tiny_llama, n_ctx=512, n_threads=1) as session:
        n_tokens = len(session.tokenize(text))
    assert f" {n_tokens} of {n_tokens} tokens" in read_of(shown.err)
    longer = text + "where nobody lives"
    expected = out_of(capsys, *run, "-p", longer)
    before = cache.read_bytes()
    assert main([*cached, "--prompt-cache-ro", "-p", longer]) == 0
    shown = capsys.readouterr()
    assert shown.out == expected
    assert int(read_of(shown.err).split()[1]) >= n_tokens - 1
    assert cache.read_bytes() == before
    other = "a house " + text
    expected = out_of(capsys, *run, "-p", other)
    assert out_of(capsys, *cached, "-p", other) == expected
    assert cache.read_bytes() != before


def test_the_answer_is_cached_where_it_is_asked_for(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "prompt.bin"
    run = ["run", "-m", str(tiny_llama), "--no-chat", *GREEDY, "--prompt-cache", str(cache)]
    out_of(capsys, *run, "--prompt-cache-all", "-p", "the cat and the dog")
    with Session(tiny_llama, n_ctx=512, n_threads=1) as session:
        read = session.files.load(cache).n_tokens
        assert read == len(session.tokenize("the cat and the dog")) + 8


def test_a_cache_of_another_model_or_a_smaller_budget_is_refused_or_read_again(
    tiny_llama: Path, pool_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "prompt.bin"
    text = "the cat and the dog and the bird and the house by the sea " * 6
    run = ["run", "-m", str(tiny_llama), "--no-chat", *GREEDY, "--prompt-cache", str(cache)]
    tight = [*run, "--kv-budget", "32", "--kv-type", "q8_0"]
    expected = out_of(capsys, *tight, "-p", text)
    assert main([*tight, "-p", text]) == 0  # The cache is used, although it lacks evicted entries.
    shown = capsys.readouterr()
    assert shown.out == expected
    first, second = re.findall(r"\d+", read_of(shown.err))[:2]
    assert first == second
    changed = "a dog" + text[7:]
    expected = out_of(
        capsys,
        *(each for each in tight if each not in ("--prompt-cache", str(cache))),
        "-p",
        changed,
    )
    assert out_of(capsys, *tight, "-p", changed) == expected
    other = ["run", "-m", str(pool_llama), "--no-chat", *GREEDY, "--prompt-cache", str(cache)]
    assert main([*other, "-p", "the"]) == 2
    assert str(cache) in capsys.readouterr().err
    cache.write_bytes(b"no session at all")
    assert main([*run, "-p", "the"]) == 2
    assert str(cache) in capsys.readouterr().err
    assert main([*run[:-1], str(tmp_path / "none" / "cache"), "-p", "the"]) == 2


def test_chat_begins_with_a_turn_and_may_end_with_it(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def chat(typed: str, *words: str) -> list[str]:
        stdin = TextIOWrapper(BytesIO(typed.encode()), encoding="utf-8")
        monkeypatch.setattr("sys.stdin", stdin)
        out = out_of(capsys, "chat", "-m", tiny_llama, "--no-chat", *GREEDY, *words)
        return out.splitlines()

    both = chat("the cat\na dog\n")
    assert len(both) == 2
    assert chat("a dog\n", "-p", "the cat") == both
    text = tmp_path / "first.txt"
    text.write_text("the cat", encoding="utf-8")
    assert chat("a dog\n", "-f", str(text)) == both
    assert chat("a dog\n", "-p", "the cat", "-st") == both[:1]
    assert chat("the cat\na dog\n", "-st") == both[:1]
    assert chat("", "-e", "-p", "the\\tcat", "-st") == chat("", "-p", "the\tcat", "-st")
    assert main(["chat", "-m", str(tiny_llama), "--web", "-p", "the cat"]) == 2
    assert "-p works only in the terminal" in capsys.readouterr().err
