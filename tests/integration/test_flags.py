"""Every flag that users of llama-cli type works, or says what to do instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from entropykv.cli import main
from entropykv.errors import SettingsError
from entropykv.session.generate import SamplerChain
from entropykv.settings.sampling import SAMPLERS, Sampling

WORKING = [
    ["-ctk", "f16", "-ctv", "f16"],
    ["--cache-type-k", "q8_0"],
    ["-ctk", "q8_0", "-ctv", "iq4_nl"],
    ["-tb", "1"],
    ["--threads-batch", "1"],
    ["-r", "zzz", "-r", "yyy"],
    ["--grammar", 'root ::= "yes" | "no"'],
    ["--grammar", '%llguidance {}\nstart: "yes" | "no"'],
    ["--grammar-lark", 'start: "yes" | "no"'],
    ["--regex", "yes|no"],
    ["-j", "{}"],
    ["--json-schema", '{"type": "boolean"}'],
    ["--no-mmap"],
    ["--chat-template", "chatml"],
    ["--presence-penalty", "0.5", "--frequency-penalty", "0.5", "--repeat-last-n", "32"],
    ["--samplers", "top_k;temperature", "--temp", "0.8"],
    ["--sampler-seq", "kt", "--temp", "0.8"],
    ["--typical", "0.9", "--top-nsigma", "1.5", "--temp", "0.8"],
    ["--xtc-probability", "0.5", "--xtc-threshold", "0.2", "--temp", "0.8"],
    ["--dynatemp-range", "0.3", "--dynatemp-exp", "2", "--temp", "0.8"],
    ["--mirostat", "1", "--mirostat-lr", "0.2", "--mirostat-ent", "4", "--temp", "0.8"],
    ["--mirostat", "2", "--temp", "0.8"],
    ["--dry-multiplier", "0.8", "--dry-base", "1.7", "--dry-allowed-length", "1"],
    ["--dry-multiplier", "0.8", "--dry-penalty-last-n", "64", "--dry-sequence-breaker", "none"],
    ["-l", "7+1", "-l", "8-100"],
    ["--ignore-eos"],
    ["--predict", "4"],
    ["-no-cnv"],
    ["-fa"],
    ["-fa", "on"],
    ["-ngl", "99"],
    ["-ngl", "all"],
    ["--temperature", "0"],
    ["--rope-freq-base", "20000", "--rope-freq-scale", "0.5"],
    ["--rope-scaling", "linear", "--rope-scale", "2"],
    ["--yarn-orig-ctx", "64", "--yarn-ext-factor", "0"],
    ["-e"],
    ["-n4"],
    ["-n", "-2"],
    ["--keep", "6"],
    ["--keep", "0"],
    ["--chat-template", "chatml", "--chat-template-kwargs", '{"enable_thinking": false}'],
    ["-sm", "row", "-ts", "3,1", "-mg", "0"],
    ["--override-kv", "tokenizer.ggml.add_bos_token=bool:false,general.name=str:x"],
    ["-ctv", "iq4_nl"],
    ["-lm", "mmap+mlock"],
    ["-lm", "none"],
    ["--mmap"],
    ["--log-verbose"],
]

REFUSED = [
    (["-fa", "off"], "leave it out"),
    (["--keep", "-1"], "give a number"),
    (["--override-kv", "a.b=integer:7"], "key=type:value"),
    (["--override-kv", f"{'k' * 200}=int:7"], "127 bytes"),
    (["--override-kv", f"a=int:{2**64}"], "64 bits"),
    (["--chat-template-kwargs", "[1]"], "not a JSON object"),
    (["-ts", "a,b"], "such as 3,1"),
    (["-ts", ",".join("1" * 20)], "16 devices"),
    (["-mg", "99"], "15 or less"),
    (["--lora-scaled", "file"], "FILE:SCALE"),
    (["--lora-scaled", "/no/such/file:0.5"], "LoRA"),
    (["--prompt-cache-all"], "--prompt-cache FILE"),
    (["--prompt-cache", "a", "--save-session", "b"], "leave"),
    (["-sysf", "/no/such/file"], "/no/such/file: No such file"),
    (["-cnv"], "entropykv chat"),
    (["-ctk", "q4_0"], "--kv-type"),
    (["-ctk", "f16", "-ctv", "q8_0"], "K in f16 and V in q8_0: no store has these types"),
    (["-ctv", "q4_0"], "V in q4_0: no store"),
    (["-ctk", "q8_0", "-ctv", "iq4_nl", "--kv-type", "q8_0"], "disagree; give one"),
    (["--kv-type", "q8_0/iq4_nl", "--store", "flat"], "use --kv-type q8_0"),
    (["-zz"], "--help"),
    (["-fast"], "--help"),
    (["--thread", "2"], "did you mean --threads?"),
    (["--grammar", "no grammar"], "rule"),
    (["--grammar", 'root ::= root "a"'], "allows no token"),
    (["--grammar-lark", "start: x"], "unknown name"),
    (["--regex", "a("], "regular expression"),
    (["-j", '{"items": {"type": "string", "minLength": -2}}'], "#/items"),
    (["-j", "[" * 100_000], "not JSON"),
    (["-j", "{"], "JSON schema"),
    (["-l", "seven"], "15043-1"),
    (["--samplers", "top_j"], "top_k"),
    (["--lora", "/no/such/file"], "LoRA"),
    (["--chat-template", "nonsense"], "chatml"),
    (["-sys", "Be brief.", "-no-cnv"], "-p"),
    (["--numa", "often"], "distribute"),
]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must be refused; return its error message, which is one line."""
    capsys.readouterr()
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out.strip() == ""
    told = [line for line in shown.err.splitlines() if line.startswith("entropykv: ")]
    assert len(told) == 1, shown.err
    assert "Traceback" not in shown.err
    return told[0]


def run(model: Path, *flags: str) -> list[str]:
    return ["run", "-m", str(model), "-p", "the", "-t", "1", "-c", "64", "--temp", "0", *flags]


@pytest.mark.parametrize("flags", WORKING, ids=" ".join)
def test_flags_work(tiny_llama: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*run(tiny_llama, "-n", "4"), *flags]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(("flags", "way_out"), REFUSED, ids=str)
def test_flags_are_refused(
    tiny_llama: Path, flags: list[str], way_out: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert way_out in refused([*run(tiny_llama, "-n", "4"), *flags], capfd)


def test_an_answer_ends_before_a_reverse_prompt(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(run(tiny_llama, "-n", "24")) == 0
    whole = capsys.readouterr().out.rstrip("\n")
    stop = whole[len(whole) // 2 :][:3]
    assert main(run(tiny_llama, "-n", "24", "-r", stop)) == 0
    assert capsys.readouterr().out.rstrip("\n") == whole[: whole.index(stop)]


def test_an_answer_fits_the_grammar(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(run(tiny_llama, "--grammar", 'root ::= "on" | "off"', "-n", "20")) == 0
    assert capsys.readouterr().out.strip() in ("on", "off")
    schema = '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],'
    schema += '"additionalProperties": false}'
    assert main(run(tiny_llama, "-j", schema, "-n", "60")) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"a"}


def test_without_a_device_ngl_changes_nothing_but_one_note(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(run(tiny_llama, "-n", "8")) == 0
    plain = capsys.readouterr()
    assert main(run(tiny_llama, "-n", "8", "-ngl", "99")) == 0
    asked = capsys.readouterr()
    assert asked.out == plain.out
    notes = [line for line in asked.err.splitlines() if line.startswith("entropykv: ")]
    assert len(notes) == 1
    assert "-ngl" in notes[0]
    assert "headwise store" in asked.err


@pytest.mark.parametrize("command", ["run", "chat"])
def test_help_fits_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main([command, flag])
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
    assert {"sampling:", "answer:", "KV budget:", "engine:", "model:"} <= set(lines)


def test_impossible_sampling_is_refused() -> None:
    with pytest.raises(SettingsError, match="no sampler"):
        Sampling(samplers=("top_q",))
    with pytest.raises(SettingsError, match="tokens 0 to 9"):
        SamplerChain(Sampling(logit_bias=((10, 1.0),)), 10, 16, None)
    assert Sampling().samplers == SAMPLERS
