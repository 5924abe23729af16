"""Slice(TopK(x, n), 0, k) -> TopK(x, k)."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import EXPERTS, assert_fuses, assert_same, block

CONSTANTS = {
    "zero": np.array([0]),
    "first_two": np.array([2]),
    "all_but": np.array([2 - EXPERTS]),
    "three": np.array([3]),
    "every": np.array([EXPERTS]),
    "last": np.array(-1),
}
SORTED = """
    scores = Softmax <axis = -1> (logits)
    lengths = Shape (scores)
    length = Gather <axis = 0> (lengths, last)
    n = Reshape (length, one)
    sorted, order = TopK (scores, n)
    raw = Slice (sorted, zero, first_two, one)
    ids = Slice (order, zero, all_but, minus1, one)
    total = ReduceSum (raw, minus1)
    weights = Div (raw, total)"""
ARGSORTED = SORTED.replace("raw = Slice (sorted, zero, first_two, one)", "").replace(
    "total =", "raw = GatherElements <axis = 1> (scores, ids)\n total ="
)


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize(
    ("text", "absorbed"),
    [
        (SORTED, ("normalize", "softmax")),
        (ARGSORTED, ("gather-scores", "normalize", "softmax")),
        (SORTED.replace("(scores, n)", "(scores, every)"), ("normalize", "softmax")),
    ],
    ids=["sort", "argsort", "as many as there are"],
)
def test_sort(text: str, absorbed: tuple[str, ...], dtype: str) -> None:
    build = partial(block, text, CONSTANTS, dtype=dtype)
    assert_fuses(build, {"k": 2, "score": "softmax"}, absorbed=absorbed, rtol=1e-5 if dtype == "float" else 3e-3)


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        (
            "raw = Slice (sorted, zero, first_two, one)",
            "more = Slice (sorted, zero, three, one)\n raw = Slice (more, zero, first_two, one)",
        ),
        ("Slice (sorted, zero, first_two, one)", "Slice (sorted, one, three, one)"),
    ],
    ids=["other lengths", "not the first"],
)  # fmt: skip
def test_other_slices_stay(was: str, becomes: str) -> None:
    assert was in SORTED
    build = partial(block, SORTED.replace(was, becomes), CONSTANTS)
    model = build()
    (site,) = rewrite(model).sites
    assert (site.status, site.k) == ("partly", EXPERTS)
    assert_same(build(), model)


def test_what_is_not_sorted_has_no_first() -> None:
    model = block(SORTED.replace("TopK (scores, n)", "TopK <sorted = 0> (scores, n)"), CONSTANTS)
    (site,) = rewrite(model).sites
    assert (site.status, site.k) == ("partly", EXPERTS)


def test_an_order_that_is_an_output_stays() -> None:
    build = partial(block, SORTED, CONSTANTS, outputs=", int64[T, N] order")
    original, model = build(), build()
    (site,) = rewrite(model).sites
    assert (site.status, site.k) == ("partly", EXPERTS)
    assert_same(original, model)
