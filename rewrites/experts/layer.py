"""The two layers of the experts: which constants they are, and how they lie in the file."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.rewrites.rule import Mismatch, Refusal
from ort_moe.rewrites.values import FLOATS, integer, integers, is_op, label, producer, rank


@dataclass(frozen=True)
class Stack:
    """A constant with one matrix, or one row, for each expert.

    Attributes:
        value: The initializer, (E, N, D), (E, D, N) or (E, N).
        transposed: Whether the matrices lie as (D, N), so that FusedExperts needs a copy.
    """

    value: ir.Value
    transposed: bool = False

    @property
    def experts(self) -> int:
        """E."""
        return self._sizes[0]

    @property
    def rows(self) -> int:
        """N."""
        return self._sizes[-1] if self.transposed else self._sizes[1]

    @property
    def depth(self) -> int:
        """D."""
        return self._sizes[1] if self.transposed else self._sizes[-1]

    @property
    def _sizes(self) -> tuple[int, ...]:
        tensor = self.value.const_value
        assert tensor is not None
        return tuple(int(size) for size in tensor.shape.numpy())


@dataclass(frozen=True)
class Layer:
    """One layer of all experts.

    Attributes:
        weights: Matrices.
        bias: Rows (E, N), or None.
        product: The node, or the last of the nodes, that multiplies.
    """

    weights: Stack
    bias: Stack | None
    product: ir.Node


def read_stack(value: ir.Value | None, *, transposed: bool) -> Stack:
    """The stack of matrices that a value is, perhaps transposed in the graph.

    Args:
        value: (E, ., .), of which each matrix is one expert's.
        transposed: Whether the graph uses the matrices of the value as (D, N).

    Raises:
        Refusal: It is no constant of floating-point matrices.
        Mismatch: It is nothing like it.
    """
    value, swapped = through_transposes(value)
    constant = _constant(value)
    if rank(constant) != 3:
        raise Mismatch
    return Stack(constant, transposed != swapped)


def read_bias(value: ir.Value | None) -> Stack:
    """The stack of rows that a value is.

    Raises:
        Refusal: It is no constant (E, N) of floating-point numbers.
    """
    constant = _constant(value)
    if rank(constant) != 2:
        raise Refusal(
            f"the bias '{constant.name}' of the experts has rank {rank(constant)}, expected 2", "experts-form"
        )
    return Stack(constant)


def through_transposes(value: ir.Value | None) -> tuple[ir.Value | None, bool]:
    """The value before transposes of its last two axes, and whether they are swapped."""
    swapped = False
    while (node := producer(value, "Transpose")) is not None:
        perm, known = list(node.attributes.get_ints("perm") or ()), rank(node.inputs[0])
        if known is None or known < 2 or perm != [*range(known - 2), known - 1, known - 2]:
            break
        value, swapped = node.inputs[0], not swapped
    return value, swapped


def gathered(value: ir.Value | None) -> ir.Node | None:
    """The node that takes whole entries of the first axis of its data by indices, if one makes the value."""
    node = producer(value, "Gather", "GatherND")
    if node is None or integer(node, "axis", 0) != 0 or integer(node, "batch_dims", 0) != 0:
        return None
    if node.op_type == "GatherND":
        places = node.inputs[1]
        if places is None or places.shape is None or not places.shape.rank() or places.shape[-1] != 1:
            return None
    return node


def _constant(value: ir.Value | None) -> ir.Value:
    """The value, if it is an initializer of numbers that are the same in every run.

    Raises:
        Refusal: It is computed or fed, or of another type.
    """
    if value is None:
        raise Mismatch
    made_by = value.producer()
    if made_by is not None:
        if is_op(made_by, "Constant") or integers(value) is not None:
            raise Mismatch
        sentence = f"the experts' weights '{value.name}' are computed by {label(made_by)}"
        raise Refusal(sentence, "expert-weights-computed")
    if value.is_graph_input() and value.is_initializer():
        raise Refusal(f"the experts' weights '{value.name}' are an input with a default", "weights-as-inputs")
    if value.const_value is None:
        raise Refusal(f"the experts' weights '{value.name}' are an input", "expert-weights-computed")
    if value.const_value.dtype not in FLOATS:
        sentence = f"the experts' weights '{value.name}' are {value.const_value.dtype}"
        raise Refusal(f"{sentence}, expected float32, float16 or bfloat16", "experts-form")
    return value
