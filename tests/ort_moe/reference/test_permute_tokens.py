"""The reference of PermuteTokens: by hand, undone by FinalizeRouting, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ort_moe.reference.finalize_routing import finalize_routing
from ort_moe.reference.permute_tokens import permute_tokens


def test_by_hand() -> None:
    x = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]], np.float32)
    indices = np.array([[2, 0], [0, 3], [2, 0]], np.int32)  # three tokens, experts 0 to 2
    permuted, maps = permute_tokens(x, indices, num_experts=3)
    assert permuted[:, 0].tolist() == [1, 2, 3, 1, 3, 0]  # expert 0, expert 2, and the row without one
    assert permuted[:, 1].tolist() == [10, 20, 30, 10, 30, 0]
    assert maps.expert_first_token_offset.tolist() == [0, 3, 3, 5]


@pytest.mark.parametrize("leading", [(), (0,), (1,), (4, 5)])
def test_finalize_brings_the_rows_back(leading: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-64, 65, (*leading, 7)).astype(np.float16)
    indices = rng.integers(0, 6, (*leading, 4), np.int32)
    permuted, maps = permute_tokens(x, indices, num_experts=6)
    quarters = np.full((*leading, 4), 0.25, np.float32)
    np.testing.assert_array_equal(finalize_routing(permuted, quarters, indices, maps.unpermuted_to_permuted), x)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": np.zeros((2, 4))}, "input 'x' must be float32, float16 or bfloat16, but is float64"),
        ({"x": np.float32(1.0)}, "input 'x' must have rank 1 or more, but is a scalar"),
        ({"indices": np.zeros((2, 3), np.int64)}, r"input 'indices' must be int32 of shape \(2, 3\), but is int64"),
        ({"indices": np.zeros((3, 3), np.int32)}, r"input 'indices' must be int32 of shape \(2, 3\)"),
        ({"num_experts": 0}, "attribute 'num_experts' must be at least 1, but is 0"),
    ],
)
def test_refusals(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"x": np.zeros((2, 4), np.float32), "indices": np.zeros((2, 3), np.int32), "num_experts": 5}
    with pytest.raises(ValueError, match=f"PermuteTokens: {message}"):
        permute_tokens(**(given | changed))
