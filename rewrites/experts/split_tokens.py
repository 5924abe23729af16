"""A sum over all experts whose tokens are split into two axes -> the sum over tokens in one, viewed as before.

ReduceSum(Reshape(r, (E, b, -1, H)) * w, 0) -> Reshape(ReduceSum(Reshape(. * w, (E, -1, H)), 0), (b, -1, H))

How GPT-OSS's experts leave exporters that compute all of them.
"""

from __future__ import annotations

import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.computed_shapes import Length, target_entries
from ort_moe.rewrites.experts.node import Writer
from ort_moe.rewrites.fixed_lengths import fixed_integers
from ort_moe.rewrites.names import Names, take_over
from ort_moe.rewrites.values import FLOATS, axes, dim, integer, is_op, is_same_length, operands, producer, rank, through


def join_tokens(model: ir.Model) -> int:
    """Spell every such sum in place; how many."""
    nodes = [node for node in model.graph.all_nodes() if is_op(node, "ReduceSum") and rank(node.inputs[0]) == 4]
    names, joined = Names(model.graph) if nodes else None, 0
    for node in nodes:
        graph, y = node.graph, node.outputs[0]
        terms, target = operands(node)[0], _target(operands(node)[0])
        if names is None or target is None or not isinstance(graph, ir.Graph) or y.dtype not in FLOATS:
            continue
        experts, hidden = dim(terms, 0), dim(terms, 3)
        if axes(node) not in ([0], [-4]) or integer(node, "keepdims", 1) or experts is None or hidden is None:
            continue
        writer = Writer(graph, node, names)
        whole = writer.integers([experts, -1, hidden], "rows_shape")
        rows = writer.insert("Reshape", [terms, whole], {}, terms.dtype, ir.Shape([experts, None, hidden]))
        over = writer.integers([0], "axes")
        total = writer.insert("ReduceSum", [rows, over], {"keepdims": 0}, y.dtype, ir.Shape([None, hidden]))
        cut = [target, writer.integers([1], "starts"), writer.integers([4], "ends"), writer.integers([0], "axes")]
        shape = writer.insert("Slice", cut, {}, ir.DataType.INT64, ir.Shape([3]))
        result = writer.insert("Reshape", [total, shape], {}, y.dtype, y.shape)
        take_over(y, result)
        graph.remove(node, safe=True)
        joined += 1
    return joined


def _target(terms: ir.Value) -> ir.Value | None:
    """The shape (E, b, ., H) as which a view makes the rows that are weighed; None where none does."""
    product = producer(through(terms, {"Cast"}), "Mul")
    pairs = () if product is None else (operands(product), operands(product)[::-1])
    for rows, column in pairs:
        view = producer(through(rows, {"Cast"}), "Reshape")
        # A zero in the target would be the length that the view has in that place.
        if view is None or rank(rows) != 4 or (not integer(view, "allowzero", 0) and _may_copy(view.inputs[1])):
            continue
        if not all(_is_as_long(rows, column, axis) for axis in (1, 2)):
            continue
        if producer(through(rows, RESHAPING | {"Cast"}), "MatMul", "Add") is not None:
            return view.inputs[1]
    return None


def _is_as_long(rows: ir.Value, column: ir.Value, axis: int) -> bool:
    """Whether the length that rows are viewed with is that of the product, over which the column may spread them."""
    if rows.shape is None or column.shape is None or column.shape.rank() != 4:
        return False
    told = _told(rows, axis)
    # What a -1 stands for is what all other lengths leave.
    return (
        told == -1
        or is_same_length(rows.shape[axis], column.shape[axis])
        or (told is not None and told == _told(column, axis))
    )


def _told(value: ir.Value, axis: int) -> int | Length | None:
    """What the target of the view that makes a value, perhaps with another axis behind, says of an axis."""
    value = through(value, {"Cast"})
    last = producer(value, "Unsqueeze")
    if last is not None and axes(last) in ([-1], [3]):
        value = through(operands(last)[0], {"Cast"})
    view = producer(value, "Reshape")
    if view is None:
        return None
    target = fixed_integers(view.inputs[1]) or target_entries(view.inputs[1])
    return target[axis] if target is not None and axis < len(target) else None


def _may_copy(target: ir.Value | None) -> bool:
    """Whether an entry of a target may be 0, which stands for the length that is there."""
    known = fixed_integers(target)
    if known is not None:
        return 0 in known
    node = producer(target, "Concat")
    if node is None:
        return True
    return any(_is_zero(part) for part in operands(node))


def _is_zero(part: ir.Value) -> bool:
    known = fixed_integers(part)
    return known is not None and 0 in known
