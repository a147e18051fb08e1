"""A second thread that calls an EntropyLlama gets one clear error, and the model is not damaged."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import Llama

from entropykv import EntropyKVError, EntropyLlama, Recovery
from entropykv.errors import SettingsError
from entropykv.session.recovery import Climb
from entropykv.settings.recovery import Rung
from tests.support.llamas import QUIET, as_long
from tests.support.logits import tokens_for

PROMPT, OTHER = tokens_for(60), tokens_for(50, seed=1)


def test_two_threads_at_once_get_one_clear_error(tiny_llama: Path) -> None:
    llm = EntropyLlama(str(tiny_llama), n_ctx=256, **QUIET)
    expected = llm.create_completion(PROMPT, max_tokens=8, temperature=0.0)["choices"]
    inside, go_on = threading.Event(), threading.Event()

    def busy(_ids: object, logits: object) -> object:
        inside.set()
        assert go_on.wait(30)
        return logits

    answers = []
    one = threading.Thread(
        target=lambda: answers.append(
            llm.create_completion(OTHER, max_tokens=2, temperature=0.0, logits_processor=[busy])
        )
    )
    one.start()
    assert inside.wait(30)
    with pytest.raises(EntropyKVError, match="another thread is using this EntropyLlama"):
        llm.create_completion(PROMPT, max_tokens=8)
    with pytest.raises(EntropyKVError, match="another thread"):
        llm.eval([5])
    go_on.set()
    one.join(30)
    assert len(answers) == 1
    again = llm.create_completion(PROMPT, max_tokens=8, temperature=0.0)["choices"]
    assert again == expected
    llm.close()


def test_an_answer_that_was_left_cannot_go_on(tiny_llama: Path) -> None:
    llm = EntropyLlama(str(tiny_llama), n_ctx=256, **QUIET)
    left = llm.generate(PROMPT, temp=0.0)
    next(left)
    assert next(llm.generate(OTHER, temp=0.0)) is not None
    with pytest.raises(EntropyKVError, match="another call has used"):
        next(left)
    assert next(llm.generate(PROMPT, temp=0.0)) is not None
    llm.close()


def test_seeds_are_those_of_llama(tiny_llama: Path) -> None:
    """Sampled texts equal those of llama_cpp.Llama, with a seed per call and with the model's
    seed.
    """
    arguments = {"n_ctx": 128, "seed": 7, **QUIET}
    ours = EntropyLlama(str(tiny_llama), kv_type="f16", **arguments)
    stock = Llama(str(tiny_llama), **arguments)
    for seed in (3, 3, None, None, 4):
        options: dict[str, Any] = {"max_tokens": 6, "temperature": 0.7, "seed": seed}
        expected = stock.create_completion(PROMPT[:20], **options)
        found = ours.create_completion(PROMPT[:20], **as_long(options, expected))
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
