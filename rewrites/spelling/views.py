"""Views out of the way: reshapes, transposes and dimensions of length one between the steps of a router.

A view keeps the elements in their order. One that also keeps the last axis commutes with every step that treats a row
over the experts like any other; before the choice it moves to the front of such steps, behind the choice to their end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.spelling.writer import Spelling, Writer
from ort_moe.rewrites.values import (
    Array,
    axes,
    constant,
    dim,
    has_same_shape,
    integer,
    integers,
    is_last_axis,
    is_op,
    is_same_length,
    is_same_shape_if_as_many,
    producer,
    rank,
    reduces_last_axis,
)

_ELEMENTWISE = frozenset(
    {
        "Abs", "Add", "Cast", "Clip", "Div", "Equal", "Exp", "Greater", "Less", "Log", "Max", "Min", "Mul", "Neg",
        "Not", "Pow", "Reciprocal", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Tanh", "Where",
    }
)  # fmt: skip
_ALONG_AXIS = {"Softmax": -1, "LogSoftmax": -1, "GatherElements": 0}
"""Ops that treat rows alike if their axis is the last one, and the axis that they take by default."""
_OVER_ROWS = ("ReduceSum", "ReduceL1", "ReduceMax")
_REDUCTIONS = (*_OVER_ROWS, "ReduceMin", "ReduceMean", "ReduceProd")


def needless(node: ir.Node, writer: Writer) -> ir.Value | None:
    """A view, or a chain of them, that ends in the shape it began with -> what it began with."""
    del writer
    result, value = node.outputs[0], node.inputs[0]
    found = None
    while value is not None:
        if is_same_shape_if_as_many(value.shape, result.shape):
            found = value
        view = producer(value, *RESHAPING)
        value = None if view is None else view.inputs[0]
    return found


def hoist(node: ir.Node, writer: Writer) -> ir.Value | None:
    """View(f(x, constants)) -> f(View(x), constants), before the choice."""
    value = node.inputs[0]
    if writer.after_choice or value is None or len(value.uses()) > 1 or value.is_graph_output():
        return None
    step, result = value.producer(), node.outputs[0]
    if step is None or not _keeps_rows(node) or not _treats_rows_alike(step, value):
        return None
    operands = [_operand(operand, value) for operand in step.inputs]
    if any(operand is None for operand in operands) or all(isinstance(operand, np.ndarray) for operand in operands):
        return None
    inputs: list[ir.Value | Array] = []
    for operand in operands:
        assert operand is not None
        if isinstance(operand, ir.Value):
            viewed = _view_again(node, operand, dim(operand, -1), result, writer)
            if viewed is None:
                return None
            operand = viewed
        inputs.append(operand)
    return _written_elsewhere(step, inputs, writer, like=result)


def sink(node: ir.Node, writer: Writer) -> ir.Value | None:
    """f(View(w), constants) -> View(f(w, constants)), behind the choice."""
    result = node.outputs[0]
    if not writer.after_choice:
        return None
    views = [view for value in node.inputs if (view := producer(value, *RESHAPING)) is not None and _keeps_rows(view)]
    if not views or not _treats_rows_alike(node, result):
        return None
    first = views[0]
    inputs: list[ir.Value | Array] = []
    for value in node.inputs:
        view = producer(value, *RESHAPING)
        if value is None:
            return None
        if view in views and view is not None:
            source = view.inputs[0]
            assert source is not None
            if not _same_rows(source, first.inputs[0]) or not _same_rows(value, first.outputs[0]):
                return None
            inputs.append(source)
            continue
        operand = _operand(value, first.outputs[0])
        if isinstance(operand, ir.Value):
            operand = _viewed_elsewhere(operand, first.inputs[0])
        if operand is None:
            return None
        inputs.append(operand)
    source, last = first.inputs[0], dim(result, -1)
    if source is None or source.shape is None or not isinstance(last, int) or not _can_view_again(first, last, result):
        return None
    shape = ir.Shape([*source.shape[:-1], last])
    moved = _written_elsewhere(node, inputs, writer, like=result, shape=shape)
    return _view_again(first, moved, last, result, writer)


def keep_dimension(node: ir.Node, writer: Writer) -> ir.Value | None:
    """Unsqueeze(Reduce(x, keepdims = 0)) -> Reduce(x, keepdims = 1), and the other way round."""
    value, result = node.inputs[0], node.outputs[0]
    reduction = producer(value, *_REDUCTIONS)
    if reduction is None or value is None:
        return None
    x, over, known = reduction.inputs[0], axes(reduction), rank(reduction.inputs[0])
    if x is None or x.shape is None or over is None or not over or known is None:
        return None
    reduced = {axis % known for axis in over}
    kept = integer(reduction, "keepdims", 1)
    shape = ir.Shape(
        [1 if axis in reduced else x.shape[axis] for axis in range(known) if axis not in reduced or not kept]
    )
    if not is_same_shape_if_as_many(shape, result.shape):
        return None
    attributes = _attributes(reduction) | {"keepdims": 1 - kept}
    inputs = [operand for operand in reduction.inputs if operand is not None]
    return writer.op(reduction.op_type, *inputs, like=result, **attributes)


def transposes(node: ir.Node, writer: Writer) -> ir.Value | None:
    """Transpose(Transpose(x)) -> x or one Transpose, a Transpose that moves nothing -> x."""
    x, permutation = node.inputs[0], _permutation(node)
    if x is None or permutation is None:
        return None
    if permutation == sorted(permutation):
        return x
    inner = producer(x, "Transpose")
    first = None if inner is None else _permutation(inner)
    if inner is None or first is None or inner.inputs[0] is None:
        return None
    both = [first[axis] for axis in permutation]
    if both == sorted(both):
        return inner.inputs[0]
    return writer.op("Transpose", inner.inputs[0], like=node.outputs[0], perm=both)


def turned(node: ir.Node, writer: Writer) -> ir.Value | None:
    """f(Transpose(x)) -> Transpose(f(x)), for a softmax or a function of one element."""
    transpose = producer(node.inputs[0], "Transpose")
    permutation = None if transpose is None else _permutation(transpose)
    if transpose is None or permutation is None or len(node.inputs) != 1:
        return None
    x, result = transpose.inputs[0], node.outputs[0]
    assert x is not None
    attributes = _attributes(node)
    if "Softmax" in node.op_type:
        attributes["axis"] = permutation[integer(node, "axis", -1)] - len(permutation)
    moved = writer.op(node.op_type, x, like=result, shape=x.shape, **attributes)
    return writer.op("Transpose", moved, like=result, perm=permutation)


def needless_repeat(node: ir.Node, writer: Writer) -> ir.Value | None:
    """Expand(x) -> x and Tile(x) -> x, where nothing is repeated."""
    del writer
    x = node.inputs[0]
    return x if x is not None and has_same_shape(x, node.outputs[0]) else None


def gather_elements(node: ir.Node, writer: Writer) -> ir.Value | None:
    """GatherND(s, Unsqueeze(ids), batch_dims of all leading axes) -> GatherElements(s, ids)."""
    scores, coordinates = node.inputs
    known = rank(scores)
    if scores is None or coordinates is None or known is None:
        return None
    if integer(node, "batch_dims", 0) != known - 1 or rank(coordinates) != known + 1 or dim(coordinates, -1) != 1:
        return None
    view, result = producer(coordinates, *RESHAPING), node.outputs[0]
    ids = None if view is None else view.inputs[0]
    if ids is None or rank(ids) != known or not is_same_shape_if_as_many(ids.shape, result.shape):
        return None
    return writer.op("GatherElements", scores, ids, like=result, axis=-1)


def _same_rows(value: ir.Value | None, other: ir.Value | None) -> bool:
    """Whether two values have the same leading dimensions."""
    if value is None or other is None or value.shape is None or other.shape is None:
        return False
    a, b = value.shape[:-1], other.shape[:-1]
    return len(a) == len(b) and all(map(is_same_length, a, b))


def _keeps_rows(view: ir.Node) -> bool:
    """Whether a view keeps the last axis, hence the rows along it."""
    length = dim(view.inputs[0], -1)
    return is_op(view, *RESHAPING) and length is not None and length == dim(view.outputs[0], -1)


def _treats_rows_alike(step: ir.Node, value: ir.Value) -> bool:
    """Whether the step makes each row of `value`, its output, from the same rows of its operands."""
    if is_op(step, *_ALONG_AXIS):
        axis = integer(step, "axis", _ALONG_AXIS[step.op_type])
        return is_last_axis(axis, value)
    if is_op(step, *_OVER_ROWS):
        return reduces_last_axis(step, keepdims=True)
    return is_op(step, *_ELEMENTWISE)


def _operand(operand: ir.Value | None, rows: ir.Value) -> ir.Value | Array | None:
    """The operand where the rows lie in another shape: itself, if it has these rows, or a constant row; else None."""
    if operand is None:
        return None
    array = constant(operand)
    if array is not None:
        if array.size == 1 and array.dtype.kind in "iu" and array.ndim == 1:
            return array  # axes of a reduction
        lengths = array.shape[:-1]
        return array.reshape(array.shape[-1:]) if all(length == 1 for length in lengths) else None
    return operand if _same_rows(operand, rows) and dim(operand, -1) is not None else None


def _written_elsewhere(
    step: ir.Node, inputs: list[ir.Value | Array], writer: Writer, *, like: ir.Value, shape: ir.Shape | None = None
) -> ir.Value:
    """The step on operands whose rows lie in another shape, where the last axis may have another number."""
    attributes = _attributes(step)
    if is_op(step, *_OVER_ROWS):
        inputs = [inputs[0], *(np.array([-1], np.int64) for _ in inputs[1:])]
        attributes |= {"axes": [-1]} if "axes" in attributes else {}
    return writer.op(step.op_type, *inputs, like=like, shape=shape, **attributes)


def _viewed_elsewhere(value: ir.Value, other: ir.Value | None) -> ir.Value | None:
    """The value with its rows arranged as those of `other`, where the graph has that already."""
    views = (user for user in value.consumers() if is_op(user, *RESHAPING) and user.inputs[0] is value)
    return next((view.outputs[0] for view in views if _keeps_rows(view) and _same_rows(view.outputs[0], other)), None)


def _can_view_again(view: ir.Node, last: int | None, result: ir.Value) -> bool:
    """Whether `_view_again` can do what this view does for rows of another length."""
    known = rank(view.inputs[0])
    if last is None or known is None or result.shape is None:
        return False
    if view.op_type in ("Squeeze", "Unsqueeze"):
        over, longer = axes(view), max(known, len(result.shape))
        return over is not None and not any(axis in (-1, longer - 1) for axis in over)
    if view.op_type == "Flatten":
        return integer(view, "axis", 1) in (-1, known - 1)
    return view.op_type == "Identity" or integers(view.inputs[1]) is not None


def _view_again(view: ir.Node, value: ir.Value, last: int | None, result: ir.Value, writer: Writer) -> ir.Value | None:
    """`value` with its rows arranged as the view arranges those of its input."""
    if not _can_view_again(view, last, result) or result.shape is None or last is None:
        return None
    shape = ir.Shape([*result.shape[:-1], last])
    if view.op_type == "Reshape":
        target = integers(view.inputs[1])
        assert target is not None
        if target[-1] == -1 and dim(view.inputs[0], -1) is None:
            return None
        lengths = np.array([*target[:-1], last], np.int64)
        return writer.op("Reshape", value, lengths, like=value, shape=shape, **_attributes(view))
    others: Sequence[ir.Value] = [operand for operand in view.inputs[1:] if operand is not None]
    return writer.op(view.op_type, value, *others, like=value, shape=shape, **_attributes(view))


def _attributes(node: ir.Node) -> dict[str, Any]:
    """The attributes, with an axis of rows counted from the end."""
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    if node.op_type in ("Softmax", "LogSoftmax", "GatherElements"):
        attributes["axis"] = -1
    return attributes


def _permutation(transpose: ir.Node) -> list[int] | None:
    given = transpose.attributes.get_ints("perm")
    if given is not None:
        return [int(axis) for axis in given]
    known = rank(transpose.inputs[0])
    return None if known is None else list(range(known))[::-1]


_VIEWS: dict[str, tuple[Spelling, ...]] = dict.fromkeys(RESHAPING - {"Identity"}, (needless, keep_dimension, hoist))
_STEPS: dict[str, tuple[Spelling, ...]] = {
    **dict.fromkeys((*_ELEMENTWISE, *_ALONG_AXIS, *_OVER_ROWS), (sink,)),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Sigmoid", "Softplus", "Sqrt", "Exp", "Cast"), (turned, sink)),
}
VIEWS: dict[str, tuple[Spelling, ...]] = {
    **_VIEWS,
    **_STEPS,
    "Transpose": (transposes,),
    "Expand": (needless_repeat,),
    "Tile": (needless_repeat,),
    "GatherND": (gather_elements,),
}
