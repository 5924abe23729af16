"""Differences and tolerances, and logits moved towards a choice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ort_moe.verification.router_check import compare_routing
from ort_moe.verification.tolerance import TOLERANCES, by_expert, coarsest, favoured, relative_difference, told

NAN, INF = np.nan, np.inf

Array = np.ndarray[Any, Any]


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


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("magnitude", [1.0, 30.0, 100.0])
def test_weights_of_large_logits(dtype: str, magnitude: float) -> None:
    """A router of logits that are not rounded to their type passes, another one does not."""
    exact = magnitude * np.random.default_rng(0).standard_normal((400, 8))
    logits = exact.astype(dtype)

    def routing(scores: Array, factor: float = 1.0) -> tuple[Array, Array]:
        chosen = np.argsort(-scores, axis=-1, kind="stable")[:, :2]
        powers = np.exp(np.take_along_axis(scores, chosen, -1) - scores.max(-1, keepdims=True))
        return factor * powers / powers.sum(-1, keepdims=True), chosen

    def check(expected: tuple[Array, Array]) -> str:
        return compare_routing(
            logits, expected, routing(logits.astype(float)), TOLERANCES[dtype], lambda moved: routing(moved)[1]
        ).status

    assert check(routing(exact)) == "passed"
    assert check(routing(exact, factor=0.5)) == "failed"


@pytest.mark.parametrize(
    ("limit", "words"),
    [(5e-6, "5e-06"), (0.012, "0.012"), (0.06, "6e-02"), (0.095, "0.095"), (0.18, "0.18"), (0.7, "0.7"), (1.2, "1.2")],
)
def test_a_limit_is_told_as_it_is(limit: float, words: str) -> None:
    assert told(limit) == words
