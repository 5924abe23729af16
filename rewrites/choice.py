"""The node that makes a choice: a TopK, or an ArgMax as a choice of one."""

from __future__ import annotations

from collections import deque

import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.values import dim, integer, integers, is_last_axis, is_op, producer, rank, scalar, through

CHOICES = ("TopK", "ArgMax")
"""Types of the nodes that choose."""


def ranked_axis(choice: ir.Node) -> int:
    """The axis over which it chooses."""
    return integer(choice, "axis", -1 if choice.op_type == "TopK" else 0)


def chosen_indices(choice: ir.Node) -> ir.Value:
    """Its output that tells what it chose."""
    return choice.outputs[1] if choice.op_type == "TopK" else choice.outputs[0]


def chosen_count(choice: ir.Node) -> int | None:
    """How many it chooses; None where that is not fixed."""
    return 1 if choice.op_type == "ArgMax" else ranked_count(choice)


def ranked_count(topk: ir.Node) -> int | None:
    """k of a TopK, a constant or, as of a sort, the fixed length of an axis; None where it is neither."""
    k = topk.inputs[1] if len(topk.inputs) > 1 else None
    chosen = integers(k)
    if chosen is not None:
        return chosen[0] if len(chosen) == 1 else None
    return None if k is None else _length(through(k, RESHAPING | {"Cast"}))


def ranks_integers(choice: ir.Node) -> bool:
    """Whether it ranks integers, as a sort of what another choice has chosen: no router does."""
    ranked = choice.inputs[0]
    if ranked is None:
        return False
    source = through(ranked, RESHAPING | {"Cast"})
    made_by = producer(source, *CHOICES)
    return any(value.dtype is not None and value.dtype.is_integer() for value in (ranked, source)) or (
        made_by is not None and source is chosen_indices(made_by)
    )


def follows_choice(choice: ir.Node, most: int = 16) -> bool:
    """Whether it is made among what another choice has left: the second of two in a row."""
    queue, seen = deque([choice.inputs[0]]), {choice.inputs[0]}
    while queue and len(seen) <= most:
        value = queue.popleft()
        node = None if value is None else value.producer()
        if is_op(node, *CHOICES):
            return True
        if node is not None and node.op_type not in ("MatMul", "Gemm"):
            fresh = [source for source in node.inputs if source not in seen]
            seen.update(fresh)
            queue.extend(fresh)
    return False


def _length(value: ir.Value) -> int | None:
    """The fixed length of an axis that is looked up while the model runs."""
    gather = producer(value, "Gather")
    index = 0.0 if gather is None else scalar(gather.inputs[1])
    shape = producer(value if gather is None else gather.inputs[0], "Shape")
    known = None if shape is None else rank(shape.inputs[0])
    if shape is None or known is None or index is None:
        return None
    looked_up = range(known)[integer(shape, "start", 0) : integer(shape, "end", known)]
    if (gather is None and len(looked_up) != 1) or not -len(looked_up) <= index < len(looked_up):
        return None
    return dim(shape.inputs[0], looked_up[int(index)])


def taken_first(value: ir.Value, user: ir.Node) -> int | None:
    """How many elements from the first one on along the last axis a Slice takes; None for anything else."""
    if not is_op(user, "Slice") or user.inputs[0] is not value:
        return None
    starts, ends, over, steps = (integers(each) for each in (*user.inputs, None, None, None)[1:5])
    length = dim(value, -1)
    if length is None and (sort := producer(value, "TopK")) is not None:
        length = ranked_count(sort)
    if starts != [0] or ends is None or over is None or len(over) != 1 or not is_last_axis(over[0], value):
        return None
    if steps not in (None, [1]) or (ends[0] < 0 and length is None):
        return None
    count = ends[0] if ends[0] >= 0 else ends[0] + (length or 0)
    return count if count > 0 else None
