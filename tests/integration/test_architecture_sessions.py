"""Sessions work with a few models of each kind: with windows, recurrent layers or ALiBi. Layers
without a window can freeze entries.

test_architectures.py tests what holds for every architecture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropykv import ContextError, EntropyLlama, Session, SettingsError
from entropykv.evaluation.stock import StockSession
from entropykv.settings.freezing import Recovery, Rung
from tests.architectures import MODELS
from tests.support.architecture_models import (
    TRAINED,
    WINDOW,
    session_of,
    some,
    windowed_layers,
    written,
)
from tests.support.architecture_reading import next_logits, read
from tests.support.command import entropykv
from tests.support.freeze_and_restore import freeze_and_restore, frozen_entries
from tests.support.llamas import QUIET
from tests.support.logits import relative_error, tokens_for
from tests.support.reads import Reads
from tests.support.saved_sessions import all_entries


@pytest.fixture
def path(name: str, tmp_path: Path) -> Path:
    return written(MODELS[name], tmp_path)


@some("gemma2", "gemma3", "gemma4", "gpt-oss", "phi3", "jamba", "qwen3next", "bloom", "deepseek2")
def test_micro_batches_of_any_size_and_tokens_after_them(name: str, path: Path) -> None:
    """Prompts shorter and longer than a micro-batch, and tokens after them, give stock's logits."""
    tokens = tokens_for(606)
    stock = StockSession(path, n_ctx=768, n_threads=1, flash=False)
    expected = read(stock, tokens, 512)
    stock.close()
    for n_ubatch, prompts in ((1, (3, 60)), (7, (5, 90)), (64, (50, 190)), (512, (300, 600))):
        with session_of(path, n_ctx=768, n_ubatch=n_ubatch) as session:
            for n_prompt in prompts:
                session.reset()
                rows = [session.decode(tokens[:n_prompt], all_logits=True)]
                rows += [next_logits(session, [t])[None] for t in tokens[n_prompt:][:6]]
                error = relative_error(np.concatenate(rows), expected[: n_prompt + 6])
                assert error < MODELS[name].rounding, (n_ubatch, n_prompt)


@some("llama4")
def test_windows_of_8192_tokens_that_do_not_slide(name: str, tmp_path: Path) -> None:
    path = written(MODELS[name], tmp_path, context_length=16384)
    tokens = tokens_for(8260)
    rows = []
    stock = StockSession(path, n_ctx=8448, n_threads=1, flash=False)
    ours = session_of(path, n_ctx=8448, n_ubatch=512, n_threads=1)
    for session in (stock, ours):
        for first in range(0, 8160, 510):
            session.decode(tokens[first : first + 510])
        rows.append(read(session, tokens[8160:], 20))
        session.close()
    assert relative_error(rows[1], rows[0]) < MODELS[name].rounding


@some("gemma2", "gemma3", "gpt-oss", "step35")
@pytest.mark.parametrize("policy", ["uniform", "adaptive"])
def test_windows_go_back_a_few_tokens_and_no_further(name: str, policy: str, path: Path) -> None:
    """Rolling back a few tokens works, also within a prompt at whose end entries outside the
    windows were dropped; further back it is refused, and changes nothing.
    """
    tokens, after = tokens_for(250), tokens_for(12, seed=8)
    options = {"kv_budget": 0.5, "policy": policy}
    with session_of(path, **options) as session:
        for position in (233, 215):
            session.reset()
            session.decode(tokens[:position])
            expected = read(session, after, 1)
            session.reset()
            session.decode(tokens[:230])
            read(session, tokens[230:], 1)
            assert session.text.held().can_return_to(position)
            session.text.truncate(position)
            error = relative_error(read(session, after, 1), expected)
            assert error < MODELS[name].rounding
        entries = all_entries(session)
        assert not session.text.held().can_return_to(150)
        with pytest.raises(ContextError, match=r"position 150: .*sliding window.* reset\(\)"):
            session.text.truncate(150)
        assert (session.position, all_entries(session)) == (227, entries)


@some("gemma2", "gemma3", "gpt-oss")
@pytest.mark.parametrize("n_sinks", [0, 4])
def test_the_flat_store_goes_back_as_far_as_windows_hold(
    name: str, n_sinks: int, path: Path
) -> None:
    """The flat store goes back as far as windows hold: llama.cpp puts tokens that follow a
    truncate() into cells outside the windows.
    """
    options = {"store": "flat", "n_ctx": 512, "n_ubatch": 64, "n_threads": 1, "kv_type": "f16"}
    tokens, others = tokens_for(447), tokens_for(16, seed=3)
    with Session(path, n_sinks=n_sinks, **options) as session:
        session.decode(tokens)
        assert session.text.held().can_return_to(148)
        session.text.truncate(148)
        session.decode(others)
        assert not session.text.held().can_return_to(77)
        with pytest.raises(ContextError, match=r"position 77: .*sliding window.* reset\(\)"):
            session.text.truncate(77)
        assert session.position == 164
        session.text.truncate(160)
        again = session.decode([5])
        session.reset()
        session.decode([*tokens[:148], *others[:12]])
        assert relative_error(again, session.decode([5])) < MODELS[name].rounding


@some("gemma3", "gpt-oss")
@pytest.mark.parametrize("n_sinks", [0, 4])
def test_a_small_flat_budget_goes_back_within_its_newest_tokens(n_sinks: int, path: Path) -> None:
    """A small budget of the flat store goes back within its newest tokens, because tokens that the
    budget has evicted do not count as lost by windows.
    """
    options = {"store": "flat", "policy": "streaming", "n_ctx": 512, "kv_type": "f16"}
    with Session(path, kv_budget=24, n_sinks=n_sinks, n_threads=1, **options) as session:
        session.decode(tokens_for(200))
        session.decode([5])
        session.text.truncate(195)
        assert session.decode([7]).shape == (1, session.model.n_vocab)


@some("gemma3", "jamba", "bloom")
def test_a_prompt_that_was_read_is_not_read_again(name: str, path: Path) -> None:
    """Of a prompt that was read, only micro-batches from the first change on are read again; with
    recurrent layers, or if the change is further back than a window, all of them.
    """
    llm = EntropyLlama(str(path), n_ctx=512, kv_budget=1.0, n_ubatch=64, **QUIET)
    reads = Reads(llm)
    prompt = tokens_for(200)
    # Reading begins again where a micro-batch begins: at 192, and at 0.
    for changed, n_again in ((3, 9), (150, 201)):
        llm.reset()
        llm.eval(prompt)
        reads.count()
        fresh = [*prompt[:-changed], *tokens_for(changed, seed=8), 5]
        texts = [next(llm.generate(fresh, temp=0.0))]
        again = reads.count()
        goes_back = name == "bloom" or (name == "gemma3" and changed == 3)
        assert again == (n_again if goes_back else len(fresh))
        llm.reset()
        texts.append(next(llm.generate(fresh, temp=0.0)))
        assert texts[0] == texts[1]
        reads.count()
    llm.close()


@some("gemma3")
def test_a_session_with_a_small_budget_takes_back_what_it_read_ahead(path: Path) -> None:
    """A generation that is left takes back tokens that it read ahead; if windows cannot roll back,
    the text is read again.
    """
    options = {"kv_budget": 24, "n_ctx": 256, "freeze": "ram", "policy": "uniform"}
    with session_of(path, recovery=Recovery(rewalk=8), **options) as session:
        generator = session.generate(tokens_for(120), max_tokens=30)
        first = [next(generator) for _ in range(3)]
        assert session.position > 122
        generator.close()
        assert session.tokens == [*tokens_for(120), *first[:2]]
        read(session, first[2:], 1)


@some("gemma3", "gemma4", "gpt-oss", "deepseek2")
@pytest.mark.parametrize("n_sinks", [0, 4])
def test_windows_beyond_the_trained_context(name: str, n_sinks: int, tmp_path: Path) -> None:
    """Beyond the trained context and without sinks, a small budget gives the logits of a model
    trained for longer texts, up to rounding. With sinks, logits are finite. In both cases the bytes
    stay within the budget.
    """
    tokens, logits = tokens_for(600), []
    for trained in (TRAINED, 4096):
        path = written(MODELS[name], tmp_path, context_length=trained)
        options = {"kv_budget": 96, "n_ctx": 1024, "policy": "streaming", "n_sinks": n_sinks}
        with session_of(path, **options) as session:
            logits.append(read(session, tokens[:570], 30))
            logits[-1] = np.concatenate([logits[-1], read(session, tokens[570:], 1)])
            stats = session.stats()
            assert (stats.rebases > 0) == (trained == TRAINED)
            assert stats.kv_bytes_peak <= stats.kv_bytes_budget
    if n_sinks == 0:
        assert relative_error(logits[0], logits[1]) < MODELS[name].rounding
    assert np.isfinite(logits[0]).all()


@some("jamba")
def test_recurrent_layers_do_not_go_beyond_it(name: str, tmp_path: Path) -> None:
    path = written(MODELS[name], tmp_path, context_length=TRAINED)
    with session_of(path, n_ctx=512) as session:
        session.decode(tokens_for(TRAINED))
        with pytest.raises(ContextError, match="recurrent layers"):
            session.decode([5])


@some("gemma3", "gemma4", "jamba", "qwen3next", "bloom", "deepseek2")
def test_calibrate_and_use_the_profile(path: Path, tmp_path: Path) -> None:
    profile, text = tmp_path / "profile.json", tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog and on " * 60, encoding="utf-8")
    arguments = ("-m", path, "-o", profile, "--text", text, "--n-sequences", 2)
    result = entropykv("calibrate", *arguments, "--curve-length", 128, "-t", 1)
    assert result.returncode == 0, result.stderr
    for policy in ("profile", "entropy"):
        options = {"entropy_config": profile, "policy": policy, "kv_budget": 0.3, "n_ctx": 256}
        with session_of(path, **options) as session:
            read(session, tokens_for(200), 40)
            stats = session.stats()
            assert stats.kv_bytes_peak <= stats.kv_bytes_budget
            budgets = [sum(layer) for layer in session.cache.budgets()]
            heads = session._slot.store.facts.n_kv_heads
            assert sum(budgets) <= round(0.3 * 256) * heads


@some("gemma3", "gemma4", "deepseek2")
def test_a_session_on_disk(path: Path, tmp_path: Path) -> None:
    tokens, file = tokens_for(300), tmp_path / "saved.session"
    options = {"kv_budget": 0.4, "freeze": "ram", "policy": "rolling-freeze"}
    with session_of(path, **options) as first:
        read(first, tokens[:200], 64)
        first.files.save(file)
        expected = read(first, tokens[200:], 10)
    with session_of(path, **options) as second:
        second.files.load(file)
        assert np.array_equal(read(second, tokens[200:], 10), expected)


@some("jamba")
def test_recovery_that_goes_back_is_refused_by_name(path: Path) -> None:
    options = {"freeze": "ram", "policy": "uniform"}
    with pytest.raises(SettingsError, match="recurrent layers cannot"):
        session_of(path, recovery=Recovery(), **options)
    with session_of(path, recovery=Recovery(highest=Rung.FULL), **options) as session:
        session.decode(tokens_for(20))


every_kind = some(
    "gemma2",
    "gemma3",
    "gemma4",
    "gpt-oss",
    "jamba",
    "qwen3next",
    "bloom",
    "deepseek2",
    "kimi-linear",
)


@every_kind
def test_frozen_and_restored_is_as_never_interrupted(path: Path) -> None:
    rows: list[Any] = []
    for interrupts in (False, True):
        with session_of(path, freeze="ram", policy="uniform") as session:
            session.decode(tokens_for(150))
            if interrupts:
                freeze_and_restore_what_has_no_window(session)
            rows.append(read(session, tokens_for(70, seed=4), 64))
            for token in tokens_for(4, seed=5):
                if interrupts:
                    freeze_and_restore_what_has_no_window(session)
                rows.append(session.decode([token]))
    half = len(rows) // 2
    assert np.array_equal(np.concatenate(rows[:half]), np.concatenate(rows[half:]))


def freeze_and_restore_what_has_no_window(session: Session) -> None:
    if not windowed_layers(session):
        freeze_and_restore(session)
        return
    core = session._slot.store.core  # type: ignore[attr-defined]
    before = core.entries
    core.freeze_all(session.position - 1)
    for layer, heads in enumerate(session.cache.budgets()):
        for head in range(len(heads)):
            n_frozen = len(core.frozen_positions(layer, head))
            windowed = layer in windowed_layers(session)
            assert (n_frozen == 0) == windowed
            assert (core.count(layer, head) == 0) != windowed
    n_frozen_entries = core.frozen
    assert core.restore(session.position - 1) == n_frozen_entries
    assert (core.entries, core.frozen) == (before, 0)


@every_kind
@pytest.mark.parametrize("policy", ["rolling-freeze", "uniform"])
def test_freezing_inside_a_budget(policy: str, path: Path) -> None:
    with session_of(path, kv_budget=0.3, n_ctx=256, freeze="ram", policy=policy) as session:
        read(session, tokens_for(200), 50)
        rows = read(session, tokens_for(30, seed=5), 1)
        stats = session.stats()
        windowed = windowed_layers(session)
        frozen = iter(frozen_entries(session))
        for layer, heads in enumerate(session.cache.budgets()):
            for head in range(len(heads)):
                active = session.cache.entries(layer, head).tolist()
                both = sorted([*active, *next(frozen)])
                if layer not in windowed:
                    assert both == list(range(230))
                else:
                    assert set(both[-WINDOW + 1 :]) == set(range(231 - WINDOW, 230))
                    assert both == active
    assert np.isfinite(rows).all()
    assert stats.kv_bytes_peak <= stats.kv_bytes_budget
    assert stats.entries_frozen > 0
    assert stats.evictions == 0


@some("spark2_5")
def test_nothing_can_be_frozen_where_every_layer_has_a_window(name: str, tmp_path: Path) -> None:
    all_of_them = {"attention.sliding_window_pattern": (1, 1, 1, 1)}
    path = written(MODELS[name], tmp_path, **all_of_them)
    with session_of(path) as session:
        assert len(windowed_layers(session)) == 4
    with pytest.raises(SettingsError, match="nothing can be frozen"):
        session_of(path, freeze="ram", policy="uniform")
