"""A model being edited, and the table of the edits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from ort_moe.rewrites import rewrite
from ort_moe.rewrites.experts import EXPERTS_RULES
from ort_moe.rewrites.router_node import is_router

Array = np.ndarray[Any, np.dtype[Any]]

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def router_values(model: ir.Model) -> frozenset[str]:
    """Names of the values that a rewrite of the model absorbs, and of those that its routers read and make."""
    rewritten = model.clone()
    rewrite(rewritten, skip=EXPERTS_RULES)
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


def mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__] = function
    return function


def _is_known(value: ir.Value) -> bool:
    """Whether type and shape are known: not of what earlier edits wrote."""
    return value.dtype is not None and value.shape is not None


def array_of(value: ir.Value | None) -> Array | None:
    """The elements of an initializer."""
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    return value.const_value.numpy()


def with_constant(node: ir.Node) -> tuple[ir.Value, Array] | None:
    """The operands of a binary node of which one is a floating-point constant: the other, and the constant."""
    for position in (1, 0):
        array, other = array_of(node.inputs[position]), node.inputs[1 - position]
        if array is not None and array.dtype.kind == "f" and other is not None and other.const_value is None:
            return other, array
    return None


def number_like(value: ir.Value, number: float) -> Array:
    assert value.dtype is not None
    return np.array(number, value.dtype.numpy())


def rank_of(value: ir.Value | None) -> int:
    assert value is not None
    assert value.shape is not None
    return value.shape.rank()
