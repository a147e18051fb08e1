"""The figures, callbacks, errors and end of an EntropyLlama are as documented, also where a second
thread calls it.
"""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp import Llama, LogitsProcessorList

from entropykv import EntropyKVError, EntropyLlama, EvictionEvent, Recovery, Session, attach
from entropykv.errors import SettingsError
from entropykv.session.recovery import Climb
from entropykv.settings.freezing import Rung
from tests.support.llamas import PROMPT, QUIET, as_long, content
from tests.support.logits import tokens_for
from tests.support.tiny_models import write_llama


def test_deleting_is_enough(tiny_llama: Path) -> None:
    """Deleting an EntropyLlama frees its session without a reference cycle; so does close()."""
    llm = EntropyLlama(str(tiny_llama), n_ctx=64, **QUIET)
    gone = weakref.ref(llm._session)
    llm(PROMPT, max_tokens=2)
    gc.disable()
    try:
        del llm
        assert gone() is None
    finally:
        gc.enable()
    llm = EntropyLlama(str(tiny_llama), n_ctx=64, **QUIET)
    gone = weakref.ref(llm._session)
    llm.close()
    llm.close()
    assert gone() is None
    for use in (llm.kv_stats, llm.reset, lambda: llm.eval([5]), lambda: llm(PROMPT)):
        with pytest.raises(EntropyKVError, match="closed"):
            use()


def test_pickling_makes_another_one(tiny_llama: Path) -> None:
    llm = EntropyLlama(
        str(tiny_llama), n_ctx=96, kv_budget=48, kv_type="q8_0", policy="streaming", **QUIET
    )
    expected = content(llm(PROMPT, max_tokens=20, temperature=0.0))
    other = pickle.loads(pickle.dumps(llm))  # noqa: S301
    assert type(other) is EntropyLlama
    assert content(other(PROMPT, max_tokens=20, temperature=0.0)) == expected
    mine, theirs = llm.kv_stats(), other.kv_stats()
    for name in ("kv_budget", "policy", "kv_type", "n_ctx", "kv_bytes_budget", "evictions"):
        assert getattr(mine, name) == getattr(theirs, name)
    llm.close()
    other.close()


def test_statistics_tell_prompt_from_generated(tiny_llama: Path) -> None:
    llm = EntropyLlama(str(tiny_llama), n_ctx=256, **QUIET)
    first = llm(PROMPT, max_tokens=9, temperature=0.0, logit_bias={2: -1e9})["usage"]
    stats = llm.kv_stats()
    assert stats.prompt_tokens == first["prompt_tokens"]
    assert stats.generated_tokens == first["completion_tokens"] >= 9
    assert min(stats.prompt_seconds, stats.decode_seconds) > 0
    other = llm("of another", max_tokens=3, temperature=0.0, logit_bias={2: -1e9})["usage"]
    stats = llm.kv_stats()
    both = first["prompt_tokens"] + other["prompt_tokens"]
    # The prompt and the answer before it may share their BOS.
    assert both - 1 <= stats.prompt_tokens <= both
    assert stats.generated_tokens == first["completion_tokens"] + other["completion_tokens"]
    llm.close()


def test_on_evict_tells_what_was_dropped(tiny_llama: Path, store: str) -> None:
    events: list[EvictionEvent] = []
    llm = EntropyLlama(
        str(tiny_llama),
        n_ctx=512,
        kv_budget=64,
        n_ubatch=32,
        store=store,
        on_evict=events.append,
        **QUIET,
    )
    llm.eval(tokens_for(60))
    assert events == []
    llm.eval(tokens_for(200))
    assert len(events) == 1  # A decode call has one event, however many micro-batches it takes.
    assert events[0].position == 260
    assert events[0].kept == llm.kv_stats().entries_kept
    assert events[0].evicted + events[0].kept == 260 * 6
    llm("and so on", max_tokens=120, temperature=0.0, logit_bias={2: -1e9})
    assert sum(event.evicted for event in events) == llm.kv_stats().evictions
    with pytest.raises(AttributeError):
        events[0].kept = 0  # type: ignore[misc]
    llm.close()


def test_a_stream_closed_half_way(pair: tuple[EntropyLlama, Llama]) -> None:
    ours, _ = pair
    expected = content(ours(PROMPT, max_tokens=24, temperature=0.0))
    ours.reset()
    stream = ours(PROMPT, max_tokens=24, temperature=0.0, stream=True)
    for _ in range(5):
        next(stream)
    stream.close()
    assert ours.n_tokens == ours._session.position
    assert content(ours(PROMPT, max_tokens=24, temperature=0.0)) == expected


def test_an_exception_in_a_logits_processor(pair: tuple[EntropyLlama, Llama]) -> None:
    """An exception in a logits processor reaches the caller; llama-cpp-python prints it, and
    continues without the processor.
    """
    ours, _ = pair

    def fails(_: Any, __: Any) -> Any:
        raise ZeroDivisionError

    expected = content(ours(PROMPT, max_tokens=6, temperature=0.0))
    processors = LogitsProcessorList([fails])
    with pytest.raises(ZeroDivisionError):
        ours(PROMPT, max_tokens=6, temperature=0.0, logits_processor=processors)
    assert content(ours(PROMPT, max_tokens=6, temperature=0.0)) == expected


def test_an_exception_in_stopping_criteria(pair: tuple[EntropyLlama, Llama]) -> None:
    ours, _ = pair

    def fails(ids: Any, logits: Any) -> bool:
        assert logits.shape == (ours.n_vocab(),)
        if len(ids) > 30:
            raise ZeroDivisionError
        return False

    expected = content(ours(PROMPT, max_tokens=20, temperature=0.0))
    criteria = llama_cpp.StoppingCriteriaList([fails])
    with pytest.raises(ZeroDivisionError):
        ours(PROMPT, max_tokens=20, temperature=0.0, stopping_criteria=criteria)
    assert content(ours(PROMPT, max_tokens=20, temperature=0.0)) == expected


def test_an_exception_of_on_evict_leaves_the_model_where_it_is(tiny_llama: Path) -> None:
    angry = [True]

    def on_evict(_: EvictionEvent) -> None:
        if angry[0]:
            raise ZeroDivisionError

    def make(callback: Any) -> EntropyLlama:
        return EntropyLlama(
            str(tiny_llama), n_ctx=512, kv_budget=64, n_ubatch=32, on_evict=callback, **QUIET
        )

    llm, calm = make(on_evict), make(None)
    tokens = tokens_for(150)
    with pytest.raises(ZeroDivisionError):
        llm.eval(tokens)
    angry[0] = False
    calm.eval(tokens)
    assert llm.n_tokens == calm.n_tokens == 150
    more = tokens_for(20, seed=9)
    for each in (llm, calm):
        each.eval(more)
    np.testing.assert_array_equal(llm.scores, calm.scores)
    llm.close()
    calm.close()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupt_while_reading(
    tiny_llama: Path, store: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interrupt in the second micro-batch, the first counts, the rest is read again."""
    llm = EntropyLlama(str(tiny_llama), n_ctx=512, n_ubatch=32, kv_budget=96, store=store, **QUIET)
    tokens = tokens_for(120)
    expected = content(llm(tokens, max_tokens=8, temperature=0.0))
    llm.reset()
    inner = llm._session._slot.store
    original = getattr(inner, moment)
    calls = []

    def interrupted(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(inner, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm(tokens, max_tokens=8, temperature=0.0)
        assert llm.n_tokens == 32
    with pytest.raises(EntropyKVError, match="half-way"):
        llm._session.decode([5])
    assert content(llm(tokens, max_tokens=8, temperature=0.0)) == expected
    llm.close()


def test_seeds(tiny_llama: Path) -> None:
    llm = EntropyLlama(str(tiny_llama), n_ctx=64, seed=3, kv_type="f16", **QUIET)
    stock = Llama(str(tiny_llama), n_ctx=64, seed=3, **QUIET)
    for each in (llm, stock):
        each.set_seed(12)
    assert content(llm(PROMPT, max_tokens=8)) == content(stock(PROMPT, max_tokens=8))
    assert llm.tokenize(b"the land", special=True) == stock.tokenize(b"the land", special=True)
    assert llm.detokenize([270, 271]) == stock.detokenize([270, 271])
    llm.close()
    stock.close()


def test_squared_relu_needs_no_other_file(tmp_path: Path) -> None:
    """The activation that the file names is computed also for a Llama that was loaded by
    llama-cpp-python.
    """
    path = tmp_path / "relu2.gguf"
    write_llama(path, weight_type="F32", activation="relu2")
    tokens = tokens_for(20)
    with Session(path, n_ctx=64, kv_type="f16", n_threads=1) as session:
        expected = session.decode(tokens, all_logits=True)
    llm = attach(Llama(str(path), n_ctx=64, logits_all=True, **QUIET), kv_type="f16")
    llm.eval(tokens)
    np.testing.assert_array_equal(llm.scores[:20], expected)
    llm.close()


TOKENS, OTHER_TOKENS = tokens_for(60), tokens_for(50, seed=1)


def test_two_threads_at_once_get_one_clear_error(tiny_llama: Path) -> None:
    llm = EntropyLlama(str(tiny_llama), n_ctx=256, **QUIET)
    expected = llm.create_completion(TOKENS, max_tokens=8, temperature=0.0)["choices"]
    inside, go_on = threading.Event(), threading.Event()

    def busy(_ids: object, logits: object) -> object:
        inside.set()
        assert go_on.wait(30)
        return logits

    answers = []
    one = threading.Thread(
        target=lambda: answers.append(
            llm.create_completion(
                OTHER_TOKENS, max_tokens=2, temperature=0.0, logits_processor=[busy]
            )
        )
    )
    one.start()
    assert inside.wait(30)
    with pytest.raises(EntropyKVError, match="another thread is using this EntropyLlama"):
        llm.create_completion(TOKENS, max_tokens=8)
    with pytest.raises(EntropyKVError, match="another thread"):
        llm.eval([5])
    go_on.set()
    one.join(30)
    assert len(answers) == 1
    again = llm.create_completion(TOKENS, max_tokens=8, temperature=0.0)["choices"]
    assert again == expected
    llm.close()


def test_an_answer_that_was_left_cannot_go_on(tiny_llama: Path) -> None:
    llm = EntropyLlama(str(tiny_llama), n_ctx=256, **QUIET)
    left = llm.generate(TOKENS, temp=0.0)
    next(left)
    assert next(llm.generate(OTHER_TOKENS, temp=0.0)) is not None
    with pytest.raises(EntropyKVError, match="another call has used"):
        next(left)
    assert next(llm.generate(TOKENS, temp=0.0)) is not None
    llm.close()


def test_seeds_are_those_of_llama(tiny_llama: Path) -> None:
    """Sampled texts equal those of llama_cpp.Llama, with a seed per call or with the model's."""
    arguments = {"n_ctx": 128, "seed": 7, **QUIET}
    ours = EntropyLlama(str(tiny_llama), kv_type="f16", **arguments)
    stock = Llama(str(tiny_llama), **arguments)
    for seed in (3, 3, None, None, 4):
        options: dict[str, Any] = {"max_tokens": 6, "temperature": 0.7, "seed": seed}
        expected = stock.create_completion(TOKENS[:20], **options)
        found = ours.create_completion(TOKENS[:20], **as_long(options, expected))
        assert found["choices"] == expected["choices"]
        assert ours._seed == stock._seed
    ours.close()
    stock.close()


def test_the_recovery_ladder_restores_what_is_frozen(tiny_llama: Path) -> None:
    climbs: list[Climb] = []
    ladder = Recovery(deviations=0.01, warm_up=2, smooth=1, refractory=0, highest=Rung.FULL)
    llm = EntropyLlama(
        str(tiny_llama),
        n_ctx=256,
        kv_budget=48,
        freeze="ram",
        recovery=ladder,
        on_climb=climbs.append,
        **QUIET,
    )
    llm.create_completion(tokens_for(150), max_tokens=60, temperature=1.0, seed=1)
    assert climbs
    assert llm.kv_stats().climbs
    llm.close()
    with pytest.raises(SettingsError, match=r"highest=Rung\.FULL"):
        EntropyLlama(str(tiny_llama), freeze="ram", recovery=Recovery(), **QUIET)
