"""GatherFinalize on CUDA against the emulation, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from ort_moe import kernels
from ort_moe.reference.gather_finalize import gather_finalize
from tests.device_arrays import DeviceArray, poisoned
from tests.finalize_cases import CHOICES
from tests.gather_finalize_cases import GatherFinalizeCase, gather_finalize_cases
from tests.op_models import assert_same_bits, run_op
from tests.router_cases import DTYPES

pytestmark = pytest.mark.gpu


def launch(case: GatherFinalizeCase, *, in_place: bool = False, unaligned: bool = False) -> Any:
    """y of the launcher, written over poison or over the residual; the rows may lie an element off."""
    arrays = {name: DeviceArray(array) for name, array in case.feeds.items() if name != "expert_output"}
    rows = case.feeds["expert_output"]
    shift = 1 if unaligned else 0
    shifted = DeviceArray(np.concatenate([np.zeros(shift, rows.dtype), rows.reshape(-1)]))
    y = arrays["residual"] if in_place else poisoned((*case.leading, case.hidden), DTYPES[case.onnx_type])
    begin, count = case.local or (0, case.experts)
    kernels.gather_finalize(
        tokens=math.prod(case.leading), hidden=case.hidden, padded=case.hidden + case.padding, capacity=case.capacity,
        experts=case.experts, local_begin=begin, local_count=count, k=case.k, dtype=case.onnx_type,
        expert_output=shifted.address + shift * rows.itemsize, y=y.address,
        **{name: array.address for name, array in arrays.items()},
    )  # fmt: skip
    return y.read()


def check(case: GatherFinalizeCase, **how: bool) -> None:
    assert_same_bits(launch(case, **how), gather_finalize(**case.feeds, **case.attributes))


@pytest.mark.parametrize("hidden", [1, 7, 8, 64, 1000, 2880, 4096, 7168])
def test_sizes(hidden: int) -> None:
    n = hidden
    for k in (1, 3, 4, 6, 8, 10, 12, 22, 40):
        for onnx_type in DTYPES:
            tokens = (1, 3, 2, 5)[n % 4] if hidden > 1000 else (1, 3, 33, 70)[n % 4]
            case = GatherFinalizeCase(
                (tokens,), k, hidden, 9, (0, 8, 24, 1)[n % 4], ((0, 9), (2, 5), (8, 1))[n % 3], (3, 8, 70)[n // 2 % 3],
                onnx_type, CHOICES[n % len(CHOICES)], special=n % 2 == 1, has_bias=n // 2 % 3 == 0,
                has_residual=n // 3 % 2 == 0, seed=n,
            )  # fmt: skip
            check(case, in_place=case.has_residual and n % 7 == 0)
            n += 1


@settings(max_examples=200, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(gather_finalize_cases())
def test_random_calls(case: GatherFinalizeCase) -> None:
    check(case)


def test_many_tokens() -> None:
    """More than a grid has rows, and more choices than a block stages at a time."""
    check(GatherFinalizeCase((66000,), 2, 16, 4, onnx_type="bfloat16", capacity=40000, has_residual=True))
    check(GatherFinalizeCase((3000,), 22, 1024, 60, local=(10, 40), capacity=900, onnx_type="float16"))


def test_every_run_has_the_same_bits() -> None:
    case = GatherFinalizeCase((33,), 8, 1024, 16, 8, (4, 9), 20, "bfloat16", has_bias=True)
    for _ in range(20):
        check(case)


def test_unaligned_rows() -> None:
    """Addresses that no 16-byte access may touch."""
    check(GatherFinalizeCase((3,), 4, 64, 6, 8, onnx_type="float16"), unaligned=True)


def test_few_of_each_path() -> None:
    """What the memory checkers run."""
    for n, (hidden, k) in enumerate(((7, 3), (64, 2), (72, 8), (256, 10), (520, 22))):
        for onnx_type in DTYPES:
            for bias in (False, True):
                check(
                    GatherFinalizeCase(
                        (5,), k, hidden, 9, n % 3 * 8, (n % 4, 5), 4, onnx_type, CHOICES[n % 5], has_bias=bias,
                        has_residual=n % 2 == 0,
                    )
                )  # fmt: skip
    check(GatherFinalizeCase((66000,), 9, 8, 4, capacity=40000))


@pytest.mark.parametrize("onnx_type", DTYPES)
def test_session(onnx_type: str) -> None:
    for tokens in (0, 1, 20):
        case = GatherFinalizeCase(
            (tokens, 1), 6, 320, 8, 64, (2, 4), 20, onnx_type, "outside", has_bias=True, has_residual=True
        )
        got = run_op("GatherFinalize", case.feeds, case.attributes, providers=["CUDAExecutionProvider"])["y"]
        assert_same_bits(got, gather_finalize(**case.feeds, **case.attributes))
