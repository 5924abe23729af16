"""The two layers of the experts: which constants they are, and how they lie in the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ort_moe.rewrites.fixed_lengths import fixed_integers
from ort_moe.rewrites.rule import Mismatch, Refusal
from ort_moe.rewrites.values import (
    FLOATS,
    RESHAPING,
    Array,
    axes,
    constant,
    dim,
    integer,
    integers,
    is_op,
    label,
    operands,
    producer,
    rank,
    scalar,
    through,
)
from ort_moe.streamed_tensor import let_go


@dataclass(frozen=True)
class Part:
    """Some of the rows of all experts, as they lie in the file.

    Attributes:
        values: One initializer (E, N, D), (E, D, N) or (E, N), or one of a matrix for each expert.
        transposed: Whether the matrices lie as (D, N).
        apart: Whether there is one initializer for each expert.
    """

    values: tuple[ir.Value, ...]
    transposed: bool = False
    apart: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape as (E, N, D), or (E, N)."""
        tensor = self.values[0].const_value
        assert tensor is not None
        sizes = [int(size) for size in tensor.shape.numpy()]
        stacked = [len(self.values), *sizes] if self.apart else sizes
        return (stacked[0], *stacked[:0:-1]) if self.transposed else tuple(stacked)

    def expert(self, number: int) -> Array:
        """The numbers of one expert, (N, D) or (N)."""
        tensor = self.values[number if self.apart else 0].const_value
        assert tensor is not None
        array = tensor.numpy() if self.apart else tensor.numpy()[number]
        return array.T if self.transposed else array


@dataclass(frozen=True)
class Stack:
    """A matrix, or a row, for each expert.

    Attributes:
        parts: Along N, in their order.
    """

    parts: tuple[Part, ...]

    @property
    def experts(self) -> int:
        """E."""
        return self.parts[0].sizes[0]

    @property
    def rows(self) -> int:
        """N."""
        return sum(part.sizes[1] for part in self.parts)

    @property
    def depth(self) -> int:
        """D."""
        return self.parts[0].sizes[-1]

    @property
    def values(self) -> tuple[ir.Value, ...]:
        """The initializers."""
        return tuple(value for part in self.parts for value in part.values)

    @property
    def as_it_lies(self) -> ir.Value | None:
        """The initializer that is as FusedExperts takes it; None where a copy must be written."""
        (first, *others) = self.parts
        return first.values[0] if not first.apart and not first.transposed and not others else None

    def expert(self, number: int) -> Array:
        """The numbers of one expert, (N, D) or (N), as a copy; what was read for the last one is unmapped."""
        arrays = [part.expert(number) for part in self.parts]
        joined = np.concatenate(arrays) if len(arrays) > 1 else np.array(arrays[0], order="C")
        del arrays
        for part in self.parts:
            if part.apart or number == self.experts - 1:
                let_go(part.values[number if part.apart else 0].const_value)
        return joined


@dataclass(frozen=True)
class Layer:
    """One layer of all experts.

    Attributes:
        weights: Matrices.
        bias: Rows (E, N), or None.
        products: The nodes, or the last of the nodes, that multiply.
    """

    weights: Stack
    bias: Stack | None
    products: tuple[ir.Node, ...]


def read_stack(value: ir.Value | None, *, transposed: bool) -> Stack:
    """The stack of matrices that a value is, perhaps transposed in the graph, or joined of one for each expert.

    Args:
        value: (E, ., .), of which each matrix is one expert's.
        transposed: Whether the graph uses the matrices of the value as (D, N).

    Raises:
        Refusal: It is no constant of floating-point matrices.
        Mismatch: It is nothing like it.
    """
    value, swapped = through_transposes(value)
    joined = _joined(value)
    if joined is not None:
        return read_matrices(joined, transposed=transposed != swapped)
    matrices = _constant(value)
    if rank(matrices) != 3:
        raise Mismatch
    return Stack((Part((matrices,), transposed != swapped),))


def read_bias(value: ir.Value | None) -> Stack:
    """The stack of rows that a value is.

    Raises:
        Refusal: It is no constant (E, N) of floating-point numbers.
    """
    rows = _constant(value)
    if rank(rows) != 2:
        sentence = f"the experts' bias '{rows.name}' has rank {rank(rows)}, expected 2"
        raise Refusal(sentence, "experts-form")
    return Stack((Part((rows,)),))


def read_matrices(values: Sequence[ir.Value | None], *, transposed: bool) -> Stack:
    """The stack of one constant matrix (., .) for each expert.

    Args:
        values: In the experts' order.
        transposed: Whether the graph uses them as (D, N).

    Raises:
        Refusal: They are no constants of floating-point numbers.
        Mismatch: They are no matrices of one shape.
    """
    found = tuple(map(_constant, values))
    shapes = {tuple(each.const_value.shape.numpy()) for each in found if each.const_value is not None}
    if len(shapes) != 1 or rank(found[0]) != 2:
        raise Mismatch
    return Stack((Part(found, transposed, apart=True),))


def read_vectors(values: Sequence[ir.Value | None]) -> Stack:
    """The stack of one constant bias (N) for each expert.

    Raises:
        Refusal: They are no constants of floating-point numbers.
        Mismatch: They are no vectors.
    """
    found = tuple(map(_constant, values))
    if any(rank(each) != 1 for each in found):
        raise Mismatch
    return Stack((Part(found, apart=True),))


def _joined(value: ir.Value | None) -> list[ir.Value | None] | None:
    """The matrices (., .) that are stacked one by one to a value (E, ., .)."""
    concat = producer(value, "Concat")
    if concat is None or integer(concat, "axis", 0) != 0 or len(concat.inputs) < 2:
        return None
    unsqueezes = [producer(part, "Unsqueeze") for part in operands(concat)]
    if any(node is None or axes(node) != [0] or rank(node.outputs[0]) != 3 for node in unsqueezes):
        return None
    return [node.inputs[0] for node in unsqueezes if node is not None]


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


def entry(value: ir.Value, whole: int) -> tuple[ir.Value, int] | None:
    """What a value is an entry of, along the first axis, and the entry's place; None where nothing tells.

    Args:
        value: A view of what a Split or a Gather makes.
        whole: Rank of what they take it from.
    """
    value = through(value, RESHAPING)
    node = producer(value, "Split", "Gather")
    if node is None or rank(node.inputs[0]) != whole or integer(node, "axis", 0) not in (0, -whole):
        return None
    source = operands(node)[0]
    if node.op_type == "Gather":
        place = scalar(node.inputs[1])
        return None if place is None or place < 0 else (source, int(place))
    if dim(source, 0) != len(node.outputs) or not _are_ones(node.inputs[1] if len(node.inputs) > 1 else None):
        return None
    return source, node.outputs.index(value)


def _are_ones(sizes: ir.Value | None) -> bool:
    """Whether a Split of as many outputs as entries makes one of each: the sizes are left out, or all 1."""
    if sizes is None:
        return True
    array = constant(sizes)  # of any number of experts; what is computed is followed for few
    known = fixed_integers(sizes) if array is None else array.tolist()
    return known is not None and set(known) == {1}


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
