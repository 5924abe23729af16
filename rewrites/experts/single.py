"""Experts one by one, each with matrices of its own: what they add up to, whichever rows each of them sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.rewrites.experts.block import ExpertsBlock
from ort_moe.rewrites.experts.layer import Layer, Stack, joined, read_vectors
from ort_moe.rewrites.experts.linear import read_linear
from ort_moe.rewrites.experts.sums import experts_type
from ort_moe.rewrites.experts.tokens import named, plain, require_as_many, require_choices, require_range
from ort_moe.rewrites.experts.two_layers import Product, read_two_layers
from ort_moe.rewrites.rule import Mismatch, Refusal
from ort_moe.rewrites.values import INDICES, dim, may_spread, rank, through_casts


@dataclass(frozen=True)
class Term:
    """What one expert adds.

    Attributes:
        expert: Its number.
        rows: What it returns, before it is weighed.
        ids: The choices that it is told by.
        weights: What weighs them.
        tokens: Finds the tokens' rows behind those that it is given.
        is_once: Whether a token that chooses it twice would count once.
    """

    expert: int
    rows: ir.Value
    ids: ir.Value
    weights: ir.Value
    tokens: Callable[[ir.Value, int], ir.Value]
    is_once: bool = False


def chosen_by(ids: ir.Value) -> ir.Value:
    """The choices (..., K) that indices are a view of, which float32 holds as they are."""
    return through_casts(ids, {*INDICES, ir.DataType.FLOAT}, RESHAPING)


def read_terms(found: Sequence[Term], y: ir.Value, residual: ir.Value | None) -> ExpertsBlock:
    """The block of experts that add up to a value.

    Args:
        found: What they add, of one choice.
        y: The value.
        residual: What else is added; None: nothing.

    Raises:
        Mismatch: They are no experts.
        Refusal: They are nothing that FusedExperts computes.
    """
    terms = sorted(found, key=lambda term: term.expert)
    first, ids = terms[0], chosen_by(terms[0].ids)
    if [term.expert for term in terms] != list(range(len(terms))) or len(terms) < 2:
        raise Refusal(f"{named(y)} adds up other experts than each of some once", "experts-form")
    dtype = experts_type(first.rows)
    layers = [read_two_layers(term.rows, dtype, _width(term.rows), _read_product, _read_bias) for term in terms]
    mix = plain(first.weights, dtype)
    for term in terms:
        if plain(term.weights, dtype) is not mix:
            raise Refusal(f"{named(term.rows)} is weighed by others than the first expert", "experts-form")
    x = first.tokens(layers[0].first.rows, layers[0].first.weights.depth)
    for term, each in zip(terms, layers, strict=True):
        same = all(term.tokens(product.rows, each.first.weights.depth) is x for product in each.products[:-1])
        if not same or each.attributes != layers[0].attributes:
            raise Refusal(f"{named(each.first.node.outputs[0])} is of another form than the first", "experts-form")
    k = dim(ids, -1)
    if k is None:
        raise Refusal(f"the number of choices in {named(ids)} is not fixed", "experts-form")
    require_choices(ids, mix, k)
    if any(dim(view, -1) != k for term in terms for view in (term.ids, term.weights)):
        raise Refusal(f"{named(first.rows)} is not weighed by all {k} choices of a token at once", "experts-form")
    require_range(ids, len(terms), distinct=any(term.is_once for term in terms))
    require_as_many(mix, ids, "the weights")
    require_as_many(x, ids, "the rows")
    if y.dtype != dtype:
        raise Refusal(f"the sum {named(y)} is {y.dtype}, not the experts' {dtype}", "experts-form")
    if residual is not None and (residual.dtype != dtype or may_spread(residual, y)):
        raise Refusal(f"{named(residual)}, to which the experts are added, is of another type or shape", "experts-form")
    if residual is not None:
        require_as_many(residual, x, "the rows to which the experts are added,")
    fc1, fc2 = _joined([each.fc1 for each in layers]), _joined([each.fc2 for each in layers])
    attributes = {**layers[0].attributes, "weight_on": "output"}
    return ExpertsBlock(y, x, mix, ids, fc1, fc2, attributes, residual)


def _width(rows: ir.Value) -> int:
    width = dim(rows, -1)
    if width is None:
        raise Mismatch
    return width


def _read_product(value: ir.Value) -> Product | None:
    """A linear layer of rows with one constant matrix."""
    linear = read_linear(value)
    return None if linear is None else Product(linear.weights, linear.node, linear.rows, bias=linear.bias)


def _read_bias(value: ir.Value, product: Product) -> Stack | None:
    """A constant vector, or one row."""
    del product
    return read_vectors([value]) if rank(value) == 1 or dim(value, 0) == 1 else None


def _joined(layers: Sequence[Layer]) -> Layer:
    """The layers of single experts as one of all."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if biases and len(biases) != len(layers):
        raise Refusal("some experts have a bias, and others none", "experts-form")
    products = tuple(product for layer in layers for product in layer.products)
    return Layer(_stacked([layer.weights for layer in layers]), _stacked(biases) if biases else None, products)


def _stacked(stacks: Sequence[Stack]) -> Stack:
    (first, *others) = stacks
    for stack in others:
        told = [[each.form, *(part.shape[1:] for part in each.parts.values())] for each in (stack, first)]
        if told[0] != told[1]:
            sentence = f"'{stack.data.values[0].name}' makes weights {told[0]}, those of the first expert are {told[1]}"
            raise Refusal(sentence, "experts-form")
    return joined(stacks, 0)
