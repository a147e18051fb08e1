"""A forked process has none of the threads that compute; it says so, and waits for none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import python

CHILD = """
import os, sys
from entropykv import EntropyKVError, Pool, Session

def refused(action):
    try:
        action()
    except EntropyKVError as error:
        assert "start processes by spawn" in str(error), error
        return
    raise AssertionError("nothing was refused")

options = {"n_ctx": 256, "n_threads": 2}
with Session(sys.argv[1], **options) as session, Pool(sys.argv[1], **options) as pool:
    session.decode(list(range(5, 40)))
    of_pool = pool.session()
    of_pool.decode(list(range(5, 40)))
    held = pool.runner.scheduler.between_steps()
    held.__enter__()  # as another thread of the parent may do at that moment
    child = os.fork()
    if child == 0:
        for each in (session, of_pool):
            refused(lambda: each.decode([7]))
            refused(lambda: each.text.truncate(3))
            each.close()
        refused(pool.session)
        pool.close()
        os._exit(17)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    held.__exit__(None, None, None)
    for each in (session, of_pool):
        each.decode([7])
"""


@pytest.mark.needs("os.fork")
def test_a_forked_process_is_told_and_the_parent_goes_on(tiny_llama: Path) -> None:
    python(CHILD, tiny_llama)
