"""FinalizeRouting's emulation: against float64, by hand, and with the order that the contract states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ort_moe.reference.finalize_routing import finalize_routing
from tests.finalize_cases import FinalizeCase


@pytest.mark.parametrize("onnx_type", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize("choices", ["random", "outside", "any_map"])
def test_against_float64(choices: str, onnx_type: str) -> None:
    case = FinalizeCase((4, 3), 5, 37, 6, onnx_type, choices, has_bias=True, has_residual=True)
    feeds = {name: array.reshape(12, -1) if array.ndim == 3 else array for name, array in case.feeds.items()}
    expected = feeds["residual"].astype(np.float64)
    for token in range(12):
        for k in range(5):
            row, expert = feeds["unpermuted_to_permuted"][k * 12 + token], feeds["indices"][token, k]
            if 0 <= row < 60 and 0 <= expert < 6:
                value = feeds["expert_output"][row].astype(np.float64) + feeds["bias"][expert].astype(np.float64)
                expected[token] += feeds["weights"][token, k] * value
    got = finalize_routing(**case.feeds).reshape(12, 37)
    tolerance = {"float": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[onnx_type]
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=tolerance, atol=tolerance * 4)


def test_the_sum_runs_in_rank_order_by_fused_steps() -> None:
    rows = np.array([[1.0], [-1.0], [1.0]], np.float32)
    weights = np.array([[1.0, 1.0 + 2.0**-23, 2.0**-40]], np.float32)
    permuted = np.array([0, 1, 2], np.int32)
    y = finalize_routing(rows, weights, np.zeros((1, 3), np.int32), permuted)
    assert y[0, 0] == np.float32(-(2.0**-23) + 2.0**-40)
    backwards = finalize_routing(rows[::-1], weights[:, ::-1], np.zeros((1, 3), np.int32), permuted)
    assert backwards[0, 0] == np.float32(-(2.0**-23))  # 2^-40 is lost beside 1
    one = np.float32(1 + 2.0**-12)
    fused = finalize_routing(np.array([[one], [1.0]], np.float32), np.array([[one, -1.0]], np.float32), *_pair())
    assert fused[0, 0] == np.float32(np.float32(float(one) * float(one)) - 1)


def _pair() -> tuple[Any, Any]:
    return np.zeros((1, 2), np.int32), np.array([0, 1], np.int32)


def test_a_token_without_rows_is_its_residual() -> None:
    case = FinalizeCase((2,), 3, 4, 5, choices="none", has_residual=True)
    np.testing.assert_array_equal(finalize_routing(**case.feeds), case.feeds["residual"])
    without = {name: array for name, array in case.feeds.items() if name != "residual"}
    assert not finalize_routing(**without).any()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"expert_output": np.zeros((6, 4), np.float64)}, "'expert_output' must be float32, float16 or bfloat16"),
        ({"expert_output": np.zeros((5, 4), np.float32)}, r"'expert_output' must be float32 of shape \(6, 4\)"),
        ({"indices": np.zeros((2, 3), np.int64)}, r"'indices' must be int32 of shape \(2, 3\), but is int64"),
        ({"bias": np.zeros((5, 4), np.float16)}, r"'bias' must be float32 of shape \(5, 4\), but is float16"),
        ({"residual": np.zeros((2, 5), np.float32)}, r"'residual' must be float32 of shape \(2, 4\)"),
        ({"weights": np.float32(1.0)}, "'weights' must have rank 1 or more, but is a scalar"),
    ],
)
def test_refusals(changed: dict[str, Any], message: str) -> None:
    case = FinalizeCase((2,), 3, 4, 5)
    with pytest.raises(ValueError, match=f"FinalizeRouting: input {message}"):
        finalize_routing(**(case.feeds | changed))
