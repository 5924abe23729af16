"""FusedRouter(f(x)) -> score = f, and casts before the choice."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.rewrites.blocks import EXPERTS, HIDDEN, assert_fuses, assert_stays, block

CHOOSE = "\n weights, ids = TopK (scores, k)"
SOFTPLUS = "soft = Softplus (logits)\n"


@pytest.mark.parametrize("axis", [-1, 1])
def test_softmax_over_the_experts(axis: int) -> None:
    build = partial(block, f"scores = Softmax <axis = {axis}> (logits)" + CHOOSE)
    assert_fuses(build, {"score": "softmax", "normalize": 0}, absorbed=("softmax",))


def test_sigmoid() -> None:
    assert_fuses(partial(block, "scores = Sigmoid (logits)" + CHOOSE), {"score": "sigmoid"}, absorbed=("sigmoid",))


def test_sqrt_softplus() -> None:
    build = partial(block, SOFTPLUS + "scores = Sqrt (soft)" + CHOOSE)
    assert_fuses(build, {"score": "sqrtsoftplus"}, absorbed=("sqrt-softplus",))


def test_sqrt_softplus_with_threshold() -> None:
    text = SOFTPLUS + "big = Greater (logits, top)\n lin = Where (big, logits, soft)\n scores = Sqrt (lin)" + CHOOSE
    assert_fuses(partial(block, text, {"top": 20.0}), {"score": "sqrtsoftplus"}, absorbed=("sqrt-softplus",))


SHIFTS = {
    "logarithm": "shifted = LogSoftmax <axis = 1> (logits)",
    "largest": "most = ReduceMax <keepdims = 1> (logits, minus1)\n shifted = Sub (logits, most)",
    "largest in float": "wide = Cast <to = 1> (logits)\n most = ReduceMax <keepdims = 1> (wide, minus1)\n"
    "narrow = CastLike (most, logits)\n shifted = Sub (logits, narrow)",
}


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("after", [False, True])
def test_a_shift_of_each_row(shift: str, after: bool, dtype: str) -> None:
    softmax = "raw, ids = TopK (shifted, k)\n weights = Softmax <axis = 1> (raw)"
    if not after:
        softmax = "scores = Softmax <axis = 1> (shifted)" + CHOOSE
    build = partial(block, f"{SHIFTS[shift]}\n{softmax}", dtype=dtype)
    absorbed = ("row-shift", "softmax-after-topk" if after else "softmax")
    expected = {"score": "softmax", "score_after_topk": int(after)}
    assert_fuses(build, expected, absorbed=absorbed, rtol=1e-5 if dtype == "float" else 5e-3)


def test_logarithms_of_the_chosen_renormalised() -> None:
    text = """
        shifted = LogSoftmax <axis = -1> (logits)
        raw, ids = TopK (shifted, k)
        grown = Exp (raw)
        total = ReduceSum <keepdims = 1> (grown, minus1)
        weights = Div (grown, total)"""
    assert_fuses(partial(block, text), {"score": "softmax"}, absorbed=("row-shift", "softmax-after-topk"))


@pytest.mark.parametrize(
    ("shift", "score"),
    [
        ("shifted = LogSoftmax <axis = 0> (logits)", "Softmax <axis = 1>"),
        ("most = ReduceMax <keepdims = 1> (logits, nought)\n shifted = Sub (logits, most)", "Softmax <axis = 1>"),
        (
            "other = Neg (logits)\n most = ReduceMax <keepdims = 1> (other, minus1)\n shifted = Sub (logits, most)",
            "Sigmoid",
        ),
        ("most = ReduceMax <keepdims = 1> (logits, minus1)\n shifted = Sub (logits, most)", "Sigmoid"),
    ],
    ids=["logarithm over tokens", "largest of the tokens", "sigmoid of another", "sigmoid"],
)
def test_other_shifts_stay(shift: str, score: str) -> None:
    text = f"{shift}\n scores = {score} (shifted)" + CHOOSE
    build = partial(block, text, {"nought": np.array([0])})
    site = assert_stays(build, status="partly", sentence="stands before the choice")
    assert "row-shift" not in site.absorbed


def test_refuses_another_threshold() -> None:
    text = SOFTPLUS + "big = Greater (logits, top)\n lin = Where (big, logits, soft)\n scores = Sqrt (lin)"
    text += "\n raw, ids = TopK (scores, k)\n weights = Mul (raw, top)"
    sentence = "the softplus turns linear above 2.0, expected 20"
    assert_stays(partial(block, text, {"top": 2.0}), status="partly", sentence=sentence, reason="left-over-before")


def test_refuses_a_threshold_that_adds_a_dimension() -> None:
    lines = "big = Greater (logits, top)\n lin = Where (big, logits, soft)\n deep = Sqrt (lin)\n"
    lines += "values, positions = TopK (deep, k)\n weights = Squeeze (values, zero)\n ids = Squeeze (positions, zero)"
    constants = {"top": np.full((1, 1, 1), 20, np.float32), "zero": np.array([0])}
    site = assert_stays(partial(block, SOFTPLUS + lines, constants), status="left", sentence="turns linear")
    assert site.absorbed == ()


def test_refuses_softmax_over_tokens() -> None:
    text = "scores = Softmax <axis = 0> (logits)\n raw, ids = TopK (scores, k)\n weights = Mul (raw, two_f)"
    sentence = "the softmax does not run over the experts"
    assert_stays(partial(block, text, {"two_f": 2.0}), status="partly", sentence=sentence)


def test_refuses_a_second_score() -> None:
    text = "inner = Sigmoid (logits)\n scores = Softmax <axis = -1> (inner)" + CHOOSE
    sentence = "the FusedRouter already has a score or a soft cap"
    site = assert_stays(partial(block, text), status="partly", sentence=sentence)
    assert site.absorbed == ("softmax",)


def test_logits_may_be_read_elsewhere() -> None:
    build = partial(block, "scores = Softmax <axis = -1> (logits)" + CHOOSE, outputs=", float[T, 8] logits")
    assert_fuses(build, {"score": "softmax"}, absorbed=("softmax",))


@pytest.mark.parametrize(
    "text",
    [
        "wide = Cast <to = 1> (logits)\n s = Softmax <axis = -1> (wide)\n raw, ids = TopK (s, k)",
        "s = Softmax <axis = -1> (logits)\n wide = Cast <to = 1> (s)\n raw, ids = TopK (wide, k)",
        "wide = Cast <to = 1> (logits)\n s = Softmax <axis = -1> (wide)\n t = Cast <to = 10> (s)\n"
        "raw, ids = TopK (t, k)",
    ],
    ids=["before the score", "behind the score", "rounded score"],
)
def test_casts_around_the_score(text: str) -> None:
    build = partial(block, text + "\n weights = Cast <to = 10> (raw)", dtype="float16")
    assert_fuses(build, {"score": "softmax"}, absorbed=("softmax", "input-cast"), rtol=3e-3)


def test_refuses_logits_rounded_before_the_choice() -> None:
    text = """
        wide = Cast <to = 1> (logits)
        bent = Relu (wide)
        narrow = Cast <to = 10> (bent)
        scores = Softmax <axis = -1> (narrow)
        weights, ids = TopK (scores, k)"""
    build = partial(block, text, dtype="float16")
    assert_stays(build, status="partly", sentence="the logits are rounded to FLOAT16 before the choice", rtol=3e-3)


def test_refuses_scores_rounded_and_widened_again() -> None:
    """All is float32 but for the rounding, which the weights would show."""
    text = """
        scores = Softmax <axis = -1> (logits)
        narrow = Cast <to = 10> (scores)
        wide = Cast <to = 1> (narrow)
        weights, ids = TopK (wide, k)"""
    sentence = "the scores are rounded to FLOAT16 and then widened again before the choice"
    assert_stays(partial(block, text), status="left", sentence=sentence)


def test_rounded_logits_stay_rounded() -> None:
    text = """
        narrow = Cast <to = 10> (logits)
        wide = Cast <to = 1> (narrow)
        scores = Softmax <axis = -1> (wide)
        weights, ids = TopK (scores, k)"""
    build = partial(
        block, text, {"gate": np.linspace(-1.1, 1.3, HIDDEN * EXPERTS, dtype=np.float32).reshape(HIDDEN, -1)}
    )
    assert_fuses(build, {"score": "softmax"}, absorbed=("softmax", "input-cast"))


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_exponential_of_the_chosen_logarithms(dtype: str) -> None:
    text = "scores = LogSoftmax <axis = -1> (logits)\n raw, ids = TopK (scores, k)\n weights = Exp (raw)"
    rtol = 1e-5 if dtype == "float" else 3e-3
    build = partial(block, text, dtype=dtype)
    assert_fuses(build, {"score": "softmax"}, absorbed=("exp-of-log-softmax",), rtol=rtol)


def test_refuses_logarithms_along_another_axis() -> None:
    text = "scores = LogSoftmax <axis = 0> (logits)\n raw, ids = TopK (scores, k)\n weights = Exp (raw)"
    assert_stays(partial(block, text), status="left", sentence="the softmax does not run over the experts")


WRITTEN_OUT = """
    most = ReduceMax (INPUT, minus1)
    below = Sub (INPUT, most)
    grown = Exp (below)
    wide = Cast <to = 1> (grown)
    sum = ReduceSum (wide, minus1)
    total = Cast <to = 10> (sum)
    OUTPUT = Div (grown, total)
"""


@pytest.mark.parametrize("before", [True, False], ids=["before the choice", "of the chosen"])
def test_softmax_written_out_in_half_precision(before: bool) -> None:
    if before:
        text = WRITTEN_OUT.replace("INPUT", "logits").replace("OUTPUT", "scores") + CHOOSE
    else:
        text = "raw, ids = TopK (logits, k)" + WRITTEN_OUT.replace("INPUT", "raw").replace("OUTPUT", "weights")
    absorbed = ("softmax",) if before else ("softmax-after-topk",)
    build = partial(block, text, dtype="float16")
    assert_fuses(build, {"score": "softmax", "score_after_topk": int(not before)}, absorbed=absorbed, rtol=3e-3)


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_sigmoid_of_the_chosen_renormalised(dtype: str) -> None:
    text = """
        raw, ids = TopK (logits, k)
        each = Sigmoid (raw)
        sum = ReduceSum (each, minus1)
        total = Add (sum, eps)
        weights = Div (each, total)"""
    build = partial(block, text, {"eps": 0.125}, dtype=dtype)
    expected = {"score": "sigmoid", "score_after_topk": 1, "normalize": 1, "normalize_eps": 0.125}
    rtol = 1e-5 if dtype == "float" else 3e-3
    assert_fuses(build, expected, absorbed=("normalize", "sigmoid-after-topk"), rtol=rtol)
