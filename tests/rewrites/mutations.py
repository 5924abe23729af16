"""Meaning-preserving edits of the router in a model: each writes the same arithmetic in another way.

    mutant = Mutant(model, router_values(model), random.Random(0))
    if MUTATIONS["reciprocal"](mutant): ...  # one place was edited

An edit of a node acts on one that the rewriter absorbs, an edit of a value on one that such a node reads or makes.
Constants are split exactly (by powers of two), so that the router's attributes stay what they were. New values carry no
type and no shape: the rewriter has to infer them again.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from ort_moe.rewrites import rewrite
from ort_moe.rewrites.router_node import is_router

Array = np.ndarray[Any, np.dtype[Any]]

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def router_values(model: ir.Model) -> frozenset[str]:
    """Names of the values that a rewrite of the model absorbs, and of those that its routers read and make."""
    rewritten = model.clone()
    rewrite(rewritten)
    left = {value.name for node in rewritten.graph for value in node.outputs}
    around = set()
    for node in rewritten.graph:
        if is_router(node):
            ends = [node.inputs[0], *node.outputs, *(user.outputs[0] for v in node.outputs for user in v.consumers())]
            around.update(value.name for value in ends if value is not None)
    made = {value.name or "" for node in model.graph if node.op_type != "Constant" for value in node.outputs}
    return frozenset(name for name in made if name not in left or name in around)


@dataclass
class Mutant:
    """A model being edited.

    Attributes:
        model: The model, whose main graph is edited in place.
        router: Names of the values that belong to routers; grows with the edits.
        rng: Chooses the places.
        applied: The edits made.
        stopped: Names of values given another consumer, and of what makes them: their routers may be fused partly.
    """

    model: ir.Model
    router: frozenset[str]
    rng: random.Random
    applied: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    _number: int = 0

    @property
    def opset(self) -> int:
        return self.model.graph.opset_imports[""]

    def nodes(self, *op_types: str) -> list[ir.Node]:
        """The routers' nodes of these types, in random order."""
        found = [
            node
            for node in self.model.graph
            if node.op_type in op_types
            and any(value.name in self.router for value in node.outputs)
            and all(value is None or _is_known(value) for value in (*node.inputs, *node.outputs))
        ]
        return self.rng.sample(found, len(found))

    def values(self, dtypes: Iterable[ir.DataType] = (*FLOATS, ir.DataType.INT64)) -> list[ir.Value]:
        """The routers' values of these types that something reads, in random order."""
        found = [
            value
            for node in self.model.graph
            for value in node.outputs
            if value.name in self.router and value.dtype in dtypes and value.uses() and _is_known(value)
        ]
        return self.rng.sample(found, len(found))

    def write(self, op_type: str, *inputs: ir.Value | Array | None, at: ir.Node, **attributes: Any) -> ir.Value:
        """Insert a node before `at`; arrays become initializers."""
        values = [self.constant(each) if isinstance(each, np.ndarray) else each for each in inputs]
        while values and values[-1] is None:
            values.pop()
        node = ir.node(op_type, values, attributes, name=self._name(op_type))
        node.outputs[0].name = self._name("value")
        self.model.graph.insert_before(at, node)
        self.router |= {node.outputs[0].name or ""}
        return node.outputs[0]

    def constant(self, array: Array) -> ir.Value:
        name = self._name("constant")
        value = ir.Value(
            name=name,
            const_value=ir.tensor(array, name=name),
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            shape=ir.Shape(array.shape),
        )
        self.model.graph.register_initializer(value)
        return value

    def take_over(self, node: ir.Node, new: ir.Value) -> None:
        """Let `new`, which stands before it, take the place of the node's first output, its name and type."""
        old = node.outputs[0]
        new.type, new.shape = old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        self.model.graph.remove(node, safe=True)
        new.name = old.name

    def divert(self, value: ir.Value, write: Callable[[ir.Node], ir.Value]) -> None:
        """Let the value's readers read what `write` makes of it, right behind its producer."""
        readers = list(value.uses())
        producer = value.producer()
        assert producer is not None
        anchor = ir.node("Identity", [value])
        self.model.graph.insert_after(producer, anchor)
        new = write(anchor)
        self.model.graph.remove(anchor, safe=True)
        for node, position in readers:
            node.replace_input_with(position, new)

    def _name(self, what: str) -> str:
        self._number += 1
        return f"mutation_{self._number}_{what.lower()}"


Mutation = Callable[[Mutant], bool]
MUTATIONS: dict[str, Mutation] = {}
"""Every edit by its name; False: the model has no place for it."""


def _mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__] = function
    return function


def _is_known(value: ir.Value) -> bool:
    """Whether type and shape are known: not of what earlier edits wrote."""
    return value.dtype is not None and value.shape is not None


def _array(value: ir.Value | None) -> Array | None:
    """The elements of an initializer."""
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    return value.const_value.numpy()


def _with_constant(node: ir.Node) -> tuple[ir.Value, Array] | None:
    """The operands of a binary node of which one is a floating-point constant: the other, and the constant."""
    for position in (1, 0):
        array, other = _array(node.inputs[position]), node.inputs[1 - position]
        if array is not None and array.dtype.kind == "f" and other is not None and other.const_value is None:
            return other, array
    return None


def _like(value: ir.Value, number: float) -> Array:
    assert value.dtype is not None
    return np.array(number, value.dtype.numpy())


def _rank(value: ir.Value | None) -> int:
    assert value is not None
    assert value.shape is not None
    return value.shape.rank()


# Nodes in another spelling


@_mutation
def count_axis_from_the_other_end(mutant: Mutant) -> bool:
    for node in mutant.nodes("Softmax", "TopK", "GatherElements", "ScatterElements"):
        if node.inputs[0] is None or node.inputs[0].shape is None:
            continue
        axis = node.attributes.get_int("axis", -1 if node.op_type in ("Softmax", "TopK") else 0)
        rank = _rank(node.inputs[0])
        node.attributes["axis"] = ir.AttrInt64("axis", axis - rank if axis >= 0 else axis + rank)
        return True
    return False


@_mutation
def count_axes_from_the_other_end(mutant: Mutant) -> bool:
    for node in mutant.nodes("ReduceSum", "ReduceMax", "Squeeze"):
        axes = _array(node.inputs[1]) if len(node.inputs) > 1 else None
        if axes is None or node.inputs[0] is None or node.inputs[0].shape is None:
            continue
        rank = _rank(node.inputs[0])
        node.replace_input_with(1, mutant.constant(np.where(axes < 0, axes + rank, axes - rank)))
        return True
    return False


@_mutation
def swap_operands(mutant: Mutant) -> bool:
    for node in mutant.nodes("Add", "Mul", "Max"):
        first, second = node.inputs
        node.replace_input_with(0, second)
        node.replace_input_with(1, first)
        return True
    return False


@_mutation
def divide_by_reciprocal(mutant: Mutant) -> bool:
    for node in mutant.nodes("Div"):
        x, divisor = node.inputs
        mutant.take_over(node, mutant.write("Mul", x, mutant.write("Reciprocal", divisor, at=node), at=node))
        return True
    return False


@_mutation
def divide_by_one_over(mutant: Mutant) -> bool:
    for node in mutant.nodes("Div"):
        x, divisor = node.inputs
        one = _like(node.outputs[0], 1.0)
        mutant.take_over(node, mutant.write("Mul", mutant.write("Div", one, divisor, at=node), x, at=node))
        return True
    return False


@_mutation
def divide_by_power(mutant: Mutant) -> bool:
    for node in mutant.nodes("Div"):
        x, divisor = node.inputs
        inverse = mutant.write("Pow", divisor, _like(node.outputs[0], -1.0), at=node)
        mutant.take_over(node, mutant.write("Mul", x, inverse, at=node))
        return True
    return False


@_mutation
def divide_by_inverse_scale(mutant: Mutant) -> bool:
    for node in mutant.nodes("Mul"):
        operands = _with_constant(node)
        if operands is None or 0 in operands[1]:
            continue
        x, factor = operands
        inverse = np.array(1 / factor, factor.dtype)
        if not np.allclose(1 / inverse.astype(np.float64), factor, rtol=1e-6, atol=0):
            continue
        mutant.take_over(node, mutant.write("Div", x, inverse, at=node))
        return True
    return False


@_mutation
def split_factor(mutant: Mutant) -> bool:
    for node in mutant.nodes("Mul"):
        operands = _with_constant(node)
        if operands is None:
            continue
        x, factor = operands
        half = mutant.write("Mul", x, _like(node.outputs[0], 0.5), at=node)
        mutant.take_over(node, mutant.write("Mul", half, np.array(2 * factor), at=node))
        return True
    return False


@_mutation
def split_summand(mutant: Mutant) -> bool:
    for node in mutant.nodes("Add"):
        operands = _with_constant(node)
        if operands is None:
            continue
        x, summand = operands
        half = np.array(summand / 2)
        part = mutant.write("Add", x, half, at=node)
        mutant.take_over(node, mutant.write("Add", np.array(summand - half), part, at=node))
        return True
    return False


@_mutation
def subtract_negated_constant(mutant: Mutant) -> bool:
    for node in mutant.nodes("Add"):
        operands = _with_constant(node)
        if operands is None:
            continue
        x, summand = operands
        mutant.take_over(node, mutant.write("Sub", x, np.array(-summand), at=node))
        return True
    return False


@_mutation
def subtract_negation(mutant: Mutant) -> bool:
    for node in mutant.nodes("Add"):
        x, summand = node.inputs
        mutant.take_over(node, mutant.write("Sub", x, mutant.write("Neg", summand, at=node), at=node))
        return True
    return False


@_mutation
def negate_twice(mutant: Mutant) -> bool:
    for node in mutant.nodes("Mul"):
        operands = _with_constant(node)
        if operands is None:
            continue
        x, factor = operands
        mutant.take_over(node, mutant.write("Neg", mutant.write("Mul", x, np.array(-factor), at=node), at=node))
        return True
    return False


@_mutation
def reduce_and_unsqueeze(mutant: Mutant) -> bool:
    for node in mutant.nodes("ReduceSum", "ReduceMax"):
        if node.attributes.get_int("keepdims", 1) != 1:
            continue
        reduced = mutant.write(node.op_type, *node.inputs, at=node, keepdims=0)
        mutant.take_over(node, mutant.write("Unsqueeze", reduced, np.array([-1]), at=node))
        return True
    return False


@_mutation
def reduce_and_squeeze(mutant: Mutant) -> bool:
    for node in mutant.nodes("ReduceSum", "ReduceMax"):
        if node.attributes.get_int("keepdims", 1) != 0:
            continue
        reduced = mutant.write(node.op_type, *node.inputs, at=node, keepdims=1)
        mutant.take_over(node, mutant.write("Squeeze", reduced, np.array([-1]), at=node))
        return True
    return False


@_mutation
def sum_magnitudes(mutant: Mutant) -> bool:
    """The scores of the chosen are not negative."""
    for node in mutant.nodes("ReduceSum"):
        if node.attributes.get_int("keepdims", 1) != 1 or (mutant.opset < 18):
            continue
        mutant.take_over(node, mutant.write("ReduceL1", *node.inputs, at=node))
        return True
    return False


@_mutation
def clip_or_max(mutant: Mutant) -> bool:
    for node in mutant.nodes("Clip", "Max"):
        x, least = node.inputs[:2]
        mutant.take_over(node, mutant.write("Max" if node.op_type == "Clip" else "Clip", x, least, at=node))
        return True
    return False


@_mutation
def sigmoid_by_exp(mutant: Mutant) -> bool:
    for node in mutant.nodes("Sigmoid"):
        (x,) = node.inputs
        one = _like(node.outputs[0], 1.0)
        grown = mutant.write("Exp", mutant.write("Neg", x, at=node), at=node)
        mutant.take_over(node, mutant.write("Div", one, mutant.write("Add", one, grown, at=node), at=node))
        return True
    return False


@_mutation
def softmax_over_the_first_axis(mutant: Mutant) -> bool:
    for node in mutant.nodes("Softmax"):
        (x,) = node.inputs
        if _rank(x) != 2:
            continue
        turned = mutant.write("Softmax", mutant.write("Transpose", x, at=node, perm=[1, 0]), at=node, axis=0)
        mutant.take_over(node, mutant.write("Transpose", turned, at=node, perm=[1, 0]))
        return True
    return False


@_mutation
def softmax_by_exp(mutant: Mutant) -> bool:
    for node in mutant.nodes("Softmax"):
        (x,) = node.inputs
        last = np.array([-1])
        grown = mutant.write(
            "Exp", mutant.write("Sub", x, mutant.write("ReduceMax", x, last, at=node), at=node), at=node
        )
        mutant.take_over(node, mutant.write("Div", grown, mutant.write("ReduceSum", grown, last, at=node), at=node))
        return True
    return False


@_mutation
def softmax_by_log(mutant: Mutant) -> bool:
    for node in mutant.nodes("Softmax"):
        (x,) = node.inputs
        mutant.take_over(node, mutant.write("Exp", mutant.write("LogSoftmax", x, at=node, axis=-1), at=node))
        return True
    return False


@_mutation
def gather_by_coordinates(mutant: Mutant) -> bool:
    for node in mutant.nodes("GatherElements"):
        scores, ids = node.inputs
        if _rank(scores) != 2:
            continue
        rows = mutant.write("Unsqueeze", ids, np.array([-1]), at=node)
        mutant.take_over(node, mutant.write("GatherND", scores, rows, at=node, batch_dims=1))
        return True
    return False


@_mutation
def invert_condition(mutant: Mutant) -> bool:
    for node in mutant.nodes("Where"):
        condition, a, b = node.inputs
        mutant.take_over(node, mutant.write("Where", mutant.write("Not", condition, at=node), b, a, at=node))
        return True
    return False


@_mutation
def merge_inverted_condition(mutant: Mutant) -> bool:
    for node in mutant.nodes("Where"):
        condition, a, b = node.inputs
        inverted = None if condition is None else condition.producer()
        if inverted is None or inverted.op_type != "Not":
            continue
        mutant.take_over(node, mutant.write("Where", inverted.inputs[0], b, a, at=node))
        return True
    return False


@_mutation
def compare_the_other_way(mutant: Mutant) -> bool:
    for node in mutant.nodes("Greater", "Less"):
        a, b = node.inputs
        mutant.take_over(node, mutant.write("Less" if node.op_type == "Greater" else "Greater", b, a, at=node))
        return True
    return False


@_mutation
def root_by_power(mutant: Mutant) -> bool:
    for node in mutant.nodes("Sqrt"):
        (x,) = node.inputs
        mutant.take_over(node, mutant.write("Pow", x, _like(node.outputs[0], 0.5), at=node))
        return True
    return False


@_mutation
def split_linear_layer(mutant: Mutant) -> bool:
    for node in mutant.nodes("Gemm"):
        x, weight, bias = (*node.inputs, None)[:3]
        array = _array(weight)
        if array is None or node.attributes.get_int("transB", 0) != 1:
            continue
        product = mutant.write("MatMul", x, np.ascontiguousarray(array.T), at=node)
        mutant.take_over(node, product if bias is None else mutant.write("Add", product, bias, at=node))
        return True
    return False


@_mutation
def transpose_weight(mutant: Mutant) -> bool:
    for node in mutant.nodes("Gemm"):
        x, weight, bias = (*node.inputs, None)[:3]
        if _array(weight) is None or node.attributes.get_int("transB", 0) != 1:
            continue
        product = mutant.write("MatMul", x, mutant.write("Transpose", weight, at=node, perm=[1, 0]), at=node)
        mutant.take_over(node, product if bias is None else mutant.write("Add", bias, product, at=node))
        return True
    return False


@_mutation
def constant_as_node(mutant: Mutant) -> bool:
    for node in mutant.nodes("Add", "Mul", "Div", "Clip", "TopK", "ReduceSum", "Where", "Greater"):
        for position, value in enumerate(node.inputs):
            array = _array(value)
            if array is not None:
                node.replace_input_with(position, mutant.write("Constant", at=node, value=ir.tensor(array)))
                return True
    return False


@_mutation
def compute_twice(mutant: Mutant) -> bool:
    for value in mutant.values():
        node, uses = value.producer(), list(value.uses())
        assert node is not None
        if len(uses) < 2 or len(node.outputs) > 1 or node.op_type in ("Gemm", "MatMul"):
            continue  # two linear layers that compute the same are beyond the router
        reader, position = mutant.rng.choice(uses)
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        reader.replace_input_with(position, mutant.write(node.op_type, *node.inputs, at=node, **attributes))
        return True
    return False


# Values on a detour


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
    if _rank(value) != 2:
        return mutant.write("Identity", value, at=at)
    return mutant.write("Flatten", value, at=at, axis=1)


def _transpose_twice(mutant: Mutant, value: ir.Value, at: ir.Node) -> ir.Value:
    perm = list(range(_rank(value)))[::-1]
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
    "add_zero": _detour(FLOATS, lambda mutant, value, at: mutant.write("Add", value, _like(value, 0.0), at=at)),
    "times_one": _detour(FLOATS, lambda mutant, value, at: mutant.write("Mul", _like(value, 1.0), value, at=at)),
    "divide_by_one": _detour(FLOATS, lambda mutant, value, at: mutant.write("Div", value, _like(value, 1.0), at=at)),
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
                wide[1] = mutant.constant(np.array([-1]))
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


@_mutation
def score_in_double(mutant: Mutant) -> bool:
    for node in mutant.nodes("Softmax", "Sigmoid", "Sqrt"):
        if node.outputs[0].dtype != ir.DataType.FLOAT:
            continue
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        wide = mutant.write("Cast", node.inputs[0], at=node, to=ir.DataType.DOUBLE)
        scored = mutant.write(node.op_type, wide, at=node, **attributes)
        mutant.take_over(node, mutant.write("Cast", scored, at=node, to=ir.DataType.FLOAT))
        return True
    return False


def _negated(mutant: Mutant, value: ir.Value, at: ir.Node) -> ir.Value:
    return mutant.write("Neg", value, at=at)


@_mutation
def choose_the_smallest_of_the_negated(mutant: Mutant) -> bool:
    for node in mutant.nodes("TopK"):
        if not node.attributes.get_int("largest", 1):
            continue
        x = node.inputs[0]
        assert x is not None
        node.replace_input_with(0, mutant.write("Neg", x, at=node))
        node.attributes["largest"] = ir.AttrInt64("largest", 0)
        if node.outputs[0].uses():
            mutant.divert(node.outputs[0], functools.partial(_negated, mutant, node.outputs[0]))
        return True
    return False


@_mutation
def extra_output(mutant: Mutant) -> bool:
    """Not absorbed where the value is: a stated reason, then."""
    for value in mutant.values():
        if not value.is_graph_output():
            mutant.model.graph.outputs.append(value)
            producer = value.producer()
            assert producer is not None
            mutant.stopped += [value.name or "", producer.name or ""]
            return True
    return False


def mutate(model: ir.Model, router: frozenset[str], names: Iterable[str], seed: int) -> Mutant:
    """Edit the model in place; edits without a place in it are passed over."""
    mutant = Mutant(model, router, random.Random(seed))
    for name in names:
        if MUTATIONS[name](mutant):
            mutant.applied.append(name)
    return mutant
