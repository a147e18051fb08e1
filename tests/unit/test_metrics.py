"""Figures of several models are told apart, whatever characters their names have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from entropykv.server.http.metrics import as_prometheus


def registry(**loads: int) -> Any:
    """Return a registry of models that are not loaded; `loads` says how often each one was."""
    models = [
        SimpleNamespace(name=n, engine=None, estimate=None, loads=k) for n, k in loads.items()
    ]
    return SimpleNamespace(has_several=True, loaded=list, all=lambda: models)


@pytest.mark.parametrize("name", ["model.gguf", 'a "b" \\ c', "a\nb", '{x="y"} 7', "ü"])
def test_a_name_of_a_model_is_read_back_as_it_is(name: str) -> None:
    text = as_prometheus(registry(**{name: 3, "other": 5})).decode()
    found = {
        (sample.name, sample.labels["model"]): sample.value
        for metric in text_string_to_metric_families(text)
        for sample in metric.samples
    }
    assert found["entropykv_model_loads_total", name] == 3
    assert found["entropykv_model_loads_total", "other"] == 5
    assert found["entropykv_model_loaded", name] == 0
    assert text.count("# TYPE entropykv_model_loads_total counter\n") == 1


def test_two_servers_of_one_process_share_no_figures() -> None:
    first, second = (as_prometheus(registry(m=n)).decode() for n in (1, 2))
    assert 'entropykv_model_loads_total{model="m"} 1.0\n' in first
    assert 'entropykv_model_loads_total{model="m"} 2.0\n' in second
