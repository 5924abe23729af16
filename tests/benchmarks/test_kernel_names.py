"""Kernels' names are short and their times add up."""

from __future__ import annotations

import pytest

from benchmarks.kernel_names import short_name, together


@pytest.mark.parametrize(
    ("kernel", "short"),
    [
        ("void ns::a::finalizeKernel<__half, (Mode)1, std::pair<int, float> >(float const*)", "finalizeKernel"),
        ("void (anonymous namespace)::topK<8>(int)", "topK"),
        ("onnxruntime::{lambda(int)#1}::build(int)", "build"),
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
        ("Memset (Device)", "Memset"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("void a::X<T>::run<int>(int) const", "run"),
        ("void a::gemm<decltype(f() -> int)>(T*, int) [clone .kd]", "gemm"),
        ("(odd)", "(odd)"),
        ("_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalINS1_9SomeShapeEEEEEvNT_6ParamsE", "device_kernel"),
        ("_ZN12_GLOBAL__N_14sortEPf", "sort"),
        ("_Z4gemvILi8EEvPKf", "gemv"),
        ("_Z4gemv6Params", "gemv"),
        ("_ZL4gemvPf", "gemv"),
        ("_ZSt3foov", "_ZSt3foov"),
    ],
)
def test_short_names(kernel: str, short: str) -> None:
    assert short_name(kernel) == short


def test_times_of_a_layer() -> None:
    kernels = [("void a::gemv<1>(int)", 3.0), ("void b::topk(int)", 1.0), ("void a::gemv<2>(int)", 5.0)]
    assert together(kernels, layers=2) == {"gemv": 4.0, "topk": 0.5}
    assert list(together(kernels[::-1], layers=1)) == ["gemv", "topk"]
