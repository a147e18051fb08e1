"""A small model drafts for another one, and the text is the same as without drafts."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

from entropykv import EntropyLlama, Pool, Session
from entropykv.errors import EntropyKVError, SettingsError
from entropykv.session.draft_model import ModelDrafter
from tests.support.tiny_models import write_llama

PROMPT = [1, *(3 + 7 * i % 50 for i in range(60))]
SHAPE: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_head_kv": 2, "head_dim": 32, "n_ff": 64}


@pytest.fixture(scope="module")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write another model with the vocabulary of pool_llama."""
    path = tmp_path_factory.mktemp("models") / "other.gguf"
    write_llama(path, weight_type="Q8_0", seed=5, **SHAPE)
    return path


def options(**given: Any) -> dict[str, Any]:
    common = {"n_ctx": 400, "kv_budget": 48, "n_threads": 1, "policy": "uniform"}
    return {**common, "draft_p_min": 0.0, "draft_kv_budget": 1.0, **given}


def make_cheap(session: Session) -> ModelDrafter:
    """Pretend that drafts cost no time, so that as many are read as are likely to be accepted."""
    assert session.reader.drafting is not None
    drafter = session.reader.drafting._drafter
    assert isinstance(drafter, ModelDrafter)
    drafter.__class__ = type("Cheap", (ModelDrafter,), {"seconds_each": 0.0})
    return drafter


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7}], ids=str)
def test_a_text_is_the_same_with_a_draft_model(
    pool_llama: Path, other_llama: Path, sampling: dict[str, Any]
) -> None:
    with Session(pool_llama, **options(spec_type="none")) as session:
        expected = list(session.generate(PROMPT, 200, **sampling))
    shares = []
    for draft in (pool_llama, other_llama):
        with Session(pool_llama, **options(spec_draft_model=draft)) as session:
            make_cheap(session)
            assert list(session.generate(PROMPT, 200, **sampling)) == expected
            stats = session.stats()
            assert stats.drafted_tokens > 0
            assert stats.draft_kv_bytes > 0
            assert stats.kv_bytes_peak <= stats.kv_bytes_budget
            shares.append(stats.accepted_drafts / stats.drafted_tokens)
    assert shares[0] > shares[1]


def test_the_same_model_knows_what_comes(pool_llama: Path) -> None:
    """A model that drafts for itself with full caches is right, except where sampled text ends."""
    given = options(spec_draft_model=pool_llama, kv_budget=1.0, kv_type="f16")
    with Session(pool_llama, **given) as session:
        make_cheap(session)
        session.decode(PROMPT)
        drafts = session.reader.propose_drafts(3, 8)
        assert len(drafts) > 1
        rows = []

        def verify(logits: np.ndarray) -> int:
            rows.append(logits.argmax(axis=1).tolist())
            return len(drafts)

        assert session.reader.read_drafts(3, drafts, verify) == len(drafts)
        assert rows[0][:-1] == drafts


@pytest.mark.parametrize("said", [-1, 4, 99])
def test_more_right_drafts_than_were_read_are_refused_in_a_sentence(
    tiny_llama: Path, said: int
) -> None:
    with Session(tiny_llama, n_ctx=256, n_threads=1) as session:
        session.decode(PROMPT)
        with pytest.raises(EntropyKVError, match=f"verify returned {said}, and 3 drafts were read"):
            session.reader.read_drafts(3, [5, 6, 7], lambda _: said)
        session.reset()
        session.decode(PROMPT)
        assert session.reader.read_drafts(3, [5, 6, 7], lambda rows: len(rows) - 1) == 3


def test_sessions_of_a_pool_share_a_draft_model(pool_llama: Path, other_llama: Path) -> None:
    texts = [[1, *(3 + (5 + k) * i % 50 for i in range(40 + k))] for k in range(3)]
    given = options(kv_budget=1.0, n_sequences=2)
    with Pool(pool_llama, spec_type="none", **given) as pool:
        expected = []
        for text in texts:
            with pool.session() as session:
                expected.append(list(session.generate(text, 60)))
    with Pool(pool_llama, spec_draft_model=other_llama, **given) as pool:
        sessions = [pool.session() for _ in texts]
        found: list[list[int]] = [[] for _ in texts]

        def write(k: int) -> None:
            found[k] = list(sessions[k].generate(texts[k], 60))

        threads = [threading.Thread(target=write, args=(k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == expected
        drafts = pool.runner.draft_model
        assert drafts is not None
        assert len(drafts._runner.slots) == 3
        sessions.pop().close()
        with drafts._runner.scheduler.between_steps():
            pass
        assert len(drafts._runner.slots) == 2
        runner = drafts._runner
    assert runner.closed


def test_a_long_prompt_is_read_in_pieces(pool_llama: Path, other_llama: Path) -> None:
    """The draft model reads a long prompt in pieces between written tokens, so that no token waits
    for the whole prompt.
    """
    prompt = [1, *(3 + 7 * i % 50 for i in range(1500))]
    given = options(spec_draft_model=other_llama, n_ctx=2048)
    with Session(pool_llama, **given) as session:
        drafter = make_cheap(session)
        stream = session.generate(prompt, 8)
        read = [(next(stream), drafter._slot.text.position)[1] for _ in range(6)]
        assert read[:3] == [0, 512, 1024]
        assert read[3] > len(prompt)
        stream.close()


def test_after_a_rollback_the_draft_model_follows(pool_llama: Path, other_llama: Path) -> None:
    with Session(pool_llama, **options(spec_draft_model=other_llama, kv_budget=1.0)) as session:
        drafter = make_cheap(session)
        first = list(session.generate(PROMPT, 30))
        session.text.truncate(len(PROMPT) - 10)
        assert list(session.generate(PROMPT[-10:], 30)) == first
        common = drafter._slot.text.tokens.tolist()[: len(PROMPT)]
        assert common == PROMPT


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spec_type": "draft"}, "--model-draft"),
        ({"spec_type": "ngram", "spec_draft_model": "x.gguf"}, "does not use"),
        ({"spec_type": "ngram", "freeze": "ram"}, "where entries are frozen"),
        ({"spec_type": "ngram", "policy": "layer"}, "policy layer, which chooses"),
        ({"spec_draft_model": "x.gguf", "policy": "layer"}, "policy layer, which chooses"),
        ({"draft_p_min": 1.5}, "draft_p_min cannot be 1.5; use a number from 0 to 1"),
    ],
    ids=str,
)
def test_what_cannot_draft_is_refused_by_name(
    pool_llama: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        Session(pool_llama, **{**options(), **given})


def test_a_model_with_other_tokens_is_refused(pool_llama: Path, smollm2: Path) -> None:
    with pytest.raises(SettingsError, match="cannot guess for"):
        Session(pool_llama, **options(spec_draft_model=smollm2))
    gc.collect()


class Repeats(LlamaDraftModel):
    """Draft the last token again and again."""

    calls = 0

    def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:  # noqa: ARG002
        self.calls += 1
        return np.repeat(input_ids[-1:], 6)


@pytest.mark.parametrize("kv_budget", [48, 1.0])
@pytest.mark.parametrize("store", ["headwise", "flat"])
def test_a_draft_model_of_llama_cpp_drafts_inside_a_budget(
    pool_llama: Path, kv_budget: float, store: str
) -> None:
    def answer(draft_model: LlamaDraftModel | None) -> tuple[list[int], int]:
        policy = "uniform" if store == "headwise" else "streaming"
        given = options(store=store, kv_budget=kv_budget, kv_type="f16", policy=policy)
        llm = EntropyLlama(str(pool_llama), draft_model=draft_model, verbose=False, **given)
        assert llm.draft_model is None
        stream = llm.generate(PROMPT, temp=0.0)
        found = [next(stream) for _ in range(120)]
        stream.close()
        drafted = llm.kv_stats().drafted_tokens
        llm.close()
        return found, drafted

    expected, _ = answer(None)
    for draft_model in (LlamaPromptLookupDecoding(num_pred_tokens=5), Repeats()):
        found, drafted = answer(draft_model)
        assert drafted > 0 or (store == "flat" and kv_budget == 48)
        # In the flat store, attention to several tokens gives other bits than to one.
        if store == "headwise":
            assert found == expected


def test_attach_and_detach_keep_the_draft_model(pool_llama: Path) -> None:
    from llama_cpp import Llama  # noqa: PLC0415

    from entropykv import attach, detach  # noqa: PLC0415

    draft = Repeats()
    stock = Llama(str(pool_llama), n_ctx=400, n_batch=128, draft_model=draft, verbose=False)
    llm = attach(stock, 48, policy="uniform")
    assert llm.draft_model is None
    stream = llm.generate(PROMPT, temp=0.0)
    for _ in range(40):
        next(stream)
    stream.close()
    assert draft.calls > 0
    assert detach(llm).draft_model is draft
    stock.close()
