"""w / max(ReduceSum(w) + eps, min) -> normalize."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import DTYPES, EXPERTS, assert_fuses, assert_stays, block

CHOOSE = """
    scores = Softmax <axis = -1> (logits)
    raw, ids = TopK (scores, k)
"""
SUM = "total = ReduceSum <keepdims = 1> (raw, minus1)"


def test_softmax_renormalised() -> None:
    text = CHOOSE + SUM + "\n weights = Div (raw, total)"
    expected = {"score": "softmax", "normalize": 1, "normalize_eps": 0.0, "normalize_min": 0.0}
    assert_fuses(partial(block, text), expected, absorbed=("normalize", "softmax"))


@pytest.mark.parametrize("line", ["divisor = Add (total, eps)", "divisor = Add (eps, total)"])
def test_epsilon_on_either_side(line: str) -> None:
    text = CHOOSE + SUM + f"\n {line}\n weights = Div (raw, divisor)"
    expected = {"normalize_eps": float(np.float32(1e-2)), "normalize_min": 0.0}
    assert_fuses(partial(block, text, {"eps": 1e-2}), expected, absorbed=("normalize", "softmax"))


@pytest.mark.parametrize("line", ["Clip (total, least)", "Max (total, least)", "Max (least, total)"])
def test_lower_limit(line: str) -> None:
    text = CHOOSE + SUM + f"\n divisor = {line}\n weights = Div (raw, divisor)"
    assert_fuses(partial(block, text, {"least": 0.75}), {"normalize_min": 0.75}, absorbed=("normalize", "softmax"))


def test_epsilon_then_lower_limit() -> None:
    text = CHOOSE + SUM + "\n more = Add (total, eps)\n divisor = Max (more, least)\n weights = Div (raw, divisor)"
    build = partial(block, text, {"eps": 0.25, "least": 0.5})
    assert_fuses(build, {"normalize_eps": 0.25, "normalize_min": 0.5}, absorbed=("normalize", "softmax"))


EXPANDED = (
    CHOOSE
    + """
    total = ReduceL1 <keepdims = 1> (raw, minus1)
    limited = Clip (total, least)
    shape = Shape (ids)
    divisor = Expand (limited, shape)
    weights = Div (raw, divisor)"""
)


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_expanded_divisor(dtype: str) -> None:
    build = partial(block, EXPANDED, {"least": 0.75}, dtype=dtype)
    rtol = 1e-5 if dtype == "float" else 3e-3
    assert_fuses(build, {"normalize_min": 0.75}, absorbed=("normalize", "softmax"), rtol=rtol)


def test_refuses_an_expansion_to_another_shape() -> None:
    # To T rows of one, which changes nothing, and which shape inference does not know.
    computed = "rows = Shape (logits)\n other = Min (rows, limits)\n divisor"
    text = EXPANDED.replace("(limited, shape)", "(limited, other)").replace("divisor", computed, 1)
    build = partial(block, text.replace("rows", "lengths"), {"least": 0.75, "limits": np.array([1000, 1])})
    assert_stays(build, status="partly", sentence="'divisor' has not the shape of the weights")


def test_weights_of_any_sign_have_no_lower_limit() -> None:
    text = "raw, ids = TopK (logits, k)\n" + SUM + "\n more = Add (total, eps)\n weights = Div (raw, more)"
    build = partial(block, text, {"eps": 64.0})
    assert_fuses(build, {"score": "none", "normalize_min": -math.inf}, absorbed=("normalize",))


def test_half_precision_sinks_its_casts() -> None:
    text = (
        CHOOSE
        + """
        wide = Cast <to = 1> (raw)
        total = ReduceSum <keepdims = 1> (wide, minus1)
        narrow = Cast <to = 10> (total)
        divisor = Add (narrow, eps)
        weights = Div (raw, divisor)"""
    )
    expected = {"normalize": 1, "normalize_eps": float(np.float16(1e-3))}
    build = partial(block, text, {"eps": 1e-3}, dtype="float16")
    assert_fuses(build, expected, absorbed=("normalize", "softmax"), rtol=3e-3)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("more = Add (logits1, eps)\n weights = Div (raw, more)", "the divisor is not the sum of the weights"),
        (
            "total = ReduceSum <keepdims = 1> (raw, zero)\n weights = Div (raw, total)",
            "the sum of the weights does not run over the chosen experts",
        ),
        (
            "total = ReduceSum <keepdims = 1> (raw, minus1)\n least = Add (total, total)\n weights = Div (raw, least)",
            "Add has no constant operand",
        ),
        (
            "total = ReduceSum <keepdims = 1> (raw, minus1)\n d = Clip (total, eps, top)\n weights = Div (raw, d)",
            "the divisor has an upper limit",
        ),
        (
            "total = ReduceSum <keepdims = 1> (raw, minus1)\n d = Max (total, eps, top)\n weights = Div (raw, d)",
            "Max has 3 operands, expected 2",
        ),
    ],
)
def test_refuses_other_divisors(lines: str, sentence: str) -> None:
    text = CHOOSE + "logits1 = ReduceMax <keepdims = 1> (logits, minus1)\n" + lines
    build = partial(block, text, {"eps": 0.125, "top": 8.0, "zero": np.array([0])})
    assert_stays(build, status="partly", sentence=sentence, reason="left-over-after")


def test_refuses_a_second_normalisation() -> None:
    text = (
        CHOOSE
        + SUM
        + """
        once = Div (raw, total)
        again = ReduceSum <keepdims = 1> (once, minus1)
        more = Add (again, eps)
        weights = Div (once, more)"""
    )
    sentence = "the weights have already been normalised"
    assert_stays(partial(block, text, {"eps": 0.5}), status="partly", sentence=sentence)


def test_names_the_other_reader_of_the_weights() -> None:
    text = CHOOSE + SUM + "\n weights = Div (raw, total)\n entropy = Log (raw)"
    site = assert_stays(
        partial(block, text, outputs=", float[T, 2] entropy"), status="partly", sentence="is also read by Log 'log_5'"
    )
    assert site.absorbed == ("softmax",)
    assert any("Log 'log_5'" in finding.consumers for finding in site.findings)


def test_names_the_graph_output() -> None:
    text = CHOOSE + SUM + "\n weights = Div (raw, total)"
    build = partial(block, text, outputs=", float[T, 2] raw")
    assert_stays(build, status="partly", sentence="'raw' is also read by output 'raw' of the model")


def test_refuses_nan() -> None:
    """The op takes no NaN for an attribute: the session would refuse the node."""
    model = block(CHOOSE + SUM + "\n more = Add (total, eps)\n weights = Div (raw, more)", {"eps": math.nan})
    (site,) = rewrite(model).sites
    assert site.absorbed == ("softmax",)
    assert "a limit of the divisor is NaN" in site.findings[0].detail


SCALED = CHOOSE + "big = Mul (raw, c)\n total = ReduceSum <keepdims = 1> (big, minus1)\n"


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_a_scale_before_cancels(dtype: str) -> None:
    build = partial(block, SCALED + "weights = Div (big, total)", {"c": 4.0}, dtype=dtype)
    expected = {"normalize": 1, "scale": 1.0, "normalize_eps": 0.0}
    rtol = 1e-5 if dtype == "float" else 3e-3
    assert_fuses(build, expected, absorbed=("scale", "normalize", "softmax"), rtol=rtol)


def test_limits_are_divided_by_a_scale_before() -> None:
    text = SCALED + "more = Add (total, eps)\n divisor = Max (more, least)\n weights = Div (big, divisor)"
    build = partial(block, text, {"c": 4.0, "eps": 0.5, "least": 3.5})
    expected = {"normalize_eps": 0.125, "normalize_min": 0.875, "scale": 1.0}
    assert_fuses(build, expected, absorbed=("scale", "normalize", "softmax"))


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize(
    ("lines", "constants", "sentence"),
    [
        ("square = ReduceL2 <keepdims = 1> (raw, minus1)\n weights = Div (raw, square)", {}, "their Euclidean norm"),
        (
            "each = Gather (per_expert, ids)\n big = Mul (raw, each)\n total = ReduceSum (big, minus1)\n"
            "weights = Div (big, total)",
            {"per_expert": np.linspace(0.5, 2.0, EXPERTS)},
            "the weights were scaled per expert before they are normalised",
        ),
        (
            SCALED.removeprefix(CHOOSE) + "weights = Div (big, total)",
            {"c": -4.0},
            "the weights that are normalised were scaled by -4.0",
        ),
    ],
    ids=["Euclidean norm", "scaled per expert", "scaled by less than 0"],
)
def test_refuses_other_norms(lines: str, constants: dict[str, Any], sentence: str, dtype: str) -> None:
    arrays = {name: np.asarray(value, DTYPES[dtype]) for name, value in constants.items()}
    build = partial(block, CHOOSE + lines, arrays, dtype=dtype)
    assert_stays(build, status="partly", sentence=sentence, rtol=1e-5 if dtype == "float" else 3e-3)
