"""The two layers of the experts and what stands between, in any form: it says what a product and a bias are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.ops import AttributeValue
from ort_moe.printing.wording import counted
from ort_moe.rewrites.experts.activation import read_activation
from ort_moe.rewrites.experts.layer import Layer, Stack
from ort_moe.rewrites.experts.tokens import named, plain
from ort_moe.rewrites.rule import Mismatch, Refusal
from ort_moe.rewrites.values import dim, label, may_spread, operands, producer, rank, through


@dataclass(frozen=True)
class Product:
    """A product of rows with the experts' matrices.

    Attributes:
        weights: The matrices.
        node: What multiplies.
        rows: What it multiplies.
        ids: Which experts, in the form's own terms.
        spread: Whether a token's one row meets the matrices of all its experts.
        bias: What the product itself adds, if it does.
    """

    weights: Stack
    node: ir.Node
    rows: ir.Value
    ids: ir.Value | None = None
    spread: bool = False
    bias: Stack | None = None


ReadProduct = Callable[[ir.Value], Product | None]
ReadBias = Callable[[ir.Value, Product], Stack | None]


@dataclass(frozen=True)
class TwoLayers:
    """The experts of a form, read.

    Attributes:
        first: Product of the first layer.
        second: Product of the second.
        value: That of the first layer's second half, where each half has one of its own.
        fc1: The first layer.
        fc2: The second.
        attributes: Of what stands between.
    """

    first: Product
    second: Product
    value: Product | None
    fc1: Layer
    fc2: Layer
    attributes: dict[str, AttributeValue]

    @property
    def products(self) -> tuple[Product, ...]:
        """All of them."""
        return (self.first, self.second) if self.value is None else (self.first, self.value, self.second)


def read_two_layers(
    rows: ir.Value, dtype: ir.DataType, hidden: int, read_product: ReadProduct, read_bias: ReadBias
) -> TwoLayers:
    """Reads back from what the experts return.

    Args:
        rows: Rows of H.
        dtype: In which they compute.
        hidden: H.
        read_product: Reads a value before views and casts; None where no product with experts' matrices makes it.
        read_bias: Reads what is added to a product; None where it is not each expert's row.

    Raises:
        Mismatch: No experts make the rows.
        Refusal: FusedExperts has no such experts.
    """
    second, bias2 = _read_layer(rows, dtype, read_product, read_bias)
    if second is None:
        raise Mismatch
    inner = second.weights.depth
    if second.weights.rows != hidden:
        raise Refusal(f"the experts return {second.weights.rows} elements, summed are {hidden}", "experts-form")
    activation = read_activation(second.rows, dtype, 2 * inner)
    first, bias1 = _read_layer(activation.rows, dtype, read_product, read_bias)
    if first is None:
        raise Refusal(f"{named(activation.rows)} is no product with the chosen experts' weights", "experts-form")
    value, weights = None, first.weights
    if activation.value_rows is not None:
        value, value_bias = _read_layer(activation.value_rows, dtype, read_product, read_bias)
        if value is None or not _are_halves(first, value) or (bias1 is None) != (value_bias is None):
            sentence = f"{named(activation.value_rows)} is not made as {named(activation.rows)} is"
            raise Refusal(sentence, "experts-form")
        weights = first.weights.followed_by(value.weights)
        if bias1 is not None and value_bias is not None:
            bias1 = bias1.followed_by(value_bias)
    expected = 2 * inner if activation.attributes["gated"] else inner
    if weights.experts != second.weights.experts:
        sentence = f"the first layer has {counted(weights.experts, 'expert')}, the second {second.weights.experts}"
        raise Refusal(sentence, "experts-mismatch")
    if weights.rows != expected:
        raise Refusal(f"the first layer makes {weights.rows} elements, expected are {expected}", "experts-form")
    if weights.form != second.weights.form:
        told = "{} in blocks of {}".format(*weights.form), "{} in blocks of {}".format(*second.weights.form)
        raise Refusal(f"the first layer's weights are {told[0]}, the second's {told[1]}", "experts-form")
    attributes = dict(activation.attributes)
    attributes["weight_format"], attributes["block_size"] = weights.form
    if activation.value_first:
        layout, attributes["gate_layout"] = str(attributes["gate_layout"]), "concat"
        weights = weights.with_halves_swapped(layout)
        bias1 = None if bias1 is None else bias1.with_halves_swapped(layout)
    nodes = (first.node,) if value is None else (first.node, value.node)
    return TwoLayers(
        first,
        second,
        value,
        Layer(weights, bias1, nodes),
        Layer(second.weights, bias2, (second.node,)),
        attributes,
    )


def _are_halves(first: Product, value: Product) -> bool:
    """Whether two products are of the same rows, and of matrices of one shape of the same experts."""
    same_rows = through(first.rows, RESHAPING) is through(value.rows, RESHAPING) and first.spread == value.spread
    return same_rows and _shapes(first.weights) == _shapes(value.weights)


def _shapes(stack: Stack) -> tuple[object, ...]:
    return (stack.form, *((name, part.shape) for name, part in stack.parts.items()))


def weighted(terms: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """Rows, and the column that they are multiplied with; None where there is none."""
    node = producer(terms, "Mul")
    if node is None:
        return terms, None
    left, right = operands(node)
    for rows, column in ((left, right), (right, left)):
        if dim(column, -1) == 1 and not may_spread(rows, column, (rank(rows) or 0) - 1):
            return rows, column
    return terms, None


def _read_layer(
    rows: ir.Value, dtype: ir.DataType, read_product: ReadProduct, read_bias: ReadBias
) -> tuple[Product | None, Stack | None]:
    """The product that makes these rows, and its bias."""
    rows = plain(rows, dtype)
    add = producer(rows, "Add")
    if add is None:
        product = read_product(rows)
        if product is not None and product.bias is not None and product.bias.rows != product.weights.rows:
            raise Refusal(f"{label(product.node)} adds no bias of the experts to their product", "experts-form")
        return product, None if product is None else product.bias
    left, right = operands(add)
    for value, other in ((left, right), (right, left)):
        product = read_product(plain(value, dtype))
        if product is None:
            continue
        bias = read_bias(other, product)
        if (
            product.bias is not None
            or bias is None
            or (bias.experts, bias.rows) != (product.weights.experts, product.weights.rows)
            or not _keeps_shape(value, other)
        ):
            raise Refusal(f"{label(add)} adds no bias of the experts to their product", "experts-form")
        return product, bias
    return None, None


def _keeps_shape(value: ir.Value, added: ir.Value) -> bool:
    """Whether a value is not spread over any axis of what is added to it."""
    known, axes = rank(value), rank(added)
    if known is None or axes is None or axes > known:
        return False
    return all(dim(value, -axis) != 1 or dim(added, -axis) == 1 for axis in range(1, axes + 1))
