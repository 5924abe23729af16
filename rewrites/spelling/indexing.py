"""Rows gathered by an index for each: p[arange(T)[:, None], ids] of p (T, E) and ids (T, K) as GatherElements.

PyTorch's exporters write such an index by coordinates, (row, id) for every element, or by its place row * E + id in the
flattened p. A row number must be that of its row: a Range as long as p, or constants.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.computed_shapes import follow, looked_up
from ort_moe.rewrites.spelling.writer import Spelling, Writer
from ort_moe.rewrites.values import constant, dim, integer, producer, rank, scalar, through


def by_coordinates(node: ir.Node, writer: Writer) -> ir.Value | None:
    """GatherND(p, Concat(rows, Unsqueeze(ids))) -> GatherElements(p, ids)."""
    p, concat, result = node.inputs[0], producer(node.inputs[1], "Concat"), node.outputs[0]
    if p is None or concat is None or len(concat.inputs) != 2 or integer(node, "batch_dims", 0) != 0:
        return None
    rows, ids = concat.inputs
    view = producer(ids, *RESHAPING)
    ids = None if view is None else view.inputs[0]
    if rows is None or ids is None or rank(p) != 2 or rank(ids) != 2 or rank(rows) != 3 or rank(result) != 2:
        return None
    if integer(concat, "axis", 0) not in (-1, 2) or dim(rows, -1) != 1 or dim(concat.outputs[0], -1) != 2:
        return None
    if dim(ids, -1) is None or dim(ids, -1) != dim(result, -1) or not _has_as_many_rows(ids, p):
        return None
    if not _numbers_rows(rows, p):
        return None
    return writer.op("GatherElements", p, ids, like=result, axis=-1)


def by_place(node: ir.Node, writer: Writer) -> ir.Value | None:
    """Gather(Flatten(p), ids + rows * E) -> Reshape(GatherElements(p, ids))."""
    flat, places, result = node.inputs[0], producer(node.inputs[1], "Add"), node.outputs[0]
    view = producer(flat, *RESHAPING)
    p = None if view is None else view.inputs[0]
    if p is None or places is None or rank(p) != 2 or integer(node, "axis", 0) != 0:
        return None
    if rank(flat) != 1 and (rank(flat) != 2 or dim(flat, -1) != 1):
        return None
    for ids, firsts in (places.inputs, places.inputs[::-1]):
        if ids is None or firsts is None or rank(ids) != 2 or not _has_as_many_rows(ids, p):
            continue
        if not _is_chosen(ids) or not _places_first(firsts, p):
            continue
        chosen = writer.op("GatherElements", p, ids, like=result, shape=ids.shape, axis=-1)
        if rank(result) == 2:
            return chosen
        return writer.op("Unsqueeze", chosen, np.array([-1], np.int64), like=result)
    return None


def _is_chosen(ids: ir.Value) -> bool:
    """Whether they are indices of a choice: none is negative, which would count from the end of the row before."""
    source = through(ids, RESHAPING | {"Cast"})
    topk = producer(source, "TopK")
    return topk is not None and source is topk.outputs[1]


def _has_as_many_rows(ids: ir.Value, p: ir.Value) -> bool:
    lengths = [each.shape[0] if each.shape is not None else None for each in (ids, p)]
    if all(isinstance(length, int) for length in lengths):
        return lengths[0] == lengths[1]
    return not any(isinstance(length, int) for length in lengths) and follow(ids, 0) == follow(p, 0)


def _places_first(firsts: ir.Value, p: ir.Value) -> bool:
    """Whether it holds, (T, 1), the place of the first element of each row of p."""
    experts, array = dim(p, -1), constant(firsts)
    if experts is None or rank(firsts) != 2 or dim(firsts, -1) != 1:
        return False
    if array is not None:
        return dim(p, 0) == array.size and np.array_equal(array.reshape(-1), np.arange(array.size) * experts)
    product = producer(firsts, "Mul")
    for rows, width in () if product is None else (product.inputs, product.inputs[::-1]):
        if rows is not None and (scalar(width) == experts or looked_up(width) == [experts]):
            return rank(rows) == 2 and dim(rows, -1) == 1 and _numbers_rows(rows, p)
    return False


def _numbers_rows(rows: ir.Value, p: ir.Value) -> bool:
    """Whether every element along the first axis of `rows` is its place there, and p has as many rows."""
    array = constant(rows)
    if array is not None:
        length = array.shape[0]
        expected = np.arange(length).reshape(-1, *[1] * (array.ndim - 1))
        return dim(p, 0) == length and bool((array == expected).all())
    expand = producer(through(rows, RESHAPING), "Expand")
    column = rows if expand is None else expand.inputs[0]
    if column is None or (expand is not None and rank(column) != 2):
        return False
    if dim(column, -1) != 1 or (expand is not None and dim(expand.outputs[0], -1) != dim(rows, 1)):
        return False
    counter = producer(through(column, RESHAPING), "Range")
    if counter is None or scalar(counter.inputs[0]) != 0.0 or scalar(counter.inputs[2]) != 1.0:
        return False
    length, own = follow(p, 0), counter.outputs[0]
    return looked_up(counter.inputs[1]) == [length] or (isinstance(length, str) and follow(own, 0) == length)


INDEXING: dict[str, Spelling] = {"GatherND": by_coordinates, "Gather": by_place}
"""What is tried on a node, by its type, wherever it stands."""
