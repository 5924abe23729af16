"""Views between the steps of a router, out of the way."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.rewrites.blocks import assert_fuses, block

CHOICE_IN_THREE_DIMENSIONS = """
    deep = Unsqueeze (logits, zero)
    scores = Softmax <axis = -1> (deep)
    best, places = TopK (scores, k)
    raw = Squeeze (best, zero)
    ids = Squeeze (places, zero)
"""


@pytest.mark.parametrize(
    ("total", "opset"),
    [("ReduceSum <keepdims = 1> (raw, one)", 20), ("ReduceL1 <axes = [1], keepdims = 1> (raw)", 17)],
    ids=["axes as an input", "axes as an attribute"],
)
def test_an_axis_counted_from_the_front_behind_a_view(total: str, opset: int) -> None:
    """The last axis has another number where the view leads: summed over that one, every weight would be wrong."""
    text = f"{CHOICE_IN_THREE_DIMENSIONS} total = {total}\n weights = Div (raw, total)"
    build = partial(block, text, {"zero": np.array([0])}, opset=opset)
    assert_fuses(build, {"score": "softmax", "normalize": 1}, absorbed=("normalize", "softmax"))
