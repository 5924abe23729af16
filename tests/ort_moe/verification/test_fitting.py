"""Fewer tokens where each costs a copy of its experts' matrices."""

from __future__ import annotations

import onnx_ir as ir
import pytest

import models.fixtures
from ort_moe.files.loading import load_model
from ort_moe.rewrites import rewrite
from ort_moe.verification.fitting import MOST_COPIED, copied_by_bodies, copied_per_token, fitting
from ort_moe.verification.sample_inputs import SHAPES, Shape
from tests.contrib_models import HIDDEN, INNER, ContribCase


def test_copied_by_the_batched_form_alone() -> None:
    fixture = models.fixtures.get("mixtral_block_dynamo_fp32")
    model = load_model(fixture.path)
    largest = max(value.const_value.size for value in model.graph.initializers.values() if len(value.shape) == 3)
    assert copied_per_token(model) == fixture.k * 4 * largest // fixture.experts


@pytest.mark.parametrize("weight_format", ["dense", "int4", "int8", "nvfp4"])
def test_copied_by_the_bodies_of_what_copied_nothing(weight_format: str) -> None:
    model = ir.from_proto(ContribCase(weight_format=weight_format).model())
    assert (copied_per_token(model), copied_by_bodies(model)) == (0, 0)
    rewrite(model, target="cpu")
    assert copied_by_bodies(model) == 4 * 2 * INNER * HIDDEN
    model.functions.clear()
    assert copied_by_bodies(model) == 0


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
