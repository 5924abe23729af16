"""Differences and tolerances, and logits moved towards a choice."""

from __future__ import annotations

import numpy as np
import pytest

from ort_moe.verification.tolerance import TOLERANCES, by_expert, coarsest, favoured, relative_difference

NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("got", "expected", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([0.5], [0.0], 0.5),
        ([NAN, 1.0], [NAN, 1.0], 0.0),
        ([NAN, 1.0], [1.0, 1.0], INF),
        ([1.0, 1.0], [NAN, 1.0], INF),
        ([INF], [INF], 0.0),
        ([INF], [-INF], INF),
        ([], [], 0.0),
        ([1.0], [1.0, 1.0], INF),
    ],
)
def test_relative_difference(got: list[float], expected: list[float], difference: float) -> None:
    assert relative_difference(np.float32(got), np.float32(expected)) == difference


def test_half_precision_does_not_overflow() -> None:
    assert relative_difference(np.float16([-60000.0]), np.float16([60000.0])) == 2.0


def test_coarsest() -> None:
    assert coarsest({"float32", "float16"}) is TOLERANCES["float16"]
    assert coarsest({"float16", "bfloat16"}) is TOLERANCES["bfloat16"]
    assert coarsest({"int64"}) is TOLERANCES["float32"]


def test_by_expert_keeps_pairs() -> None:
    weights, indices = by_expert(np.float32([[0.1, 0.9], [0.7, 0.3]]), np.int32([[5, 2], [0, 1]]))
    np.testing.assert_array_equal(indices, [[2, 5], [0, 1]])
    np.testing.assert_array_equal(weights, np.float32([[0.9, 0.1], [0.7, 0.3]]))


def test_favoured_turns_near_ties_and_nothing_else() -> None:
    logits = np.float32([[3.0, 3.000001, 1.0], [3.0, 3.1, 1.0], [np.nan, 3.0, 3.1]])
    moved = favoured(logits, np.int32([[0], [0], [1]]), 1e-5)
    assert np.nanargmax(moved, axis=-1).tolist() == [0, 1, 2]
