"""`auto` reads drafts only if it pays with the products of a model's weights."""

from __future__ import annotations

import pytest

from entropykv.policy.resolved_config import products_are_ours

AVX2, AVX512 = ["avx2"], ["avx2", "avx512vnni"]


@pytest.mark.parametrize("kernels", [AVX2, AVX512])
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q4_K", "Q6_K", "TQ2_0", "F32"])
def test_quantised_weights_are_read_with_drafts(name: str, kernels: list[str]) -> None:
    assert products_are_ours([(name, 1000)], kernels)


@pytest.mark.parametrize(("n_halves", "ours"), [(0, True), (7, True), (8, False), (100, False)])
def test_halves_are_llama_cpps_without_avx512(n_halves: int, ours: bool) -> None:
    types = [("Q4_K", 100 - n_halves), ("F16", n_halves)]
    assert products_are_ours(types, AVX2) == ours
    assert products_are_ours(types, AVX512)
