"""Run a few seeds of the fuzzers with the other tests; `make fuzz` runs new seeds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from entropykv import Session, SessionFileError
from tests.fuzz.file_runs import run_files
from tests.fuzz.forgery import crafted
from tests.fuzz.pool_runs import run_pool
from tests.support.logits import tokens_for


@pytest.mark.parametrize("seed", [3, 8, 12, 14])
def test_pools_beside_a_fresh_reading(tmp_path: Path, seed: int) -> None:
    assert "compared" in run_pool(seed, tmp_path)


@pytest.mark.parametrize("seed", [4, 5, 20])
def test_crafted_files_are_refused_or_work(tmp_path: Path, seed: int) -> None:
    assert "files refused" in run_files(seed, tmp_path)


def test_a_seed_crafts_the_same_file_again(tiny_llama: Path) -> None:
    with Session(tiny_llama, n_ctx=64) as session:
        session.decode(tokens_for(20))
        data = session.files.save_state()
        made = [[crafted(random.Random(seed), data) for seed in range(60)] for _ in range(2)]
        assert made[0] == made[1]
        assert len({what for what, _ in made[0]}) > 20
        assert 30 < sum(is_refused(session, other) for _, other in made[0]) < 60


def is_refused(session: Session, data: bytes) -> bool:
    try:
        session.files.load_state(data)
    except SessionFileError:
        return True
    return False
