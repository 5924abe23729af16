"""Which values are seen to be never negative."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from onnx_ir.passes import common

from ort_moe.rewrites.signs import is_never_negative


def read(body: str) -> bool:
    """Whether `y` of these nodes is: of floats x, integers n, booleans on, unsigned u, and constants."""
    text = f"""<ir_version: 10, opset_import: ["" : 20, "other" : 1]>
    graph (float[T,4] x, int64[T,4] n, bool[T,4] on, uint8[T,4] u, int64[T,2] ids, float[4] fed) => (float[T,4] y)
    <float[4] some = {{0, 1, 2, 3}}, float[4] mixed = {{0, 1, -1, 3}}, float[4] fed = {{1, 1, 1, 1}},
     float zero = {{0}}, float one = {{1}}, float below = {{-1}},
     int64[1] last = {{-1}}, int64[2] shape = {{-1, 4}}, int64[1] two = {{2}}>
    {{ {body} }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    common.ShapeInferencePass(strict_mode=False)(model)
    return is_never_negative(model.graph.outputs[0])


SCORES = ("Sigmoid", "Softmax", "Exp", "Relu", "Abs", "Softplus", "Sqrt")


@pytest.mark.parametrize("op", SCORES)
def test_scores(op: str) -> None:
    assert read(f"y = {op} (x)")


@pytest.mark.parametrize(
    "body",
    [
        "a = Sigmoid (x) y = Mul (a, some)",
        "a = Sigmoid (x) b = Cast <to = 1> (on) y = Mul (a, b)",
        "a = Sigmoid (x) b = Cast <to = 1> (u) y = Add (a, b)",
        "a = Sigmoid (x) y = Where (on, a, zero)",
        "c = Clip (x, zero) y = Identity (c)",
        "a = Exp (x) y = Clip (a, below, one)",
        "y = Max (x, zero)",
        "a = Exp (x) b = Softplus (x) y = Min (a, b)",
        "a = Neg (x) b = Exp (a) c = Add (b, one) y = Reciprocal (c)",
        "a = Exp (x) b = ReduceSum (a, last) y = Div (a, b)",
        "a = Exp (x) b = Cast <to = 10> (a) c = Cast <to = 1> (b) y = Reshape (c, shape)",
        "a = Softmax (x) b, i = TopK (a, two) y = Concat <axis = 1> (b, b)",
        "a = Softmax (x) b = GatherElements <axis = 1> (a, ids) y = Concat <axis = 1> (b, b)",
        "a = Shape (x) b = ConstantOfShape (a) c = Sigmoid (x) d = GatherElements <axis = 1> (c, ids) "
        "y = ScatterElements <axis = 1> (b, ids, d)",
        "a = Equal (n, n) y = Cast <to = 1> (a)",
        "a = Shape (x) y = Expand (some, a)",
    ],
)
def test_never_negative(body: str) -> None:
    assert read(body)


@pytest.mark.parametrize(
    "body",
    [
        "y = Identity (x)",
        "y = Log (x)",
        "y = Cast <to = 1> (n)",
        "a = Sigmoid (x) y = Mul (a, mixed)",
        "a = Sigmoid (x) y = Mul (a, fed)",  # a default, which the caller may overrule
        "a = Sigmoid (x) y = Sub (one, a)",
        "a = Sigmoid (x) y = Where (on, a, x)",
        "y = Clip (x, below)",
        "y = Clip (x, , one)",
        "y = Clip (x, zero, below)",  # the upper limit wins
        "a = Sigmoid (x) y = Min (a, x)",
        "y = Max (x, below)",
        "a = Exp (x) b = Cast <to = 6> (a) y = Cast <to = 1> (b)",  # infinity becomes the least integer
        "a = other.Sigmoid (x) y = Identity (a)",
        "a = Shape (x) y = ConstantOfShape <value = float[1] {-1}> (a)",
        "a = Sigmoid (x) b = GatherElements <axis = 1> (x, ids) y = ScatterElements <axis = 1> (a, ids, b)",
    ],
)
def test_may_be_negative(body: str) -> None:
    assert not read(body)


def test_a_long_way_back_is_not_gone() -> None:
    """Sums of sums, as of the rows that layers hand on, take no time that doubles with each."""
    body = "a0 = Sigmoid (x) b0 = Sigmoid (x) "
    body += "".join(f"a{i} = Add (a{i - 1}, b{i - 1}) b{i} = Add (b{i - 1}, a{i - 1}) " for i in range(1, 400))
    assert not read(body + "y = Identity (a399)")
    assert read(body + "y = Identity (a20)")
