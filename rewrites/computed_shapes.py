"""Reshape(x, Concat(a length of x, ..., -1)) -> Reshape(x, constants), and the same of Expand, around a TopK.

Tracing exporters write `x.view(x.shape[0], groups, -1)` with a length that is looked up while the model runs. ONNX's
shape inference, which does no arithmetic with such lengths, loses the fixed ones: how many experts a group has, and all
that is made of it. Here a length that is not fixed is followed back to where it comes from. A reshape whose target
names each such length of x once leaves as many fixed elements as x has, so the target is fixed but for a -1, or zeros
for lengths that stay in their places; an Expand to a length that x has there expands nothing.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.names import Names, new_constant
from ort_moe.rewrites.values import axes, dim, filling, integer, integers, is_op, producer, rank, scalar, through
from ort_moe.rewrites.vicinity import around

Length = tuple[ir.Value, int] | str
"""A length that is not fixed: the value and the axis where it first appears, or its name."""

_KEEPS_SHAPE = frozenset(
    {
        "Abs", "Cast", "Clip", "Exp", "Identity", "Log", "LogSoftmax", "Neg", "Not", "Reciprocal", "Relu",
        "ScatterElements", "Sigmoid", "Softmax", "Softplus", "Sqrt", "Tanh",
    }
)  # fmt: skip
_BROADCASTS = frozenset(
    {"Add", "Div", "Equal", "Greater", "Less", "Max", "Min", "Mul", "Pow", "Sub", "Where"}
)  # fmt: skip
_REDUCES = frozenset({"ReduceL1", "ReduceMax", "ReduceMean", "ReduceSum"})
_INFERRED = "unk__"
"""How the names begin that ONNX's shape inference gives to lengths."""
_MOST_STEPS = 64
"""Nodes that a length is followed through."""


def fix_computed_shapes(model: ir.Model) -> bool:
    """Fix the targets of Reshape and Expand around every TopK, in place; True if there were any to fix.

    Args:
        model: With types and shapes as far as they could be inferred. They are forgotten where a length has a name that
            inference gave it, and must be inferred again.
    """
    names = None
    found = dict.fromkeys(
        node
        for topk in model.graph.all_nodes()
        if is_op(topk, "TopK")
        for nodes in around(topk)
        for node in nodes
        if is_op(node, "Reshape", "Expand") and producer(node.inputs[1], "Concat", "Where") is not None
    )
    fixed = False
    for node in found:
        target = _reshape_target(node) if node.op_type == "Reshape" else _expand_target(node)
        if target is None or not isinstance(node.graph, ir.Graph):
            continue
        names = names or Names(model.graph)
        name = names.unused(f"{node.outputs[0].name}_shape")
        node.replace_input_with(1, new_constant(node.graph, name, np.array(target, np.int64)))
        node.outputs[0].shape = None
        fixed = True
    if fixed:
        _forget_inferred_names(model.graph)
    return fixed


def _forget_inferred_names(graph: ir.Graph) -> None:
    """Inference keeps a name that it once gave to a length, even where it could tell the length by now."""
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.shape is not None and any(_is_inferred(length) for length in value.shape):
                value.shape = ir.Shape([None if _is_inferred(length) else length for length in value.shape])


def _is_inferred(length: int | ir.SymbolicDim) -> bool:
    return isinstance(length, ir.SymbolicDim) and (length.value or "").startswith(_INFERRED)


def _reshape_target(reshape: ir.Node) -> list[int] | None:
    """The target by constants; None where it tells more than they could."""
    x, entries = reshape.inputs[0], target_entries(reshape.inputs[1])
    if x is None or x.shape is None or entries is None or integer(reshape, "allowzero", 0):
        return None
    if 0 in entries or entries.count(-1) > 1:
        return None
    lengths = [length if isinstance(length, int) else follow(x, axis) for axis, length in enumerate(x.shape)]
    named = Counter(_not_fixed(entries))
    if not named or named != Counter(_not_fixed(lengths)):
        return None
    elements, told = (math.prod(n for n in each if isinstance(n, int) and n > 0) for each in (lengths, entries))
    rest, remainder = divmod(elements, told)
    if remainder or (-1 not in entries and rest != 1):
        return None
    target = [rest if entry == -1 else entry if isinstance(entry, int) else -1 for entry in entries]
    if named.total() > 1:  # a -1 cannot be told from the others where one of them is 0
        in_place = [entry for entry, length in zip(entries, lengths, strict=False) if entry == length]
        if _not_fixed(entries) != _not_fixed(in_place):
            return None
        target = [0 if not isinstance(entry, int) else fixed for entry, fixed in zip(entries, target, strict=True)]
    return target


def _expand_target(expand: ir.Node) -> list[int] | None:
    """The target by constants, 1 for a length that stays; None where it tells more than they could."""
    x, target = expand.inputs[0], expand.inputs[1]
    entries = target_entries(target) or _entries_but_minus_ones(target)
    known = rank(x)
    if x is None or x.shape is None or known is None or entries is None or len(entries) < known:
        return None
    fixed = []
    for axis, entry in enumerate(entries):
        own = axis - (len(entries) - known)
        if isinstance(entry, int):
            fixed.append(entry)
        elif own >= 0 and not isinstance(x.shape[own], int) and follow(x, own) == entry:
            fixed.append(1)
        else:
            return None
    return fixed


def target_entries(target: ir.Value | None) -> list[int | Length] | None:
    """What is joined to the target of a Reshape or an Expand, if it is all constants and lengths that are looked up."""
    concat = None if target is None else producer(through(target, RESHAPING), "Concat")
    entries: list[int | Length] = []
    for value in () if concat is None else concat.inputs:
        known = integers(value)
        told = known if known is not None else looked_up(value)
        if told is None:
            return None
        entries += told
    return entries or None


def _entries_but_minus_ones(target: ir.Value | None) -> list[int | Length] | None:
    """The same of Where(shape == -1, 1, shape), as tracing exporters write an expansion."""
    where = producer(target, "Where")
    test = None if where is None else producer(where.inputs[0], "Equal")
    if where is None or test is None or _filling(test.inputs[1]) != -1.0 or _filling(where.inputs[1]) != 1.0:
        return None
    entries = target_entries(where.inputs[2])
    if entries is None or target_entries(test.inputs[0]) != entries:
        return None
    return [1 if entry == -1 else entry for entry in entries]


def _filling(value: ir.Value | None) -> float | None:
    """The one number of which a tensor is full, which may be a product."""
    product = producer(value, "Mul")
    numbers = [filling(each) for each in ([value] if product is None else product.inputs)]
    return None if None in numbers else math.prod(number for number in numbers if number is not None)


def _not_fixed(lengths: list[int | Length]) -> list[Length]:
    return [length for length in lengths if not isinstance(length, int)]


def looked_up(value: ir.Value | None) -> list[int | Length] | None:
    """The lengths that are looked up in a shape while the model runs."""
    value = None if value is None else through(value, RESHAPING | {"Cast"})
    pick = producer(value, "Gather", "Slice")
    shape = producer(value if pick is None else pick.inputs[0], "Shape")
    source = None if shape is None else shape.inputs[0]
    known = rank(source)
    if shape is None or source is None or source.shape is None or known is None:
        return None
    over: list[int] = list(range(known)[integer(shape, "start", 0) : integer(shape, "end", known)])
    if pick is not None and pick.op_type == "Gather":
        index = scalar(pick.inputs[1])
        if index is None or not -len(over) <= index < len(over):
            return None
        over = [over[int(index)]]
    elif pick is not None:
        starts, ends, along, steps = (integers(each) for each in (*pick.inputs, None, None)[1:5])
        if starts is None or ends is None or len(starts) != 1 or along not in (None, [0]) or steps not in (None, [1]):
            return None
        over = over[starts[0] : ends[0]]
    lengths = [(axis, source.shape[axis]) for axis in over]
    return [length if isinstance(length, int) else follow(source, axis) for axis, length in lengths]


def follow(value: ir.Value, axis: int) -> Length:
    """Where a length that is not fixed comes from: equal answers are equal lengths."""
    for _ in range(_MOST_STEPS):
        length = None if value.shape is None else value.shape[axis]
        if isinstance(length, ir.SymbolicDim) and length.value is not None and not _is_inferred(length):
            return length.value
        node = value.producer()
        step = None if node is None else _step(node, value, axis)
        if step is None:
            return (value, axis) if not isinstance(length, ir.SymbolicDim) else length.value or (value, axis)
        value, axis = step
    return value, axis


def _step(node: ir.Node, result: ir.Value, axis: int) -> tuple[ir.Value, int] | None:
    """The operand of the node, and its axis, of which the length of the result's axis comes."""
    x, known = node.inputs[0] if node.inputs else None, rank(result)
    if x is None or known is None:
        return None
    if is_op(node, *_KEEPS_SHAPE):
        return x, axis
    if is_op(node, *_BROADCASTS):
        return _broadcast(node, known, axis)
    if is_op(node, "ConstantOfShape"):
        shape = producer(x, "Shape")
        source = None if shape is None or len(shape.attributes) else shape.inputs[0]
        return None if source is None else (source, axis)
    if is_op(node, "Expand"):
        target, before = integers(node.inputs[1]), rank(x)
        own = axis if before is None else axis - (known - before)
        stays = target is not None and ([1] * known + target)[axis - known] == 1
        return (x, own) if stays and own >= 0 else None
    if is_op(node, "MatMul"):
        other = rank(node.inputs[1])
        return (x, axis) if other == 2 and axis < known - 1 else None
    if is_op(node, "Gemm"):
        return (x, 0) if axis == 0 and not integer(node, "transA", 0) else None
    if is_op(node, "TopK", "OneHot"):
        over = integer(node, "axis", -1)
        return (x, axis) if over in (-1, known - 1) and axis < known - 1 else None
    if is_op(node, "Reshape"):
        return _reshaped(node, x, result, axis)
    if is_op(node, *_REDUCES, "Squeeze", "Unsqueeze"):
        return _moved(node, x, known, axis)
    return None


def _broadcast(node: ir.Node, known: int, axis: int) -> tuple[ir.Value, int] | None:
    """The one operand that has more than one row there, or the first of several whose rows are as many."""
    steps = []
    for operand in node.inputs:
        ranked = rank(operand)
        if operand is None or ranked is None:
            return None
        own = axis - (known - ranked)
        if own >= 0 and dim(operand, own) != 1:
            steps.append((operand, own))
    return steps[0] if steps and len({follow(*step) for step in steps}) == 1 else None


def _reshaped(node: ir.Node, x: ir.Value, result: ir.Value, axis: int) -> tuple[ir.Value, int] | None:
    """Where one length is not fixed on either side and the fixed ones make as many elements, it is the same."""
    if x.shape is None or result.shape is None:
        return None
    free = [[a for a, length in enumerate(each) if not isinstance(length, int)] for each in (x.shape, result.shape)]
    fixed = [math.prod(length for length in each if isinstance(length, int)) for each in (x.shape, result.shape)]
    is_same = fixed[0] == fixed[1] != 0 and free[1] == [axis] and len(free[0]) == 1
    return (x, free[0][0]) if is_same else None


def _moved(node: ir.Node, x: ir.Value, known: int, axis: int) -> tuple[ir.Value, int] | None:
    """Through dimensions of length 1 that come or go, or a reduction over others."""
    over, before = axes(node), rank(x)
    if over is None or before is None or not over:
        return None
    if is_op(node, "Unsqueeze"):
        added = {each % known for each in over}
        return None if axis in added else (x, axis - sum(each < axis for each in added))
    removed = {each % before for each in over}
    if before == known:
        return None if axis in removed else (x, axis)
    kept = [each for each in range(before) if each not in removed]
    return (x, kept[axis]) if axis < len(kept) else None
