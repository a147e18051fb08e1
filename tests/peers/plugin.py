"""Let pytest run the tests of llama.cpp's server against another program and other models.

PEER_REPORT names the file that gets the outcome of every test, as JSON, and PEER_MODELS the files
that replace downloads, by the ends of their addresses.
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
"""Parameters of tests that are numbers of tokens, which depend on the vocabulary."""
_outcomes: dict[str, str] = {}
_reasons: dict[str, str] = {}


class AnyCount(int):
    """Equal any positive whole number, because another vocabulary gives other numbers of tokens."""

    def __eq__(self, other: object) -> bool:
        """Tell whether the other value is a positive whole number."""
        return isinstance(other, int) and not isinstance(other, bool) and other > 0

    __hash__ = int.__hash__


def _is_text(_: str, text: Any) -> bool:
    """Replace match_regex(): accept any text, because another model writes another one."""
    return isinstance(text, str)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Replace what the tests' helpers download, and what they expect of texts."""
    sys.modules["wget"] = types.ModuleType("wget")
    sys.path.insert(0, str(_TESTS))
    import utils  # type: ignore[import-not-found]  # noqa: PLC0415

    models = json.loads(os.environ["PEER_MODELS"])
    utils.match_regex = _is_text
    utils.download_file = lambda url, *_: models[url.rpartition("/")[2]]
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    ask = utils.ServerProcess.make_request

    def make_request(*arguments: Any, **options: Any) -> Any:
        """Send a request, and let headers be found whatever the case of their names, as in HTTP."""
        found = ask(*arguments, **options)
        found.headers = CaseInsensitiveDict(found.headers)
        return found

    utils.ServerProcess.make_request = make_request


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let parameters that are numbers of tokens equal any such number."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        parameters.update({name: AnyCount(1) for name in _COUNTS if name in parameters})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the outcome of a test, and write all of them to the report."""
    name = report.nodeid
    if report.outcome == "failed":
        _outcomes[name] = "failed"
        crash = getattr(report.longrepr, "reprcrash", None)
        _reasons[name] = str(report.longrepr if crash is None else crash.message)[:400]
    elif report.outcome == "skipped":
        _outcomes.setdefault(name, "skipped")
    elif report.when == "call":
        _outcomes.setdefault(name, "passed")
    # Each outcome is written at once, so that it is known even if the run is killed.
    if report.when == "teardown":
        found = {"outcomes": _outcomes, "reasons": _reasons}
        Path(os.environ["PEER_REPORT"]).write_text(json.dumps(found, indent=1), encoding="utf-8")
