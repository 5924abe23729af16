"""Fewer tokens where each costs a copy of its experts' matrices."""

from __future__ import annotations

import pytest

import models.fixtures
from ort_moe.files.loading import load_model
from ort_moe.verification.fitting import MOST_COPIED, copied_per_token, fitting
from ort_moe.verification.sample_inputs import SHAPES, Shape


def test_copied_by_the_batched_form_alone() -> None:
    fixture = models.fixtures.get("mixtral_block_dynamo_fp32")
    model = load_model(fixture.path)
    largest = max(value.const_value.size for value in model.graph.initializers.values() if len(value.shape) == 3)
    assert copied_per_token(model) == fixture.k * 4 * largest // fixture.experts


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (64, SHAPES),
        (10, (Shape(1, 1), Shape(2, 3), Shape(1, 10))),
        (4, (Shape(1, 1), Shape(2, 2), Shape(1, 4))),
        (0.5, (Shape(1, 1), Shape(2, 1), Shape(1, 2))),
    ],
)
def test_as_many_tokens_as_fit(tokens: float, expected: tuple[Shape, ...]) -> None:
    assert fitting(SHAPES, int(MOST_COPIED / tokens)) == list(expected)


def test_all_where_nothing_is_copied() -> None:
    assert fitting(SHAPES, 0) == list(SHAPES)
