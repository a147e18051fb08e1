"""Whether `auto` reads drafts, by what the products of a model's weights then cost."""

from __future__ import annotations

import pytest

from entropykv.policy.drafts import drafts_pay

AVX2, AVX512 = ["avx2"], ["avx2", "avx512vnni"]
Q4_K_M = [("Q4_K", 74), ("Q6_K", 26)]
TERNARY = [("TQ2_0", 67), ("Q6_K", 33)]


@pytest.mark.parametrize("types", [Q4_K_M, TERNARY])
def test_a_part_in_q6_k_ends_drafts_only_where_its_product_is_slow(
    types: list[tuple[str, int]],
) -> None:
    assert drafts_pay(types, AVX512)
    assert not drafts_pay(types, AVX2)


@pytest.mark.parametrize("kernels", [AVX2, AVX512])
@pytest.mark.parametrize("name", ["Q6_K", "F16"])
def test_a_whole_model_of_a_slow_type_is_read_without_drafts(name: str, kernels: list[str]) -> None:
    assert not drafts_pay([(name, 1000)], kernels)


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q4_K", "TQ2_0", "F32"])
def test_other_types_are_read_with_drafts(name: str) -> None:
    assert drafts_pay([(name, 1000)], AVX2)
