"""Edits of values: on a detour that ends where it began, or in another shape on the way through a node."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import onnx_ir as ir

from tests.rewrites.mutations.mutant import FLOATS, MUTATIONS, Mutant, Mutation, number_like, rank_of


def _detour(dtypes: Iterable[ir.DataType], write: Callable[[Mutant, ir.Value, ir.Node], ir.Value | None]) -> Mutation:
    def mutation(mutant: Mutant) -> bool:
        for value in mutant.values(dtypes):
            mutant.divert(value, lambda at, value=value: write(mutant, value, at))  # type: ignore[misc]
            return True
        return False

    return mutation


def _round_trip(source: ir.DataType, over: ir.DataType) -> Mutation:
    def write(mutant: Mutant, value: ir.Value, at: ir.Node) -> ir.Value:
        return mutant.write("Cast", mutant.write("Cast", value, at=at, to=over), at=at, to=source)

    return _detour([source], write)


def _reshape(mutant: Mutant, value: ir.Value, at: ir.Node, *shape: int) -> ir.Value:
    return mutant.write("Reshape", value, np.array(shape), at=at)


def _own_shape(mutant: Mutant, value: ir.Value, at: ir.Node) -> ir.Value:
    assert value.shape is not None
    last = value.shape[-1]
    if isinstance(last, int) and len(value.shape) > 1 and mutant.rng.random() < 0.5:
        return _reshape(mutant, value, at, *[0] * (len(value.shape) - 2), -1, last)
    return _reshape(mutant, value, at, *[0] * len(value.shape))


def _extra_axis(axis: int) -> Callable[[Mutant, ir.Value, ir.Node], ir.Value]:
    def write(mutant: Mutant, value: ir.Value, at: ir.Node) -> ir.Value:
        return mutant.write(
            "Squeeze", mutant.write("Unsqueeze", value, np.array([axis]), at=at), np.array([axis]), at=at
        )

    return write


def _flat_and_back(mutant: Mutant, value: ir.Value, at: ir.Node) -> ir.Value:
    assert value.shape is not None
    last = value.shape[-1]
    if not isinstance(last, int) or len(value.shape) != 2:
        return mutant.write("Identity", value, at=at)
    return _reshape(mutant, _reshape(mutant, value, at, -1), at, -1, last)


def _flatten(mutant: Mutant, value: ir.Value, at: ir.Node) -> ir.Value:
    if rank_of(value) != 2:
        return mutant.write("Identity", value, at=at)
    return mutant.write("Flatten", value, at=at, axis=1)


def _transpose_twice(mutant: Mutant, value: ir.Value, at: ir.Node) -> ir.Value:
    perm = list(range(rank_of(value)))[::-1]
    return mutant.write("Transpose", mutant.write("Transpose", value, at=at, perm=perm), at=at, perm=perm)


_ANY = (*FLOATS, ir.DataType.INT64)
MUTATIONS |= {
    "over_double": _round_trip(ir.DataType.FLOAT, ir.DataType.DOUBLE),
    "over_float": _round_trip(ir.DataType.FLOAT16, ir.DataType.FLOAT),
    "over_int32": _round_trip(ir.DataType.INT64, ir.DataType.INT32),
    "identity": _detour(_ANY, lambda mutant, value, at: mutant.write("Identity", value, at=at)),
    "cast_to_own_type": _detour(_ANY, lambda mutant, value, at: mutant.write("Cast", value, at=at, to=value.dtype)),
    "reshape_to_own_shape": _detour(_ANY, _own_shape),
    "unsqueeze_first": _detour(_ANY, _extra_axis(0)),
    "unsqueeze_last": _detour(_ANY, _extra_axis(-1)),
    "flat_and_back": _detour(_ANY, _flat_and_back),
    "flatten": _detour(_ANY, _flatten),
    "transpose_twice": _detour(FLOATS, _transpose_twice),
    "negate_value_twice": _detour(
        FLOATS, lambda mutant, value, at: mutant.write("Neg", mutant.write("Neg", value, at=at), at=at)
    ),
    "add_zero": _detour(FLOATS, lambda mutant, value, at: mutant.write("Add", value, number_like(value, 0.0), at=at)),
    "times_one": _detour(FLOATS, lambda mutant, value, at: mutant.write("Mul", number_like(value, 1.0), value, at=at)),
    "divide_by_one": _detour(
        FLOATS, lambda mutant, value, at: mutant.write("Div", value, number_like(value, 1.0), at=at)
    ),
}


def _in_three_dimensions(*op_types: str) -> Mutation:
    """Unsqueeze, the node, Squeeze."""

    def mutation(mutant: Mutant) -> bool:
        for node in mutant.nodes(*op_types):
            values = [value for value in node.inputs if value is not None and value.const_value is None]
            alone = len(values) == 1 or node.op_type == "GatherElements"
            if not alone or any(value.shape is None or value.shape.rank() != 2 for value in values):
                continue
            axis = np.array([mutant.rng.choice((0, 1))])
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            if "axis" in attributes:
                attributes["axis"] = -1
            wide = [mutant.write("Unsqueeze", each, axis, at=node) if each in values else each for each in node.inputs]
            if node.op_type == "ReduceSum":
                wide[1] = mutant.constant(np.array([mutant.rng.choice((-1, 2))]))
            result = mutant.write(node.op_type, *wide, at=node, **attributes)
            mutant.take_over(node, mutant.write("Squeeze", result, axis, at=node))
            return True
        return False

    return mutation


MUTATIONS |= {
    "score_in_three_dimensions": _in_three_dimensions("Softmax", "Sigmoid", "Softplus", "Sqrt"),
    "scale_in_three_dimensions": _in_three_dimensions("Mul", "Add", "Div", "Clip", "Cast"),
    "gather_in_three_dimensions": _in_three_dimensions("GatherElements"),
    "sum_in_three_dimensions": _in_three_dimensions("ReduceSum"),
}
