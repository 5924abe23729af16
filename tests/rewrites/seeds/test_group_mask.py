"""TopK(Where(group_mask(x), x, fill)) -> num_groups, topk_groups, group_score_top, group_fill."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import DTYPES, EXPERTS, assert_fuses, assert_stays, block

BIAS = np.random.default_rng(5).standard_normal(EXPERTS).astype(np.float32)
GROUPS, KEPT = 4, 2

SUM_OF_TWO = """
    best, unused0 = TopK (grouped, k)
    group_scores = ReduceSum <keepdims = 0> (best, minus1)"""
LARGEST = "group_scores = ReduceMax <keepdims = 0> (grouped, minus1)"
ONES = "ConstantOfShape <value = float[1] {1}> (kept_shape)"
SCATTERED = f"""
    groups_shape = Shape (group_scores)
    zeros = Expand (zero_f, groups_shape)
    kept_shape = Shape (kept)
    ones = {ONES}
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
    experts: int = EXPERTS,
    **constants: Any,
) -> Any:
    text = f"""
        {keys}
        grouped = Reshape (keys, grouped_shape)
        {score}
        unused1, kept = {ranking} (group_scores, kept_count)
        {scattered if dtype == "float" else scattered.replace(ONES, "Expand (unit, kept_shape)")}
        {repeated}
        {masked}
        {end}"""
    shape = {
        "grouped_shape": np.array([-1, groups, experts // groups]),
        "group_shape": np.array([1, groups, experts // groups]),
        "flat_shape": np.array([-1, experts]),
        "kept_count": np.array([kept]),
        "bias": BIAS.astype(DTYPES[dtype]),
        "fill": fill,
        "zero_f": 0.0,
        "unit": 1.0,
    }
    return block(text, {**shape, **constants}, dtype=dtype, experts=experts)


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


SUMS = {
    "sum of two": (SUM_OF_TWO, 2),
    "sum with its dimension": (
        "best, unused0 = TopK (grouped, k)\n kept_dimension = ReduceSum (best, minus1)\n"
        "group_scores = Squeeze (kept_dimension, minus1)",
        2,
    ),
    "sum in float": (
        "best, unused0 = TopK (grouped, k)\n wide_best = Cast <to = 1> (best)\n"
        "wide_sum = ReduceSum <keepdims = 0> (wide_best, minus1)\n group_scores = Cast <to = 10> (wide_sum)",
        2,
    ),
    "largest": (LARGEST, 1),
    "best one": ("best, unused0 = TopK (grouped, one)\n group_scores = Squeeze (best, minus1)", 1),
    "sum of one": ("best, unused0 = TopK (grouped, one)\n group_scores = ReduceSum <keepdims = 0> (best, minus1)", 1),
    "first of two": (
        "best, unused0 = TopK (grouped, one)\n group_scores = Gather <axis = -1> (best, first)",
        1,
    ),
    "sum of all": ("group_scores = ReduceSum <keepdims = 0> (grouped, minus1)", EXPERTS // GROUPS),
}


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("name", SUMS)
def test_scores_of_groups(name: str, dtype: str) -> None:
    score, top = SUMS[name]
    if dtype == "float":
        score = score.replace("<to = 10>", "<to = 1>")
    build = partial(masked_router, BIASED, GATHERED, score=score, factor=2.5, dtype=dtype, first=np.array(0))
    expected = {"num_groups": GROUPS, "topk_groups": KEPT, "group_score_top": top, "score": "sigmoid"}
    absorbed = ("gather-scores", "normalize", "scale", "sigmoid")
    assert_fuses(build, expected, absorbed=absorbed, rtol=1e-5 if dtype == "float" else 3e-3)


MASKS: dict[str, dict[str, Any]] = {
    "equal to 0": {"masked": "outside = Equal (flat, zero_f)\n masked = Where (outside, fill, keys)"},
    "greater than 0": {"masked": "inside = Greater (flat, zero_f)\n masked = Where (inside, keys, fill)"},
    "less than a half": {"masked": "outside = Less (flat, half)\n masked = Where (outside, fill, keys)"},
    "one minus": {
        "masked": "rest = Sub (one_f, flat)\n bits = Cast <to = 9> (rest)\n masked = Where (bits, fill, keys)"
    },
    "turned before it is repeated": {
        "repeated": "bits = Cast <to = 9> (hot)\n outside = Not (bits)\n bits_of = Unsqueeze (outside, minus1)\n"
        "repeated = Expand (bits_of, group_shape)\n flat = Reshape (repeated, flat_shape)",
        "masked": "masked = Where (flat, fill, keys)",
    },
    "tiled": {
        "repeated": "bits_of = Unsqueeze (hot, minus1)\n repeated = Tile (bits_of, repeats)\n"
        "flat = Reshape (repeated, flat_shape)"
    },
    "truths scattered": {
        "scattered": "groups_shape = Shape (group_scores)\n"
        "zeros = ConstantOfShape <value = bool[1] {1}> (groups_shape)\n"
        "kept_shape = Shape (kept)\n marks = ConstantOfShape <value = bool[1] {0}> (kept_shape)\n"
        "hot = ScatterElements <axis = 1> (zeros, kept, marks)",
        "masked": "masked = Where (flat, fill, keys)",
    },
    "one-hot rows": {
        "scattered": "each = OneHot (kept, group_count, zero_one)\n hot = ReduceSum <keepdims = 0> (each, one)",
    },
    "one-hot rows by a comparison": {
        "scattered": "column_of = Unsqueeze (kept, minus1)\n each = Equal (column_of, numbers)\n"
        "ones = Cast <to = 7> (each)\n hot = ReduceSum <keepdims = 0> (ones, one)",
    },
    "in groups": {
        "repeated": "bits_of = Unsqueeze (hot, minus1)\n bits = Cast <to = 9> (bits_of)",
        "masked": "in_groups = Where (bits, grouped, fill)\n masked = Reshape (in_groups, flat_shape)",
    },
    "a filler as large as the keys": {
        "masked": "shape = Shape (keys)\n fills = Expand (fill, shape)\n bits = Cast <to = 9> (flat)\n"
        "masked = Where (bits, keys, fills)"
    },
}  # fmt: skip
CONSTANTS: dict[str, Any] = {
    "half": 0.5,
    "one_f": 1.0,
    "repeats": np.array([1, 1, EXPERTS // GROUPS]),
    "group_count": np.array(GROUPS),
    "numbers": np.arange(GROUPS),
    "zero_one": np.array([0, 1]),
}


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, dtype: str) -> None:
    build = partial(masked_router, BIASED, GATHERED, factor=2.5, dtype=dtype, **CONSTANTS, **MASKS[name])
    expected = {"num_groups": GROUPS, "topk_groups": KEPT, "group_fill": -math.inf, "score": "sigmoid"}
    absorbed = ("gather-scores", "normalize", "scale", "sigmoid")
    assert_fuses(build, expected, absorbed=absorbed, rtol=1e-5 if dtype == "float" else 3e-3)


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("line", ["Mul (keys, flat)", "Mul (flat, keys)"])
def test_mask_that_is_multiplied_with(line: str, dtype: str) -> None:
    build = partial(masked_router, BIASED, GATHERED, masked=f"masked = {line}", factor=2.5, dtype=dtype)
    absorbed = ("gather-scores", "normalize", "scale", "sigmoid")
    assert_fuses(build, {"group_fill": 0.0}, absorbed=absorbed, rtol=1e-5 if dtype == "float" else 3e-3)


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_fill_of_the_least_number(dtype: str) -> None:
    """A sigmoid with its bias is never below its least bias, so the least number of the type is never chosen."""
    fill = float(np.finfo(DTYPES[dtype]).min)
    build = partial(masked_router, BIASED, GATHERED, fill=fill, factor=2.5, dtype=dtype)
    absorbed = ("gather-scores", "normalize", "scale", "sigmoid")
    assert_fuses(build, {"group_fill": -math.inf}, absorbed=absorbed, rtol=1e-5 if dtype == "float" else 3e-3)


def test_bfloat16() -> None:
    score = SUMS["sum in float"][0].replace("<to = 10>", "<to = 16>")
    model = masked_router(BIASED, GATHERED, score=score, factor=2.5, dtype="bfloat16")
    (site,) = [site for site in rewrite(model).sites if site.experts is not None]
    assert (site.status, site.attributes is not None and site.attributes["num_groups"]) == ("whole", GROUPS)


def test_mask_that_keeps_all_groups_is_dropped() -> None:
    build = partial(masked_router, BIASED, GATHERED, groups=1, kept=1, factor=2.0)
    expected = {"num_groups": 1, "topk_groups": 1, "group_score_top": 1, "weights_from": "scores"}
    assert_fuses(build, expected, absorbed=("gather-scores", "normalize", "scale", "sigmoid"))


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "other fill": ({"fill": 0.5}, "the masked keys become 0.5, expected -inf or 0, or less than any key can be"),
    "a fill that a key may reach": (
        {"keys": "keys = Identity (logits)", "fill": float(np.finfo(np.float32).min)},
        "or less than any key can be",
    ),
    "a fill above the least key": (
        {"keys": "scores = Sigmoid (logits)\n keys = Add (scores, bias)", "fill": float(BIAS.min()) + 0.5},
        "or less than any key can be",
    ),
    "a fill with more dimensions": (
        {
            "three": np.zeros((1, 1, 1), np.float32),
            "masked": "bits = Cast <to = 9> (flat)\n"
            "padded = Where (bits, keys, three)\n masked = Squeeze (padded, zero)",
            "zero": np.array([0]),
        },
        "the masked keys become None",
    ),
    "multiplied logits": (
        {"keys": "keys = Identity (logits)", "masked": "masked = Mul (keys, flat)"},
        "the keys that a mask is multiplied with may be infinite",
    ),
    "multiplied with what is dropped": (
        {"masked": "rest = Sub (one_f, flat)\n masked = Mul (keys, rest)", "one_f": 1.0},
        "multiplied with a mask of the groups to drop",
    ),
    "a comparison that tells nothing": (
        {"masked": "bits = Greater (flat, two_f)\n masked = Where (bits, keys, fill)", "two_f": 2.0},
        "compared with a number that tells nothing of it",
    ),
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
    "interleaved experts, as many as groups": (
        {
            "experts": 16,
            "keys": "keys = Sigmoid (logits)",
            "repeated": "tall = Unsqueeze (hot, minus1)\n bits_of = Reshape (tall, row_shape)\n"
            "repeated = Expand (bits_of, group_shape)\n flat = Reshape (repeated, flat_shape)",
            "row_shape": np.array([-1, 1, GROUPS]),
        },
        "not repeated for the neighbouring experts",
    ),
    "compared with other numbers": (
        {
            "scattered": "column_of = Unsqueeze (kept, minus1)\n each = Equal (column_of, numbers)\n"
            "ones = Cast <to = 7> (each)\n hot = ReduceSum <keepdims = 0> (ones, one)",
            "numbers": np.arange(GROUPS)[::-1].copy(),
        },
        "not compared with the numbers of all groups",
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
    options = {"fill": 0.0, **options}
    keys = options.pop("keys", "keys = Softmax <axis = -1> (logits)")
    build = partial(masked_router, keys, end, **options)
    node = "Mul 'mul_" if "Mul" in options.get("masked", "") else "Where 'where_"
    site = assert_stays(build, status="left", sentence=node, reason="left-over-before")
    assert any(sentence in finding.detail for finding in site.findings), site.findings


def test_choices_of_groups_refer_to_the_router_that_was_left() -> None:
    """Both of them: the best keys of each group, and the best groups."""
    options = {"scattered": SCATTERED.replace("{1}", "{2}"), "score": SUM_OF_TWO}
    keys = "keys = Softmax <axis = -1> (logits)"
    *parts, router = rewrite(masked_router(keys, "weights, ids = TopK (masked, k)", fill=0.0, **options)).sites
    assert [site.findings[0].remedy for site in parts] == [f"See what is said of the site '{router.node}'."] * 2


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
