"""Views of weights and indices, out of the way."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import EXPERTS, K, assert_fuses, assert_same, block

CHOOSE = "scores = Softmax <axis = -1> (logits)\n raw, ids = TopK (scores, k)\n"


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_the_shape_of_the_weights_is_that_of_the_indices(dtype: str) -> None:
    text = CHOOSE + "shape = Shape (raw)\n zeros = Expand (nothing, shape)\n weights = Mul (raw, factor)"
    build = partial(block, text, {"factor": 2.5, "nothing": 0.0}, dtype=dtype, outputs=f", {dtype}[T, {K}] zeros")
    rtol = 1e-5 if dtype == "float" else 3e-3
    assert_fuses(build, {"scale": 2.5}, absorbed=("scale", "softmax"), rtol=rtol)


def test_a_dimension_that_is_dropped_and_comes_back() -> None:
    text = """
        scores = Softmax <axis = -1> (logits)
        best, place = TopK (scores, one)
        lone = Squeeze (best, minus1)
        raw = Unsqueeze (lone, one)
        alone = Squeeze (place, minus1)
        ids = Unsqueeze (alone, minus1)
        weights = Mul (raw, factor)"""
    assert_fuses(partial(block, text, {"factor": 2.5}), {"k": 1, "scale": 2.5}, absorbed=("scale", "softmax"))


def test_a_dimension_elsewhere_stays() -> None:
    text = """
        scores = Softmax <axis = -1> (logits)
        weights, ids = TopK (scores, one)
        lone = Squeeze (weights, minus1)
        row = Unsqueeze (lone, zero)"""
    build = partial(block, text, {"zero": np.array([0])}, outputs=", float[one, T] row")
    original, model = build(), build()
    (site,) = rewrite(model).sites
    assert (site.status, site.experts, site.k) == ("whole", EXPERTS, 1)
    assert_same(original, model)
