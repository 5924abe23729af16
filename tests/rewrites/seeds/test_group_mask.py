"""TopK(Where(group_mask(x), x, fill)) -> num_groups, topk_groups, group_score_top, group_fill."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.rewrites.blocks import EXPERTS, assert_fuses, assert_stays, block

BIAS = np.random.default_rng(5).standard_normal(EXPERTS).astype(np.float32)
GROUPS, KEPT = 4, 2

SUM_OF_TWO = """
    best, unused0 = TopK (grouped, k)
    group_scores = ReduceSum <keepdims = 0> (best, minus1)"""
LARGEST = "group_scores = ReduceMax <keepdims = 0> (grouped, minus1)"
SCATTERED = """
    groups_shape = Shape (group_scores)
    zeros = Expand (zero_f, groups_shape)
    kept_shape = Shape (kept)
    ones = ConstantOfShape <value = float[1] {1}> (kept_shape)
    hot = ScatterElements <axis = 1> (zeros, kept, ones)"""
REPEATED = """
    bits_of = Unsqueeze (hot, minus1)
    repeated = Expand (bits_of, group_shape)
    flat = Reshape (repeated, flat_shape)"""
MASKED = """
    bits = Cast <to = 9> (flat)
    outside = Not (bits)
    masked = Where (outside, fill, keys)"""


def masked_router(
    keys: str,
    end: str,
    *,
    score: str = SUM_OF_TWO,
    scattered: str = SCATTERED,
    repeated: str = REPEATED,
    masked: str = MASKED,
    fill: float = -math.inf,
    groups: int = GROUPS,
    kept: int = KEPT,
    ranking: str = "TopK <sorted = 0>",
    dtype: str = "float",
    **constants: Any,
) -> Any:
    text = f"""
        {keys}
        grouped = Reshape (keys, grouped_shape)
        {score}
        unused1, kept = {ranking} (group_scores, kept_count)
        {scattered}
        {repeated}
        {masked}
        {end}"""
    shape = {
        "grouped_shape": np.array([-1, groups, EXPERTS // groups]),
        "group_shape": np.array([1, groups, EXPERTS // groups]),
        "flat_shape": np.array([-1, EXPERTS]),
        "kept_count": np.array([kept]),
        "bias": BIAS,
        "fill": fill,
        "zero_f": 0.0,
    }
    return block(text, {**shape, **constants}, dtype=dtype)


BIASED = "scores = Sigmoid (logits)\n keys = Add (scores, bias)"
GATHERED = """
    unused2, ids = TopK <sorted = 0> (masked, k)
    raw = GatherElements <axis = 1> (scores, ids)
    total = ReduceSum <keepdims = 1> (raw, minus1)
    shares = Div (raw, total)
    weights = Mul (shares, factor)"""


def test_group_limited_sigmoid() -> None:
    expected = {
        "score": "sigmoid",
        "num_groups": GROUPS,
        "topk_groups": KEPT,
        "group_score_top": 2,
        "group_fill": -math.inf,
        "weights_from": "scores",
        "normalize": 1,
        "normalize_min": 0.0,
        "scale": 2.5,
    }
    absorbed = ("gather-scores", "normalize", "scale", "sigmoid")
    assert_fuses(partial(masked_router, BIASED, GATHERED, factor=2.5), expected, absorbed=absorbed)


@pytest.mark.parametrize("fill", [0.0, -math.inf])
def test_group_limited_softmax(fill: float) -> None:
    keys = "keys = Softmax <axis = -1> (logits)"
    end = "raw, ids = TopK (masked, k)\n weights = Mul (raw, factor)"
    expected = {
        "score": "softmax",
        "group_score_top": 1,
        "group_fill": fill,
        "weights_from": "selection",
        "scale": 16.0,
    }
    build = partial(masked_router, keys, end, score=LARGEST, fill=fill, factor=16.0)
    assert_fuses(build, expected, absorbed=("scale", "softmax"))


def test_mask_without_not() -> None:
    masked = "bits = Cast <to = 9> (flat)\n masked = Where (bits, keys, fill)"
    build = partial(masked_router, BIASED, GATHERED, masked=masked, factor=2.5)
    assert_fuses(build, {"num_groups": GROUPS}, absorbed=("gather-scores", "normalize", "scale", "sigmoid"))


def test_mask_that_keeps_all_groups_is_dropped() -> None:
    build = partial(masked_router, BIASED, GATHERED, groups=1, kept=1, factor=2.0)
    expected = {"num_groups": 1, "topk_groups": 1, "group_score_top": 1, "weights_from": "scores"}
    assert_fuses(build, expected, absorbed=("gather-scores", "normalize", "scale", "sigmoid"))


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "other fill": ({"fill": 0.5}, "the masked keys become 0.5, expected -inf or 0, or less than any key can be"),
    "other keys": (
        {"score": "other = Neg (grouped)\n" + SUM_OF_TWO.replace("grouped", "other")},
        "not made of the masked keys",
    ),
    "keys of another rank": (
        {
            "masked": "bits = Cast <to = 9> (flat)\n row = ReduceMax <keepdims = 0> (keys, zero)\n"
            "masked = Where (bits, row, fill)",
            "zero": np.array([0]),
        },
        "the mask adds dimensions to the keys",
    ),
    "truncated keys": (
        {
            "score": "whole = Cast <to = 7> (grouped)\n other = Cast <to = 1> (whole)\n"
            + SUM_OF_TWO.replace("grouped", "other")
        },
        "not made of the masked keys",
    ),
    "smallest groups": (
        {"ranking": "TopK <largest = 0>"},
        "the groups kept are not chosen by a TopK of largest scores",
    ),
    "mean": (
        {"score": "group_scores = ReduceMean <keepdims = 0> (grouped, minus1)"},
        "neither the largest key nor the sum of the largest",
    ),
    "twos": (
        {"scattered": SCATTERED.replace("{1}", "{2}")},
        "the group mask is not made of ones among zeros",
    ),
    "interleaved experts": (
        {
            "repeated": "bits_of = Unsqueeze (hot, one)\n repeated = Expand (bits_of, other_shape)\n"
            "flat = Reshape (repeated, flat_shape)",
            "other_shape": np.array([1, EXPERTS // GROUPS, GROUPS]),
        },
        "not repeated for the neighbouring experts",
    ),
    "too few left": (
        {"groups": 8, "kept": 1, "score": LARGEST},
        "1 groups of 1 experts are fewer than the 2 to choose",
    ),
    "no scatter": ({"masked": MASKED.replace("(flat)", "(keys)")}, "not made by scattering ones to the groups kept"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    options, sentence = REFUSALS[name]
    end = "weights, ids = TopK (masked, k)"
    build = partial(masked_router, "keys = Softmax <axis = -1> (logits)", end, **{"fill": 0.0, **options})
    site = assert_stays(build, status="left", sentence="Where 'where_", reason="left-over-before")
    assert any(sentence in finding.detail for finding in site.findings), site.findings


def test_the_mask_tells_the_number_of_experts() -> None:
    """Shape inference knows no width of logits that were reshaped by a computed shape; the mask's is fixed."""
    unknown = """
        shape = Shape (logits)
        places = NonZero (logits)
        count = Shape (places)
        nothing = Sub (count, count)
        computed = Add (shape, nothing)
        loose = Reshape (logits, computed)
        """
    build = partial(masked_router, unknown + BIASED.replace("logits", "loose"), GATHERED, factor=2.5)
    absorbed = ("gather-scores", "normalize", "scale", "sigmoid")
    assert_fuses(build, {"num_groups": GROUPS, "score": "sigmoid"}, absorbed=absorbed)
