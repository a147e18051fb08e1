"""Our kernels or llama.cpp compute products, as fits the machine."""

import llama_cpp
import pytest

from entropykv import _core
from entropykv.llamacpp.model import reads_blocks, serves_products


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
