"""Arithmetic: quotients, sums without signs, no neutral elements, conditions without Not."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ort_moe.rewrites.spelling.writer import Spelling, Writer, number, wide
from ort_moe.rewrites.values import FLOATS, HALF, Array, integer, producer, rank, scalar, scalar_beside

_CANCELLATION = 64.0
"""How many times larger than their sum two summands may be whose sums are exchanged: it costs that many ulp."""


def reciprocal(node: ir.Node, writer: Writer) -> ir.Value | None:
    """Reciprocal(x) -> 1 / x."""
    (x,) = node.inputs
    return None if x is None else writer.op("Div", number(1.0, x), x, like=x)


def power(node: ir.Node, writer: Writer) -> ir.Value | None:
    """Pow(x, -1) -> 1 / x, Pow(x, 1/2) -> Sqrt(x), Pow(x, 1) -> x."""
    x, exponent = node.inputs
    if x is None or x.dtype not in FLOATS:
        return None
    match scalar_beside(exponent, x):
        case 1.0:
            return x
        case -1.0:
            return writer.op("Div", number(1.0, x), x, like=x)
        case 0.5:
            return writer.op("Sqrt", x, like=x)
    return None


def product(node: ir.Node, writer: Writer) -> ir.Value | None:
    """x * 1 -> x, (x * a) * b -> x * (a * b) for constants, x * (1 / y) -> x / y."""
    result = node.outputs[0]
    for x, y in _both_ways(node):
        factor = scalar_beside(y, x)
        if factor == 1.0:
            return x
        inner = None if factor is None or _is_softcap(x) else producer(x, "Mul")
        for source, other in () if inner is None else _both_ways(inner):
            first = scalar_beside(other, source)
            both = None if first is None or factor is None else _rounded(first * factor, x)
            if both is not None:
                return writer.op("Mul", source, both, like=result)
        if (inverse := producer(y, "Div")) is not None and scalar_beside(*inverse.inputs[:2]) == 1.0:
            return writer.op("Div", x, _operand(inverse, 1), like=result)
    return None


def quotient(node: ir.Node, writer: Writer) -> ir.Value | None:
    """x / 1 -> x, x / (1 / y) -> x * y, and before the choice x / c -> x * (1 / c) for a constant c."""
    x, y = node.inputs
    if x is None or x.dtype not in FLOATS:
        return None
    divisor, result = scalar_beside(y, x), node.outputs[0]
    if divisor == 1.0:
        return x
    if (inverse := producer(y, "Div")) is not None and scalar_beside(*inverse.inputs[:2]) == 1.0:
        return writer.op("Mul", x, _operand(inverse, 1), like=result)
    factor = _rounded(1.0 / divisor, x) if divisor and not writer.after_choice else None
    return None if factor is None else writer.op("Mul", x, factor, like=result)


def negation(node: ir.Node, writer: Writer) -> ir.Value | None:
    """-x -> x * -1."""
    (x,) = node.inputs
    return writer.op("Mul", x, number(-1.0, x), like=x) if x is not None and x.dtype in FLOATS else None


def difference(node: ir.Node, writer: Writer) -> ir.Value | None:
    """x - c -> x + -c for a constant c, x - y * -1 -> x + y."""
    x, y = node.inputs
    if x is None or y is None or x.dtype not in FLOATS:
        return None
    array = wide(y)
    if array is not None:
        return writer.op("Add", x, np.asarray(-array, number(0, x).dtype), like=node.outputs[0])
    opposite = negated(y)
    return None if opposite is None else writer.op("Add", x, opposite, like=node.outputs[0])


def total(node: ir.Node, writer: Writer) -> ir.Value | None:
    """x + 0 -> x, x + c * -1 -> x + -c and (x + a) + b -> x + (a + b), for constants."""
    for x, y in _both_ways(node):
        if scalar_beside(y, x) == 0.0:
            return x
        opposite = negated(y)
        array = None if opposite is None else wide(opposite)
        if array is not None:
            return writer.op("Add", x, np.asarray(-array, number(0, x).dtype), like=node.outputs[0])
        inner, second = producer(x, "Add"), wide(y)
        if inner is None or second is None or len(x.uses()) > 1 or x.is_graph_output():
            continue  # another reader tells the two sums apart: the bias of a linear layer, say, and that of a choice
        for source, other in _both_ways(inner):
            first = wide(other)
            if first is None:
                continue
            both = np.asarray(first + second)
            if (
                np.isfinite(both).all()
                and (np.maximum(abs(first), abs(second)) <= _CANCELLATION * (1 + abs(both))).all()
            ):
                return writer.op("Add", source, both.astype(number(0, x).dtype), like=node.outputs[0])
    return None


def condition(node: ir.Node, writer: Writer) -> ir.Value | None:
    """Where(Not(c), a, b) -> Where(c, b, a)."""
    inverted = producer(node.inputs[0], "Not")
    if inverted is None:
        return None
    return writer.op("Where", _operand(inverted, 0), _operand(node, 2), _operand(node, 1), like=node.outputs[0])


def twice_inverted(node: ir.Node, writer: Writer) -> ir.Value | None:
    """Not(Not(c)) -> c."""
    del writer
    inner = producer(node.inputs[0], "Not")
    return None if inner is None else inner.inputs[0]


def comparison(node: ir.Node, writer: Writer) -> ir.Value | None:
    """a < b -> b > a."""
    return writer.op("Greater", _operand(node, 1), _operand(node, 0), like=node.outputs[0])


def smallest(node: ir.Node, writer: Writer) -> list[ir.Value] | None:
    """The smallest of x * -1 -> the largest of x, times -1."""
    x = None if node.inputs[0] is None else negated(node.inputs[0])
    if x is None or integer(node, "largest", 1) != 0:
        return None
    attributes = {name: attribute.value for name, attribute in node.attributes.items()} | {"largest": 1}
    values, ids = writer.ops("TopK", x, _operand(node, 1), like=list(node.outputs), **attributes)
    return [writer.op("Mul", values, number(-1.0, x), like=values), ids]


def negated(value: ir.Value) -> ir.Value | None:
    """x, of a value x * -1."""
    node = producer(value, "Mul")
    if node is not None:
        for x, factor in _both_ways(node):
            if scalar(factor) == -1.0 and rank(value) == rank(x):
                return x
    return None


def _rounded(factor: float, like: ir.Value) -> Array | None:
    """The factor in the value's type; None where that loses it, or more of a half-precision one than a rounding."""
    with np.errstate(over="ignore"):
        array = number(factor, like)
    kept = float(array.astype(np.float64))
    if like.dtype in HALF:
        return array if kept == factor else None
    return array if np.isfinite(factor) and abs(kept) >= np.finfo(np.float32).tiny and np.isfinite(kept) else None


def _is_softcap(value: ir.Value) -> bool:
    """Whether it is c * Tanh(x / c), which another factor would hide."""
    outer = producer(value, "Mul")
    for tanh, cap in () if outer is None else _both_ways(outer):
        inner = producer(tanh, "Tanh")
        scaled = producer(None if inner is None else inner.inputs[0], "Mul", "Div")
        if scaled is not None and (limit := scalar_beside(cap, tanh)):
            numbers = [scalar(operand) for operand in scaled.inputs]
            expected = limit if scaled.op_type == "Div" else 1.0 / limit
            return any(one is not None and np.float32(one) == np.float32(expected) for one in numbers)
    return False


def _operand(node: ir.Node, position: int) -> ir.Value:
    value = node.inputs[position]
    assert value is not None
    return value


def _both_ways(node: ir.Node) -> list[tuple[ir.Value, ir.Value]]:
    """The operands of a commutative node of two floating-point operands, in either order."""
    if len(node.inputs) != 2 or node.outputs[0].dtype not in FLOATS:
        return []
    a, b = _operand(node, 0), _operand(node, 1)
    return [(a, b), (b, a)]


ARITHMETIC: dict[str, tuple[Spelling, ...]] = {
    "Reciprocal": (reciprocal,),
    "Pow": (power,),
    "Mul": (product,),
    "Div": (quotient,),
    "Neg": (negation,),
    "Sub": (difference,),
    "Add": (total,),
    "Where": (condition,),
    "Not": (twice_inverted,),
    "Less": (comparison,),
    "TopK": (smallest,),
}
