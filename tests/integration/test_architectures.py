"""Every architecture of llama.cpp gives stock's logits, or is refused by name."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from entropykv import ContextError, Session, SettingsError, UnsupportedModelError
from entropykv.llamacpp.model import Model
from entropykv.llamacpp.recurrent import is_recurrent
from entropykv.model.geometry import read_geometry
from entropykv.session.memory_plan import make_plan
from entropykv.settings.cache_options import CacheOptions
from tests.architectures import ARCHITECTURES, Architecture, write_architecture
from tests.support.architecture_reading import decided, greedy, next_logits, read, stock
from tests.support.logits import relative_error, tokens_for
from tests.support.releases import IS_CHECKED, write_known


def bytes_cached_for_a_token(path: Path) -> float:
    """Return the bytes of one token in llama.cpp's own cache, by which its saved state grows."""
    model = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, flash_attn=True, verbose=False)
    sizes = []
    for n_tokens in (8, 16):
        model.eval(tokens_for(n_tokens))
        sizes.append(llama_cpp.llama_state_seq_get_size(model.ctx, 0))
    model.close()
    return (sizes[1] - sizes[0]) / 16


# The reason for which the headwise store refuses each of these kinds; it serves all others.
REFUSALS = {
    "recurrent": "only recurrent layers",
    "sparse": "not the KV cache|computed in its graph|several kinds of keys",
    "unfused": "not one flash attention node per layer",
    "diffusion": "diffusion model",
}


ALL = [(kind, model) for kind, models in ARCHITECTURES.items() for model in models]
SERVED = [model for kind, model in ALL if kind not in REFUSALS]
WINDOWED = [model for model in SERVED if model in ARCHITECTURES["windowed"]]
CACHED = [model for kind, model in ALL if kind != "diffusion"]
every_model = pytest.mark.parametrize(("kind", "model"), ALL, ids=[model.name for _, model in ALL])


@pytest.fixture
def path(model: Architecture, tmp_path: Path) -> Path:
    file = tmp_path / f"{model.name}.gguf"
    write_known(file, model)
    return file


def test_names_tell_the_models_apart() -> None:
    names = [model.name for _, model in ALL]
    assert len(set(names)) == len(names)


def test_the_same_description_gives_the_same_bytes(tmp_path: Path) -> None:
    files = tmp_path / "first.gguf", tmp_path / "second.gguf"
    for file in files:
        write_architecture(file, ARCHITECTURES["hybrid"][0])
    assert files[0].read_bytes() == files[1].read_bytes()


@every_model
def test_a_header_tells_of_states_what_llama_cpp_knows(
    kind: str,  # noqa: ARG001
    model: Architecture,  # noqa: ARG001
    path: Path,
) -> None:
    """The header of a file tells whether a model is recurrent, as llama.cpp does, so that `plan`
    knows whether a policy can read a text twice.
    """
    loaded = Model(path, n_gpu_layers=0, verbose=False)
    by_header, by_llama_cpp = read_geometry(path).recurrent, is_recurrent(loaded)
    loaded.close()
    # Older releases of llama.cpp keep no states.
    assert by_header == by_llama_cpp or (by_header and not IS_CHECKED)


@every_model
def test_stock_llama_cpp_decodes_it(kind: str, model: Architecture, path: Path) -> None:
    """The weights make sense: logits are finite and depend on the text, and, except for diffusion,
    not on how it is read.
    """
    tokens = tokens_for(48)
    other = [tokens[0], tokens[1] ^ 1, *tokens[2:]]
    session = stock(path)
    logits = read(session, tokens, 48)
    session.reset()
    changed = read(session, other, 48)
    session.reset()
    one_by_one = read(session, tokens, 1)
    session.close()
    fused_session = stock(path, flash=True)
    fused = read(fused_session, tokens, 48)
    fused_session.close()
    assert np.isfinite(logits).all()
    assert logits.std() > 0.5
    assert relative_error(changed[20:], logits[20:]) > 2 * model.rounding
    assert relative_error(fused, logits) < 2 * model.rounding
    if kind != "diffusion":
        assert relative_error(one_by_one, logits) < model.rounding


@pytest.mark.parametrize("model", SERVED, ids=lambda model: model.name)
def test_headwise_gives_the_logits_and_the_text_of_stock(model: Architecture, path: Path) -> None:
    tokens = tokens_for(130)
    session = stock(path)
    expected = read(session, tokens, 130)
    session.reset()
    text, rows = greedy(session, tokens[:30], 64)
    session.close()
    sure = decided(rows, model.rounding)
    # 22 layers of gemma3n have rounding errors of 5e-2, so that fewer choices are beyond doubt.
    assert sure.mean() > (0.85 if model.rounding <= 1e-2 else 0.5)
    for n_ubatch in (7, 64):
        with Session(
            path, n_ctx=256, store="headwise", kv_type="f16", n_ubatch=n_ubatch, n_threads=1
        ) as ours:
            assert relative_error(read(ours, tokens, 130), expected) < model.rounding
            ours.reset()
            chosen = [next_logits(ours, tokens[:30]).argmax()]
            chosen += [next_logits(ours, [token]).argmax() for token in text[:-1]]
            assert np.array_equal(np.array(chosen)[sure], np.array(text)[sure])
            ours.reset()
            assert relative_error(read(ours, tokens, 1), expected) < model.rounding


@pytest.mark.parametrize("model", SERVED, ids=lambda model: model.name)
def test_headwise_evicts_inside_its_bytes(model: Architecture, path: Path) -> None:  # noqa: ARG001
    """Bytes stay within the budget, and logits are the same for every number of threads."""
    tokens = tokens_for(138)
    runs = []
    for kv_budget, n_threads in ((0.5, 1), (0.25, 1), (0.25, 2), (0.25, 3), (0.25, 4)):
        with Session(
            path,
            n_ctx=256,
            kv_budget=kv_budget,
            store="headwise",
            kv_type="f16",
            n_ubatch=32,
            n_threads=n_threads,
        ) as ours:
            runs.append(
                np.concatenate([read(ours, tokens[:130], 130), read(ours, tokens[130:], 1)])
            )
            stats = ours.stats()
            only_windows = all(shape.window == 32 for shape in ours._slot.store.layers)
            if kv_budget == 0.25:  # With 0.5, layers without windows may hold everything.
                assert (stats.evictions == 0) == only_windows
            assert stats.kv_bytes_peak <= stats.kv_bytes_budget
            check_entries(ours, len(tokens))
    assert np.isfinite(runs).all()
    assert all(np.array_equal(runs[1], run) for run in runs[2:])


def check_entries(session: Session, position: int) -> None:
    """Check that KV heads keep the sinks and recent windows that they see, within budgets."""
    store = session._slot.store
    sinks = range(store.sharing.plan.protection.n_sinks)
    recent = range(position - store.reach().recent_window, position)
    for layer, shape in enumerate(store.layers):
        oldest = position + 1 - shape.window if shape.window and not shape.chunked else 0
        wanted = {p for p in (*sinks, *recent) if p >= oldest}
        for head in range(shape.n_head_kv):
            entries = session.cache.entries(layer, head)
            assert wanted <= set(entries.tolist())
            assert len(entries) <= session.cache.budgets()[layer][head]


@pytest.mark.parametrize("model", WINDOWED, ids=lambda model: model.name)
def test_what_a_window_cannot_use_goes_to_other_layers(model: Architecture, path: Path) -> None:  # noqa: ARG001
    with Session(path, n_ctx=512, kv_budget=0.5, store="headwise", n_threads=1) as session:
        layers = session._slot.store.layers
        budgets = session.cache.budgets()
        heads = sum(shape.n_head_kv for shape in layers)
        assert sum(map(sum, budgets)) <= 256 * heads
        for shape, of_layer in zip(layers, budgets, strict=True):
            if shape.window == 32:
                assert set(of_layer) == {96}
            elif any(other.window == 32 for other in layers):
                assert min(of_layer) > 256
        session.decode(tokens_for(150))
        assert session.stats().kv_bytes_peak <= session.stats().kv_bytes_budget
        if any(shape.window == 32 for shape in layers):
            assert not session.text.held().can_return_to(40)
        read(session, tokens_for(20), 1)
        assert session.text.held().can_return_to(
            155
        )  # Entries outside the window are dropped only when the text has 150 tokens.


@every_model
def test_auto_takes_headwise_or_says_why_not(kind: str, model: Architecture, path: Path) -> None:
    if kind == "diffusion":
        with pytest.raises(UnsupportedModelError, match=REFUSALS[kind]):
            Session(path, n_ctx=256, n_threads=1)
        return
    with Session(path, n_ctx=256, kv_type="f16", n_threads=1) as session:
        store, fallback = session.stats().store, session.config.fallback
    if kind not in REFUSALS:
        assert (store, fallback) == ("headwise", None)
        return
    if store == "headwise" and not IS_CHECKED:  # An older llama.cpp attends to all positions.
        plain, tokens = stock(path), tokens_for(130)
        expected = read(plain, tokens, 130)
        plain.close()
        with Session(path, n_ctx=256, kv_type="f16", n_ubatch=64, n_threads=1) as ours:
            assert relative_error(read(ours, tokens, 130), expected) < model.rounding
        return
    assert store == "flat"
    with pytest.raises(UnsupportedModelError, match=REFUSALS[kind]) as refusal:
        Session(path, n_ctx=256, store="headwise", kv_type="f16", n_threads=1)
    assert str(refusal.value) == fallback


@pytest.mark.parametrize("model", CACHED, ids=lambda model: model.name)
def test_flat_gives_the_logits_of_stock(model: Architecture, path: Path) -> None:
    tokens = tokens_for(90)
    session = stock(path, flash=True)
    expected = read(session, tokens, 90)
    session.close()
    with Session(path, n_ctx=256, kv_type="f16", store="flat", n_ubatch=64, n_threads=1) as ours:
        assert relative_error(read(ours, tokens, 90), expected) < model.rounding


def some(kinds: tuple[str, ...]) -> pytest.MarkDecorator:
    models = [model for kind, model in ALL if kind in kinds]
    return pytest.mark.parametrize("model", models, ids=lambda model: model.name)


@some(("diffusion",))
def test_flat_refuses_models_without_a_cache(model: Architecture, path: Path) -> None:  # noqa: ARG001
    with pytest.raises(UnsupportedModelError, match="diffusion model"):
        Session(path, n_ctx=256, store="flat", kv_type="f16", n_threads=1)


@some(("hybrid", "latent hybrid", "recurrent"))
def test_recurrent_layers_cannot_go_back(model: Architecture, path: Path) -> None:  # noqa: ARG001
    for store in ("flat", "auto"):
        with Session(path, n_ctx=256, store=store, kv_type="f16", n_threads=1) as session:
            expected = session.decode(tokens_for(60))
            assert [session.text.held().can_return_to(p) for p in (0, 40, 60)] == [
                True,
                False,
                True,
            ]
            with pytest.raises(ContextError, match=r"position 40: it has recurrent .* reset\(\)"):
                session.text.truncate(40)
            assert session.position == 60
            session.reset()
            assert np.array_equal(session.decode(tokens_for(60)), expected)


@some(("hybrid", "windowed", "latent", "latent hybrid", "shared keys"))
def test_a_saved_session_goes_on_with_the_same_logits(model: Architecture, path: Path) -> None:  # noqa: ARG001
    tokens = tokens_for(120)
    options = {"n_ctx": 256, "kv_budget": 0.3, "kv_type": "f16", "n_ubatch": 32, "n_threads": 1}
    with Session(path, store="headwise", **options) as first:
        first.decode(tokens[:90])
        state = first.files.save_state()
        expected = read(first, tokens[90:], 7)
    with Session(path, store="headwise", **options) as second:
        second.decode(tokens[50:70])
        second.files.load_state(state)
        assert np.array_equal(read(second, tokens[90:], 7), expected)
        assert not second.text.held().can_return_to(80)


@some(("latent", "latent hybrid", "shared keys"))
def test_budgets_are_of_what_is_cached_and_no_more(model: Architecture, path: Path) -> None:
    """Bytes of a full cache and of budgets are those that llama.cpp caches: V that is a part of K,
    and layers that use another layer's keys, count for nothing.
    """
    n_ctx, n_tokens = 256, 100
    options = {"n_ctx": n_ctx, "kv_budget": 0.5, "policy": "streaming", "kv_type": "f16"}
    plan = make_plan(path, CacheOptions(**options))  # type: ignore[arg-type]
    full = []
    for store in ("flat", "headwise"):
        with Session(path, store=store, n_threads=1, **options) as session:
            session.decode(tokens_for(n_tokens))
            stats, n_heads = session.stats(), session._slot.store.facts.n_kv_heads
            full.append(stats.kv_bytes_full / n_tokens)
    full.append(plan.kv_bytes_f16 / n_ctx)
    # The header of gemma4 declares heads of two sizes, but not which layers have them.
    if model.name == "gemma4":
        full = full[1:2]
    cached = bytes_cached_for_a_token(path)
    assert all(0 < cached - ours <= 24 for ours in full)  # llama.cpp also stores positions.
    # A header does not say which layers have windows.
    if model not in ARCHITECTURES["shared keys"]:
        assert plan.budget_bytes == stats.kv_bytes_budget
        assert stats.kv_bytes_budget < 0.6 * n_ctx * (full[1] + 8 * n_heads)


@pytest.mark.parametrize(
    "model",
    [model for _, model in ALL if model.name in ("llama-80", "mimo2", "jamba")],
    ids=lambda model: model.name,
)
def test_flat_has_a_type_for_heads_of_any_size(model: Architecture, path: Path) -> None:  # noqa: ARG001
    with Session(path, n_ctx=256, store="flat", n_threads=1) as session:
        session.decode(tokens_for(60))
    with pytest.raises(SettingsError, match="kv-type f16"):
        Session(path, n_ctx=256, store="flat", kv_type="q8_0", n_threads=1)


@pytest.mark.parametrize(
    "model", [model for _, model in ALL if model.name == "qwen4exp"], ids=lambda model: model.name
)
def test_flat_does_not_evict_where_llama_cpp_would_end_the_process(
    model: Architecture,  # noqa: ARG001
    path: Path,
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"kv-budget 1\.0"):
        Session(path, n_ctx=512, kv_budget=0.5, n_threads=1)
    with Session(path, n_ctx=512, n_threads=1) as session:
        with pytest.raises(UnsupportedModelError, match=r"kv-budget 1\.0"):
            session.cache.resize(0.5)
        session.decode(tokens_for(60))
