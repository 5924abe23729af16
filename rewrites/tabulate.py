"""What a value that is made of the chosen indices alone is for each expert."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.values import Array, constant, integer, is_last_axis, is_op, producer, rank

_DEEPEST = 16
"""Steps from a value to the indices; the longest seen is 4."""

_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "Abs": np.abs,
    "Add": operator.add,
    "And": np.logical_and,
    "Div": np.true_divide,
    "Equal": operator.eq,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Max": np.maximum,
    "Min": np.minimum,
    "Mul": operator.mul,
    "Neg": operator.neg,
    "Not": np.logical_not,
    "Or": np.logical_or,
    "Sub": operator.sub,
    "Where": np.where,
    "Xor": np.logical_xor,
}


def tabulate(value: ir.Value | None, indices: ir.Value, experts: int | None) -> Array | None:
    """The value for each expert that may be chosen, (experts), if it is a function of the index at its place alone.

    Elementwise steps, casts, views and look-ups in small constants are followed.

    Args:
        value: Any value.
        indices: Of the chosen experts.
        experts: E.
    """
    array = None if experts is None else _evaluate(value, indices, experts, _DEEPEST)
    return None if array is None or array.shape != (experts,) else array


def _evaluate(value: ir.Value | None, indices: ir.Value, experts: int, depth: int) -> Array | None:
    """The value for each expert, (experts) or, where it is the same for all, ()."""
    if value is indices:
        return np.arange(experts)
    if value is None or depth == 0:
        return None
    array = constant(value, limit=1)
    if array is not None:
        return array.reshape(()) if array.size == 1 else None
    node = value.producer()
    if node is None or not node.inputs:
        return None
    if is_op(node, "Gather", "GatherND", "GatherElements"):
        return _look_up(node, indices, experts, depth)
    operands = [_evaluate(each, indices, experts, depth - 1) for each in node.inputs]
    first = operands[0]
    if is_op(node, *RESHAPING):
        return first
    if is_op(node, "Cast"):
        dtype = value.dtype
        return None if first is None or dtype is None or dtype == ir.DataType.STRING else first.astype(dtype.numpy())
    if is_op(node, "Clip"):
        return _clip(node, operands)
    if not is_op(node, *_ELEMENTWISE) or any(operand is None for operand in operands):
        return None
    if node.op_type == "Div" and first is not None and first.dtype.kind not in "fV":
        return None  # of integers, it rounds towards zero
    function = _ELEMENTWISE[node.op_type]
    with np.errstate(all="ignore"):
        # Of any number of operands, while NumPy would take a third for the place of the result.
        result = functools.reduce(function, operands) if node.op_type in ("Max", "Min") else function(*operands)
    return np.asarray(result)


def _clip(node: ir.Node, operands: list[Array | None]) -> Array | None:
    result = operands[0]
    for limit, given, function in zip(operands[1:], node.inputs[1:], (np.maximum, np.minimum), strict=False):
        if given is None:
            continue
        if result is None or limit is None:
            return None
        result = function(result, limit)
    return result


def _look_up(node: ir.Node, indices: ir.Value, experts: int, depth: int) -> Array | None:
    """An element of a constant, by a place that is made of the indices."""
    table, places = _table(node), _evaluate(node.inputs[1], indices, experts, depth - 1)
    if table is None or places is None or places.dtype.kind not in "iu":
        return None
    if ((places < -table.size) | (places >= table.size)).any():
        return None
    return np.asarray(table[places])


def _table(node: ir.Node) -> Array | None:
    """The constant that a node looks elements up in, as a vector."""
    data = node.inputs[0]
    if node.op_type == "GatherElements":
        # A constant row, repeated for every token.
        expand = producer(data, "Expand", "Tile")
        row = constant(data if expand is None else expand.inputs[0])
        is_row = row is not None and row.size == (row.shape[-1] if row.ndim else 0)
        along = data is not None and is_last_axis(integer(node, "axis", 0), data)
        return row.reshape(-1) if row is not None and is_row and along else None
    if integer(node, "axis", 0) != 0 or integer(node, "batch_dims", 0) != 0:
        return None
    array = constant(data)
    if array is None or array.ndim == 0 or array.size != array.shape[0]:
        return None  # a trailing dimension of length 1, as of an embedding, is dropped by a view
    if node.op_type == "GatherND" and rank(data) != 1:
        return None
    return array.reshape(-1)
