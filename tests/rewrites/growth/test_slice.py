"""FusedRouter(Slice(f(x))) -> FusedRouter(f(Slice(x))), and the bias of a choice whose weights are not read."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.rewrites.blocks import DTYPES, EXPERTS, HIDDEN, assert_fuses, assert_stays, block

SHARED = 2
WIDE_GATE = np.random.default_rng(7).standard_normal((HIDDEN, EXPERTS + SHARED))
BIAS = np.random.default_rng(5).standard_normal(EXPERTS) / 4


def gated(text: str, dtype: str = "float", **constants: Any) -> ir.Model:
    """A block whose gate also scores two shared experts, in the last columns."""
    arrays = {"wide_gate": WIDE_GATE, "bias": BIAS, **constants}
    return block(
        "wide = MatMul (x, wide_gate)\n" + text,
        {
            **{name: np.asarray(value, DTYPES[dtype]) for name, value in arrays.items()},
            "zero": np.array([0]),
            "routed": np.array([-SHARED]),
            "end": np.array([EXPERTS + SHARED]),
        },
        dtype=dtype,
    )


CUT = "scores = Slice (all, zero, routed, one)\n"
NORMALISED = "total = ReduceSum (raw, minus1)\n weights = Div (raw, total)"
BIASED = CUT + "keys = Add (scores, bias)\n unused, ids = TopK (keys, k)\n"


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize(
    ("text", "score", "absorbed"),
    [
        (
            "all = Sigmoid (wide)\n" + BIASED + "raw = GatherElements <axis = 1> (scores, ids)\n" + NORMALISED,
            "sigmoid",
            ("gather-scores", "normalize", "sigmoid"),
        ),
        (
            "soft = Softplus (wide)\n all = Sqrt (soft)\n" + CUT + "raw, ids = TopK (scores, k)\n" + NORMALISED,
            "sqrtsoftplus",
            ("normalize", "sqrt-softplus"),
        ),
        (
            "all = Softmax <axis = -1> (wide)\n" + CUT + "raw, ids = TopK (scores, k)\n" + NORMALISED,
            "softmax",
            ("normalize", "softmax"),
        ),
    ],
    ids=["sigmoid", "sqrtsoftplus", "softmax"],
)
def test_scores_of_shared_experts_are_cut_off(text: str, score: str, absorbed: tuple[str, ...], dtype: str) -> None:
    expected = {"score": score, "normalize": 1}
    rtol = 1e-5 if dtype == "float" else 3e-3
    assert_fuses(partial(gated, text, dtype), expected, absorbed=("slice-of-score", *absorbed), rtol=rtol)


@pytest.mark.parametrize(
    "text",
    [
        CUT + "weights, ids = TopK (scores, k)",
        CUT + "raw, ids = TopK (scores, k)\n total = ReduceSum (raw, minus1)\n more = Add (total, eps)\n"
        "weights = Div (raw, more)",
        BIASED + "raw = GatherElements <axis = 1> (scores, ids)\n" + NORMALISED,
    ],
    ids=["not normalised", "with an epsilon", "with a bias"],
)
def test_refuses_a_softmax_over_more(text: str) -> None:
    sentence = "the softmax is also over experts that are not chosen among"
    status = "left" if "total" not in text else "partly"
    build = partial(gated, "all = Softmax <axis = -1> (wide)\n" + text, eps=0.125)
    assert_stays(build, status=status, sentence=sentence, reason="left-over-before")


TOGETHER = """
    of_shared = Slice (all, routed, end, one)
    raw = GatherElements <axis = 1> (scores, ids)
    both = Concat <axis = -1> (raw, of_shared)
    total = ReduceSum (both, minus1)
    shares = Div (both, total)
    weights = Slice (shares, zero, k, one)"""


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_normalised_with_the_shared_experts(dtype: str) -> None:
    build = partial(gated, "all = Sigmoid (wide)\n" + BIASED + TOGETHER, dtype)
    sentence = "Concat 'concat_8' joins the weights with others, and ReduceSum 'reducesum_9' is over all of them"
    rtol = 1e-5 if dtype == "float" else 3e-3
    site = assert_stays(build, status="partly", sentence=sentence, reason="shared-normaliser", rtol=rtol)
    assert site.absorbed == ("gather-scores", "slice-of-score", "sigmoid")


IN_LOGARITHMS = """
    of_routed = Slice (wide, zero, routed, one)
    of_shared = Slice (wide, routed, end, one)
    chosen_of = GatherElements <axis = 1> (of_routed, ids)
    both = Concat <axis = -1> (chosen_of, of_shared)
    each = Sigmoid (both)
    logarithms = Log (each)
    total = ReduceLogSumExp (logarithms, minus1)
    shifted = Sub (logarithms, total)
    shares = Exp (shifted)
    weights = Slice (shares, zero, k, one)"""


def test_a_bias_for_the_choice_alone() -> None:
    """The weights are made of the logits of the chosen: what is ranked is absorbed all the same."""
    build = partial(gated, "all = Sigmoid (wide)\n" + BIASED + IN_LOGARITHMS)
    site = assert_stays(build, status="partly", sentence="joins the weights with others", reason="shared-normaliser")
    assert site.absorbed == ("bias-for-choice", "slice-of-score", "sigmoid")
    assert site.inputs == ("logits", "selection_bias")


def test_a_linear_bias_is_no_bias_for_the_choice() -> None:
    text = "shifted = Add (logits, bias)\n unused, ids = TopK (shifted, k)\n bent = Tanh (shifted)\n"
    text += "weights = GatherElements <axis = 1> (bent, ids)"
    build = partial(block, text, {"bias": BIAS.astype(np.float32)})
    assert_stays(build, status="left", sentence="gathers values of the chosen experts")
