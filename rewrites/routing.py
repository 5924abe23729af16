"""Which TopK is a router?

A TopK followed by a softmax may as well sample a token, classify an image or attend sparsely, so what surrounds the
*values* is no evidence. What counts is who consumes the *indices*: a router's pick the weight matrices of experts.

Strong evidence, each sufficient: they gather constant matrices, one per ranked element, that meet a matrix product; an
operator of another domain takes them together with such a stack of matrices; they scatter into rows over all ranked
elements that meet a product with such a stack. Weak evidence (a one-hot or a comparison with every index that masks a
product, rows over all ranked elements that scale what each expert made, a sort of all indices, a histogram) counts only
where a linear layer made the ranked scores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NoReturn

import onnx_ir as ir

from ort_moe.graphs.operators import PRODUCTS, RESHAPING
from ort_moe.rewrites.choice import chosen_count, chosen_indices, ranked_axis
from ort_moe.rewrites.router_node import is_router
from ort_moe.rewrites.rule import Refusal
from ort_moe.rewrites.values import (
    FLOATS,
    constant,
    consumers,
    dim,
    integer,
    integers,
    is_last_axis,
    is_op,
    label,
    listed,
    producer,
    rank,
    scalar,
    through,
)

_LIMITS_INDICES = frozenset({"Where", "Clip", "Min", "Max"})
"""Ops that may give a choice that runs no expert the index of another."""
_MOVES_INDICES = RESHAPING | _LIMITS_INDICES | {"Cast", "Concat", "Tile", "Expand", "Transpose", "Slice", "Split"}
_PREPARES_WEIGHTS = RESHAPING | {"Cast", "Transpose", "DequantizeLinear"}
_SCORES = RESHAPING | {
    "Cast", "Softmax", "Sigmoid", "Sqrt", "Softplus", "Relu", "Exp", "Tanh", "Add", "Sub", "Mul", "Div", "Where",
}  # fmt: skip
_BY_INDEX = ("Equal", "Gather", "GatherND", "OneHot", "ScatterElements", "TopK")
"""Standard ops that tell experts apart by an index."""
_LOOK_AHEAD = 64
"""Nodes looked at behind a value before giving up; the chains between are shorter than 20 in every export seen."""


def router_width(topk: ir.Node) -> int:
    """The number of experts among which this TopK, or ArgMax, chooses.

    Raises:
        Refusal: It is no router, or not one over the last axis that can be fused, and why.
    """
    scores, k = topk.inputs[0], topk.inputs[1] if len(topk.inputs) > 1 else None
    assert scores is not None
    if not may_route(topk):
        _refuse(topk, "topk-not-a-router", _fate(chosen_indices(topk)))
    if scores.dtype is not None and not scores.dtype.is_floating_point():
        _refuse(topk, "topk-not-a-router", f"it ranks {scores.dtype}, as a sort of indices does")
    axis = ranked_axis(topk)
    ranked, last = dim(scores, axis), dim(scores, -1)
    experts = next((n for n in dict.fromkeys((ranked, last)) if n is not None and _routes(topk, n)), None)
    if experts is None:
        _refuse_unrouted(topk, scores, ranked)
    if not is_last_axis(axis, scores):
        _refuse(
            topk,
            "topk-form",
            f"axis {axis} is not the last one",
            "Export the router with the experts on the last axis.",
        )
    if integer(topk, "largest", 1) != 1:
        _refuse(topk, "topk-form", "it takes the smallest", "Export the router with a TopK of the largest scores.")
    if integer(topk, "select_last_index", 0) != 0:
        _refuse(topk, "topk-form", "of equal scores it takes the last", "Export it with select_last_index = 0.")
    if scores.dtype not in FLOATS:
        _refuse(
            topk,
            "topk-form",
            f"its input is {scores.dtype}, expected float32, float16 or bfloat16",
            "Export the router in one of these types.",
        )
    chosen = chosen_count(topk)
    if chosen is None or not 1 <= chosen <= experts:
        _refuse(
            topk,
            "topk-form",
            f"k is not a constant from 1 to {experts}: {_told(k)}",
            "Export with a fixed number of experts per token.",
        )
    return experts


def _refuse_unrouted(topk: ir.Node, scores: ir.Value, ranked: int | None) -> NoReturn:
    """Refuse a choice whose indices are not seen to select among the `ranked` elements of its axis as experts."""
    axis = ranked_axis(topk)
    experts = _experts_on_another_axis(scores, axis)
    if experts is not None and _feeds_experts(topk, experts):
        _refuse(
            topk,
            "topk-form",
            f"each of {experts} experts chooses its tokens: axis {axis} of '{scores.name}' are the tokens",
            "Nothing: a FusedRouter chooses experts for each token.",
        )
    if ranked is not None:
        stack = _stack_from_outside(topk, ranked)
        if stack is not None:
            _refuse(topk, "weights-as-inputs", f"its indices gather from '{stack.name}', an input with a default")
        _refuse(topk, "topk-not-a-router", f"its indices do not select among {ranked} expert weight matrices")
    if experts == 1:
        _refuse(topk, "topk-not-a-router", f"axis {axis} of '{scores.name}' are the tokens, each with one score")
    _refuse(
        topk,
        "expert-count-unknown",
        f"{'the last axis' if is_last_axis(axis, scores) else f'axis {axis}'} of its input '{scores.name}' "
        "has no fixed length",
        f"Export with a fixed number of experts, or give '{scores.name}' its shape in the file.",
    )


def _stack_from_outside(topk: ir.Node, experts: int) -> ir.Value | None:
    """The stack of matrices that the indices gather from, where a caller of the model may replace it."""
    for node, position, _ in _readers_of_indices(chosen_indices(topk)):
        data = node.inputs[0] if is_op(node, "Gather", "GatherND") and position == 1 else None
        if data is not None and dim(data, 0) == experts and (rank(data) or 0) >= 3:
            source = through(data, _PREPARES_WEIGHTS)
            if source.is_initializer() and source.is_graph_input():
                return source
    return None


def _experts_on_another_axis(scores: ir.Value, axis: int) -> int | None:
    """Their number, where a linear layer made scores (tokens, experts) and the axis of the tokens is ranked."""
    if is_last_axis(axis, scores):
        source = through(scores, _SCORES)
        gather = producer(source, "Gather")
        if (
            gather is not None and _column(gather) is not None and rank(gather.inputs[1]) == 0
        ):  # one column, as x[..., 0]
            width = dim(gather.inputs[0], -1)
            return 1 if width is not None and _comes_from_linear_layer(gather.inputs[0], width) else None
        transpose = producer(source, "Transpose")
        if transpose is None and dim(source, -1) != 1:
            return None
        source = source if transpose is None else transpose.inputs[0] or source
    else:
        source = scores
    experts = dim(source, -1)
    return experts if experts is not None and _comes_from_linear_layer(source, experts) else None


def _feeds_experts(topk: ir.Node, experts: int) -> bool:
    """Whether the indices gather rows that meet a stack of experts."""
    return any(
        is_op(node, "Gather", "GatherND") and position == 1 and _reaches(node.outputs[0], experts)
        for node, position, _ in _readers_of_indices(chosen_indices(topk))
    )


def may_route(choice: ir.Node) -> bool:
    """Whether anything reads the indices as those of a router are read; needs neither types nor shapes."""
    return any(is_op(node, *_BY_INDEX) or node.domain for node, _, _ in _readers_of_indices(chosen_indices(choice)))


def _fate(indices: ir.Value, most: int = 3) -> str:
    """Where indices go that `may_route` knows no use of."""
    goals: list[str] = []
    queue = [indices]
    for value in queue:
        if value.is_graph_output():
            goals.append(f"output '{value.name}'")
        for node in consumers(value):
            if is_op(node, *_MOVES_INDICES):
                queue.extend(output for output in node.outputs if output not in queue)
            else:
                goals.append(label(node))
        if len(goals) > most or len(queue) > _LOOK_AHEAD:
            break
    if not goals:
        return "nothing reads its indices"
    return f"its indices go to {listed(goals, most)}, where they tell no experts apart"


def _refuse(topk: ir.Node, slug: str, sentence: str, remedy: str = "") -> NoReturn:
    raise Refusal(f"{label(topk)}: {sentence}", slug, remedy=remedy)


def _told(k: ir.Value | None) -> str:
    """What k is, that is no constant or none of the right size."""
    if k is None:
        return "it is an attribute, as before operator set 10"
    if (array := constant(k)) is not None:
        return f"it is {array.tolist()}"
    made_by = k.producer()
    return f"it is computed by {label(made_by)}" if made_by is not None else f"it is the input '{k.name}' of the model"


def _routes(topk: ir.Node, experts: int) -> bool:
    weak = False
    compared: set[int] = set()
    for node, position, limited in _readers_of_indices(chosen_indices(topk)):
        if is_op(node, "Gather", "GatherND") and position == 1:
            if _gathers_experts(node, experts, limited=limited):
                return True
        elif is_op(node, "ScatterElements") and position == 1 and dim(node.inputs[0], -1) == experts:
            if rank(node.inputs[0]) == 1:
                weak = True  # histogram of the choices
            elif _reaches(node.outputs[0], experts):
                return True
            weak = weak or _scales_all_experts(node.outputs[0], experts)
        elif is_op(node, "OneHot") and position == 0:
            # One more where masked choices get a class of their own. Behind it there may be a branch for each expert.
            depth = scalar(node.inputs[1])
            weak = weak or (depth in (experts, experts + 1) and _reaches(node.outputs[0], None, _LOOK_AHEAD * experts))
        elif is_op(node, "Equal"):
            others = constant(node.inputs[1 - position], limit=experts)
            if others is not None and others.dtype.kind in "iu" and _reaches(node.outputs[0], None):
                compared.update(int(x) for x in others.reshape(-1))
        elif is_op(node, "TopK") and position == 0 and rank(node.inputs[0]) == 1:
            weak = True  # a sort of all choices by expert
        elif node.domain and any(_is_expert_stack(value, experts) for value in node.inputs):
            return True  # an operator of the experts that we do not know
    weak = weak or compared >= set(range(experts))
    return weak and _comes_from_linear_layer(topk.inputs[0], experts)


def _readers_of_indices(indices: ir.Value) -> Iterator[tuple[ir.Node, int, bool]]:
    """The nodes that read the indices behind any reshaping of them.

    With the position of the input, and whether some indices may have been given up for others.
    """
    queue, seen = deque([(indices, False)]), {indices}
    while queue and len(seen) <= _LOOK_AHEAD:
        value, limited = queue.popleft()
        for node, position in value.uses():
            if is_op(node, *_MOVES_INDICES):
                fresh = [output for output in node.outputs if output not in seen]
                seen.update(fresh)
                queue.extend((output, limited or is_op(node, *_LIMITS_INDICES)) for output in fresh)
            else:
                yield node, position, limited


def _gathers_experts(node: ir.Node, experts: int, *, limited: bool) -> bool:
    """Whether it gathers matrices of as many experts as are chosen among, or of fewer where the indices are limited."""
    data = node.inputs[0]
    stacked = dim(data, 0) or 0 if limited else experts
    first_axis = integer(node, "axis", 0) == 0 and integer(node, "batch_dims", 0) == 0
    return first_axis and 1 < stacked <= experts and _is_expert_stack(data, stacked) and _reaches(node.outputs[0], None)


def _is_expert_stack(value: ir.Value | None, experts: int) -> bool:
    """Whether the value is a constant (E, rows, columns, ...), perhaps transposed or dequantised in the graph."""
    if value is None or dim(value, 0) != experts or (rank(value) or 0) < 3:
        return False
    source = through(value, _PREPARES_WEIGHTS)
    return (source.is_initializer() and not source.is_graph_input()) or producer(source, "Constant") is not None


def _reaches(value: ir.Value, experts: int | None, most: int = _LOOK_AHEAD) -> bool:
    """Whether the value soon meets a matrix product: any (or a product of values), or one with a stack of experts."""
    queue, seen = deque([value]), {value}
    while queue and len(seen) <= most:
        current = queue.popleft()
        for node, position in current.uses():
            if node.op_type in PRODUCTS or (experts is None and is_op(node, "Mul")):
                if experts is None or _is_expert_stack(node.inputs[1 - position], experts):
                    return True
                continue
            if is_op(node, "TopK", "Shape") or is_router(node):
                continue
            fresh = [output for output in node.outputs if output not in seen]
            seen.update(fresh)
            queue.extend(fresh)
    return False


def _scales_all_experts(rows: ir.Value, experts: int) -> bool:
    """Whether rows over all experts weigh their results: whole, or taken apart into one column per expert."""
    columns: set[int] = set()
    queue, seen = deque([rows]), {rows}
    while queue and len(seen) <= _LOOK_AHEAD:
        current = queue.popleft()
        for node, position in current.uses():
            if node.op_type in PRODUCTS or is_op(node, "Mul"):
                others = [value for place, value in enumerate(node.inputs) if place != position]
                if any(_holds_all_experts(value, experts) for value in others):
                    return True
            elif is_op(node, "Slice", "Gather") and position == 0:
                column = _column(node)
                if column is not None and _reaches(node.outputs[0], None):
                    columns.add(column)
            elif is_op(node, *_SCORES, "Transpose"):
                fresh = [output for output in node.outputs if output not in seen]
                seen.update(fresh)
                queue.extend(fresh)
    return columns >= set(range(experts))


def _column(node: ir.Node) -> int | None:
    """The one index of the last axis that a Slice or a Gather takes, if that is what it does."""
    data = node.inputs[0]
    if node.op_type == "Gather":
        index = scalar(node.inputs[1])
        return None if index is None or data is None or not is_last_axis(integer(node, "axis", 0), data) else int(index)
    starts, ends, over = (integers(value) for value in (*node.inputs, None, None, None)[1:4])
    if data is None or starts is None or ends is None or over is None or len(over) != 1:
        return None
    return starts[0] if is_last_axis(over[0], data) and dim(node.outputs[0], -1) == 1 else None


def _holds_all_experts(value: ir.Value | None, experts: int) -> bool:
    """Whether a product with a stack of experts made the value, or as many results as experts are joined in it."""
    queue: deque[ir.Value | None] = deque([value])
    for _ in range(_LOOK_AHEAD):
        if not queue:
            break
        current = queue.popleft()
        node = None if current is None else current.producer()
        if node is None:
            continue
        if node.op_type in PRODUCTS:
            if any(_is_expert_stack(operand, experts) for operand in node.inputs):
                return True
        elif is_op(node, "Concat") and len(node.inputs) == experts:
            return True
        elif not is_op(node, "Shape"):
            queue.extend(node.inputs)
    return False


def _comes_from_linear_layer(scores: ir.Value | None, experts: int) -> bool:
    """Whether a matrix product of that width, or a wider one that was cut, made the scores by element-wise steps."""
    queue, seen = deque([(scores, False)]), {scores}
    while queue and len(seen) <= _LOOK_AHEAD:
        current, cut = queue.popleft()
        node = None if current is None else current.producer()
        if node is not None and is_op(node, "MatMul", "Gemm"):
            width = dim(node.outputs[0], -1) or 0
            if width == experts or (cut and width > experts):
                return True
        elif node is not None and is_op(node, "Slice", *_SCORES):
            fresh = [value for value in node.inputs if value not in seen]
            seen.update(fresh)
            queue.extend((value, cut or node.op_type == "Slice") for value in fresh)
    return False
