"""Let pytest run the tests of llama.cpp's server against another program and other models.

PEER_REPORT names the file that gets the outcome of every test, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from requests.structures import CaseInsensitiveDict

_TESTS = Path.cwd()
_COUNTS = ("n_prompt",)
"""Parameters that are numbers of tokens of their model."""
_outcomes: dict[str, str] = {}
_reasons: dict[str, str] = {}


class AnyCount(int):
    """Equal any positive whole number: with another vocabulary, texts have other numbers of
    tokens.
    """

    def __eq__(self, other: object) -> bool:
        """Tell whether the other is a number of tokens."""
        return isinstance(other, int) and not isinstance(other, bool) and other > 0

    __hash__ = int.__hash__


def _is_text(_: str, text: Any) -> bool:
    """Take the place of match_regex(), which says what their model writes."""
    return isinstance(text, str)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Replace what their helpers fetch, and what they expect of texts."""
    sys.modules["wget"] = types.ModuleType("wget")
    sys.path.insert(0, str(_TESTS))
    import utils  # type: ignore[import-not-found]  # noqa: PLC0415

    models = json.loads(os.environ["PEER_MODELS"])
    utils.match_regex = _is_text
    utils.download_file = lambda url, *_: models[url.rpartition("/")[2]]
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    ask = utils.ServerProcess.make_request

    def make_request(*arguments: Any, **options: Any) -> Any:
        """Ask, and find headers whatever the case of their names, as HTTP has it."""
        found = ask(*arguments, **options)
        found.headers = CaseInsensitiveDict(found.headers)
        return found

    utils.ServerProcess.make_request = make_request


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Replace the numbers of tokens among the parameters of the tests."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        parameters.update({name: AnyCount(1) for name in _COUNTS if name in parameters})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember how a test ended."""
    name = report.nodeid
    if report.outcome == "failed":
        _outcomes[name] = "failed"
        crash = getattr(report.longrepr, "reprcrash", None)
        _reasons[name] = str(report.longrepr if crash is None else crash.message)[:400]
    elif report.outcome == "skipped":
        _outcomes.setdefault(name, "skipped")
    elif report.when == "call":
        _outcomes.setdefault(name, "passed")
    if report.when == "teardown":  # What ended is told even if the rest never does.
        found = {"outcomes": _outcomes, "reasons": _reasons}
        Path(os.environ["PEER_REPORT"]).write_text(json.dumps(found, indent=1), encoding="utf-8")
