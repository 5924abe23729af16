"""Each expert on the tokens that chose it, found by NonZero, and added to their rows.

y[tokens_e] += w[tokens_e, slots_e] * (W2_e @ act(W1_e @ x[tokens_e])), (slots_e, tokens_e) = NonZero(ids == e)

How a loop over all experts leaves exporters, with lengths that depend on the data, so that no CUDA graph can be
captured of it. A loop over the experts that the example input hit is another model, and stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.experts.block import ExpertsBlock
from ort_moe.rewrites.experts.single import Term, chosen_by, read_terms
from ort_moe.rewrites.experts.tokens import matrix, named, require_as_many
from ort_moe.rewrites.experts.two_layers import weighted
from ort_moe.rewrites.fixed_lengths import cuts, fixed_integers
from ort_moe.rewrites.rule import Mismatch, Refusal, RuleInfo
from ort_moe.rewrites.values import (
    constant,
    consumers,
    dim,
    filling,
    integer,
    is_op,
    operands,
    producer,
    rank,
    scalar,
    through,
)

RULE = RuleInfo(
    "experts-dispatched",
    "y[t_e] += w[t_e, k_e] * (W2_e @ act(W1_e @ x[t_e])), k_e, t_e = NonZero(ids == e) -> FusedExperts(x, w, ids, ...)",
    "Where each expert that may be chosen runs on the tokens that chose it, with matrices of its own.",
)

ROOT = "ScatterND"

_VIEWS = RESHAPING | {"Cast"}


@dataclass(frozen=True)
class _Places:
    """Where a choice is one expert.

    Attributes:
        node: The NonZero.
        ids: The choices (T, K).
        expert: The expert.
        token: Which row of the NonZero has the tokens; the other has the places among their choices.
    """

    node: ir.Node
    ids: ir.Value
    expert: int
    token: int


def read(node: ir.Node) -> ExpertsBlock:
    """Reads the experts whose sum ends here.

    Raises:
        Mismatch: None do, or the sum goes on.
        Refusal: They are nothing that FusedExperts computes.
    """
    y = node.outputs[0]
    last = _added(node)
    if last is None:
        raise Mismatch
    ids = chosen_by(last.ids)
    if any(_added(user, ids) is not None for user in consumers(y) if user.inputs[0] is y):
        raise Mismatch
    terms, base = [last], operands(node)[0]
    while (before := base.producer()) is not None and (term := _added(before, ids)) is not None:
        if len(list(consumers(base))) > 1 or base.is_graph_output():
            raise Refusal(f"the sum {named(base)} of some experts is also read by others", "read-by-others")
        terms.append(term)
        base = operands(before)[0]
    block = read_terms(terms, y, None if filling(base) == 0.0 else base)
    require_tokens(base, block.x)
    return block


def require_tokens(base: ir.Value, x: ir.Value) -> None:
    """Refuse to add experts to rows that may be others than the tokens'.

    Raises:
        Refusal: They may.
    """
    if _lengths(base) != _lengths_of_rows(x) or not _lengths(base):
        require_as_many(base, x, "the rows to which the experts are added,")


def scattered(value: ir.Value, choice: ir.Value | None = None) -> Term | None:
    """What one expert adds, as rows of zeros for all tokens into which its own are put."""
    node = producer(value, "ScatterElements", "ScatterND")
    if node is None or filling(node.inputs[0]) != 0.0:
        return None
    data, places, rows = operands(node)
    reduction = node.attributes.get_string("reduction", "none")
    if reduction not in ("none", "add"):
        return None
    if node.op_type == "ScatterElements":
        if integer(node, "axis", 0) not in (0, -(rank(data) or 0)) or rank(data) != 2:
            return None
        if not _spreads_columns(places) or not _spreads_nothing(rows):
            return None
        places, rows = _unspread(places), _unspread(rows)
    if dim(places, -1) != 1:
        return None
    return _term(places, rows, choice, is_once=reduction == "none")


def _added(node: ir.Node, choice: ir.Value | None = None) -> Term | None:
    """What one expert adds to rows for all tokens, one after the other."""
    if not is_op(node, "ScatterND") or node.attributes.get_string("reduction", "none") != "add":
        return None
    _, places, rows = operands(node)
    return _term(places, rows, choice, is_once=False) if dim(places, -1) == 1 else None


def _term(places: ir.Value, rows: ir.Value, choice: ir.Value | None, *, is_once: bool) -> Term | None:
    found = _coordinate(places)
    if found is None or found[1] != found[0].token or choice not in (None, chosen_by(found[0].ids)):
        return None
    where = found[0]
    made, column = weighted(through(rows, _VIEWS))
    weights = None if column is None else _weights(column, where)
    if weights is None or rank(where.ids) != 2:
        return None

    def tokens(value: ir.Value, width: int) -> ir.Value:
        """The tokens' rows, of which a value holds those that chose the expert."""
        x = _rows(value, where, width)
        if x is None:
            raise Refusal(
                f"{named(value)} are not the rows of the tokens that chose expert {where.expert}", "experts-form"
            )
        return x

    return Term(where.expert, made, where.ids, weights, tokens, is_once)


def _coordinate(value: ir.Value) -> tuple[_Places, int] | None:
    """Which row of which NonZero a list of places is, perhaps behind views."""
    value = through(value, _VIEWS)
    node = producer(value, "Slice", "Split", "Gather")
    if node is None or not node.inputs or node.inputs[0] is None:
        return None
    source, row, axis = through(node.inputs[0], {"Cast", "Identity"}), one_of_two_axes(node, value), 0
    if (turned := producer(source, "Transpose")) is not None and turned.inputs[0] is not None:
        if list(turned.attributes.get_ints("perm") or (1, 0)) != [1, 0]:
            return None
        source, axis = turned.inputs[0], 1
    nonzero = producer(source, "NonZero")
    if nonzero is None or row is None or row[1] != axis or row[0] > 1 or rank(nonzero.inputs[0]) != 2:
        return None
    places = _places(nonzero)
    return None if places is None else (places, row[0])


def one_of_two_axes(node: ir.Node, value: ir.Value) -> tuple[int, int] | None:
    """Of a Slice, Gather or Split that takes one row or column of a matrix: its number, and the axis."""
    if node.op_type == "Split":
        axis = integer(node, "axis", 0) % 2
        lengths = {dim(output, axis) for output in node.outputs}
        return (node.outputs.index(value), axis) if lengths == {1} else None
    if node.op_type == "Gather":
        places = fixed_integers(node.inputs[1])
        is_one = places is not None and len(places) == 1 and places[0] >= 0
        return (places[0], integer(node, "axis", 0) % 2) if places is not None and is_one else None
    known = cuts(node)
    if known is None or len(known) != 1:
        return None
    ((start, end, axis, step),) = known
    length = dim(node.inputs[0], axis)
    is_one = start >= 0 and step == 1 and (end if length is None else min(end, length)) == start + 1
    return (start, axis) if is_one else None


def _places(nonzero: ir.Node) -> _Places | None:
    """What a NonZero finds: a mask of one expert over the choices, or over the choices turned."""
    mask = through(operands(nonzero)[0], {"Cast", "Identity"})
    token = 0
    if (turned := producer(mask, "Transpose")) is not None and rank(mask) == 2:
        mask, token = through(operands(turned)[0], {"Cast", "Identity"}), 1
    if (equal := producer(mask, "Equal")) is not None:
        for ids, number in (operands(equal), operands(equal)[::-1]):
            expert = scalar(number)
            if expert is not None and expert.is_integer() and rank(number) in (0, 1) and constant(ids) is None:
                return _Places(nonzero, ids, int(expert), token)
        return None
    pick = producer(through(mask, RESHAPING), "Gather")
    expert = None if pick is None else scalar(pick.inputs[1])
    if pick is None or expert is None or token or rank(pick.inputs[0]) != 3:
        return None
    axis, table, order = integer(pick, "axis", 0) % 3, through(operands(pick)[0], {"Cast", "Identity"}), [0, 1, 2]
    if (turned := producer(table, "Transpose")) is not None:
        order = list(turned.attributes.get_ints("perm") or (2, 1, 0))
        table = through(operands(turned)[0], {"Cast", "Identity"})
    read = _table(table)
    if read is None or order[axis] != 2 or not 0 <= expert < read[1]:
        return None
    return _Places(nonzero, read[0], int(expert), [each for each in order if each != 2].index(0))


def _table(value: ir.Value) -> tuple[ir.Value, int] | None:
    """The choices (T, K) of which a value (T, K, E) is the one-hot table, and E."""
    node = producer(value, "OneHot", "Equal")
    if node is None:
        return None
    if node.op_type == "OneHot":
        depth, values = scalar(node.inputs[1]), constant(node.inputs[2])
        is_plain = values is not None and values.reshape(-1).tolist() == [0, 1] and integer(node, "axis", -1) in (-1, 2)
        return (operands(node)[0], int(depth)) if is_plain and depth is not None else None
    for ids, numbers in (operands(node), operands(node)[::-1]):
        array = constant(numbers)
        if array is None or dim(ids, -1) != 1 or rank(ids) != 3 or not array.size or array.shape[-1] != array.size:
            continue
        if np.array_equal(array.reshape(-1), np.arange(array.size)):
            return matrix(ids, dim(ids, 1) or 0), array.size
    return None


def _weights(column: ir.Value, where: _Places) -> ir.Value | None:
    """The weights (T, K) of which a column holds those at the places."""
    node = producer(through(column, _VIEWS), "Gather", "GatherND")
    if node is None:
        return None
    data, indices = operands(node)
    source = through(data, RESHAPING)
    if rank(source) != 2 or (k := dim(source, 1)) is None:
        return None
    if node.op_type == "GatherND":
        pair = producer(through(indices, {"Cast"}), "Concat")
        if pair is None or integer(node, "batch_dims", 0) or len(pair.inputs) != 2 or rank(pair.outputs[0]) != 2:
            return None
        if rank(data) not in (2, 3):
            return None
        if (rank(data) == 3 and dim(data, 2) != 1) or dim(data, 1) != k or integer(pair, "axis", 0) % 2 != 1:
            return None
        token, slot = operands(pair)
    else:
        total = producer(through(indices, _VIEWS), "Add")
        if (
            total is None
            or integer(node, "axis", 0) != 0
            or any(dim(data, axis) != 1 for axis in range(1, rank(data) or 0))
        ):
            return None
        token, slot = operands(total)
        if producer(through(token, _VIEWS), "Mul") is None:
            token, slot = slot, token
        times = producer(through(token, _VIEWS), "Mul")
        if times is None:
            return None
        token, by = operands(times)
        if fixed_integers(by) != [k]:
            token, by = by, token
        if fixed_integers(by) != [k]:
            return None
    found = _coordinate(token), _coordinate(slot)
    is_there = all(each is not None and each[0] == where for each in found)
    return source if is_there and [each[1] for each in found if each] == [where.token, 1 - where.token] else None


def _rows(value: ir.Value, where: _Places, width: int) -> ir.Value | None:
    """The tokens' rows (T, D) of which a value holds those at the places, whichever axes of length 1 there are."""
    node = producer(_flat(value), "Gather", "GatherND")
    if node is None:
        return None
    data, indices = operands(node)
    if node.op_type == "GatherND" and (integer(node, "batch_dims", 0) or dim(indices, -1) != 1):
        return None
    axis, known = (0 if node.op_type == "GatherND" else integer(node, "axis", 0)), rank(data)
    if known is None or any(dim(data, each) != 1 for each in range(known - 1) if each != axis % known):
        return None
    found = _coordinate(indices)
    x = _flat(data, width)
    is_there = found is not None and found[0] == where and found[1] == where.token
    return x if is_there and rank(x) == 2 and dim(x, 1) == width else None


def _flat(value: ir.Value, width: int | None = None) -> ir.Value:
    """The value before views, and transposes that move axes of length 1 alone; or the first of rows of this width."""
    while (rank(value), dim(value, 1)) != (2, width) and (node := producer(value, "Transpose", *RESHAPING)) is not None:
        source = operands(node)[0]
        if node.op_type == "Transpose":
            order = node.attributes.get_ints("perm")
            kept = None if order is None else [axis for axis in order if dim(source, axis) != 1]
            if kept is None or kept != sorted(kept):
                break
        value = source
    return value


def _spreads_columns(places: ir.Value) -> bool:
    """Whether a column of places is repeated along the rows: Expand(places (n, 1), ...)."""
    node = producer(places, "Expand")
    return node is not None and dim(node.inputs[0], -1) == 1 and rank(node.inputs[0]) == 2


def _spreads_nothing(rows: ir.Value) -> bool:
    """Whether rows are as many as before an Expand, or one of them is repeated, which is put in the same place again.

    Expand(rows, Shape(the first row of others)), as exporters write index_add.
    """
    node = producer(rows, "Expand")
    if node is None:
        return True
    shape = producer(node.inputs[1], "Shape")
    cut = None if shape is None else producer(shape.inputs[0], "Slice")
    if cut is None or rank(node.inputs[0]) != 2 or dim(node.outputs[0], -1) != dim(node.inputs[0], -1):
        return False
    known = cuts(cut)
    rows_cut = None if known is None else [(start, end) for start, end, axis, _ in known if axis == 0]
    return rows_cut == [(0, 1)]


def _unspread(value: ir.Value) -> ir.Value:
    node = producer(value, "Expand")
    return value if node is None else operands(node)[0]


def _lengths(value: ir.Value) -> list[tuple[ir.Value, int]]:
    """The lengths whose product is the number of rows that a value was made with; none where they are not known."""
    node = producer(value, "ConstantOfShape", "Expand")
    shape = None if node is None else producer(operands(node)[-1], "Concat")
    if shape is None or len(shape.inputs) != 2:
        return []
    queue, found = [operands(shape)[0]], []
    while queue:
        each = through(queue.pop(), _VIEWS)
        product = producer(each, "Mul")
        if product is not None:
            queue += operands(product)
            continue
        pick = producer(each, "Gather")
        lengths = producer(each if pick is None else pick.inputs[0], "Shape")
        if lengths is None:
            return []
        place = integer(lengths, "start", 0) if pick is None else scalar(pick.inputs[1])
        if place is None or (pick is not None and lengths.attributes):
            return []
        if pick is None and lengths.attributes.get_int("end", 0) != int(place) + 1:
            return []
        found.append((operands(lengths)[0], int(place)))
    return sorted(found, key=lambda each: each[1])


def _lengths_of_rows(x: ir.Value) -> list[tuple[ir.Value, int]]:
    """The lengths whose product is the number of rows of a matrix, which is a view of them."""
    node = producer(x, "Reshape")
    source = None if node is None else node.inputs[0]
    if source is None or dim(source, -1) is None or dim(source, -1) != dim(x, -1) or (known := rank(source)) is None:
        return []
    return [(source, axis) for axis in range(known - 1)]


def shape_readers(users: Sequence[ir.Node]) -> list[ir.Node]:
    """Of the nodes that read a value, those that take no more than its shape."""
    return [
        user
        for user in users
        if is_op(user, "Shape")
        or (is_op(user, "Slice") and all(is_op(each, "Shape") for each in consumers(user.outputs[0])))
    ]
