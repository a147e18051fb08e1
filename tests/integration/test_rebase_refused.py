"""Models that cannot continue beyond the trained context say so at the limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from entropykv import ContextError, Session, SettingsError
from tests.support.logits import relative_error, tokens_for
from tests.support.rebase_models import FACTORS, MODELS, SMALL, TRAINED
from tests.support.tiny_models import write_gpt2, write_llama
from tests.support.tiny_writer import TinyRope


def write_unmovable(name: str, path: Path) -> None:
    if name == "gpt2":
        write_gpt2(path, n_ctx_train=TRAINED)
    elif name in MODELS:
        MODELS[name](path, TRAINED)
    elif name == "quantised":
        MODELS["llama"](path, TRAINED)
    else:
        write_llama(path, head_dim=32, n_ctx_train=TRAINED, architecture="hunyuan-dense")


@pytest.mark.parametrize(
    ("name", "store", "kv_type", "why"),
    [
        ("hunyuan-dense", "headwise", "f16", "its keys are changed after their rotation"),
        ("gpt2", "headwise", "f16", "its position embeddings are learned"),
        ("gpt2", "flat", "f16", "its position embeddings are learned"),
        ("hunyuan-dense", "flat", "f16", "its keys are changed after their rotation"),
        ("yarn", "flat", "f16", "scale its keys again"),
        ("smollm3", "flat", "f16", "rotate keys that have no position"),
        ("quantised", "flat", "q8_0", "cannot rotate quantised keys"),
    ],
)
def test_a_model_that_cannot_go_on_says_so_at_the_limit(
    name: str, store: str, kv_type: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_unmovable(name, path)
    tokens = tokens_for(TRAINED)
    with Session(path, n_ctx=512, kv_budget=96, store=store, kv_type=kv_type, **SMALL) as session:
        session.decode(tokens)
        with pytest.raises(ContextError, match=f"tiny .*{TRAINED} that the model.*{why}"):
            session.decode([5])
        assert session.position == TRAINED
        session.text.truncate(TRAINED - 1)
        ours = session.decode(tokens[-1:])
    with Session(
        path, n_ctx=TRAINED, kv_budget=96, store=store, kv_type=kv_type, **SMALL
    ) as session:
        session.decode(tokens)
        session.text.truncate(TRAINED - 1)
        assert relative_error(ours, session.decode(tokens[-1:])) < 2e-3


@pytest.mark.parametrize(
    ("name", "why"), [("gpt2", "embeddings are learned"), ("hunyuan-dense", "keys are changed")]
)
def test_predicted_attention_needs_keys_that_can_be_moved(
    name: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_unmovable(name, path)
    with pytest.raises(SettingsError, match=f"uniform:predicted predicts .*{why}.*use measure"):
        Session(path, n_ctx=64, policy="uniform:predicted", **SMALL)


def test_frequencies_for_short_contexts_end_where_they_do(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    rope = TinyRope(factors=FACTORS, short_factors=True, n_ctx_orig=512)
    write_llama(path, head_dim=32, n_ctx_train=4096, rope=rope)
    with Session(path, n_ctx=2048, kv_budget=64, n_ubatch=64, n_threads=1) as session:
        session.decode(tokens_for(512))
        assert session.stats().rebases == 0
        session.decode(tokens_for(64))
        assert session.stats().rebases == 1
        assert session._slot.store.shift == 128
