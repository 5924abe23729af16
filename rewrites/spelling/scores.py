"""Scores by name where they are written out: softmax, sigmoid, softplus."""

from __future__ import annotations

import onnx_ir as ir

from ort_moe.rewrites.spelling.arithmetic import negated
from ort_moe.rewrites.spelling.writer import Spelling, Writer
from ort_moe.rewrites.values import FLOATS, axes, integer, producer, rank, scalar, through_casts


def sigmoid(node: ir.Node, writer: Writer) -> ir.Value | None:
    """1 / (1 + Exp(x * -1)) -> Sigmoid(x)."""
    grown = _one_plus_exp(node.inputs[1]) if scalar(node.inputs[0]) == 1.0 else None
    x = None if grown is None else negated(grown)
    return None if x is None or rank(x) != rank(node.outputs[0]) else writer.op("Sigmoid", x, like=x)


def softplus(node: ir.Node, writer: Writer) -> ir.Value | None:
    """Log(1 + Exp(x)) -> Softplus(x); an x whose exponential overflows keeps a finite result."""
    x = _one_plus_exp(node.inputs[0])
    return None if x is None or rank(x) != rank(node.outputs[0]) else writer.op("Softplus", x, like=x)


def softmax(node: ir.Node, writer: Writer) -> ir.Value | None:
    """Exp(x - max(x)) / ReduceSum(Exp(x - max(x))) -> Softmax(x), also without the maximum, the sum in another type."""
    divisor = node.inputs[1]
    grown = producer(node.inputs[0], "Exp")
    total = None if divisor is None else producer(through_casts(divisor, FLOATS), "ReduceSum")
    if grown is None or total is None or total.inputs[0] is None:
        return None
    if through_casts(total.inputs[0], FLOATS) is not node.inputs[0]:
        return None
    axis, x = _axis(total), grown.inputs[0]
    if axis is None or x is None or x.dtype not in FLOATS:
        return None
    shifted = producer(x, "Sub")
    if shifted is not None:
        most = producer(shifted.inputs[1], "ReduceMax")
        if most is not None and most.inputs[0] is shifted.inputs[0] and _axis(most) == axis:
            x = shifted.inputs[0]
    assert x is not None
    return writer.op("Softmax", x, like=x, axis=axis)


def softmax_from_logarithm(node: ir.Node, writer: Writer) -> ir.Value | None:
    """Exp(LogSoftmax(x)) -> Softmax(x), Exp(x - ReduceLogSumExp(x)) -> Softmax(x)."""
    logarithm = producer(node.inputs[0], "LogSoftmax", "Sub")
    x = None if logarithm is None else logarithm.inputs[0]
    if logarithm is None or x is None or x.dtype not in FLOATS:
        return None
    if logarithm.op_type == "LogSoftmax":
        return writer.op("Softmax", x, like=x, axis=integer(logarithm, "axis", -1))
    total = producer(logarithm.inputs[1], "ReduceLogSumExp")
    axis = None if total is None or total.inputs[0] is not x else _axis(total)
    return None if axis is None else writer.op("Softmax", x, like=x, axis=axis)


def _one_plus_exp(value: ir.Value | None) -> ir.Value | None:
    """x, of 1 + Exp(x)."""
    add = producer(value, "Add")
    for position in (0, 1) if add is not None else ():
        assert add is not None
        exp = producer(add.inputs[position], "Exp")
        if exp is not None and scalar(add.inputs[1 - position]) == 1.0:
            x = exp.inputs[0]
            return x if x is not None and x.dtype in FLOATS else None
    return None


def _axis(reduction: ir.Node) -> int | None:
    """The one axis of a reduction that keeps its dimension, counted from the end."""
    over, known = axes(reduction), rank(reduction.inputs[0])
    if over is None or len(over) != 1 or known is None or integer(reduction, "keepdims", 1) != 1:
        return None
    return over[0] if over[0] < 0 else over[0] - known


SCORES: dict[str, tuple[Spelling, ...]] = {
    "Div": (sigmoid, softmax),
    "Log": (softplus,),
    "Exp": (softmax_from_logarithm,),
}
