"""Einsum of experts' matrices -> the MatMul, or the product and sum, that the forms of experts know.

    "ti,taoi->tao"  rows of tokens, or "tao,taio->tai" of choices, with matrices gathered for each choice
    "th,ehn->etn"   rows of all tokens, or "eth,ehn->etn" of each expert, with all matrices
    "tai,ta->ti"    the sum over a token's choices, weighed; "eti,te->ti": over all experts

The letters are any; only Einsums of matrices that are constants, or gathered from them, and of what those make, are
spelled so.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.experts.layer import gathered, through_transposes
from ort_moe.rewrites.experts.node import Writer
from ort_moe.rewrites.names import Names, take_over
from ort_moe.rewrites.values import is_op, operands, producer, rank, through


@dataclass(frozen=True)
class _Terms:
    """An equation of two operands, with the one that the forms call rows in front."""

    rows: ir.Value
    other: ir.Value
    a: str
    b: str
    out: str


def spell_einsums(model: ir.Model) -> int:
    """Spell every Einsum of experts in place; how many."""
    nodes = [node for node in model.graph.all_nodes() if is_op(node, "Einsum") and len(node.inputs) == 2]
    names, spelled = Names(model.graph) if nodes else None, 0
    for node in nodes:
        graph = node.graph
        if names is None or not isinstance(graph, ir.Graph) or node.outputs[0].dtype is None:
            continue
        result = _spelled(node, Writer(graph, node, names))
        if result is None:
            continue
        old = node.outputs[0]
        result.type, result.shape = old.type, old.shape or result.shape
        take_over(old, result)
        graph.remove(node, safe=True)
        spelled += 1
    return spelled


def _spelled(node: ir.Node, writer: Writer) -> ir.Value | None:
    for terms in _orders(node):
        result = _product(terms, writer) if _are_matrices(terms.other) else _sum(terms, writer)
        if result is not None:
            return result
    return None


def _orders(node: ir.Node) -> list[_Terms]:
    """The equation, read from either operand."""
    given, arrow, out = (node.attributes.get_string("equation") or "").replace(" ", "").partition("->")
    letters = given.split(",")
    left, right = operands(node)
    if not arrow or len(letters) != 2 or not all(each.isalpha() and len(set(each)) == len(each) for each in letters):
        return []
    if (rank(left), rank(right)) != (len(letters[0]), len(letters[1])):
        return []
    a, b = letters
    return [_Terms(left, right, a, b, out), _Terms(right, left, b, a, out)]


def _are_matrices(value: ir.Value) -> bool:
    """Whether a value is a matrix for each expert, or for each choice."""
    source, _ = through_transposes(value)
    if source is None:
        return False
    gather = gathered(source)
    stack = source if gather is None else gather.inputs[0]
    stack, _ = through_transposes(stack)
    return rank(stack) == 3 and stack is not None and stack.producer() is None and stack.const_value is not None


def _product(terms: _Terms, writer: Writer) -> ir.Value | None:
    """MatMul of rows (..., c) with matrices (..., n, c) or (..., c, n)."""
    a, b, out = terms.a, terms.b, terms.out
    if len(b) < 3 or not a:
        return None
    batch, c = b[:-2], a[-1]
    n = b[-1] if b[-2] == c else b[-2]
    if c not in b[-2:] or c in out or n in a:
        return None
    turned = b[-1] == c  # the matrices lie as (n, c)
    dtype = terms.rows.dtype
    matrices = terms.other
    if out == batch + n and set(a[:-1]) <= set(batch) and [x for x in batch if x in a] == list(a[:-1]):
        missing = [place for place, letter in enumerate(batch) if letter not in a]
        # A column to the right of (n, c), a row to the left of (c, n).
        axes = [*missing, len(batch) + 1 if turned else len(batch)]
        rows = writer.insert(
            "Unsqueeze", [terms.rows, writer.integers(axes, "axes")], {}, dtype, _longer(terms.rows, axes)
        )
        pair = [matrices, rows] if turned else [rows, matrices]
        made = writer.insert("MatMul", pair, {}, dtype, _made(matrices, turned=turned))
        last = len(batch) + 1 if turned else len(batch)
        return writer.insert("Squeeze", [made, writer.integers([last], "axes")], {}, dtype, None)
    if len(batch) == 1 and len(out) == 3 and out[0] == batch and out[2] == n and a in (out[1] + c, batch + out[1] + c):
        if turned:
            shape = (
                None if matrices.shape is None else ir.Shape([matrices.shape[0], matrices.shape[2], matrices.shape[1]])
            )
            matrices = writer.turned(matrices, shape)
        return writer.insert("MatMul", [terms.rows, matrices], {}, dtype, None)
    return None


def _sum(terms: _Terms, writer: Writer) -> ir.Value | None:
    """ReduceSum(rows * weights): rows "tai" and weights "ta", or "eti" and "te" or "et"."""
    a, b, out = terms.a, terms.b, terms.out
    if len(a) != 3 or len(b) != 2 or len(out) != 2 or set(b) != set(a[:2]) or out[1] != a[2] or out[0] not in a[:2]:
        return None
    if not _made_by_product(terms.rows):
        return None
    weights, dtype = terms.other, terms.rows.dtype
    if b != a[:2]:
        shape = None if weights.shape is None else ir.Shape([weights.shape[1], weights.shape[0]])
        weights = writer.turned(weights, shape)
    axes = writer.integers([2], "axes")
    column = writer.insert("Unsqueeze", [weights, axes], {}, dtype, _longer(weights, [2]))
    weighted = writer.insert("Mul", [terms.rows, column], {}, dtype, terms.rows.shape)
    over = writer.integers([1 - a.index(out[0])], "axes")
    return writer.insert("ReduceSum", [weighted, over], {"keepdims": 0}, dtype, None)


def _made_by_product(value: ir.Value) -> bool:
    """Whether a product with experts' matrices makes a value, perhaps with a bias."""
    node = producer(through(value, RESHAPING | {"Cast"}), "MatMul", "Add")
    if node is not None and node.op_type == "Add":
        return any(_made_by_product(each) for each in operands(node))
    return node is not None and any(_are_matrices(each) for each in operands(node))


def _longer(value: ir.Value, axes: list[int]) -> ir.Shape | None:
    """The value's shape with axes of length 1 at these places of the result."""
    if value.shape is None:
        return None
    lengths: list[int | ir.SymbolicDim] = list(value.shape)
    for axis in axes:
        lengths.insert(axis, 1)
    return ir.Shape(lengths)


def _made(matrices: ir.Value, *, turned: bool) -> ir.Shape | None:
    """Shape of the product of matrices with a column, or of a row with them."""
    if matrices.shape is None:
        return None
    (*batch, first, second) = matrices.shape
    return ir.Shape([*batch, first, 1] if turned else [*batch, 1, second])
