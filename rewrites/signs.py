"""Which values of a graph are never below zero, whatever the model is fed. Nothing here changes a graph."""

from __future__ import annotations

import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.values import constant, filling, is_op, operands

_ALWAYS = frozenset(
    {
        "Abs", "Exp", "HardSigmoid", "Hardmax", "ReduceL1", "ReduceL2", "ReduceSumSquare", "Relu", "Sigmoid", "Softmax",
        "Softplus", "Sqrt",
    }
)  # fmt: skip
"""Ops whose results are never negative."""
_IF_ALL = frozenset({"Add", "Concat", "Div", "Mean", "Min", "Mul", "Reciprocal", "Sum"})
"""Ops whose results are not if none of their inputs is."""
_IF_FIRST = RESHAPING | {
    "CumSum", "Expand", "Gather", "GatherElements", "GatherND", "Pow", "ReduceMax", "ReduceMean", "ReduceMin",
    "ReduceSum", "Slice", "Split", "Tile", "TopK", "Transpose",
}  # fmt: skip
"""Ops whose results are not if their first input is not: other inputs are axes, indices, lengths and exponents."""
_IF_THESE = {"Where": (1, 2), "ScatterElements": (0, 2), "ScatterND": (0, 2)}
"""Ops whose results are not if the inputs at these places are not."""
_LOOK_BACK = 64
"""Values looked at before giving up; from a router's logits to its weights there are fewer than 20."""


def is_never_negative(value: ir.Value) -> bool:
    """Whether it is seen from what makes the value that no element is below zero; NaN is not."""
    return _holds(value, {})


def _holds(value: ir.Value | None, known: dict[ir.Value, bool]) -> bool:
    if value is None or value.dtype == ir.DataType.STRING:
        return False
    if value not in known:
        if len(known) == _LOOK_BACK:
            return False
        known[value] = False
        known[value] = _is_unsigned(value.dtype) or _is_constant(value) or _follows(value, known)
    return known[value]


def _is_unsigned(dtype: ir.DataType | None) -> bool:
    return dtype not in (None, ir.DataType.UNDEFINED) and not dtype.is_signed()


def _is_constant(value: ir.Value) -> bool:
    array = constant(value)
    return array is not None and bool((array >= 0).all())


def _follows(value: ir.Value, known: dict[ir.Value, bool]) -> bool:
    """Whether it follows from the inputs of the node that makes it."""
    node = value.producer()
    if node is None or node.domain != "":
        return False
    match node.op_type:
        case "Cast" | "CastLike":
            return _keeps_signs(node.inputs[0], value) and _holds(node.inputs[0], known)
        case "Clip":
            return _is_clipped(node, known)
        case "ConstantOfShape":
            number = filling(value)
            return number is not None and number >= 0.0
        case "Max":
            return any(_holds(operand, known) for operand in node.inputs)
    if is_op(node, *_IF_ALL):
        return all(_holds(operand, known) for operand in operands(node))
    places = (0,) if node.op_type in _IF_FIRST else _IF_THESE.get(node.op_type, ())
    return node.op_type in _ALWAYS or (bool(places) and all(_holds(node.inputs[place], known) for place in places))


def _is_clipped(node: ir.Node, known: dict[ir.Value, bool]) -> bool:
    """Whether Min(Max(x, least), most) is never negative."""
    if node.attributes:
        return False  # the limits, before opset 11
    x, least, most = (*node.inputs, None, None)[:3]
    return (_holds(x, known) or _holds(least, known)) and (most is None or _holds(most, known))


def _keeps_signs(source: ir.Value | None, target: ir.Value) -> bool:
    """Whether a cast makes no number negative, as one to an integer does that is too narrow."""
    if source is None or target.dtype is None:
        return False
    return target.dtype.is_floating_point() or source.dtype == ir.DataType.BOOL
