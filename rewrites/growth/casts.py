"""f(Cast(w)) -> Cast(f(w)): let narrowing casts sink behind the arithmetic of a router.

A router in half precision rounds between its steps. The FusedRouter computes in float32 throughout and rounds once, at
the end: nearer to the exact result than the original graph, by the roundings it drops.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.router_node import float32_initializer, is_router
from ort_moe.rewrites.rule import Refusal, RouterRule, require
from ort_moe.rewrites.values import FLOATS, HALF, INDICES, Array, constant, filling, is_op, producer, through

_ARITHMETIC = (
    "Softmax", "Sigmoid", "Exp", "ReduceSum", "ReduceL1", "ReduceL2", "Clip", "Max", "Add", "Mul", "Div", "Where",
)  # fmt: skip
_LONGEST_CHAIN = 8


class CastOfCast(RouterRule):
    """Cast(Cast(w)) -> Cast(w).

    For a float32 w that comes from a FusedRouter and passes through half precision on its way to a floating-point type:
    integers and booleans would show the rounding.
    """

    title = "sink-casts"
    root = "Cast"

    def pattern(self, op: Any, wide: Any) -> Any:
        narrow = op.Cast(wide, _allow_other_attributes=True, _outputs=["narrow"])
        return op.Cast(narrow, _allow_other_attributes=True, _outputs=["result"])

    def read(self, wide: ir.Value, narrow: ir.Value, result: ir.Value, **_: Any) -> None:
        require(narrow.dtype in HALF, "the inner cast does not narrow")
        require(result.dtype in FLOATS, f"the outer cast is to {result.dtype}")
        _require_weights(wide)

    def rewrite(self, op: Any, wide: ir.Value, result: ir.Value, **_: Any) -> ir.Value:
        cast: ir.Value = op.Identity(wide) if result.dtype == ir.DataType.FLOAT else op.Cast(wide, to=result.dtype)
        return cast


class SinkCast(RouterRule):
    """f(Cast(w), constants) -> Cast(f(w, constants)).

    For a float32 w that comes from a FusedRouter, and f one of the steps after the choice: a score, a sum, a limit, a
    scale, a mask or a quotient, whose other operands are constants, gathered from constants, cast from integers or
    truths, or from such values, too.
    """

    title = "sink-casts"

    def __init__(self, op_type: str) -> None:
        super().__init__()
        self.root = op_type

    def pattern(self, op: Any, narrow: Any) -> Any:
        return getattr(op, self.root)(
            narrow, _allow_other_attributes=True, _allow_other_inputs=True, _outputs=["result"]
        )

    def read(self, result: ir.Value, **_: Any) -> list[ir.Value | Array | None]:
        node = result.producer()
        assert node is not None
        require(result.dtype in HALF, "the result is not in half precision")
        require(any(_narrowed(value) is not None for value in node.inputs), "no operand is cast from float32")
        return [_widened(value) for value in node.inputs]

    def rewrite(self, op: Any, result: ir.Value, **_: Any) -> ir.Value:
        node = result.producer()
        assert node is not None
        inputs = []
        for value, operand in zip(node.inputs, self.read(result=result), strict=True):
            if value is not None and operand is not None and not isinstance(operand, ir.Value):
                operand = float32_initializer(op, f"{value.name}_float32", operand)
            elif operand is not None and operand.dtype in HALF:
                operand = op.Cast(operand, to=ir.DataType.FLOAT)
                operand.dtype, operand.shape = ir.DataType.FLOAT, value.shape if value is not None else None
            inputs.append(operand)
        wide = getattr(op, self.root)(*inputs, **dict(node.attributes))
        wide.dtype, wide.shape = ir.DataType.FLOAT, result.shape
        cast: ir.Value = op.Cast(wide, to=result.dtype)
        return cast


def _narrowed(value: ir.Value | None) -> ir.Value | None:
    """The computed float32 value that was cast to this one in half precision."""
    cast = producer(value, "Cast")
    source = None if cast is None or value is None or value.dtype not in HALF else cast.inputs[0]
    return source if source is not None and source.dtype == ir.DataType.FLOAT and source.producer() else None


def _widened(value: ir.Value | None) -> ir.Value | Array | None:
    """The operand for float32 arithmetic: a value of the graph, to be cast if need be, or an array to store."""
    if value is None or value.dtype not in HALF:
        return value  # a missing limit, or the axes of a sum
    if (source := _narrowed(value)) is not None:
        _require_weights(source)
        return source
    array = constant(value)
    if array is not None:
        return array.astype("float32")
    made_by = producer(through(value, RESHAPING), "Gather", "GatherND", "GatherElements", "Cast")
    source = None if made_by is None else made_by.inputs[0]
    if source is not None and made_by is not None and made_by.op_type != "Cast":
        repeat = producer(source, "Expand", "Tile")
        if constant(source if repeat is None else repeat.inputs[0]) is not None:
            return value  # one number per chosen expert, from a small constant
    elif source is not None and source.dtype in INDICES | {ir.DataType.BOOL}:
        return value
    if filling(value) is not None:
        return value
    raise Refusal(f"the operand '{value.name}' is neither constant nor cast from the weights of a FusedRouter")


def _require_weights(value: ir.Value, longest: int = _LONGEST_CHAIN) -> None:
    """Refuse unless the value is a FusedRouter's weights, or computed from such and constants alone, in float32."""
    node = value.producer()
    if is_router(node):
        return
    sources = [] if node is None else [v for v in node.inputs if v is not None and constant(v) is None]
    if longest == 0 or not sources or not is_op(node, *_ARITHMETIC) or value.dtype != ir.DataType.FLOAT:
        raise Refusal(f"'{value.name}' does not come from a FusedRouter")
    for source in sources:
        _require_weights(source, longest - 1)


CAST_RULES = (CastOfCast(), *(SinkCast(op_type) for op_type in _ARITHMETIC))
