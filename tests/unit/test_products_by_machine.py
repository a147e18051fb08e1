"""Products are computed, and drafts read, in the way that is faster on the machine."""

import llama_cpp
import pytest

from entropykv import _core
from entropykv.llamacpp.model import reads_blocks, serves_products
from entropykv.policy.resolved_config import products_are_ours


@pytest.mark.parametrize(
    ("kernels", "serves", "reads"),
    [
        ([], False, False),
        (["avx2"], True, True),
        (["avx2", "avxvnni", "avx512vnni"], True, True),
        (["neon"], True, False),
        (["neon", "neondot"], True, False),
    ],
)
def test_llama_cpp_repacks_where_its_kernels_were_not_beaten(
    monkeypatch: pytest.MonkeyPatch, kernels: list[str], serves: bool, reads: bool
) -> None:
    monkeypatch.setattr(_core, "product_kernels", lambda: kernels)
    monkeypatch.setattr(llama_cpp, "llama_print_system_info", lambda: b"AVX2 = 1")
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: False)
    assert serves_products() == serves
    assert reads_blocks() == reads


def test_what_is_faster_in_llama_cpp_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "product_kernels", lambda: ["avx2"])
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: False)
    monkeypatch.setattr(llama_cpp, "llama_print_system_info", lambda: b"AMX_INT8 = 1")
    assert not serves_products()
    assert not reads_blocks()


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
