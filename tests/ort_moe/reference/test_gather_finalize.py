"""GatherFinalize's emulation: FinalizeRouting of the gathered rows, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from ort_moe.reference.finalize_routing import finalize_routing
from ort_moe.reference.gather_finalize import gather_finalize
from tests.gather_finalize_cases import GatherFinalizeCase, gather_finalize_cases
from tests.op_models import assert_same_bits


@settings(max_examples=100)
@given(gather_finalize_cases())
def test_it_is_a_gather_and_a_finalize(case: GatherFinalizeCase) -> None:
    if case.choices == "any_map":  # rows of a map that no router would make have no permuted order
        assert gather_finalize(**case.feeds, **case.attributes).shape == (*case.leading, case.hidden)
        return
    assert_same_bits(gather_finalize(**case.feeds, **case.attributes), finalize_routing(**case.permuted[0]))


def test_by_hand() -> None:
    """Two devices' halves of three experts; a capacity of one row leaves the second row of expert 1 out."""
    rows = np.array([[[1.0, 9.0]], [[10.0, 9.0]]], np.float32)  # of experts 1 and 2
    weights = np.array([[1.0, 2.0], [4.0, 8.0]], np.float32)
    indices = np.array([[1, 0], [1, 2]], np.int32)
    permuted = np.array([1, 2, 0, 3], np.int32)  # expert 0: token 0; expert 1: tokens 0, 1; expert 2: token 1
    offset = np.array([0, 1, 3, 4], np.int64)
    call: dict[str, Any] = {"hidden_size": 1, "local_begin": 1, "local_count": 2}
    y = gather_finalize(rows, weights, indices, permuted, offset, **call)
    np.testing.assert_array_equal(y, np.array([[1.0], [80.0]], np.float32))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"expert_output": np.zeros((5, 4, 4), np.float64)}, "'expert_output' must be float32, float16 or bfloat16"),
        ({"expert_output": np.zeros((6, 4, 4), np.float32)}, r"'expert_output' must be float32 of shape \(5, 4, 4\)"),
        ({"hidden_size": 5, "residual": np.zeros((2, 5), np.float32)}, "rows of at least hidden_size = 5"),
        ({"hidden_size": 0}, "'hidden_size' must be at least 1, but is 0"),
        ({"local_begin": 1}, "must name experts below 5, but name those below 6"),
        ({"indices": np.zeros((2, 3), np.int64)}, r"'indices' must be int32 of shape \(2, 3\), but is int64"),
        ({"bias": np.zeros((4, 4), np.float32)}, r"'bias' must be float32 of shape \(5, 4\)"),
        ({"expert_first_token_offset": np.zeros(6, np.int32)}, r"'expert_first_token_offset' must be int64"),
        ({"weights": np.float32(1.0)}, "'weights' must have rank 1 or more, but is a scalar"),
    ],
)
def test_refusals(changed: dict[str, Any], message: str) -> None:
    case = GatherFinalizeCase((2,), 3, 4, 5)
    with pytest.raises(ValueError, match=f"GatherFinalize: .*{message}"):
        gather_finalize(**(case.feeds | case.attributes | changed))
