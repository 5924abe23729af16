"""Reading a graph: constants, axes and consumers of values. Nothing here changes a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING

Array = np.ndarray[Any, np.dtype[Any]]

SMALL = 65_536
"""Elements up to which a constant is read; expert weights are larger and stay on disk."""

SCORES = ("Softmax", "Sigmoid", "Sqrt")
"""Ops that end a score of the experts."""

HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
"""Element types narrower than float32 that logits may have."""

FLOATS = HALF | {ir.DataType.FLOAT}
"""Element types that logits may have."""

INDICES = frozenset({ir.DataType.INT32, ir.DataType.INT64})
"""Element types that hold every index of an expert."""


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Whether the node is a standard ONNX operator of one of these types."""
    return node is not None and node.domain == "" and node.op_type in op_types


def producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The value's producer if it is a standard operator of one of these types."""
    node = None if value is None else value.producer()
    return node if is_op(node, *op_types) else None


def through(value: ir.Value, op_types: Collection[str]) -> ir.Value:
    """The value before a chain of these ops, followed along their first input."""
    while (node := producer(value, *op_types)) is not None and node.inputs and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def through_casts(value: ir.Value, dtypes: Collection[ir.DataType], moves: Collection[str] = ()) -> ir.Value:
    """The value before a chain of casts among these types, and of ops that only move elements.

    A cast through any other type may change the numbers: to integers it truncates, to booleans it keeps one bit.
    """
    while (node := producer(value, "Cast", *moves)) is not None and (source := node.inputs[0]) is not None:
        if node.op_type == "Cast" and not {value.dtype, source.dtype} <= set(dtypes):
            break
        value = source
    return value


def through_widening(value: ir.Value) -> ir.Value:
    """The value before casts to a type that holds each of its values."""
    while (node := producer(value, "Cast")) is not None:
        source = node.inputs[0]
        if source is None or not is_widening(source.dtype, value.dtype):
            break
        value = source
    return value


def is_widening(source: ir.DataType | None, target: ir.DataType | None) -> bool:
    """Whether a cast between the two types keeps every value."""
    if source is None or target is None:
        return False
    return source == target or (source in HALF and target == ir.DataType.FLOAT)


def operands(node: ir.Node) -> tuple[ir.Value, ...]:
    """The inputs that are given; of an operator without optional ones, all."""
    return tuple(value for value in node.inputs if value is not None)


def integer(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute, or its default."""
    return int(node.attributes.get_int(name, default) or 0)


def rank(value: ir.Value | None) -> int | None:
    """The number of dimensions, where known."""
    return None if value is None or value.shape is None else value.shape.rank()


def dim(value: ir.Value | None, axis: int) -> int | None:
    """The length of an axis, where it is known and fixed."""
    if value is None or value.shape is None or not -value.shape.rank() <= axis < value.shape.rank():
        return None
    length = value.shape[axis]
    return length if isinstance(length, int) else None


def is_same_length(length: int | ir.SymbolicDim, other: int | ir.SymbolicDim) -> bool:
    """Whether two lengths of axes are known to be one: the same number, or the same name."""
    return bool(length == other) and (isinstance(length, int) or length.value is not None)


def has_same_shape(value: ir.Value, other: ir.Value) -> bool:
    """Whether both shapes are known and one: the same lengths, under the same names where they are not fixed."""
    if value.shape is None or other.shape is None or value.shape.rank() != other.shape.rank():
        return False
    return all(map(is_same_length, value.shape, other.shape))


def is_same_shape_if_as_many(shape: ir.Shape | None, other: ir.Shape | None) -> bool:
    """Whether two shapes of as many elements are one: all lengths but one at most must be known to be equal."""
    if shape is None or other is None or shape.rank() != other.rank():
        return False
    different = [pair for pair in zip(shape, other, strict=True) if not is_same_length(*pair)]
    return not different or (len(different) == 1 and not all(isinstance(length, int) for length in different[0]))


def may_spread(value: ir.Value, other: ir.Value, axes: int | None = None) -> bool:
    """Whether one of two values may be spread over an axis of the other, in an elementwise operator.

    Args:
        value: Any value.
        other: Another.
        axes: The number of axes, from the first on, that are looked at; None: all.
    """
    if value.shape is None or other.shape is None or value.shape.rank() != other.shape.rank():
        return True
    pairs = list(zip(value.shape, other.shape, strict=True))[:axes]
    return any(a != b and (1 in (a, b) or (isinstance(a, int) and isinstance(b, int))) for a, b in pairs)


def is_last_axis(axis: int, value: ir.Value) -> bool:
    """Whether `axis`, counted from either end, is the value's last one."""
    known = rank(value)
    return axis == -1 or (known is not None and axis == known - 1)


def constant(value: ir.Value | None, limit: int = SMALL) -> Array | None:
    """The elements of a small constant, also behind casts and reshapes; None for anything else.

    An initializer that is a graph input as well is a default, not a constant.
    """
    if value is None or value.is_graph_input():
        return None
    node = value.producer()
    if node is None or is_op(node, "Constant"):
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is None or tensor.size > limit:
            return None
        try:
            return tensor.numpy()
        except (FileNotFoundError, TypeError, ValueError):
            return None
    if is_op(node, "Cast") and (dtype := value.dtype) is not None:
        array = constant(node.inputs[0], limit)
        return None if array is None or dtype == ir.DataType.STRING else array.astype(dtype.numpy())
    if is_op(node, *RESHAPING) and value.shape is not None and value.shape.is_static():
        array = constant(node.inputs[0], limit)
        return None if array is None else array.reshape(value.shape.numpy())
    return None


def scalar(value: ir.Value | None) -> float | None:
    """The one element of a constant of any rank, widened to a Python float."""
    array = constant(value, limit=1)
    return None if array is None or array.size != 1 else float(array.reshape(()).astype(np.float64))


def scalar_beside(value: ir.Value | None, other: ir.Value | None) -> float | None:
    """A constant's one element, if combining it with `other` leaves the shape of `other` as it is."""
    array = constant(value, limit=1)
    known = rank(other)
    return scalar(value) if array is not None and array.ndim <= (known or 0) else None


def integers(value: ir.Value | None) -> list[int] | None:
    """The elements of a small integer constant in order."""
    array = constant(value, limit=64)
    return None if array is None or array.dtype.kind not in "iu" else [int(x) for x in array.reshape(-1)]


def vector(value: ir.Value | None, length: int | None) -> Array | None:
    """A constant of shape (..., 1, length) as float32 (length,); None for anything else."""
    array = constant(value)
    if array is None or length is None or array.ndim == 0 or array.shape[-1] != length or array.size != length:
        return None
    return np.ascontiguousarray(array.reshape(-1).astype(np.float32))


def filling(value: ir.Value | None) -> float | None:
    """The one number of which a tensor is full, however it was made."""
    if value is None:
        return None
    node = producer(value, "ConstantOfShape", "Expand", "Cast")
    if node is None:
        array = constant(value)
        single = [] if array is None else np.unique(array).tolist()
        return float(single[0]) if len(single) == 1 else None
    if node.op_type == "ConstantOfShape":
        filler = node.attributes.get_tensor("value")
        return 0.0 if filler is None else float(filler.numpy().reshape(-1)[0])
    number = filling(node.inputs[0])
    if node.op_type == "Expand" or number is None:
        return number
    if value.dtype in (None, ir.DataType.STRING):
        return None
    with np.errstate(all="ignore"):  # the least number of float32 is -inf in float16
        return float(np.array(number).astype(value.dtype.numpy()))


def axes(node: ir.Node) -> list[int] | None:
    """The axes of a reduction or an (un)squeeze, as an attribute (old opsets) or a constant input; None if neither."""
    attribute = node.attributes.get_ints("axes")
    if attribute is not None:
        return [int(axis) for axis in attribute]
    return integers(node.inputs[1]) if len(node.inputs) > 1 else None


def reduces_last_axis(node: ir.Node, *, keepdims: bool) -> bool:
    """Whether a reduction runs over the last axis alone and keeps (or drops) it."""
    over = axes(node)
    source = node.inputs[0]
    if over is None or len(over) != 1 or source is None or not is_last_axis(over[0], source):
        return False
    return bool(integer(node, "keepdims", 1)) == keepdims


def consumers(value: ir.Value) -> Iterator[ir.Node]:
    """The nodes that read the value, each once, in the order of their first use."""
    seen: set[ir.Node] = set()
    for node, _ in value.uses():
        if node not in seen:
            seen.add(node)
            yield node


def listed(items: Iterable[object], most: int = 8) -> str:
    """Some things in a message, the first few where they are many."""
    words = [str(item) for item in items]
    return ", ".join(words[:most]) + (", ..." if len(words) > most else "")


def label(node: ir.Node) -> str:
    """How messages name a node: its operator and its name, or what it makes."""
    return f"{node.op_type} '{node.name}'" if node.name else f"{node.op_type} of '{node.outputs[0].name}'"
