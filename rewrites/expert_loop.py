"""Find exports that hold the loop over the experts only as far as their example input went.

A tracing exporter unrolls a loop over the experts that were hit, and writes down how many, or which, the example input
hit. Such a model is right for inputs that hit as many, or the same ones; for others it fails, or is silently wrong.
Three forms are recognised behind a choice among E experts:

- The list of the experts hit (NonZero of a histogram of the choices) is split into a fixed number of steps.
- The rows, sorted by expert, are split into pieces of fixed sizes, one for each expert's matrix.
- The indices, or their one-hot rows, are compared with some of the experts, each of which runs, but not with all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.graphs.operators import PRODUCTS, RESHAPING
from ort_moe.rewrites.choice import CHOICES, chosen_indices
from ort_moe.rewrites.router_node import Router, is_router
from ort_moe.rewrites.values import (
    FLOATS,
    constant,
    consumers,
    dim,
    integer,
    integers,
    is_op,
    label,
    listed,
    rank,
    scalar,
)

_MOVES_INDICES = RESHAPING | {"Cast", "Clip", "Concat", "Max", "Min", "Where"}
_TO_HISTOGRAM = _MOVES_INDICES | {
    "Transpose", "OneHot", "ReduceSum", "ReduceMax", "Greater", "GreaterOrEqual", "Not", "Sign",
}  # fmt: skip
_TO_STEPS = RESHAPING | {"Cast", "Transpose"}
_TO_ROWS = RESHAPING | {"Cast", "Div", "Floor", "Mod", "Sub"}
"""From a place among the sorted choices to the token that made the choice: the place divided by K."""
_LOOK_AHEAD = 64
_COMPUTED_SIZES = "Export with torch.onnx.export(..., dynamo=True), which computes these sizes."


@dataclass(frozen=True)
class OwnLoop:
    """A loop over the experts that holds the export's example input alone.

    Attributes:
        node: The node that runs the experts, or the choice before them.
        sentence: What was written down.
        remedy: What the user can do about it; empty where the reason says it.
    """

    node: ir.Node
    sentence: str
    remedy: str = ""


def examples_own_loop(choice: ir.Node) -> OwnLoop | None:
    """The loop over the experts behind a FusedRouter, TopK or ArgMax, if it holds the example input alone."""
    if is_router(choice):
        router = Router.read(choice)
        indices, experts = router.indices, router.experts
    elif is_op(choice, *CHOICES) and choice.inputs[0] is not None and choice.inputs[0].dtype in FLOATS:
        indices, experts = chosen_indices(choice), dim(choice.inputs[0], -1)
    else:
        return None
    if experts is None or experts < 2:
        return None
    return (
        _fixed_number_of_hits(choice, indices, experts)
        or _fixed_numbers_of_rows(choice, indices, experts)
        or _some_experts_alone(choice, indices, experts)
    )


def _fixed_number_of_hits(choice: ir.Node, indices: ir.Value, experts: int) -> OwnLoop | None:
    for node, _ in _readers(indices, _TO_HISTOGRAM):
        # Of one dimension: one entry for each expert hit. With more there is one for each choice, a fixed number.
        if not is_op(node, "NonZero") or rank(node.inputs[0]) != 1 or (dim(node.inputs[0], 0) or 0) < experts:
            continue
        for step, value in _readers(node.outputs[0], _TO_STEPS):
            if is_op(step, "Split") and dim(value, integer(step, "axis", 0)) is None:
                count = "all" if len(step.outputs) >= experts else str(len(step.outputs))
                sentence = (
                    f"{label(step)} runs {count} of the {experts} experts behind {label(choice)}, as many as the "
                    "export's example input chose; inputs that choose fewer or more fail"
                )
                return OwnLoop(step, sentence)
    return None


def _fixed_numbers_of_rows(choice: ir.Node, indices: ir.Value, experts: int) -> OwnLoop | None:
    for sort, _ in _readers(indices, _MOVES_INDICES):
        for gather, places in _readers(sort.outputs[1], _TO_ROWS) if is_op(sort, "TopK") else ():
            if not is_op(gather, "Gather") or gather.inputs[1] is not places:
                continue
            for split, _ in _readers(gather.outputs[0], RESHAPING | {"Cast"}):
                sizes = _sizes(split)
                if sizes is None or not any(_meets_a_matrix(piece) for piece in split.outputs):
                    continue
                sentence = (
                    f"{label(split)} gives the {experts} experts behind {label(choice)} {listed(sizes)} rows, "
                    "as many as the export's example input chose each for; "
                    "inputs that choose otherwise fail or meet other experts"
                )
                return OwnLoop(split, sentence, _COMPUTED_SIZES)
    return None


def _sizes(split: ir.Node) -> list[int] | None:
    """The fixed sizes of the pieces, of a Split of rows into some."""
    if not is_op(split, "Split") or integer(split, "axis", 0) != 0 or len(split.outputs) < 2:
        return None
    return integers(split.inputs[1]) if len(split.inputs) > 1 else None


def _meets_a_matrix(rows: ir.Value) -> bool:
    return any(
        node.op_type in PRODUCTS and other.is_initializer()
        for node, value in _readers(rows, RESHAPING | {"Cast"})
        for other in node.inputs
        if other is not None and other is not value
    )


def _some_experts_alone(choice: ir.Node, indices: ir.Value, experts: int) -> OwnLoop | None:
    dispatched: set[int] = set()
    weighted: set[int] = set()
    for expert, branch in _branches(indices, experts):
        if _selects_rows(branch):
            dispatched.add(expert)
        elif _weighs_a_product(branch):
            weighted.add(expert)
    if _are_gathered(indices):
        return None  # the experts, that is: those that are compared have a path of their own beside them
    run = dispatched | weighted
    # One comparison that masks a product may as well tell a padding expert from the others.
    if not 0 < len(run) < experts or (not dispatched and len(weighted) < 2):
        return None
    sentence = (
        f"of the {experts} experts behind {label(choice)} run {listed(sorted(run))} alone, those that the export's "
        "example input chose; what other experts would add for other inputs is missing"
    )
    return OwnLoop(choice, sentence)


def _are_gathered(indices: ir.Value) -> bool:
    """Whether the indices pick matrices from a stack, or an operator of another domain takes them."""
    return any(
        node.domain
        or (is_op(node, "Gather", "GatherND") and node.inputs[1] is value and (rank(node.inputs[0]) or 0) >= 3)
        for node, value in _readers(indices, _MOVES_INDICES | {"Tile", "Expand"})
    )


def _branches(indices: ir.Value, experts: int) -> Iterator[tuple[int, ir.Value]]:
    """Each expert that the indices or their one-hot rows are compared with, and the result."""
    for node, value in _readers(indices, _MOVES_INDICES):
        if is_op(node, "Equal"):
            expert = scalar(node.inputs[1 if node.inputs[0] is value else 0])
            if expert is not None and 0 <= expert < experts:
                yield int(expert), node.outputs[0]
        elif is_op(node, "OneHot") and value is node.inputs[0]:
            yield from _rows(node, experts)


def _rows(one_hot: ir.Node, experts: int) -> Iterator[tuple[int, ir.Value]]:
    """Each expert whose row is taken from a one-hot tensor that is at most cast or transposed in between."""
    known, depth = rank(one_hot.outputs[0]), scalar(one_hot.inputs[1])
    if known is None or depth is None or depth < experts:
        return
    axis = integer(one_hot, "axis", -1) % known
    queue = deque([(one_hot.outputs[0], axis)])
    while queue:
        value, axis = queue.popleft()
        for node, position in value.uses():
            if is_op(node, "Cast", "Identity"):
                queue.append((node.outputs[0], axis))
            elif is_op(node, "Transpose"):
                order = node.attributes.get_ints("perm")
                queue.append((node.outputs[0], known - 1 - axis if order is None else list(order).index(axis)))
            elif is_op(node, "Gather") and position == 0 and integer(node, "axis", 0) % known == axis:
                taken = constant(node.inputs[1], limit=1)
                if taken is not None and taken.size == 1 and int(taken.reshape(-1)[0]) < experts:
                    yield int(taken.reshape(-1)[0]) % int(depth), node.outputs[0]


def _selects_rows(branch: ir.Value) -> bool:
    """Whether the places where it is true select rows that meet a product."""
    for node, _ in _readers(branch, RESHAPING | {"Cast", "Not"}):
        if is_op(node, "NonZero"):
            moves = RESHAPING | {"Cast", "Transpose", "Split", "Slice", "Gather"}
            for gather, rows in _readers(node.outputs[0], moves):
                if is_op(gather, "Gather", "GatherND") and gather.inputs[1] is rows:
                    users = [user for user, _ in _readers(gather.outputs[0], RESHAPING)]
                    if any(user.op_type in PRODUCTS for user in users):
                        return True
    return False


def _weighs_a_product(branch: ir.Value) -> bool:
    """Whether it masks the weights of what one expert made, as in Mul(MatMul(x, w), ReduceSum(Mul(mask, weights)))."""
    return any(
        is_op(node, "Mul") and any(_is_product(other) for other in node.inputs if other is not value)
        for node, value in _readers(branch, RESHAPING | {"Cast", "ReduceSum", "ReduceMax", "Mul", "Where"})
    )


def _is_product(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    while node is not None and is_op(node, *RESHAPING, "Cast", "Add"):
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    return node is not None and node.op_type in PRODUCTS


def _readers(value: ir.Value, moves: Collection[str]) -> Iterator[tuple[ir.Node, ir.Value]]:
    """The nodes that read the value, directly or behind any chain of the ops in `moves`, each with what it reads."""
    queue, seen = deque([value]), {value}
    while queue and len(seen) <= _LOOK_AHEAD:
        current = queue.popleft()
        for node in consumers(current):
            yield node, current
            if is_op(node, *moves):
                fresh = [output for output in node.outputs if output not in seen]
                seen.update(fresh)
                queue.extend(fresh)
