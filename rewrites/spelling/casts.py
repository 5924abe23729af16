"""Casts that change nothing."""

from __future__ import annotations

import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.spelling.writer import Spelling, Writer
from ort_moe.rewrites.values import HALF, INDICES, producer, through_casts

_HELD_BY: dict[ir.DataType, frozenset[ir.DataType]] = {
    ir.DataType.FLOAT16: frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE}),
    ir.DataType.BFLOAT16: frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE}),
    ir.DataType.FLOAT: frozenset({ir.DataType.DOUBLE}),
    ir.DataType.INT32: frozenset({ir.DataType.INT64}),
    ir.DataType.BOOL: frozenset(
        {ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.UINT8} | HALF
    ),
}
"""The types that hold every value of a type."""

_IN_DOUBLE = ("Softmax", "LogSoftmax", "Sigmoid", "Softplus", "Sqrt", "Exp", "Log", "Tanh", "Neg")


def needless(node: ir.Node, writer: Writer) -> ir.Value | None:
    """Cast(x) -> x, for an x of that type; Cast(Cast(x)) -> x, back from a type that holds all of it."""
    del writer
    x, result = node.inputs[0], node.outputs[0]
    if x is None or x.dtype is None or result.dtype is None:
        return None
    if x.dtype == result.dtype:
        return x
    source = None if (inner := producer(x, "Cast")) is None else inner.inputs[0]
    if source is None or source.dtype != result.dtype:
        return None
    if x.dtype in _HELD_BY.get(result.dtype, ()):
        return source
    if result.dtype in INDICES and x.dtype in INDICES:
        ranking = producer(through_casts(source, INDICES, RESHAPING), "TopK")
        if ranking is not None:  # indices, which every integer type holds
            return source
    return None


def in_double(node: ir.Node, writer: Writer) -> ir.Value | None:
    """Cast(f(Cast(x))) -> f(x), for f of one operand in double precision between two casts of float32."""
    x, result = node.inputs[0], node.outputs[0]
    if x is None or x.dtype != ir.DataType.DOUBLE or result.dtype != ir.DataType.FLOAT:
        return None
    function = producer(x, *_IN_DOUBLE)
    widened = None if function is None else producer(function.inputs[0], "Cast")
    source = None if widened is None else widened.inputs[0]
    if function is None or source is None or source.dtype != ir.DataType.FLOAT:
        return None
    attributes = {name: attribute.value for name, attribute in function.attributes.items()}
    return writer.op(function.op_type, source, like=result, **attributes)


CASTS: dict[str, tuple[Spelling, ...]] = {"Cast": (needless, in_double)}
